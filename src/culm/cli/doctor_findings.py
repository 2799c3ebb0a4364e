"""What `culm doctor` has to say: one line for each thing it looked at."""

from collections.abc import Generator, Sequence
from typing import Literal

from msgspec import Struct

from culm.wire.codec import printable

HERE = "this machine"  # Above what is about no project.

MachinePart = Literal[
    "culm", "libraries", "programs", "data", "config", "state", "token", "disk", "socket", "server"
]
Part = MachinePart | Literal["project", "database", "agents", "mailboxes", "worktrees"]


class DoctorFinding(Struct, frozen=True):
    """One line: a part of a project or of the machine, and how it is."""

    project: str  # Empty: it is about the machine.
    part: Part
    is_ok: bool
    text: str
    hint: str = ""
    is_note: bool = False  # It is no harm, and worth knowing.


def ok(part: Part, words: str) -> DoctorFinding:
    """Of the machine, as are the next two."""
    return DoctorFinding("", part, is_ok=True, text=printable(words))


def note(part: Part, words: str, hint: str) -> DoctorFinding:
    return DoctorFinding(
        "", part, is_ok=True, text=printable(words), hint=printable(hint), is_note=True
    )


def wrong(part: Part, words: str, hint: str) -> DoctorFinding:
    return DoctorFinding("", part, is_ok=False, text=printable(words), hint=printable(hint))


def lines_of(findings: Sequence[DoctorFinding]) -> Generator[str]:
    project: str | None = None
    for finding in findings:
        if finding.project != project:
            project = finding.project
            yield printable(project or HERE)
        state = "note" if finding.is_note else "ok" if finding.is_ok else "WRONG"
        yield f"  {finding.part:<9}  {state:<5}  {finding.text}"
        if finding.hint:
            yield f"{'':18}hint: {finding.hint}"

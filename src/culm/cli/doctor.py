"""`culm doctor`: is what culm keeps of a project sound, and what can be made anew.

Looks at the database, at what is derived in it, at mailboxes and at worktrees. Only the derived
part is ever changed, only if asked to, and never beside a server. The machine around it is
`doctor_machine.py`'s.
"""

import fcntl
import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import click
import msgspec

from culm.cli.doctor_findings import DoctorFinding, Part, lines_of, note, wrong
from culm.cli.exits import EXIT_FAILED
from culm.cli.mail_command import ASK_S_MAX
from culm.cli.mail_look import MailboxSummary, addresses_in, summarize_mailbox
from culm.cli.mail_place import KnownProject, UnknownProject, all_projects, get_project
from culm.cli.render.text import counted
from culm.clock import LoopClock
from culm.errors import AppError, DataLocked, DataUnusable
from culm.store.checkup import DatabaseReport, RepairReport, examine, repair
from culm.wire.agents import OUTSIDE
from culm.wire.codec import printable
from culm.worktrees.notes import SUFFIX

OnStep = Callable[[int], None]  # As of a progress bar: so many more are done.

WORKTREES_MAX = 10_000  # Looked at: as many as a large tree of agents has.
NAMED_MAX = 3  # Of what is wrong; the rest is counted.


def _nobody_watches(done: int) -> None:
    pass


def examine_all(
    projects: Sequence[KnownProject], *, rebuilds: bool, on_step: OnStep = _nobody_watches
) -> list[DoctorFinding]:
    """Say how each project is. Raises `DataLocked`.

    `on_step` is told of each, and now and then with 0, as large databases take a while.
    """
    findings: list[DoctorFinding] = []
    for project in projects:
        if rebuilds:
            with locked(project.root):
                findings += examine_project(project, rebuilds=True, on_step=on_step)
        else:
            findings += examine_project(project, rebuilds=False, on_step=on_step)
        on_step(1)
    return findings


def show(findings: Sequence[DoctorFinding], *, as_json: bool) -> int:
    """Print them; returns the exit status."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2))
    else:
        for line in lines_of(findings):
            click.echo(line)
    return 0 if all(finding.is_ok for finding in findings) else EXIT_FAILED


def find_projects(
    directory: Path, data_dir: Path, *, is_all: bool
) -> tuple[list[KnownProject], list[DoctorFinding]]:
    """Those to look at; and why there is none, which is no harm where culm was never used."""
    try:
        projects = all_projects(data_dir) if is_all else [get_project(directory, data_dir)]
    except UnknownProject as exc:
        return [], [note("project", exc.message, exc.hint)]
    except AppError as exc:
        return [], [wrong("project", exc.message, exc.hint)]
    except OSError as exc:
        words = f"{data_dir} cannot be read: {exc.strerror}"
        return [], [wrong("project", words, "it must be a directory of yours")]
    if projects:
        return projects, []
    return [], [note("project", "culm has never been used here", "`culm run` begins")]


def examine_project(
    project: KnownProject, *, rebuilds: bool, on_step: OnStep = _nobody_watches
) -> list[DoctorFinding]:
    """All that is to be said of one, whatever else is wrong with it."""

    def at_work() -> None:
        on_step(0)

    name = str(project.path)
    notes: dict[Part, str] = {}
    try:
        found = examine(project.database, at_work)
        is_wrong = bool(found.problems or found.wrong or found.circular)
        if rebuilds and found.is_current and is_wrong:
            notes["agents"] = _done(repair(project.database, int(LoopClock().now_s()), at_work))
            found = examine(project.database, at_work)
    except AppError as exc:
        damaged = DoctorFinding(name, "database", is_ok=False, text=exc.message, hint=_REPLACED)
        return [damaged, _mailboxes(name, project.mailboxes)]
    return [
        _database(name, found),
        _agents(name, found, notes.get("agents", "")),
        _mailboxes(name, project.mailboxes),
        _worktrees(name, project.worktrees, found),
    ]


def _done(repaired: RepairReport) -> str:
    rows = counted(repaired.rows, "row was made anew", "rows were made anew")
    who = counted(len(repaired.cut), "agent works", "agents work")
    cut = f"; {who} for nobody now: {_some(repaired.cut)}" if repaired.cut else ""
    return f"; {rows}{cut}"


_REPLACED = "a server that opens it moves it aside and begins anew; copy it first"
_REBUILD = "stop the server, then: culm doctor --rebuild"


def _database(name: str, found: DatabaseReport) -> DoctorFinding:
    if found.problems:
        words = f"damaged: {printable('; '.join(found.problems))}"
        return DoctorFinding(name, "database", is_ok=False, text=words, hint=_REBUILD)
    if not found.is_current:
        words = f"schema {found.schema} is not the one that this culm has"
        hint = "an older one is brought forward when a server opens it; for a newer one, upgrade"
        return DoctorFinding(name, "database", is_ok=False, text=words, hint=hint)
    return DoctorFinding(name, "database", is_ok=True, text=f"schema {found.schema}")


def _agents(name: str, found: DatabaseReport, note: str) -> DoctorFinding:
    if found.circular:
        circular = counted(len(found.circular), "is its own ancestor", "are their own ancestors")
        words = f"{circular}: {_some(found.circular)}"
        return DoctorFinding(name, "agents", is_ok=False, text=words + note, hint=_REBUILD)
    if found.problems or not found.is_current:
        return DoctorFinding(name, "agents", is_ok=False, text="not looked at: see the database")
    if found.wrong:
        rows = counted(found.wrong, "row has", "rows have")
        words = f"{rows} sums or paths that are not what the others say"
        return DoctorFinding(name, "agents", is_ok=False, text=words + note, hint=_REBUILD)
    words = counted(found.agents, "agent", "agents")
    return DoctorFinding(name, "agents", is_ok=True, text=words + note)


def _mailboxes(name: str, mailboxes: Path) -> DoctorFinding:
    try:
        boxes = [summarize_mailbox(mailboxes, address) for address in addresses_in(mailboxes)]
    except AppError as exc:
        return DoctorFinding(name, "mailboxes", is_ok=False, text=exc.message, hint=exc.hint)
    left = [box.address for box in boxes if _is_left(mailboxes, box)]
    unsafe = [box.problem for box in boxes if box.problem]
    waiting = counted(sum(box.waiting for box in boxes), "letter waits", "letters wait")
    # Dead ones are kept for people to see; nothing is wrong with that.
    dead = counted(sum(box.dead for box in boxes), "is dead", "are dead")
    words = [str(len(boxes)), waiting, dead]
    wrong: list[str] = []
    hint = ""
    if corrupt := sum(box.corrupt for box in boxes):
        wrong.append(f"{corrupt} cannot be read")
        hint = f"look into {mailboxes}/*/corrupt, and remove what is there"
    if left:
        behind = counted(len(left), "was left behind", "were left behind")
        wrong.append(f"{behind} by `culm mail ask`")
        hint = f"remove {mailboxes / left[0]}" + (" and its like" if len(left) > 1 else "")
    if unsafe:
        wrong.append(f"{len(unsafe)} cannot be used: {_some(unsafe)}")
        hint = "its directories must be yours and writable by nobody else, and no links"
    text = printable(", ".join(words + wrong))
    return DoctorFinding(name, "mailboxes", is_ok=not wrong, text=text, hint=printable(hint))


def _is_left(mailboxes: Path, box: MailboxSummary) -> bool:
    """Whether it is of a program that has been killed."""
    if not box.address.startswith(OUTSIDE):
        return False
    with suppress(OSError):
        return (mailboxes / box.address).stat().st_mtime < LoopClock().now_s() - ASK_S_MAX
    return False


def _worktrees(name: str, worktrees: Path, found: DatabaseReport) -> DoctorFinding:
    there = _names_in(worktrees)
    worktrees = worktrees.resolve()
    kept = {Path(one).resolve() for one in found.worktrees}
    used = {path for one in kept for path in (one, *one.parents)}
    left = [one for one in there if worktrees / one not in used]
    if left and found.is_current and not found.problems:
        words = f"{counted(len(left), 'belongs', 'belong')} to no agent: {_some(left)}"
        first = worktrees / left[0]
        # One that was being made when its server was killed is none of git's yet.
        how = "git worktree remove" if (first / ".git").exists() else "rm -r"
        hint = f"look what is in it, then: {how} {first}"
        return DoctorFinding(name, "worktrees", is_ok=False, text=words, hint=printable(hint))
    return DoctorFinding(name, "worktrees", is_ok=True, text=str(len(there)))


def _names_in(folder: Path) -> list[str]:
    with suppress(OSError), os.scandir(folder) as entries:
        worktrees = (entry.name for entry in entries if not entry.name.endswith(SUFFIX))
        return sorted(islice(worktrees, WORKTREES_MAX))
    return []


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return printable(", ".join(names[:NAMED_MAX]) + more)


@contextmanager
def locked(root: Path) -> Generator[None]:
    """Keep servers from a data directory; raises `DataLocked` if one has it, `DataUnusable`.

    Not by `Roots`: that notes when somebody was last alive, and a doctor is not what is meant.
    """
    try:
        descriptor = os.open(root / "culm.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise DataUnusable(str(root), exc.strerror or str(exc)) from exc
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise DataLocked(str(root), "a server") from exc
        yield
    finally:
        os.close(descriptor)

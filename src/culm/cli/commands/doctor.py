"""`culm doctor`: check the data that culm keeps for a project, and rebuild derived data.

Checks the database, its derived columns, mailboxes and worktrees. Only derived data is ever
changed, only on request, and never while a server runs. `doctor_machine.py` checks the machine.
"""

import fcntl
import os
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path

import click
import msgspec

from culm.cli.commands.doctor_machine import (
    DoctorFinding,
    Part,
    examine_machine,
    lines_of,
    note,
    wrong,
)
from culm.cli.exits import EXIT_FAILED
from culm.cli.mailboxes import ASK_S_MAX, MailboxSummary, addresses_in, summarize_mailbox
from culm.cli.options import json_option, project_options
from culm.cli.projects import KnownProject, UnknownProject, all_projects, data_dir_of, get_project
from culm.cli.render.text import counted
from culm.cli.terminal.progress import progress
from culm.client.launch import ServerRequest
from culm.clock import LoopClock
from culm.errors import AppError, DataLocked, DataUnusable
from culm.settings import default_host
from culm.store.files import DatabaseReport, RepairReport, examine, repair
from culm.wire.agents import EXTERNAL_PREFIX
from culm.wire.codec import printable
from culm.worktrees import SUFFIX

OnStep = Callable[[int], None]  # Called with the number of further items done.
WORKTREES_MAX = 10_000  # More than a large tree of agents has.
NAMED_MAX = 3  # Names in a message; the rest is counted.
_REPLACED = "copy it first: a server that opens it moves it aside and starts a new one"
_REBUILD = "stop the server, then run: culm doctor --rebuild"


@click.command()
@click.option(
    "--rebuild", "rebuilds", is_flag=True, help="Rebuild derived data, while no server is running."
)
@click.option("--all", "is_all", is_flag=True, help="Check every project that was ever opened.")
@json_option
@click.option(
    "--host",
    envvar="CULM_HOST",
    metavar="URL",
    help="Server to check, as for `culm run`; no server is started.",
)
@project_options
def doctor(
    rebuilds: bool,  # noqa: FBT001 - click passes by name
    is_all: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Check the machine, the server and the stored data.

    First come versions, programs, directories, the disk, and the server if one is running; then the
    project's database with its derived data, its mailboxes, and leftover worktrees. Nothing is
    changed, except by --rebuild: it rebuilds indices and derived columns from the other rows, and
    detaches an agent that is its own ancestor from its parent. No server may have the data
    directory open then. The exit status is 1 if there is a problem.

    \b
    Example:
      culm doctor
      culm doctor --all --json
      culm doctor --rebuild
    """
    root = data_dir_of(data_dir, os.environ)
    server = ServerRequest(host or default_host(os.environ), data_dir)
    projects, findings = find_projects(directory, root, is_all=is_all)
    text = "rebuilding" if rebuilds else "checking"
    with progress(text, len(projects)) as step:
        findings += examine_all(projects, rebuilds=rebuilds, on_step=step)
    sys.exit(show([*examine_machine(server, root, os.environ), *findings], as_json=as_json))


def _ignore_progress(done: int) -> None:
    """Ignore progress."""
    pass


def examine_all(
    projects: Sequence[KnownProject], *, rebuilds: bool, on_step: OnStep = _ignore_progress
) -> list[DoctorFinding]:
    """Check each project. Raises `DataLocked`.

    `on_step` is called with 1 after each project, and now and then with 0, because large databases
    take a while.
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
    """Print the findings; returns the exit status."""
    if as_json:
        click.echo(msgspec.json.format(msgspec.json.encode(findings), indent=2))
    else:
        for line in lines_of(findings):
            click.echo(line)
    return 0 if all(finding.is_ok for finding in findings) else EXIT_FAILED


def find_projects(
    directory: Path, data_dir: Path, *, is_all: bool
) -> tuple[list[KnownProject], list[DoctorFinding]]:
    """The projects to check, or the reason why there are none; unused is not an error."""
    try:
        projects = all_projects(data_dir) if is_all else [get_project(directory, data_dir)]
    except UnknownProject as exc:
        return [], [note("project", exc.message, exc.hint)]
    except AppError as exc:
        return [], [wrong("project", exc.message, exc.hint)]
    except OSError as exc:
        text = f"{data_dir} cannot be read: {exc.strerror}"
        return [], [wrong("project", text, "it must be a directory that you own")]
    if projects:
        return projects, []
    return [], [note("project", "culm has never been used here", "start with `culm run`")]


def examine_project(
    project: KnownProject, *, rebuilds: bool, on_step: OnStep = _ignore_progress
) -> list[DoctorFinding]:
    """All findings for a project; one problem does not hide the others."""

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
    rows = counted(repaired.rows, "row was rebuilt", "rows were rebuilt")
    agents = counted(len(repaired.cut), "agent has", "agents have")
    cut = f"; {agents} no parent any more: {_some(repaired.cut)}" if repaired.cut else ""
    return f"; {rows}{cut}"


def _database(name: str, found: DatabaseReport) -> DoctorFinding:
    if found.problems:
        text = f"damaged: {printable('; '.join(found.problems))}"
        return DoctorFinding(name, "database", is_ok=False, text=text, hint=_REBUILD)
    if not found.is_current:
        text = f"schema {found.schema} is not the schema of this culm"
        hint = "upgrade culm for a newer schema; a server migrates an older one when it opens it"
        return DoctorFinding(name, "database", is_ok=False, text=text, hint=hint)
    return DoctorFinding(name, "database", is_ok=True, text=f"schema {found.schema}")


def _agents(name: str, found: DatabaseReport, note: str) -> DoctorFinding:
    if found.circular:
        circular = counted(len(found.circular), "is its own ancestor", "are their own ancestors")
        text = f"{circular}: {_some(found.circular)}"
        return DoctorFinding(name, "agents", is_ok=False, text=text + note, hint=_REBUILD)
    if found.problems or not found.is_current:
        return DoctorFinding(name, "agents", is_ok=False, text="not checked: see the database")
    if found.wrong:
        rows = counted(found.wrong, "row has", "rows have")
        text = f"{rows} sums or paths that do not match the other rows"
        return DoctorFinding(name, "agents", is_ok=False, text=text + note, hint=_REBUILD)
    text = counted(found.agents, "agent", "agents")
    return DoctorFinding(name, "agents", is_ok=True, text=text + note)


def _mailboxes(name: str, mailboxes: Path) -> DoctorFinding:
    try:
        boxes = [summarize_mailbox(mailboxes, address) for address in addresses_in(mailboxes)]
    except AppError as exc:
        return DoctorFinding(name, "mailboxes", is_ok=False, text=exc.message, hint=exc.hint)
    left = [box.address for box in boxes if _is_left(mailboxes, box)]
    unsafe = [box.problem for box in boxes if box.problem]
    waiting = counted(sum(box.waiting for box in boxes), "letter waits", "letters wait")
    # Dead letters are kept for people to read, so they are not a problem.
    dead = counted(sum(box.dead for box in boxes), "is dead", "are dead")
    parts = [str(len(boxes)), waiting, dead]
    wrong: list[str] = []
    hint = ""
    if corrupt := sum(box.corrupt for box in boxes):
        wrong.append(f"{corrupt} cannot be read")
        hint = f"inspect and remove the files in {mailboxes}/*/corrupt"
    if left:
        behind = counted(len(left), "was left behind", "were left behind")
        wrong.append(f"{behind} by `culm mail ask`")
        hint = f"remove {mailboxes / left[0]}" + (" and the others" if len(left) > 1 else "")
    if unsafe:
        wrong.append(f"{len(unsafe)} cannot be used: {_some(unsafe)}")
        hint = "its directories must not be links, and only you may own and write them"
    text = printable(", ".join(parts + wrong))
    return DoctorFinding(name, "mailboxes", is_ok=not wrong, text=text, hint=printable(hint))


def _is_left(mailboxes: Path, box: MailboxSummary) -> bool:
    """Return whether the mailbox belongs to a `culm mail ask` that was killed."""
    if not box.address.startswith(EXTERNAL_PREFIX):
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
        text = f"{counted(len(left), 'belongs', 'belong')} to no agent: {_some(left)}"
        first = worktrees / left[0]
        # Git does not know a worktree that was being created when its server was killed.
        how = "git worktree remove" if (first / ".git").exists() else "rm -r"
        hint = f"check its content, then: {how} {first}"
        return DoctorFinding(name, "worktrees", is_ok=False, text=text, hint=printable(hint))
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
    """Lock servers out of a data directory; raises `DataLocked` if one uses it, `DataUnusable`.

    Does not use `DataRoots`, which would record this process as a live server.
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

"""`culm doctor`: check the machine, the server and the data of a project; rebuild derived data.

Only derived data is ever changed, only on request, and never while a server runs. A running server
is queried, and none is started.
"""

import asyncio
import fcntl
import os
import re
import shutil
import socket
import stat
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import metadata
from itertools import islice
from pathlib import Path
from platform import python_version
from typing import Literal

import click
import msgspec
from msgspec import Struct

from culm import __version__
from culm.cli.options import host_option, json_option, project_options
from culm.cli.projects import (
    ASK_S_MAX,
    KnownProject,
    MailboxSummary,
    UnknownProject,
    addresses_in,
    all_projects,
    data_dir_of,
    get_project,
    summarize_mailbox,
)
from culm.cli.render.text import counted, size_text
from culm.cli.terminal.process import EXIT_FAILED, print_json
from culm.cli.terminal.progress import progress
from culm.client.http import RequestRefused, open_client
from culm.client.launch import (
    ServerRequest,
    compare_version,
    find_token,
    is_compatible,
    is_listening,
)
from culm.clock import LoopClock
from culm.errors import AppError, DataLocked, DataUnusable
from culm.settings import default_config_file, default_host, default_state_dir
from culm.store.files import DatabaseReport, RepairReport, examine, repair
from culm.wire.agents import EXTERNAL_PREFIX
from culm.wire.codec import printable
from culm.worktrees import SUFFIX

OnStep = Callable[[int], None]  # Called with the number of further items done.
WORKTREES_MAX = 10_000  # More than a large tree of agents has.
NAMED_MAX = 3  # Names in a message; the rest is counted.
_REPLACED = "copy it first: a server that opens it moves it aside and starts a new one"
_REBUILD = "stop the server, then run: culm doctor --rebuild"


HERE = "this machine"  # The heading of findings that belong to no project.

MachinePart = Literal[
    "culm", "libraries", "programs", "data", "config", "state", "token", "disk", "socket", "server"
]

Part = MachinePart | Literal["project", "database", "agents", "mailboxes", "worktrees"]

FREE_BYTES_MIN = 100 << 20  # With less, the next large answer may not fit.

FREE_BYTES_LOW = 1 << 30

ASK_S = 5.0  # A healthy server answers at once.

# Programs that culm can do without, and the loss.
_PROGRAMS = {
    "git": "agents have worktrees of their own only with git",
    "rg": "searching is slower without ripgrep",
}

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class DoctorFinding(Struct, frozen=True):
    """One line: a part of a project or of the machine, and its state."""

    project: str  # Empty for the machine.
    part: Part
    is_ok: bool
    text: str
    hint: str = ""
    is_note: bool = False  # Not a problem, but worth knowing.


@click.command()
@click.option(
    "--rebuild", "rebuilds", is_flag=True, help="Rebuild derived data, while no server is running."
)
@click.option("--all", "is_all", is_flag=True, help="Check every project that was ever opened.")
@json_option
@host_option("Server to check, as for `culm run`; no server is started.")
@project_options
def doctor(
    rebuilds: bool,
    is_all: bool,
    as_json: bool,
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
        print_json(findings)
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
    repaired = ""
    try:
        found = examine(project.database, at_work)
        is_wrong = bool(found.problems or found.wrong or found.circular)
        if rebuilds and found.is_current and is_wrong:
            repaired = _done(repair(project.database, int(LoopClock().now_s()), at_work))
            found = examine(project.database, at_work)
    except AppError as exc:
        damaged = wrong("database", exc.message, _REPLACED, name)
        return [damaged, _mailboxes(name, project.mailboxes)]
    return [
        _database(name, found),
        _agents(name, found, repaired),
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
        return wrong("database", f"damaged: {'; '.join(found.problems)}", _REBUILD, name)
    if not found.is_current:
        text = f"schema {found.schema} is not the schema of this culm"
        hint = "upgrade culm for a newer schema; a server migrates an older one when it opens it"
        return wrong("database", text, hint, name)
    return ok("database", f"schema {found.schema}", name)


def _agents(name: str, found: DatabaseReport, repaired: str) -> DoctorFinding:
    if found.circular:
        circular = counted(len(found.circular), "is its own ancestor", "are their own ancestors")
        return wrong("agents", f"{circular}: {_some(found.circular)}{repaired}", _REBUILD, name)
    if found.problems or not found.is_current:
        return wrong("agents", "not checked: see the database", project=name)
    if found.wrong:
        rows = counted(found.wrong, "row has", "rows have")
        text = f"{rows} sums or paths that do not match the other rows{repaired}"
        return wrong("agents", text, _REBUILD, name)
    return ok("agents", counted(found.agents, "agent", "agents") + repaired, name)


def _mailboxes(name: str, mailboxes: Path) -> DoctorFinding:
    try:
        boxes = [summarize_mailbox(mailboxes, address) for address in addresses_in(mailboxes)]
    except AppError as exc:
        return wrong("mailboxes", exc.message, exc.hint, name)
    left = [box.address for box in boxes if _is_left(mailboxes, box)]
    unsafe = [box.problem for box in boxes if box.problem]
    waiting = counted(sum(box.waiting for box in boxes), "letter waits", "letters wait")
    # Dead letters are kept for people to read, so they are not a problem.
    dead = counted(sum(box.dead for box in boxes), "is dead", "are dead")
    parts = [str(len(boxes)), waiting, dead]
    problems: list[str] = []
    hint = ""
    if corrupt := sum(box.corrupt for box in boxes):
        problems.append(f"{corrupt} cannot be read")
        hint = f"inspect and remove the files in {mailboxes}/*/corrupt"
    if left:
        behind = counted(len(left), "was left behind", "were left behind")
        problems.append(f"{behind} by `culm mail ask`")
        hint = f"remove {mailboxes / left[0]}" + (" and the others" if len(left) > 1 else "")
    if unsafe:
        problems.append(f"{len(unsafe)} cannot be used: {_some(unsafe)}")
        hint = "its directories must not be links, and only you may own and write them"
    text = ", ".join(parts + problems)
    return wrong("mailboxes", text, hint, name) if problems else ok("mailboxes", text, name)


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
        return wrong("worktrees", text, hint, name)
    return ok("worktrees", str(len(there)), name)


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


# --- the machine


def ok(part: Part, text: str, project: str = "") -> DoctorFinding:
    """A finding about the machine or a project, as are the next two."""
    return DoctorFinding(project, part, is_ok=True, text=printable(text))


def note(part: Part, text: str, hint: str) -> DoctorFinding:
    return DoctorFinding(
        "", part, is_ok=True, text=printable(text), hint=printable(hint), is_note=True
    )


def wrong(part: Part, text: str, hint: str = "", project: str = "") -> DoctorFinding:
    return DoctorFinding(project, part, is_ok=False, text=printable(text), hint=printable(hint))


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


def examine_machine(
    server: ServerRequest, data_dir: Path, env: Mapping[str, str]
) -> list[DoctorFinding]:
    """All findings for the machine; one problem does not hide the others."""
    return [
        ok("culm", f"{__version__}, Python {python_version()}"),
        libraries(),
        *programs(env),
        _directory("data", data_dir),
        _directory("config", default_config_file(env).parent, is_read=True),
        _directory("state", default_state_dir(env)),
        _token(data_dir / "token"),
        _disk(data_dir),
        *examine_server(server, env),
    ]


# --- installed software


def libraries() -> DoctorFinding:
    """The libraries that culm requires, with their installed versions."""
    try:
        needed = metadata.requires("culm") or []
    except metadata.PackageNotFoundError:
        return note("libraries", "culm is not installed as a package", "install it with make setup")
    names = [found[0] for one in needed if "extra ==" not in one and (found := _NAME.match(one))]
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    missing = [name for name in names if name not in versions]
    if missing:
        return wrong("libraries", f"missing: {', '.join(missing)}", "install culm again")
    return ok("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))


def programs(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, loss in _PROGRAMS.items():
        path = shutil.which(name, path=env.get("PATH", os.defpath))
        if path is None:
            yield note("programs", f"{name} not found", loss)
        else:
            yield ok("programs", f"{name}: {path}")


# --- where things are kept


def _directory(part: Part, folder: Path, *, is_read: bool = False) -> DoctorFinding:
    """A directory that may not exist yet; one that is only read need not be writable."""
    try:
        there = nearest_there(folder)
    except OSError as exc:
        return wrong(part, f"{folder}: {exc.strerror}", "it must be a directory that you own")
    if not there.is_dir():
        return wrong(
            part, f"{there} is not a directory", "move it away, or choose another location"
        )
    if not os.access(there, os.W_OK | os.X_OK):
        text, hint = f"{there} is not writable", "it must be a directory that you own"
        return note(part, text, hint) if is_read else wrong(part, text, hint)
    return ok(part, str(folder) if there == folder else f"{folder}, not created yet")


def nearest_there(path: Path) -> Path:
    """The path or its nearest existing ancestor; raises `OSError` if it is not accessible."""
    for one in (path, *path.parents):
        try:
            one.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return one
    return path


def _token(file: Path) -> DoctorFinding:
    """The token file of servers over TCP."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ok("token", "none yet; a server on TCP creates one")
    except OSError as exc:
        return wrong("token", f"{file}: {exc.strerror}", "it must be a file that you own")
    if not stat.S_ISREG(found.st_mode):
        return wrong(
            "token", f"{file} is not a regular file", "remove it; a server on TCP creates one"
        )
    if found.st_mode & 0o077:
        return wrong("token", f"{file} can be read by others", f"chmod 600 {file}")
    return ok("token", str(file))


def _disk(folder: Path) -> DoctorFinding:
    try:
        free = shutil.disk_usage(nearest_there(folder)).free
    except OSError as exc:
        return wrong("disk", f"{folder}: {exc.strerror}", "it must be a directory that you own")
    text = f"{size_text(free)} free"
    if free < FREE_BYTES_MIN:
        return wrong("disk", text, "free some disk space")
    return note("disk", text, "free some disk space") if free < FREE_BYTES_LOW else ok("disk", text)


# --- the server


def examine_server(server: ServerRequest, env: Mapping[str, str]) -> list[DoctorFinding]:
    """The socket, and the server if one is running."""
    if not server.can_start:
        return [ok("socket", f"not used: the server is {server.url}"), _server(server, env, pid=0)]
    path = Path(server.url.removeprefix("unix://"))
    try:
        kind = path.stat().st_mode
    except OSError:
        return [ok("socket", f"{path} does not exist: no server is running")]
    if not stat.S_ISSOCK(kind):
        return [
            wrong(
                "socket",
                f"{path} is not a socket",
                "move it away, or choose another address with --host",
            )
        ]
    if not is_listening(server.url):
        hint = "harmless: a server was killed, and the next one replaces the socket"
        return [note("socket", f"{path} is stale: no server answers", hint)]
    return [ok("socket", str(path)), _server(server, env, _pid_behind(path))]


def _server(server: ServerRequest, env: Mapping[str, str], pid: int) -> DoctorFinding:
    try:
        version, open_ = asyncio.run(_ask(server, env))
    except (RequestRefused, AppError) as exc:
        return wrong("server", f"request refused: {exc.message}", exc.hint or "see its log")
    except OSError as exc:
        text = f"it does not answer: {exc}" if str(exc) else "it does not answer"
        return wrong("server", text, "`culm logs` may show why; `culm serve` starts one")
    except msgspec.MsgspecError:
        return wrong("server", f"{server.url} is not a culm server", "choose another with --host")
    about = f", pid {pid}" if pid else ""
    text = f"culm {version}{about}, {counted(open_, 'workspace', 'workspaces')} open"
    if not is_compatible(version):
        return wrong(
            "server", text, f"this is culm {__version__}: stop it, or choose another with --host"
        )
    if compare_version(version) != "ours":
        return note("server", text, f"this is culm {__version__}; they are compatible")
    return ok("server", text)


async def _ask(server: ServerRequest, env: Mapping[str, str]) -> tuple[str, int]:
    """The version of the server, and the number of its open workspaces."""
    token = find_token(server, None, env)
    async with asyncio.timeout(ASK_S), open_client(server.url, token=token) as client:
        return (await client.version()).version, len(await client.workspaces())


def _pid_behind(path: Path) -> int:
    """The process that listens on a socket; 0 if it is unknown."""
    form = struct.Struct("3i")  # pid, uid, gid: `struct ucred` of Linux.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ASK_S)
        probe.connect(str(path))
        ucred = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        return form.unpack(ucred)[0]
    return 0

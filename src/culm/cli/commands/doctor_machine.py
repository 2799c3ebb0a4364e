"""The findings of `culm doctor`, and its checks of the machine.

Checks programs, directories, the disk and the server. Changes nothing; a running server is queried,
and none is started.
"""

import asyncio
import os
import re
import shutil
import socket
import stat
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Literal

import msgspec
from msgspec import Struct

from culm import __version__
from culm.cli.render.text import counted, size_text
from culm.client.http import RequestRefused, open_client
from culm.client.launch import (
    ServerRequest,
    compare_version,
    find_token,
    is_compatible,
    is_listening,
)
from culm.errors import AppError
from culm.settings import default_config_file, default_state_dir
from culm.wire.codec import printable

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


def ok(part: Part, text: str) -> DoctorFinding:
    """A finding about the machine, as are the next two."""
    return DoctorFinding("", part, is_ok=True, text=printable(text))


def note(part: Part, text: str, hint: str) -> DoctorFinding:
    return DoctorFinding(
        "", part, is_ok=True, text=printable(text), hint=printable(hint), is_note=True
    )


def wrong(part: Part, text: str, hint: str) -> DoctorFinding:
    return DoctorFinding("", part, is_ok=False, text=printable(text), hint=printable(hint))


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

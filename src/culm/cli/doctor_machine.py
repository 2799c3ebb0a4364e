"""What `culm doctor` says of the machine: programs, directories, the disk, and the server.

Looks and changes nothing; a server that runs is asked what it is, and none is started.
"""

import asyncio
import os
import re
import shutil
import socket
import stat
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from platform import python_version

import msgspec

from culm import __version__
from culm.cli.doctor_findings import DoctorFinding, Part, note, ok, wrong
from culm.cli.render.text import counted, size_text
from culm.client.http import RequestRefused, open_client
from culm.client.launch import ServerRequest, age_of, find_token, is_answered, is_understood
from culm.errors import AppError
from culm.settings import default_config_file, default_state_dir

FREE_BYTES_MIN = 100 << 20  # With less the next large answer may find no room.
FREE_BYTES_LOW = 1 << 30
ASK_S = 5.0  # A server that is well answers at once.

# What does without each, but not as well.
_PROGRAMS = {
    "git": "agents have worktrees of their own only with git",
    "rg": "searching is slower without ripgrep",
}


def examine_machine(
    server: ServerRequest, data_dir: Path, env: Mapping[str, str]
) -> list[DoctorFinding]:
    """All that is to be said of it, whatever else is wrong."""
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


# --- what is installed


def libraries() -> DoctorFinding:
    """Those that culm says it needs, as they are installed."""
    try:
        needed = metadata.requires("culm") or []
    except metadata.PackageNotFoundError:
        return note("libraries", "culm is not installed as a package", "make setup installs it")
    names = [found[0] for one in needed if "extra ==" not in one and (found := _NAME.match(one))]
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    missing = [name for name in names if name not in versions]
    if missing:
        return wrong("libraries", f"missing: {', '.join(missing)}", "install culm again")
    return ok("libraries", ", ".join(f"{name} {version}" for name, version in versions.items()))


_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def programs(env: Mapping[str, str]) -> Iterator[DoctorFinding]:
    for name, loss in _PROGRAMS.items():
        path = shutil.which(name, path=env.get("PATH", os.defpath))
        if path is None:
            yield note("programs", f"{name} is not found", loss)
        else:
            yield ok("programs", f"{name}: {path}")


# --- where things are kept


def _directory(part: Part, folder: Path, *, is_read: bool = False) -> DoctorFinding:
    """One that need not be there yet; what is only read need not be writable."""
    try:
        there = nearest_there(folder)
    except OSError as exc:
        return wrong(part, f"{folder}: {exc.strerror}", "it must be a directory of yours")
    if not there.is_dir():
        return wrong(part, f"{there} is no directory", "move it away, or choose another place")
    if not os.access(there, os.W_OK | os.X_OK):
        words, hint = f"{there} is not writable", "it must be a directory of yours"
        return note(part, words, hint) if is_read else wrong(part, words, hint)
    return ok(part, str(folder) if there == folder else f"{folder}, which is not made yet")


def nearest_there(path: Path) -> Path:
    """The path, or the first above it that exists; raises `OSError` if it cannot be looked at."""
    for one in (path, *path.parents):
        try:
            one.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return one
    return path


def _token(file: Path) -> DoctorFinding:
    """That of servers over TCP."""
    try:
        found = file.stat()
    except (FileNotFoundError, NotADirectoryError):
        return ok("token", "none yet; a server over TCP makes one")
    except OSError as exc:
        return wrong("token", f"{file}: {exc.strerror}", "it must be a file of yours")
    if not stat.S_ISREG(found.st_mode):
        return wrong("token", f"{file} is no file", "remove it; a server over TCP makes one")
    if found.st_mode & 0o077:
        return wrong("token", f"{file} can be read by others", f"chmod 600 {file}")
    return ok("token", str(file))


def _disk(folder: Path) -> DoctorFinding:
    try:
        free = shutil.disk_usage(nearest_there(folder)).free
    except OSError as exc:
        return wrong("disk", f"{folder}: {exc.strerror}", "it must be a directory of yours")
    words = f"{size_text(free)} free"
    if free < FREE_BYTES_MIN:
        return wrong("disk", words, "nothing can be kept on a full disk: make room")
    return note("disk", words, "make room") if free < FREE_BYTES_LOW else ok("disk", words)


# --- the server


def examine_server(server: ServerRequest, env: Mapping[str, str]) -> list[DoctorFinding]:
    """Where it is expected, and what it is if it is there."""
    if not server.can_start:
        return [ok("socket", f"none: {server.url} was asked for"), _server(server, env, pid=0)]
    path = Path(server.url.removeprefix("unix://"))
    try:
        kind = path.stat().st_mode
    except OSError:
        return [ok("socket", f"{path} is not there: no server runs")]
    if not stat.S_ISSOCK(kind):
        return [wrong("socket", f"{path} is no socket", "move it away, or give --host")]
    if not is_answered(server.url):
        hint = "harmless: a server was killed, and the next one takes its place"
        return [note("socket", f"{path} is stale: nobody answers", hint)]
    return [ok("socket", str(path)), _server(server, env, _pid_behind(path))]


def _server(server: ServerRequest, env: Mapping[str, str], pid: int) -> DoctorFinding:
    try:
        version, open_ = asyncio.run(_ask(server, env))
    except (RequestRefused, AppError) as exc:
        return wrong("server", f"it refuses: {exc.message}", exc.hint or "see its log")
    except OSError as exc:
        words = f"it does not answer: {exc}" if str(exc) else "it does not answer"
        return wrong("server", words, "`culm logs` may say why; `culm serve` starts one")
    except msgspec.MsgspecError:
        return wrong("server", "what answers is no culm server", "choose another with --host")
    about = f", pid {pid}" if pid else ""
    words = f"culm {version}{about}, {counted(open_, 'workspace', 'workspaces')} open"
    if not is_understood(version):
        return wrong("server", words, f"this is culm {__version__}: stop it, or give --host")
    if age_of(version) != "ours":
        return note("server", words, f"this is culm {__version__}; they understand each other")
    return ok("server", words)


async def _ask(server: ServerRequest, env: Mapping[str, str]) -> tuple[str, int]:
    """Its version, and how many workspaces it has open."""
    token = find_token(server, None, env)
    async with asyncio.timeout(ASK_S), open_client(server.url, token=token) as client:
        return (await client.version()).version, len(await client.workspaces())


def _pid_behind(path: Path) -> int:
    """Of whoever listens at a socket; 0 if that is not told."""
    form = struct.Struct("3i")  # pid, uid, gid: `struct ucred`, as Linux has it.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(ASK_S)
        probe.connect(str(path))
        ucred = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, form.size)
        return form.unpack(ucred)[0]
    return 0

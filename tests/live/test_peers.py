"""A server on a shared machine: other users at its socket, failing directories and disks."""

import asyncio
import json
import os
import re
import resource
import stat
import subprocess
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, SessionId
from tests.live.harness import (
    RESUME_S,
    SERVE,
    ProcessServer,
    make_directory,
    open_client_of,
    open_process,
    open_process_server,
)
from tests.support import WAIT_S

NOBODY = 65534
is_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")

# Standard library only: another user may not be able to read this checkout.
ASK = """
import socket, sys
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(5)
    sock.connect(sys.argv[1])
    sock.sendall(sys.stdin.buffer.read())
    while data := sock.recv(65536):
        sys.stdout.buffer.write(data)
"""

# A server of another user: it imports everything before it drops its privileges.
BECOME = f"""
import importlib, os, pkgutil, encodings.idna, uvloop, culm
for module in pkgutil.walk_packages(culm.__path__, "culm."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
importlib.import_module("culm.cli.main").main()
"""


def open_to_all(server: ProcessServer) -> Path:
    """Open the socket to all users, so that its mode does not refuse them."""
    path = Path(server.url.removeprefix("unix://"))
    path.chmod(0o777)
    path.parent.chmod(0o755)
    assert stat.S_IMODE(path.stat().st_mode) == 0o777
    return path


async def ask_as(user: int | None, path: Path, request: bytes) -> bytes:
    """Return all that the server sends to a process of this user until it closes."""

    def run() -> bytes:
        # In a directory and with an interpreter that all users may use.
        found = subprocess.run(
            [interpreter(), "-I", "-c", ASK, str(path)],
            input=request, user=user, group=user, extra_groups=[], capture_output=True,
            timeout=2 * WAIT_S, cwd="/", env={}, check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr.decode()
        return found.stdout

    return await asyncio.to_thread(run)


def interpreter() -> str:
    """Return a Python that another user may run; ours may be in a private home."""
    for path in ("/usr/bin/python3", "/usr/local/bin/python3", sys.executable):
        command = [path, "-I", "-c", ""]
        try:
            if not subprocess.run(command, user=NOBODY, cwd="/", check=False).returncode:
                return path
        except OSError:
            continue
    pytest.skip("there is no Python here that another user may run")


def request(method: str, target: str, body: bytes = b"", length: int | None = None) -> bytes:
    size = len(body) if length is None else length
    head = f"{method} {target} HTTP/1.1\r\nHost: x\r\nContent-Length: {size}\r\n\r\n"
    return head.encode() + body


@is_root
async def test_other_user_on_the_socket_gets_403_and_nothing_is_done(
    folder: Path,
) -> None:
    async with open_process_server(folder, "--host", f"unix://{folder}/s") as server:
        path = open_to_all(server)
        body = {"path": str(make_directory(folder)), "client_id": Ids().client()}
        create = json.dumps(body).encode()
        for data in (
            request("GET", "/v1/health"),
            request("GET", "/v1/nothing"),
            request("PATCH", "/v1/health"),
            request("POST", "/v1/workspaces", create),
            request("POST", "/v1/control", b'{"command": "shutdown", "server": "culm"}'),
            request("POST", "/v1/workspaces", b"{"),
        ):
            answer = await ask_as(NOBODY, path, data)  # It ends, so the connection was closed.
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 403 "), answer
            assert json.loads(body)["message"] == "this socket belongs to another user"
            assert answer.count(b"HTTP/1.1") == 1
        async with open_client_of(server) as client:
            assert await client.workspaces() == []
        assert not any("Traceback" in line for line in server.errors), server.output()


@is_root
async def test_other_user_with_an_incomplete_body_gets_403_without_waiting(
    folder: Path,
) -> None:
    async with open_process_server(folder, "--host", f"unix://{folder}/s") as server:
        path = open_to_all(server)
        answer = await ask_as(NOBODY, path, request("POST", "/v1/workspaces", b"{", 1000))
        assert answer.startswith(b"HTTP/1.1 403 ")


@is_root
async def test_root_is_served_on_the_socket_of_another_user(folder: Path) -> None:
    os.chown(folder, NOBODY, NOBODY)
    program = ("-c", BECOME, "serve")
    async with open_process_server(
        folder, "--host", f"unix://{folder}/s", program=program
    ) as server:
        assert (folder / "s").stat().st_uid == NOBODY
        async with open_client_of(server) as client:
            await client.health()
        closing = request("GET", "/v1/nothing").replace(b"Host: x", b"Host: x\r\nConnection: close")
        answer = await ask_as(NOBODY, folder / "s", closing)
        assert answer.startswith(b"HTTP/1.1 404 ")


async def test_unreadable_directory_gets_400_with_the_reason_and_opens_nothing(
    folder: Path,
) -> None:
    closed = make_directory(folder, "closed")
    below = make_directory(closed, "below")
    listless = make_directory(folder, "listless")
    program = SERVE
    if os.getuid() == 0:  # Root can read everything, so the server runs as another user.
        os.chown(folder, NOBODY, NOBODY)
        program = ("-c", BECOME, "serve")
    closed.chmod(0)
    listless.chmod(0o311)
    try:
        async with (
            open_process_server(folder, "--host", f"unix://{folder}/s", program=program) as server,
            open_client_of(server) as client,
        ):
            for path in (closed, below, listless):
                with pytest.raises(RequestRefused) as refused:
                    await client.open_workspace(path)
                assert refused.value.status == 400
                assert str(path) in refused.value.message
                assert "Permission denied" in refused.value.message
            assert await client.workspaces() == []
            for path in (closed, listless):
                path.chmod(0o755)
            await client.open_workspace(listless)
    finally:
        closed.chmod(0o755)
        listless.chmod(0o755)


# --- a failing disk

# Mounts a private file system at the path and follows the orders on its stdin.
DISK_PROGRAM = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
path, ballast = sys.argv[1], os.path.join(sys.argv[1], "ballast")

def mount(source, where, kind, flags, data):
    if libc.mount(source, where.encode(), kind, ctypes.c_ulong(flags), data):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

try:
    if libc.unshare(0x20000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    mount(None, "/", None, 0x44000, None)  # MS_REC | MS_PRIVATE: invisible to all other processes.
    mount(b"tmpfs", path, b"tmpfs", 0, b"size=8m")
except OSError as exc:
    print("refused", exc, flush=True)
    sys.exit()
print("mounted", flush=True)
for number, line in enumerate(sys.stdin):
    order = line.strip()
    if order == "fill":
        with open(ballast, "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass
    elif order == "free":
        os.remove(ballast)
    else:
        for _ in range(500):  # Busy until the last file that is open for writing is closed.
            try:
                mount(None, path, None, 0x21 if order == "read-only" else 0x20, None)
                break
            except OSError:
                time.sleep(0.01)
    print("done", number, flush=True)
"""

# `culm serve` in the mount namespace of the process whose id is given.
ENTER = """
import ctypes, os, runpy, sys
if ctypes.CDLL(None).setns(os.open(f"/proc/{sys.argv.pop(1)}/ns/mnt", os.O_RDONLY), 0):
    sys.exit("cannot enter")
runpy.run_module("culm", run_name="__main__", alter_sys=True)
"""


class Disk:
    """A small file system, visible to servers that are started with its `program`."""

    def __init__(self, process: ProcessServer) -> None:
        self.program = ("-c", ENTER, str(process.process.pid), "serve")
        self._process = process
        self._orders = 0

    async def order(self, action: str) -> None:
        self._process.send_line(action)
        await self._process.until_line(f"done {self._orders}")
        self._orders += 1


@asynccontextmanager
async def open_disk(folder: Path) -> AsyncGenerator[Disk]:
    data = make_directory(folder, "data")
    async with open_process(folder, "-c", DISK_PROGRAM, str(data)) as process:
        await process.until(lambda: bool(process.lines))
        if process.lines[0] != "mounted":
            pytest.skip(f"this system does not let us mount: {process.lines[0]}")
        yield Disk(process)


async def write_until_refused(remote: RemoteWorkspace) -> tuple[list[SessionId], RequestRefused]:
    """Create sessions until one is refused; return those acknowledged, and the refusal.

    The first ones may fit into old blocks of the log.
    """
    kept: list[SessionId] = []
    for _ in range(1000):
        try:
            kept.append((await remote.create_session("x" * 9_000)).id)
        except RequestRefused as exc:
            return kept, exc
    raise AssertionError("nothing was refused although the disk is full")


async def assert_kept(folder: Path, program: tuple[str, ...], kept: Sequence[str]) -> None:
    """Assert that a new server finds exactly the acknowledged sessions."""
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, program=program) as server,
        open_client_of(server) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        snapshot = await remote.snapshot("*")
        assert sorted(session.id for session in snapshot.sessions) == sorted(kept)
        assert snapshot.store.state == "ok"


async def test_full_disk_gives_503_recovers_when_freed_and_loses_nothing(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with open_disk(folder) as disk:
        async with (
            open_process_server(folder, *host, program=disk.program) as server,
            open_client_of(server) as client,
        ):
            remote = await client.open_workspace(make_directory(folder))
            kept = [(await remote.create_session("before")).id]
            async with open_mirror(remote) as follower, asyncio.timeout(RESUME_S):
                await follower.connected()
                await disk.order("fill")
                more, refused = await write_until_refused(remote)
                assert (refused.status, refused.code) == (503, "store_busy")
                await follower.until(lambda mirror: mirror.store.state == "failing")
                snapshot = await remote.snapshot()
                assert snapshot.store.state == "failing"
                assert snapshot.store.reason in refused.message
                with pytest.raises(RequestRefused) as unopened:
                    await client.open_workspace(make_directory(folder, "other"))
                assert unopened.value.status == 500
                assert re.search("full|space|I/O", unopened.value.message), unopened.value.message
                await client.health()

                await disk.order("free")
                after = await remote.create_session("after")
                await follower.until(lambda mirror: after.id in mirror.sessions)
                await follower.until(lambda mirror: mirror.store.state == "ok")
                await client.open_workspace(make_directory(folder, "other"))
                kept += [*more, after.id]
            await server.kill()
        await assert_kept(folder, disk.program, kept)


async def test_server_killed_on_a_full_disk_loses_nothing_acknowledged(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with open_disk(folder) as disk:
        async with (
            open_process_server(folder, *host, program=disk.program) as server,
            open_client_of(server) as client,
        ):
            remote = await client.open_workspace(make_directory(folder))
            kept = [(await remote.create_session("before")).id]
            await disk.order("fill")
            more, _ = await write_until_refused(remote)
            await server.kill()
        await disk.order("free")
        await assert_kept(folder, disk.program, kept + more)


async def test_read_only_disk_gives_500_with_the_reason_until_writable(
    folder: Path,
) -> None:
    settings = ("--host", f"unix://{folder}/s")
    async with (
        open_disk(folder) as disk,
        open_process_server(folder, *settings, program=disk.program) as server,
        open_client_of(server) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        kept = await remote.create_session("before")
        await remote.release()
        await disk.order("read-only")  # Waits until no file is open there.
        for name in ("project", "other"):
            with pytest.raises(RequestRefused) as refused:
                await client.open_workspace(make_directory(folder, name))
            assert refused.value.status == 500
            assert re.search("(?i)read-?only", refused.value.message), refused.value.message
        assert await client.workspaces() == []
        await disk.order("writable")
        again = await client.open_workspace(make_directory(folder))
        assert [session.id for session in await again.sessions()] == [kept.id]


async def test_commit_io_error_gives_503_recovers_and_loses_nothing(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s", "--log-level", "error")
    async with (
        open_process_server(folder, *host) as server,
        open_client_of(server) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        kept = [(await remote.create_session("before")).id]
        pid = server.process.pid
        old = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        async with open_mirror(remote) as follower, asyncio.timeout(RESUME_S):
            await follower.connected()
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (4096, old[1]))  # No frame fits.
            more, refused = await write_until_refused(remote)
            assert (more, refused.status, refused.code) == ([], 503, "store_busy")
            await follower.until(lambda mirror: mirror.store.state == "failing")
            assert (await remote.snapshot()).store.reason in refused.message
            with pytest.raises(RequestRefused, match=r"data directory .*: .*I/O") as unopened:
                await client.open_workspace(make_directory(folder, "other"))
            assert unopened.value.status == 500
            resource.prlimit(pid, resource.RLIMIT_FSIZE, old)
            kept.append((await remote.create_session("after")).id)
            await follower.until(lambda mirror: mirror.store.state == "ok")
            assert (await remote.snapshot()).store.state == "ok"
        await server.kill()
    await assert_kept(folder, SERVE, kept)

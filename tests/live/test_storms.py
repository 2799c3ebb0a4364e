"""A real server with thousands of misbehaving clients.

After every storm its memory, descriptors and threads are back where they were, within the slack
that is stated here; meanwhile all other clients are served.
"""

import asyncio
import contextlib
import gzip
import socket
import struct
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.client.http import Client
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids
from tests.live.harness import (
    RESUME_S,
    ProcessServer,
    make_directory,
    open_client_of,
    open_process_server,
)
from tests.support import WAIT_S

pytestmark = pytest.mark.alone

STORM = 1000
AT_ONCE = 100
STORM_S = 15.0
RSS_SLACK = 8 << 20  # Freed memory that the allocator keeps; less than 8 KiB per client.
PAGES_BYTES = 8 << 20  # The page caches of four database connections.
FDS_SLACK = 4  # Idle database readers and connections of the test's own client.
THREADS_SLACK = 6  # A pool's threads appear when first needed, and stay.
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of zero: close sends a reset, not a FIN.


@dataclass(frozen=True, slots=True)
class Load:
    """The resources of a process."""

    rss: int
    fds: int
    threads: int


def load_of(server: ProcessServer) -> Load:
    pid = server.process.pid
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = {line.partition(":")[0]: line.partition(":")[2].split() for line in status}
    fds = list(Path(f"/proc/{pid}/fd").iterdir())
    return Load(int(fields["VmRSS"][0]) << 10, len(fds), int(fields["Threads"][0]))


async def load_when(server: ProcessServer, is_there: Callable[[Load], bool]) -> Load:
    """Return the resources once the condition is true, or after a time limit."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAIT_S):
            while not is_there(load_of(server)):
                await asyncio.sleep(0.02)
    return load_of(server)


async def settled(server: ProcessServer, start: Load) -> Load:
    """Return the resources once the descriptors are back at the start."""
    return await load_when(server, lambda now: now.fds <= start.fds + FDS_SLACK)


async def at_peak(server: ProcessServer, start: Load) -> Load:
    """Return the resources once all connections are accepted.

    A connect completes before that: the kernel accepts for a server that is behind.
    """
    return await load_when(server, lambda now: now.fds >= start.fds + STORM - FDS_SLACK)


async def assert_back_at(server: ProcessServer, start: Load) -> None:
    """Assert that it uses no more than at the start, once lingering connections have ended."""
    now = await settled(server, start)
    assert now.fds <= start.fds + FDS_SLACK, f"descriptors: {start} -> {now}"
    assert now.threads <= start.threads + THREADS_SLACK, f"threads: {start} -> {now}"
    assert now.rss <= start.rss + RSS_SLACK, f"memory: {start} -> {now}"


@asynccontextmanager
async def open_served(folder: Path) -> AsyncGenerator[tuple[ProcessServer, Client]]:
    """A server with both kinds of socket, whose descriptors change only by its clients."""
    config = folder / "culm.json"
    config.write_text('{"prepare_workers_s": 0}')
    args = ("--host", f"unix://{folder}/s", "--host", "tcp://127.0.0.1:0", "--config", str(config))
    async with open_process_server(folder, *args) as server, open_client_of(server) as client:
        yield server, client


@asynccontextmanager
async def others_are_served(server: ProcessServer) -> AsyncGenerator[None]:
    """Request the health all the time while in the block, on new connections and an open one."""
    served = 0

    async def ask(stop: asyncio.Event) -> None:
        nonlocal served
        async with open_client_of(server) as kept:
            while not stop.is_set():
                async with asyncio.timeout(WAIT_S), open_client_of(server, host=1) as fresh:
                    await kept.health()
                    await fresh.health()
                served += 1

    stop = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask(stop), name="health")
        try:
            yield
        finally:
            stop.set()
    assert served > 0


async def connect(server: ProcessServer, number: int) -> socket.socket:
    """Connect a plain socket to the server, alternating between both kinds."""
    loop = asyncio.get_running_loop()
    unix, tcp = server.urls
    if number % 2:
        host, _, port = tcp.removeprefix("tcp://").rpartition(":")
        sock = socket.socket(socket.AF_INET)
        where: str | tuple[str, int] = (host, int(port))
    else:
        sock = socket.socket(socket.AF_UNIX)
        where = unix.removeprefix("unix://")
    sock.settimeout(0)
    try:
        while True:
            try:
                await loop.sock_connect(sock, where)
                return sock
            except BlockingIOError:  # A unix socket's backlog is full: try again.
                await asyncio.sleep(0.001)
    except BaseException:
        sock.close()
        raise


def head(server: ProcessServer, method: str, target: str, *fields: str) -> bytes:
    host = server.urls[1].removeprefix("tcp://")
    lines = [
        f"{method} {target} HTTP/1.1",
        f"Host: {host}",
        f"Authorization: Bearer {server.token}",
    ]
    return "\r\n".join([*lines, *fields, "", ""]).encode()


def reset(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    sock.close()


Visit = Callable[[int], Awaitable[None]]


async def storm(visit: Visit, times: int = STORM) -> None:
    """Make many visits, some at once."""
    numbers = iter(range(times))

    async def visits() -> None:
        for number in numbers:
            await visit(number)

    async with asyncio.timeout(STORM_S), asyncio.TaskGroup() as tasks:
        for number in range(AT_ONCE):
            tasks.create_task(visits(), name=f"visitor {number}")


# What each client sends, and how it disconnects.
VISITS = [
    ("nothing", "close"), ("nothing", "reset"), ("half a head", "close"), ("half a head", "reset"),
    ("half a head", "half-close"), ("half a body", "reset"), ("a request", "reset"),
    ("garbage", "close"), ("an attach", "close"), ("an attach", "reset"),
    ("an attach", "half-close"),
]  # fmt: skip


def request_bytes(
    server: ProcessServer, remote: RemoteWorkspace, sends: str, client_id: str
) -> bytes:
    match sends:
        case "nothing":
            return b""
        case "half a head":
            return head(server, "GET", "/v1/health")[:-20]
        case "half a body":
            return head(server, "POST", remote.path("/sessions"), "Content-Length: 100") + b"{"
        case "garbage":
            return b"\x16\x03\x01\x02\x00" + bytes(range(256))
        case "an attach":
            return head(server, "GET", remote.path(f"/events?view=crush&client_id={client_id}"))
        case _:
            return head(server, "GET", "/v1/health")


@pytest.mark.parametrize(("sends", "leave"), VISITS)
async def test_thousand_short_connections_leak_nothing_and_disturb_no_client(
    folder: Path, sends: str, leave: str
) -> None:
    loop = asyncio.get_running_loop()
    ids = [Ids(number).client() for number in range(AT_ONCE)]  # Reused by many connections.
    async with open_served(folder) as (server, client):
        remote = await client.open_workspace(make_directory(folder))

        async def visit(number: int) -> None:
            sock = await connect(server, number)
            try:
                await loop.sock_sendall(
                    sock, request_bytes(server, remote, sends, ids[number % AT_ONCE])
                )
                if sends == "an attach":
                    assert (await loop.sock_recv(sock, 4096)).startswith(b"HTTP/1.1 200")
                if leave == "half-close":
                    sock.shutdown(socket.SHUT_WR)
                    while await loop.sock_recv(sock, 4096):
                        pass  # Until the server has closed, too.
            except ConnectionError:
                pass  # It was refused while it was sending.
            finally:
                (reset if leave == "reset" else socket.socket.close)(sock)

        async with open_mirror(remote) as follower:
            await follower.connected()
            cold = load_of(server)
            await storm(visit, 2 * AT_ONCE)  # Warm-up: allocate what is kept.
            start = await settled(server, cold)
            async with others_are_served(server):
                await storm(visit)
            mark = await remote.create_session("after the storm")
            async with asyncio.timeout(WAIT_S):
                await follower.until(lambda mirror: mark.id in mirror.sessions)
            await assert_back_at(server, start)
        assert not any("Traceback" in line for line in server.errors), server.output()


@asynccontextmanager
async def held(
    count: int, server: ProcessServer, data: Callable[[int], bytes], *, attached: bool = True
) -> AsyncGenerator[list[socket.socket]]:
    """Keep so many connections open, each of which has sent its data."""
    socks: list[socket.socket] = []

    async def join(number: int) -> None:
        sock = await connect(server, number)
        socks.append(sock)
        await asyncio.get_running_loop().sock_sendall(sock, data(number))
        if attached:
            assert b" 200 OK" in await read_until(sock, b"\r\n\r\n")

    try:
        await storm(join, count)
        yield socks
    finally:
        for sock in socks:
            sock.close()


async def read_until(sock: socket.socket, marker: bytes) -> bytes:
    """Read until `marker` has arrived; return the last data."""
    loop, seen = asyncio.get_running_loop(), b""
    while marker not in seen:
        data = await loop.sock_recv(sock, 1 << 16)
        assert data, f"the stream ended: {seen[-200:]!r}"
        seen = seen[-200:] + data
    return seen


async def test_thousand_streams_all_receive_events_within_bounded_memory(
    folder: Path,
) -> None:
    async with open_served(folder) as (server, client):
        remote = await client.open_workspace(make_directory(folder))
        ids = [Ids(number).client() for number in range(STORM // 2)]  # With two streams each.

        def attach(number: int) -> bytes:
            return request_bytes(server, remote, "an attach", ids[number % len(ids)])

        cold = load_of(server)
        async with held(STORM, server, attach):
            pass  # Warm-up: allocate what is kept.
        start = await settled(server, cold)
        async with held(STORM, server, attach) as socks:
            async with others_are_served(server), asyncio.timeout(STORM_S):
                mark = await remote.create_session("for all")
                async with asyncio.TaskGroup() as tasks:
                    for sock in socks:
                        tasks.create_task(read_until(sock, mark.id.encode()), name="reader")
            peak = await at_peak(server, start)
            assert peak.fds - start.fds >= STORM - FDS_SLACK
            assert peak.rss - start.rss < STORM * (64 << 10) + RSS_SLACK
        await assert_back_at(server, start)


async def test_silent_connections_are_closed_by_the_servers_deadline(
    folder: Path,
) -> None:
    async with open_served(folder) as (server, client):
        await client.health()

        def half(number: int) -> bytes:
            some = b"GET /v1/health HTTP/1.1\r\nHost:"
            return (b"", some, some + b"x" * 30_000)[number % 3]

        cold = load_of(server)
        async with held(STORM, server, half, attached=False):
            await at_peak(server, cold)  # Warm-up: allocate what is kept.
        start = await settled(server, cold)
        async with held(STORM, server, half, attached=False) as socks, others_are_served(server):
            peak = await at_peak(server, start)
            assert peak.fds - start.fds >= STORM - FDS_SLACK
            assert peak.rss - start.rss < STORM * (64 << 10) + RSS_SLACK
            async with asyncio.timeout(STORM_S):  # The deadline is 10 s.
                for sock in socks:
                    with contextlib.suppress(ConnectionError):
                        assert await asyncio.get_running_loop().sock_recv(sock, 1) == b""
        await assert_back_at(server, start)


async def test_streams_that_never_read_use_bounded_memory_and_delay_no_client(
    folder: Path,
) -> None:
    async with open_served(folder) as (server, client):
        remote = await client.open_workspace(make_directory(folder))
        readers = 20

        def attach(number: int) -> bytes:
            return request_bytes(server, remote, "an attach", Ids(number).client())

        for number in range(50):
            await remote.create_session(f"{number} " + "x" * 9_000)
        start = load_of(server)
        async with held(readers, server, attach), open_mirror(remote) as follower:
            await follower.connected()
            for number in range(1000):
                await remote.create_session(f"{number} " + "x" * 9_000)
            mark = await remote.create_session("the last one")
            async with asyncio.timeout(RESUME_S):
                await follower.until(lambda mirror: mark.id in mirror.sessions)
            # A buffer of 1 MiB, a page and an event more for each, not the 9 MB published.
            assert load_of(server).rss - start.rss < readers * (4 << 20)
            await client.health()
        await assert_back_at(server, replace(start, rss=start.rss + PAGES_BYTES))


async def test_compressed_body_of_256_mib_is_refused_while_others_are_served(
    folder: Path,
) -> None:
    loop = asyncio.get_running_loop()
    bomb = await asyncio.to_thread(gzip.compress, b" " * (256 << 20), 1)
    async with open_served(folder) as (server, client):
        remote = await client.open_workspace(make_directory(folder))
        start = load_of(server)
        fields = (f"Content-Length: {len(bomb)}", "Content-Encoding: gzip")
        async with others_are_served(server), asyncio.timeout(STORM_S):
            for number, rest in enumerate(("/sessions", "/agent")):
                sock = await connect(server, number)
                with sock, contextlib.suppress(ConnectionError):
                    await loop.sock_sendall(
                        sock, head(server, "POST", remote.path(rest), *fields) + bomb
                    )
                    answer = await loop.sock_recv(sock, 4096)
                    # It reads only the packed bytes: not JSON, or too many.
                    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 413")), answer
                assert load_of(server).rss - start.rss < (16 << 20)
            await client.health()
        await assert_back_at(server, start)

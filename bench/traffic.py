"""The other processes of `http.py`: a bare aiohttp server, and the clients of both servers.

Usage: traffic.py bare PAGES | gets PLAN | cycles PLAN | streams PLAN     (JSON; commands on stdin)

The clients use less CPU than the servers, so that the server is the busy side. They read the
CPU clock of the server right before the first request and after the last answer.
"""

import asyncio
import os
import resource
import sys
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import cast

import msgspec
import uvloop
from aiohttp import web
from msgspec import Struct

from bench.ipc import STEP_TIMEOUT_S, answer, commands

CONNECTIONS = 16
CONNECTING_MAX = 50  # At once, to stay within a listen backlog.
SETTLE_S = 0.05  # Work of a server after its last answer belongs to the round.
FILES = 16_384  # Descriptors wanted where 1,024 is the default.
HEAD_END = b"\r\n\r\n"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Place(Struct):
    """The addresses, the token and the process of a server."""

    pid: int
    port: int
    unix: str
    token: str

    def head(self, method: str, path: str, body: bytes = b"") -> bytes:
        """Return a whole request, the same for every server."""
        length = f"Content-Length: {len(body)}\r\n" if body else ""
        return (
            f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\n"
            f"Authorization: Bearer {self.token}\r\nAccept: */*\r\n{length}\r\n"
        ).encode() + body


class Pages(Struct):
    """The answers of a bare server: the same bytes by path, and an empty stream."""

    unix: str
    token: str  # Not checked, but requests must have the same length.
    bodies: dict[str, str]
    workspace: str  # The path of one; it can be created, streamed from and released.
    first: str  # The first data of a stream.


class Plan(Struct):
    place: Place
    unix: bool  # By the unix socket, not over TCP.
    path: str  # Of a GET, or of a workspace.
    directory: str = ""  # The workspace's.
    view: str = "delta"


class Drove(Struct):
    cpu_s: float  # Of the server, all threads.
    wall_s: float
    wrong: int  # Unexpected answers.


def cpu_s(pid: int) -> float:
    """Return the CPU time of another process; unlike /proc/PID/stat it is exact to 1 ns."""
    return time.clock_gettime(~pid << 3 | 2)  # The id of clock_getcpuclockid(3) on Linux.


def raise_file_limit() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


async def connect(plan: Plan, make: Callable[[], asyncio.Protocol]) -> None:
    loop = asyncio.get_running_loop()
    if plan.unix:
        await loop.create_unix_connection(make, plan.place.unix)
    else:
        await loop.create_connection(make, "127.0.0.1", plan.place.port)


async def connect_streams(plan: Plan) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if plan.unix:
        return await asyncio.open_unix_connection(plan.place.unix)
    return await asyncio.open_connection("127.0.0.1", plan.place.port)


def body_length(head: bytes) -> int:
    _, found, rest = head.lower().partition(b"content-length: ")
    return int(rest.partition(b"\r\n")[0]) if found else 0


# --- one GET, many times


class Gets:
    """Connections that send the next request after each answer, until a round is over."""

    def __init__(self, plan: Plan) -> None:
        self.request = plan.place.head("GET", plan.path)
        self.wrong = 0
        self._plan = plan
        self._askers: list[Asker] = []
        self._unasked = self._unanswered = 0
        self._over: asyncio.Future[None] | None = None

    async def open(self) -> None:
        for _ in range(CONNECTIONS):
            await connect(self._plan, self._add)

    def _add(self) -> "Asker":
        self._askers.append(Asker(self))
        return self._askers[-1]

    async def round(self, count: int) -> Drove:
        pid, before_wrong = self._plan.place.pid, self.wrong
        self._over = asyncio.get_running_loop().create_future()
        self._unasked = self._unanswered = count
        start_cpu_s, start_s = cpu_s(pid), time.monotonic()
        for asker in self._askers:
            if self.take():
                asker.ask()
        await self._over
        wall_s = time.monotonic() - start_s
        return Drove(cpu_s(pid) - start_cpu_s, wall_s, self.wrong - before_wrong)

    def take(self) -> bool:
        """True if one more request should be sent."""
        self._unasked -= 1
        return self._unasked >= 0

    def answered(self) -> None:
        self._unanswered -= 1
        if not self._unanswered and self._over is not None:
            self._over.set_result(None)

    def lost(self, exc: Exception | None) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_exception(exc or ConnectionError("the server closed a connection"))


class Asker(asyncio.Protocol):
    """One open connection with at most one request in flight."""

    def __init__(self, gets: Gets) -> None:
        self._gets = gets
        self._transport: asyncio.Transport | None = None
        self._data = b""
        self._size = 0  # The size of every answer, learned from the first.
        self._body = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of what they implement.
        self._transport = cast("asyncio.Transport", transport)

    def ask(self) -> None:
        assert self._transport is not None, "asked after connecting"
        self._transport.write(self._gets.request)

    def data_received(self, data: bytes) -> None:
        self._data = data = self._data + data if self._data else data
        if not self._size:
            self._learn(data)
        if not self._size or len(data) < self._size:
            return
        self._data = b""
        gets = self._gets
        if not data.startswith(b"HTTP/1.1 200 ") or not data.endswith(self._body):
            gets.wrong += 1
        if gets.take():
            self.ask()
        gets.answered()

    def _learn(self, data: bytes) -> None:
        head, found, body = data.partition(HEAD_END)
        if found and len(body) >= body_length(head):
            self._size, self._body = len(data), body

    def connection_lost(self, exc: Exception | None) -> None:
        self._gets.lost(exc)


async def drive_gets(plan: Plan) -> None:
    gets = Gets(plan)
    async with asyncio.timeout(STEP_TIMEOUT_S):
        await gets.open()
    async for command in commands():
        async with asyncio.timeout(STEP_TIMEOUT_S):
            answer(await gets.round(command.bursts))


# --- create, attach, detach, release


class Cycles:
    """One client after the other; requests share a connection, each stream has another."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._wrong = 0

    async def round(self, count: int) -> Drove:
        pid, self._wrong = self._plan.place.pid, 0
        reader, writer = await connect_streams(self._plan)
        start_cpu_s, start_s = cpu_s(pid), time.monotonic()
        for _ in range(count):
            await self._cycle(reader, writer)
        wall_s = time.monotonic() - start_s
        await asyncio.sleep(SETTLE_S)
        used_s = cpu_s(pid) - start_cpu_s
        writer.close()
        return Drove(used_s, wall_s, self._wrong)

    async def _cycle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        place, path, client_id = self._plan.place, self._plan.path, str(uuid.uuid4())
        body = msgspec.json.encode({"path": self._plan.directory, "client_id": client_id})
        writer.write(place.head("POST", "/v1/workspaces", body))
        await self._answer(reader)
        events, stream = await connect_streams(self._plan)
        stream.write(
            place.head("GET", f"{path}/events?client_id={client_id}&view={self._plan.view}")
        )
        self._check(await events.readuntil(HEAD_END))
        await events.readexactly(1)
        stream.close()
        writer.write(place.head("DELETE", f"{path}?client_id={client_id}"))
        await self._answer(reader)

    async def _answer(self, reader: asyncio.StreamReader) -> None:
        head = await reader.readuntil(HEAD_END)
        await reader.readexactly(body_length(head))
        self._check(head)

    def _check(self, head: bytes) -> None:
        self._wrong += not head.startswith(b"HTTP/1.1 200 ")


async def drive_cycles(plan: Plan) -> None:
    cycles = Cycles(plan)
    async for command in commands():
        async with asyncio.timeout(STEP_TIMEOUT_S):
            answer(await cycles.round(command.bursts))


# --- many idle streams


class Idle(asyncio.Protocol):
    """A stream that ignores its data and counts as live once it has a response head."""

    def __init__(self, plan: Plan) -> None:
        self.live = asyncio.get_running_loop().create_future()
        self.transport: asyncio.Transport | None = None
        self.lost = False
        path = f"{plan.path}/events?client_id={uuid.uuid4()}&view={plan.view}"
        self._request = plan.place.head("GET", path)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if not self.live.done():
            self.live.set_result(data.startswith(b"HTTP/1.1 200 "))

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        if not self.live.done():
            self.live.set_result(False)


async def attach(plan: Plan, count: int) -> tuple[list[Idle], Drove]:
    start_cpu_s, start_s = cpu_s(plan.place.pid), time.monotonic()
    streams: list[Idle] = []

    def add() -> Idle:
        streams.append(Idle(plan))
        return streams[-1]

    wrong = 0
    for first in range(0, count, CONNECTING_MAX):
        for _ in range(min(CONNECTING_MAX, count - first)):
            await connect(plan, add)
        for stream in streams[first:]:
            wrong += not await stream.live
    used_s = cpu_s(plan.place.pid) - start_cpu_s
    return streams, Drove(used_s, time.monotonic() - start_s, wrong)


async def drive_streams(plan: Plan) -> None:
    raise_file_limit()
    streams: list[Idle] = []
    async for command in commands():
        async with asyncio.timeout(STEP_TIMEOUT_S):
            if command.do == "attach":
                streams, drove = await attach(plan, command.streams)
                answer(drove)
            else:
                wrong = sum(stream.lost for stream in streams)
                for stream in streams:
                    if stream.transport is not None:
                        stream.transport.close()
                streams = []
                answer(Drove(0.0, 0.0, wrong))


# --- the yardstick


def bare_app(pages: Pages) -> web.Application:
    """Handlers that only make a response: no middleware, no patterns, no checks."""
    app = web.Application()
    first = pages.first.encode()

    def page(body: bytes) -> Handler:
        async def respond(request: web.Request) -> web.Response:
            return web.Response(body=body, content_type="application/json")

        return respond

    def create(body: bytes) -> Handler:
        async def respond(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=body, content_type="application/json")

        return respond

    async def nothing(request: web.Request) -> web.Response:
        return web.Response()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.force_close()
        await response.prepare(request)
        await response.write(first)
        await asyncio.Event().wait()  # Until the client disconnects, which cancels this.
        return response

    for path, body in pages.bodies.items():
        app.router.add_get(path, page(body.encode()))
    app.router.add_post("/v1/workspaces", create(pages.bodies[pages.workspace].encode()))
    app.router.add_delete(pages.workspace, nothing)
    app.router.add_get(f"{pages.workspace}/events", stream)
    return app


async def serve_bare(pages: Pages) -> None:
    """Listen with the settings of `culm.server`."""
    raise_file_limit()
    runner = web.AppRunner(
        bare_app(pages),
        handler_cancellation=True,
        keepalive_timeout=120.0,
        shutdown_timeout=1.0,
        access_log=None,
        max_line_size=32 << 10,
        max_field_size=32 << 10,
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=512).start()
        await web.UnixSite(runner, pages.unix, backlog=512).start()
        port = cast("int", runner.addresses[0][1])
        answer(Place(os.getpid(), port, pages.unix, pages.token))
        async for _ in commands():
            pass
    finally:
        await runner.cleanup()


def main(role: str, given: str) -> None:
    if role == "bare":
        uvloop.run(serve_bare(msgspec.json.decode(given, type=Pages)))
        return
    drive = {"gets": drive_gets, "cycles": drive_cycles, "streams": drive_streams}[role]
    uvloop.run(drive(msgspec.json.decode(given, type=Plan)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])

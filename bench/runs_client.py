"""The clients of `runs.py`: raw requests over open connections, and raw event streams.

A stream only records data with its time; it is parsed after the round, so that reading takes
little CPU from the server.
"""

import asyncio
import re
import time
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from typing import TypeVar, cast

import msgspec
from msgspec import Struct

from bench.runs_host import Address
from bench.traffic import body_length

T = TypeVar("T")

WAIT_S = 60.0  # For any single step.
HEAD_END = b"\r\n\r\n"
COMPLETE = b'"type":"run_complete"'
MESSAGE = b'"type":"message","payload":{"type":"updated"'
STAMP = re.compile(rb"@(\d{9,}) ")
CONNECTIONS = 20  # Over which many prompts are sent at once.
READ_BYTES_MAX = 64 << 20  # A listing of messages has to fit.


class Answer(Struct):
    status: int
    body: bytes
    sent_ns: int
    came_ns: int

    @property
    def ms(self) -> float:
        return (self.came_ns - self.sent_ns) / 1e6


class Asker:
    """One open connection, opened again if the server has closed it meanwhile."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._pair: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        """Send a request and read the whole answer; raise if it is not a success."""
        data = b"" if body is None else msgspec.json.encode(body)
        request = self._address.head(method, path, data)
        async with asyncio.timeout(WAIT_S):
            reader, writer = await self._connected()
            sent_ns = time.monotonic_ns()
            writer.write(request)
            head = await reader.readuntil(HEAD_END)
            came_ns = time.monotonic_ns()
            found = await _read_body(reader, head)
        status = int(head.split(b" ", 2)[1])
        if not 200 <= status < 300:
            raise RuntimeError(f"{method} {path} answered {status}: {found[:500]!r}")
        return Answer(status, found, sent_ns, came_ns)

    async def _connected(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._pair is not None and not self._pair[0].at_eof():
            return self._pair
        self.close()
        self._pair = await self._connect()
        return self._pair

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = self._address
        if address.unix:
            return await asyncio.open_unix_connection(address.unix, limit=READ_BYTES_MAX)
        return await asyncio.open_connection(address.host, address.port, limit=READ_BYTES_MAX)

    def close(self) -> None:
        if self._pair is not None:
            self._pair[1].close()


async def _read_body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"transfer-encoding: chunked" not in head.lower():
        return await reader.readexactly(body_length(head))
    pieces: list[bytes] = []
    while size := int(await reader.readuntil(b"\r\n"), 16):
        pieces.append((await reader.readexactly(size + 2))[:-2])
    await reader.readuntil(b"\r\n")
    return b"".join(pieces)


class ReadData(Struct, gc=False):
    """The data of one read."""

    at_ns: int
    data: bytes


class Stream(asyncio.Protocol):
    """One event stream. With `keeps` it stores the data since `begin`, else only its size."""

    def __init__(self, request: bytes, *, keeps: bool) -> None:
        self.live = asyncio.Event()
        self.lost = False
        self.received: list[ReadData] = []
        self.reads = self.size = self.completes = 0
        self._keeps = keeps
        self._request = request
        self._transport: asyncio.Transport | None = None
        self._tail = b""
        self._more = asyncio.Event()

    def begin(self) -> None:
        """Drop everything received before."""
        self.received = []
        self.reads = self.size = self.completes = 0

    async def until_complete(self, count: int, timeout_s: float) -> None:
        """Wait until so many runs have ended since `begin`; raise `TimeoutError`."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.completes < count:
                    if self.lost:
                        raise RuntimeError("the server closed the event stream")
                    self._more.clear()
                    await self._more.wait()
        except TimeoutError:
            message = f"{self.completes} of {count} runs ended within {timeout_s:.0f} s"
            raise TimeoutError(message) from None

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are not subclasses of what they implement.
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        at_ns = time.monotonic_ns()
        self.reads += 1
        self.size += len(data)
        if not self.live.is_set():
            self.live.set()
        if not self._keeps:
            return
        self.received.append(ReadData(at_ns, data))
        # The tail alone is too short for a match, so none is counted twice.
        found = (self._tail + data).count(COMPLETE)
        self._tail = data[-len(COMPLETE) + 1 :]
        if found:
            self.completes += found
            self._more.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.live.set()
        self._more.set()


async def open_stream(
    address: Address, workspace: str, client_id: str, *, keeps: bool, view: str = "delta"
) -> Stream:
    """Attach and wait until the stream is live. The caller closes it."""
    path = f"{workspace}/events?client_id={client_id}&view={view}"
    # In HTTP/1.0 a body ends with its connection, so there is no chunked encoding.
    request = address.head("GET", path, version="1.0")
    loop = asyncio.get_running_loop()

    def make() -> Stream:
        return Stream(request, keeps=keeps)

    async with asyncio.timeout(WAIT_S):
        if address.unix:
            _, stream = await loop.create_unix_connection(make, address.unix)
        else:
            _, stream = await loop.create_connection(make, address.host, address.port)
        await stream.live.wait()
    return stream


@asynccontextmanager
async def open_streams(
    address: Address, workspace: str, count: int
) -> AsyncGenerator[list[Stream]]:
    """Open more subscribers, each a separate client; their data is only counted."""
    async with AsyncExitStack() as stack:
        found: list[Stream] = []
        for _ in range(count):
            stream = await open_stream(address, workspace, str(uuid.uuid4()), keeps=False)
            stack.callback(stream.close)
            found.append(stream)
        yield found


class Frame(Struct):
    """One event, and the time of its last byte."""

    at_ns: int
    data: bytes


def frames(received: Sequence[ReadData]) -> Iterator[Frame]:
    rest = b""
    for one in received:
        *whole, rest = (rest + one.data).split(b"\n\n")
        for data in whole:
            yield Frame(one.at_ns, data)


class Complete(Struct):
    """The used fields of a `run_complete` event."""

    session_id: str
    run_id: str = ""
    message_id: str = ""
    text: str = ""
    error: str = ""
    cancelled: bool = False
    at_ns: int = 0


class _Data(Struct):
    text: str = ""


class _Part(Struct):
    type: str
    data: _Data


class _Message(Struct):
    id: str
    parts: list[_Part]

    @property
    def text(self) -> str:
        return "".join(part.data.text for part in self.parts if part.type == "text")


def completes(received: Sequence[ReadData]) -> list[Complete]:
    """Return the ends of runs; a text that is missing there is in the message before."""
    found: list[Complete] = []
    texts: dict[str, str] = {}
    for frame in frames(received):
        if COMPLETE in frame.data:
            complete = _payload(frame.data, Complete)
            complete.at_ns = frame.at_ns
            complete.text = complete.text or texts.get(complete.message_id, "")
            found.append(complete)
        elif MESSAGE in frame.data:
            message = _payload(frame.data, _Message)
            texts[message.id] = message.text
    return found


def _payload(frame: bytes, kind: type[T]) -> T:
    envelope = msgspec.json.decode(frame.rpartition(b"data: ")[2], type=_Outer)
    return msgspec.json.decode(envelope.payload.payload, type=kind)


class _Inner(Struct):
    payload: msgspec.Raw


class _Outer(Struct):
    payload: _Inner


def latencies_ms(received: Sequence[ReadData]) -> list[float]:
    """Return the time from sending each stamped token to the read that completed its event."""
    found: list[float] = []
    last = 0
    for frame in frames(received):
        for stamp in map(int, STAMP.findall(frame.data)):
            if stamp > last:  # An event that repeats the text so far contains old stamps.
                last = stamp
                found.append((frame.at_ns - stamp) / 1e6)
    return found


class WorkspaceClient:
    """A client of a workspace on a server. Made by `open_workspace_client`."""

    def __init__(self, address: Address, asker: Asker, workspace: str) -> None:
        self.address = address
        self.workspace = workspace
        self._asker = asker

    async def ask(self, method: str, path: str, body: object = None) -> Answer:
        return await self._asker.ask(method, self.workspace + path, body)

    async def create_sessions(self, count: int) -> list[str]:
        found: list[str] = []
        for n in range(count):
            answer = await self.ask("POST", "/sessions", {"title": f"session {n}"})
            found.append(msgspec.json.decode(answer.body)["id"])
        return found

    async def prompt(self, session_id: str, asker: Asker | None = None) -> Answer:
        body = {"session_id": session_id, "prompt": "Say something.", "run_id": str(uuid.uuid4())}
        return await (asker or self._asker).ask("POST", f"{self.workspace}/agent", body)

    async def prompt_all(self, sessions: Sequence[str]) -> None:
        """Send one prompt per session, one at a time on each connection."""

        async def work(own: Sequence[str]) -> None:
            with closing(Asker(self.address)) as asker:
                for session_id in own:
                    await self.prompt(session_id, asker)

        async with asyncio.TaskGroup() as tasks:
            for n in range(CONNECTIONS):
                if own := sessions[n::CONNECTIONS]:
                    tasks.create_task(work(own))

    async def cancel(self, session_id: str) -> Answer:
        return await self.ask("POST", f"/agent/sessions/{session_id}/cancel")

    async def stored_stamps(self, session_id: str) -> list[int]:
        answer = await self.ask("GET", f"/sessions/{session_id}/messages")
        return list(map(int, STAMP.findall(answer.body)))


@asynccontextmanager
async def open_workspace_client(
    address: Address, directory: str, client_id: str
) -> AsyncGenerator[WorkspaceClient]:
    with closing(Asker(address)) as asker:
        body = {"path": directory, "client_id": client_id}
        answer = await asker.ask("POST", "/v1/workspaces", body)
        workspace_id: str = msgspec.json.decode(answer.body)["id"]
        yield WorkspaceClient(address, asker, f"/v1/workspaces/{workspace_id}")

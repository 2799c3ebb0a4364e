"""Helpers below the client: raw HTTP, raw event streams, a locked database, another process."""

import asyncio
import fcntl
import json
import os
import sqlite3
import sys
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from culm.client.http import Client, RequestRefused
from culm.client.mirror import Mirror
from culm.client.stream import EventStream, ServerEvent, SseParser
from culm.client.workspace import RemoteWorkspace
from culm.ids import ClientId
from culm.server.listen import Address, UnixAddress
from culm.workspace.roots import project_folder
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S

READ_BYTES = 1 << 20
UNKNOWN = "00000000-0000-4000-8000-000000000000"


async def until(condition: Callable[[], bool]) -> None:
    """Poll until the condition holds; bounded."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.001)


async def status_of(client: Client, path: str, method: str = "GET") -> int:
    try:
        await client.request(method, path)
    except RequestRefused as exc:
        return exc.status
    return 200


async def closed(flow: FlowServer, remote: RemoteWorkspace) -> None:
    """Wait until the workspace answers 404."""
    async with asyncio.timeout(WAIT_S):
        observer = await flow.client()
        while await status_of(observer, remote.path()) != 404:
            await asyncio.sleep(0.001)


async def until_creating(flow: FlowServer, path: Path, count: int) -> None:
    """Wait until this many clients wait for the workspace to open."""
    entries = flow.server.registry._entries  # pyright: ignore[reportPrivateUsage]

    def is_creating() -> bool:
        entry = entries.get(path.resolve())
        if entry is None or entry.opened.done():
            return False
        return len(entry.waiting) == count

    await until(is_creating)


async def until_lingering(flow: FlowServer) -> None:
    """Wait until the server counts down to its exit."""
    registry = flow.server.registry
    await until(lambda: registry._linger is not None)  # pyright: ignore[reportPrivateUsage]


@contextmanager
def noticed_writes(flow: FlowServer, remote: RemoteWorkspace) -> Generator[asyncio.Event]:
    """Yield an event that is set when something is written to the store of a workspace."""
    begun = asyncio.Event()
    store = flow.workspace(remote.id).store
    write = store.write

    def noticed(*args: Any, **kwargs: Any) -> asyncio.Future[Any]:  # noqa: ANN401
        begun.set()
        return write(*args, **kwargs)

    store.write = noticed
    try:
        yield begun
    finally:
        store.write = write


# --- raw HTTP


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # Names in lower case.
    body: bytes

    def json(self) -> object:
        return json.loads(self.body)


async def connect(address: Address) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if isinstance(address, UnixAddress):
        return await asyncio.open_unix_connection(str(address.path))
    return await asyncio.open_connection(address.host, address.port)


def request_bytes(
    flow: FlowServer, method: str, target: str, headers: Mapping[str, str | None], body: bytes = b""
) -> bytes:
    """A request with the usual headers; a header of None is omitted."""
    _, _, where = flow.url.partition("://")
    fields: dict[str, str | None] = {
        "Host": "culm.localhost" if flow.url.startswith("unix") else where,
        "Authorization": f"Bearer {flow.server.token}" if flow.server.token else None,
        "Content-Length": str(len(body)) if body or method in ("POST", "PUT") else None,
        **headers,
    }
    lines = [f"{name}: {value}" for name, value in fields.items() if value is not None]
    head = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, "", ""])
    return head.encode("latin-1") + body


async def send(
    flow: FlowServer,
    method: str,
    target: str,
    body: bytes | Mapping[str, object] = b"",
    headers: Mapping[str, str | None] | None = None,
    *,
    address: Address | None = None,
) -> Answer:
    """Send one request on a new connection and read the answer to its end."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"Connection": "close", **(headers or {})}
    async with asyncio.timeout(WAIT_S):
        reader, writer = await connect(address or flow.server.addresses[0])
        try:
            writer.write(request_bytes(flow, method, target, fields, data))
            status, found = await _read_head(reader)
            return Answer(status, found, await reader.read())
        finally:
            await _close(writer)


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return int(first.split(" ")[1]), {name.lower(): value.strip() for name, _, value in pairs}


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with suppress(ConnectionError):  # The other side was faster.
        await writer.wait_closed()


class RawStream:
    """The raw bytes of an event stream. Created by `open_events`."""

    def __init__(
        self, reader: asyncio.StreamReader, status: int, headers: Mapping[str, str]
    ) -> None:
        self.status = status
        self.headers = headers
        self._seen = bytearray()
        self._reader = reader

    @property
    def seen(self) -> bytes:
        """Everything read so far."""
        return bytes(self._seen)

    async def until(self, marker: bytes) -> bytes:
        """Read until `marker` has arrived with its whole event; returns everything so far."""
        start = 0
        async with asyncio.timeout(WAIT_S):
            while (found := self._seen.find(marker, start)) < 0 or not self._seen.endswith(b"\n"):
                start = found if found >= 0 else max(0, len(self._seen) - len(marker))
                data = await self._reader.read(READ_BYTES)
                assert data, f"the stream ended before {marker!r}: {self.seen[-500:]!r}"
                self._seen += data
        return self.seen

    async def end(self) -> bytes:
        """Read until the server ends the stream."""
        async with asyncio.timeout(WAIT_S):
            while data := await self._reader.read(READ_BYTES):
                self._seen += data
        return self.seen

    def events(self) -> list[ServerEvent]:
        return SseParser().feed(self.seen)

    def types(self) -> list[str]:
        """Types of the events so far, without those that every new stream receives."""
        initial = ("presence_changed", "store_health", "skip_changed")
        return [event.type for event in self.events() if event.type not in initial]


@asynccontextmanager
async def open_events(
    flow: FlowServer,
    remote: RemoteWorkspace,
    *,
    view: str = "delta",
    client_id: ClientId | None = None,
    headers: Mapping[str, str | None] | None = None,
    cursor: str = "",
    sessions: str = "",
    types: str = "",
) -> AsyncGenerator[RawStream]:
    """A stream on its own socket; attached once its response head has arrived."""
    filters = {"cursor": cursor, "sessions": sessions, "types": types}
    query = {"client_id": client_id or remote.client.id, "view": view}
    query |= {name: value for name, value in filters.items() if value}
    target = remote.path(f"/events?{urlencode(query)}")
    reader, writer = await connect(flow.server.addresses[0])
    try:
        async with asyncio.timeout(WAIT_S):
            writer.write(request_bytes(flow, "GET", target, headers or {}))
            status, found = await _read_head(reader)
        yield RawStream(reader, status, found)
    finally:
        await _close(writer)


# --- a client that reconnects


class ReconnectingMirror:
    """Mirrors a workspace over any number of short connections."""

    def __init__(self, remote: RemoteWorkspace) -> None:
        self.mirror = Mirror()
        self._remote = remote

    async def load(self) -> None:
        self.mirror.load(await self._remote.snapshot("*"))

    async def watch(self, condition: Callable[[Mirror], bool]) -> None:
        """Stay connected, from the cursor of the mirror, until the condition holds."""
        events = EventStream(self._remote, cursor=self.mirror.cursor).events()
        try:
            async with asyncio.timeout(WAIT_S):
                async for event in events:
                    await self._apply(event)
                    if condition(self.mirror):
                        return
        finally:
            await events.aclose()

    async def attached(self) -> None:
        """Wait until a `watch` has caught up; later events arrive after that."""
        await until(lambda: self._remote.client.id in self.mirror.presence)

    async def _apply(self, event: ServerEvent) -> None:
        if event.type == "resync":
            await self.load()
        elif (gap := self.mirror.apply(event)) is not None:
            message = await self._remote.find_message(gap.session_id, gap.message_id)
            if message is not None:
                self.mirror.put_message(message)


# --- locks


@contextmanager
def held_database(root: Path, path: Path) -> Generator[None]:
    """Block every write to the database of a workspace, as a slow disk would."""
    connection = sqlite3.connect(
        project_folder(root, path.resolve()) / "culm.db", isolation_level=None
    )
    try:
        connection.execute("BEGIN IMMEDIATE")
        yield
    finally:
        connection.close()


def is_locked(root: Path) -> bool:
    """Return True if any process, including this one, has locked the data directory."""
    try:
        descriptor = os.open(root / "culm.lock", os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


_HOLD = """
import asyncio, sys
from pathlib import Path
from typing import Any
from culm.clock import LoopClock
from culm.errors import DataLocked
from culm.workspace.roots import DataRoots

async def hold() -> None:
    async with DataRoots(LoopClock()).hold(Path(sys.argv[1])):
        print("held", flush=True)
        sys.stdin.read()

try:
    asyncio.run(hold())
except DataLocked as exc:
    print(exc.message, flush=True)
"""


@asynccontextmanager
async def second_process(root: Path) -> AsyncGenerator[tuple[int, str]]:
    """Another process that locks the data directory: its pid, and "held" or its error."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLD, str(root),
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WAIT_S):
            line = await process.stdout.readline()
        yield process.pid, line.decode().strip()
    finally:
        process.stdin.close()
        await process.wait()

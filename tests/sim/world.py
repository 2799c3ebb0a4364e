"""Clients, sockets and a server that can crash, all inside one simulated loop."""

import asyncio
import contextlib
from pathlib import Path

from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent, SseParser
from culm.errors import StoreBusy
from culm.events.stream import feed
from culm.events.views import Filter, View, parse_cursor
from culm.ids import Ids, workspace_id_of
from culm.settings import Settings
from culm.store.base import last_seq
from culm.store.memory import MemoryFile
from culm.store.store import open_memory_store
from culm.wire.codec import decode, encode
from culm.wire.events import Resync
from culm.wire.messages import Message
from culm.wire.workspaces import Snapshot
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SimClock, SimLoop
from tests.support import fixed_origins, ignore_fate, make_services

PATH = Path("/simulated")
# Small enough that ordinary traffic makes a sleepy client slow.
SETTINGS = Settings(stream_buffer_bytes=2_000)


class SimSocket:
    """A transport whose bytes arrive when the other side takes them, or never."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop
        self._buffer = bytearray()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self.cut = False

    def write(self, data: bytes) -> None:
        if self.cut:
            raise RuntimeError("unable to perform operation; the handler is closed")
        self._buffer += data
        self._arrived.set()
        if len(self._buffer) > SETTINGS.stream_buffer_bytes // 2:
            self._room.clear()

    def is_closing(self) -> bool:
        # uvloop learns late that a peer is gone: now and then only the write tells.
        return self.cut and self._loop.random.random() < 0.5

    def get_write_buffer_size(self) -> int:
        return len(self._buffer)

    def abort(self) -> None:
        self.cut = True
        self._arrived.set()
        self._room.set()

    async def drained(self) -> None:
        await self._room.wait()

    async def take(self) -> bytes:
        """Take part of the written bytes; empty when the connection is gone."""
        await self._arrived.wait()
        if self.cut:
            return b""
        data = bytes(self._buffer[: self._loop.random.randint(1, 3_000)])
        del self._buffer[: len(data)]
        if not self._buffer:
            self._arrived.clear()
            self._room.set()
        return data


class SimServer:
    """A workspace on a file that outlives it."""

    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.clock = SimClock(loop)
        self.ids = Ids(loop.random.randrange(1 << 30))
        self.file = MemoryFile()
        self.workspace: LiveWorkspace | None = None
        self.up = asyncio.Event()
        self.crash = asyncio.Event()
        self._never_left: list[object] = []

    async def run(self) -> None:
        """Run, crash on request and restart, until cancelled."""
        while True:
            self.crash.clear()
            try:
                await self._open()
            except StoreBusy:
                await asyncio.sleep(0.1)  # The disk is full: it cannot be opened now.
                continue
            self.up.set()
            await self.crash.wait()
            self.up.clear()
            self.file.crash()
            self.workspace = None
            await asyncio.sleep(self.loop.random.random())

    async def _open(self) -> None:
        # Entered, never exited and never collected: a killed process runs no cleanup.
        opening = open_memory_store(self.file, self.clock, self.ids)
        self._never_left.append(opening)
        store = await opening.__aenter__()
        about = WorkspaceInfo(workspace_id_of(PATH), PATH, str(PATH), PATH)
        tasks = asyncio.TaskGroup()
        self._never_left.append(await tasks.__aenter__())
        services = make_services(self.clock, self.ids, SETTINGS)
        workspace = LiveWorkspace(about, store, fixed_origins(), services, tasks, ignore_fate, {})
        await workspace.start(None)
        workspace.trim_in_time()
        self.workspace = workspace

    def last_seq(self) -> int:
        return last_seq(self.file.connection)

    async def snapshot(self) -> Snapshot[Message]:
        await self.up.wait()
        assert self.workspace is not None
        raw = await self.workspace.snapshot(None)
        return decode(encode(raw), Snapshot[Message])


class SimClient:
    """A client with a mirror, behind a network that loses connections."""

    def __init__(self, server: SimServer, ids: Ids, view: View = "delta") -> None:
        self.server = server
        self.view: View = view
        self.id = ids.client()
        self.mirror = Mirror()
        self.loaded = False
        self.seen: list[str] = []  # Cursors in the order they arrived.
        self.socket: SimSocket | None = None
        self.sleepy = 0.0  # The maximum delay between reads in seconds.

    async def run(self) -> None:
        """Connect, follow, lose the connection, and again, until cancelled."""
        while True:
            with contextlib.suppress(ConnectionError, StoreBusy):  # The server is gone.
                await self._connection()
            await asyncio.sleep(0.01 + self.server.loop.random.random() * 0.1)

    def cut(self) -> None:
        if self.socket is not None:
            self.socket.abort()

    async def _connection(self) -> None:
        await self.server.up.wait()
        workspace = self.server.workspace
        if workspace is None or workspace.lifetime.closing:
            raise ConnectionError
        if not self.loaded or self.view == "crush":
            # A Crush client has no cursor: it reloads its state on every connection.
            self.seen.clear()
            await self._load()
        self.socket = socket = SimSocket(self.server.loop)
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(self._serve(workspace, socket))
            try:
                await self._read(socket)
            except (ConnectionError, StoreBusy):
                pass
            finally:
                socket.abort()
                serving.cancel()

    async def _serve(self, workspace: LiveWorkspace, socket: SimSocket) -> None:
        """Serve the event stream like its route."""
        subscriber = workspace.hub.join(socket, self.view, Filter())
        try:
            cursor = parse_cursor(self.mirror.cursor) if self.mirror.cursor else None
            await feed(workspace.hub, workspace.store, subscriber, cursor, socket.drained)
        except StoreBusy:
            socket.abort()
        finally:
            workspace.hub.leave(subscriber)

    async def _read(self, socket: SimSocket) -> None:
        lines = SseParser()
        while data := await socket.take():
            for event in lines.feed(data):
                await self._apply(event)
            if self.sleepy:
                await asyncio.sleep(self.server.loop.random.random() * self.sleepy)

    async def _apply(self, event: ServerEvent) -> None:
        if event.cursor:
            self.seen.append(event.cursor)
        if event.type == "resync":
            assert event.read(Resync).reason == "trimmed"
            self.loaded = False
            self.seen.clear()
            raise ConnectionError  # Reload the state and reconnect at its cursor.
        else:
            # A client could reload the message; a correct server never requires it.
            assert self.mirror.apply(event) is None, "a delta did not fit"

    async def _load(self) -> None:
        workspace = self.server.workspace
        if workspace is None:
            raise ConnectionError
        self.mirror.load(await self.server.snapshot())
        self.loaded = True

"""An event stream that outlives its connections: it resumes by cursor and detects dead ones."""

import asyncio
import builtins
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec

from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.wire.codec import decode
from culm.wire.events import CURSOR_HEADER, Envelope, Resync

T = TypeVar("T")

IDLE_TIMEOUT_S = 45.0  # Three heartbeats of the server.
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 10.0
REJOINED_S = 0.05  # Pause after a rejoin, in case the server drops the workspace at once.
EVENT_BYTES_MAX = 64 << 20


class ServerEvent(NamedTuple):
    """One received event. Stored events have a cursor."""

    type: str
    op: str
    payload: msgspec.Raw
    cursor: str = ""

    def read(self, kind: builtins.type[T]) -> T:
        return decode(self.payload, kind)


class EventTooLarge(Exception):
    """The server sent an event that is larger than allowed."""


class SseParser:
    """Parses server-sent events from chunks of any size."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # The chunks of an incomplete event.
        self._size = 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """Return the events that `data` completes."""
        last = self._rest[-1][-1:] if self._rest else b""
        self._rest.append(data)
        self._size += len(data)
        if b"\n\n" not in last + data:
            if self._size > EVENT_BYTES_MAX:
                raise EventTooLarge(f"an event may have at most {EVENT_BYTES_MAX} bytes")
            return []
        *blocks, rest = b"".join(self._rest).split(b"\n\n")
        self._rest, self._size = [rest] if rest else [], len(rest)
        return [event for block in blocks if (event := _parse_event(block)) is not None]


def _parse_event(block: bytes) -> ServerEvent | None:
    cursor = data = b""
    for line in block.split(b"\n"):
        if line.startswith(b"data: "):
            data = line[6:]
        elif line.startswith(b"id: "):
            cursor = line[4:]
    if not data:
        return None  # A heartbeat.
    envelope = decode(data, Envelope)
    inner = envelope.payload
    return ServerEvent(envelope.type, inner.type, inner.payload, cursor.decode() or envelope.cursor)


class Backoff:
    """Pauses that double up to a limit, until `reset`."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def reset(self, first_s: float = BACKOFF_FIRST_S) -> None:
        self._next_s = first_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, BACKOFF_MAX_S)
        await asyncio.sleep(pause_s)


class EventStream:
    """The events of one workspace, starting at a cursor."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        *,
        cursor: str = "",
        view: str = "delta",
        sessions: frozenset[str] = frozenset(),
        types: frozenset[str] = frozenset(),
        interactive: bool = False,
        on_connected: Callable[[], None] | None = None,
        idle_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self.cursor = cursor
        self.connections = 0  # The number of connections so far.
        self.workspace = workspace
        self.on_connected = on_connected
        self._view = view
        self._sessions = sessions
        self._types = types
        self._interactive = interactive
        self._idle_s = idle_s  # A connection that is silent for longer counts as dead.

    async def events(self) -> AsyncGenerator[ServerEvent]:
        """Yield events forever; reconnect and rejoin as needed.

        Raises `RequestRefused` for errors that reconnecting cannot fix, such as a wrong token or a
        retired client.
        """
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._connection()) as connection:
                    async for event in connection:
                        backoff.reset()
                        yield event
            except RequestRefused as exc:
                if exc.status == 404:
                    if await self.rejoin():
                        backoff.reset(REJOINED_S)
                elif not exc.may_pass:
                    raise
            except OSError:
                await self.workspace.client.revive()
            await backoff.pause()

    async def rejoin(self) -> bool:
        """Return True if the workspace was joined again; otherwise the caller retries."""
        try:
            await self.workspace.rejoin()
            return True
        except OSError:
            return False
        except RequestRefused as exc:
            if not exc.may_pass:
                raise
            return False

    async def _connection(self) -> AsyncGenerator[ServerEvent]:
        query = {"client_id": self.workspace.client.id, "view": self._view}
        if self.cursor:
            query["cursor"] = self.cursor
        if self._sessions:
            query["sessions"] = ",".join(sorted(self._sessions))
        if self._types:
            query["types"] = ",".join(sorted(self._types))
        if self._interactive:
            query["interactive"] = "1"
        path = self.workspace.path(f"/events?{urlencode(query)}")
        async with self.workspace.client.stream(path) as response:
            self.connections += 1
            self.cursor = self.cursor or response.headers.get(CURSOR_HEADER.lower(), "")
            if self.on_connected is not None:
                self.on_connected()
            parser = SseParser()
            while data := await response.piece(self._idle_s):
                for event in parser.feed(data):
                    if event.cursor:
                        self.cursor = event.cursor
                    elif event.type == "resync":
                        self.cursor = event.read(Resync).cursor
                    yield event

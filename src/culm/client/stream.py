"""One event stream that outlives its connections: it resumes by cursor, and knows a dead one."""

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
REJOINED_S = 0.05  # It is there again; only a server that drops it at once makes this a loop.
EVENT_BYTES_MAX = 64 << 20


class ServerEvent(NamedTuple):
    """One event as it arrived. Numbered ones have a cursor."""

    type: str
    op: str
    payload: msgspec.Raw
    cursor: str = ""

    def read(self, kind: builtins.type[T]) -> T:
        return decode(self.payload, kind)


class EventTooLarge(Exception):
    """The server sent an event larger than any it should."""


class SseParser:
    """Server-sent events out of bytes, however they were cut on the way."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # Of an event that has not arrived whole.
        self._size = 0

    def feed(self, data: bytes) -> list[ServerEvent]:
        """The events that `data` completes."""
        last = self._rest[-1][-1:] if self._rest else b""
        self._rest.append(data)
        self._size += len(data)
        if b"\n\n" not in last + data:
            if self._size > EVENT_BYTES_MAX:
                raise EventTooLarge(f"an event may have at most {EVENT_BYTES_MAX} bytes")
            return []
        *events, rest = b"".join(self._rest).split(b"\n\n")
        self._rest, self._size = [rest] if rest else [], len(rest)
        return [told for event in events if (told := _parse_event(event)) is not None]


def _parse_event(text: bytes) -> ServerEvent | None:
    cursor = data = b""
    for line in text.split(b"\n"):
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
    """Pauses that double up to a bound, until something works again."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def reset(self, first_s: float = BACKOFF_FIRST_S) -> None:
        self._next_s = first_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, BACKOFF_MAX_S)
        await asyncio.sleep(pause_s)


class EventStream:
    """Events of one workspace, from a cursor on, for as long as they are read."""

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
        self.connections = 0  # How often it has been connected so far.
        self.workspace = workspace
        self.on_connected = on_connected
        self._view = view
        self._sessions = sessions
        self._types = types
        self._interactive = interactive
        self._idle_s = idle_s  # A connection that is silent for longer is dead.

    async def events(self) -> AsyncGenerator[ServerEvent]:
        """Yield events for ever; reconnect and rejoin as needed.

        Raises `Refused` for what coming back cannot mend: a wrong token, a retired client.
        """
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._connection()) as connection:
                    async for told in connection:
                        backoff.reset()
                        yield told
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
        """Whether it is there again; if not, the next round tries."""
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
        async with self.workspace.client.stream(path) as answer:
            self.connections += 1
            self.cursor = self.cursor or answer.headers.get(CURSOR_HEADER.lower(), "")
            if self.on_connected is not None:
                self.on_connected()
            lines = SseParser()
            while data := await answer.piece(self._idle_s):
                for told in lines.feed(data):
                    if told.cursor:
                        self.cursor = told.cursor
                    elif told.type == "resync":
                        self.cursor = told.read(Resync).cursor
                    yield told

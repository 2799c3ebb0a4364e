"""The client's event stream: its line parser (§7.2) and the loop that never gives up (§14.2).

Owns one subscription at a time and the channel of 100 events behind it. What the events do to
the screen is `screen.py`; the calls of a recovery are the owner's, by the `Home` protocol.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum, auto
from typing import Protocol

from tests.crush_client.api import CallError, StatusError
from tests.crush_client.golang import Decoded, Kept, fill, record, unmarshal
from tests.crush_client.screen import Event
from tests.crush_client.syntax import DecodeError
from tests.crush_client.transport import Body, TransportError
from tests.crush_client.types import ENVELOPE, EVENT_PAYLOADS, event_type

log = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_MAX_S = 0.25, 10.0
CHANNEL_EVENTS = 100
RECREATE_S = 30.0
RECREATES_SHOWN = 20  # So many failures later the person is told.

Sleep = Callable[[float], Awaitable[None]]


def parse_line(line: bytes) -> Event | None:
    """One line of the stream; None for one that the client skips."""
    text = line.strip()
    if not text:
        return None
    if not text.startswith(b"data:"):
        log.warning("invalid event format: %r", text[:80])
        return None
    outer = unmarshal(text.removeprefix(b"data:").strip(), ENVELOPE)
    if outer.error is not None:
        log.error("unmarshaling event envelope: %s", outer.error)
        return None
    envelope = record(outer.value)
    kind = envelope.text("type")
    if kind not in EVENT_PAYLOADS:
        log.warning("unknown event type: %r", kind)
        return None
    raw = envelope.values["payload"]
    # What does not decode is delivered as far as it got.
    inner = fill(raw.node, event_type(kind)) if isinstance(raw, Kept) else _nothing(kind)
    event = record(inner.value)
    if inner.error is not None:
        log.error("decoding %s: %s", kind, inner.error)
    return Event(kind, event.text("type"), event.record("payload"), inner.error)


def _nothing(kind: str) -> Decoded:
    error = DecodeError("syntax", "unexpected end of JSON input")
    return Decoded(event_type(kind).zero(), error)


async def read_lines(body: Body) -> AsyncGenerator[bytes]:
    """Every whole line; ends at a clean EOF, where a line without its end is lost."""
    pending = bytearray()
    searched = 0
    while data := await body.read():
        pending += data
        while (end := pending.find(b"\n", searched)) >= 0:
            yield bytes(pending[: end + 1])
            del pending[: end + 1]
            searched = 0
        searched = len(pending)


class State(Enum):
    CONNECTING = auto()
    STREAMING = auto()
    DEGRADED = auto()  # It lost the server and will try again.
    RECREATING = auto()
    # A read failed in another way than by EOF: the client reads the same dead body every 2 s for
    # ever. Nothing leads out of here but a restart of the program.
    HUNG = auto()


class Home(Protocol):
    """Whoever the stream belongs to."""

    async def subscribe(self) -> Body: ...
    async def unsubscribe(self, body: Body) -> None: ...
    async def recreate(self) -> None:
        """Register the workspace again from the snapshot; raises `CallError`."""
        ...

    async def recovered(self) -> None:
        """Say again which session is open, and load it anew."""
        ...

    def show(self, text: str) -> None: ...


class EventLoop:
    def __init__(self, home: Home, sleep: Sleep) -> None:
        self.channel: asyncio.Queue[Event] = asyncio.Queue(CHANNEL_EVENTS)
        self.state = State.CONNECTING
        self.degraded = False
        self.connections = 0  # Subscriptions that were answered with 200.
        self.lines: list[bytes] = []  # All that ever came.
        self.recreated = 0
        self._home = home
        self._sleep = sleep
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Until it is cancelled."""
        backoff_s, failures = BACKOFF_S, 0
        while True:
            try:
                body = await self._home.subscribe()
            except CallError as exc:
                self._lose()
                gone = isinstance(exc, StatusError) and exc.status == 404
                if gone and await self._recreates():
                    failures = 0
                    continue
                failures += gone
                if failures == RECREATES_SHOWN:
                    self._home.show("can't restore the workspace")
                await self._sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                continue
            backoff_s = BACKOFF_S
            await self._stream(body)
            self._lose()
            await self._sleep(BACKOFF_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of state makes `condition` true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _stream(self, body: Body) -> None:
        """Consume one subscription to its clean end."""
        try:
            # Reading goes on while the recovery makes its calls, as in two goroutines.
            async with asyncio.TaskGroup() as tasks:
                if self.degraded:
                    tasks.create_task(self._recover(), name="recover")
                else:
                    self._connected()
                tasks.create_task(self._consume(body), name="consume")
        finally:
            await self._home.unsubscribe(body)

    async def _recover(self) -> None:
        await self._home.recovered()
        self.degraded = False
        self._connected()

    def _connected(self) -> None:
        self.connections += 1
        self._become(State.STREAMING)

    async def _consume(self, body: Body) -> None:
        try:
            async for line in read_lines(body):
                self.lines.append(line)
                if event := parse_line(line):
                    await self.channel.put(event)  # Full: no more is read from the socket.
        except TransportError as exc:
            log.error("reading events: %s", exc)
            self._become(State.HUNG)
            await asyncio.Event().wait()

    async def _recreates(self) -> bool:
        self._become(State.RECREATING)
        try:
            async with asyncio.timeout(RECREATE_S):
                await self._home.recreate()
        except (CallError, TimeoutError):
            self._become(State.DEGRADED)
            return False
        self.recreated += 1
        return True

    def _lose(self) -> None:
        self.degraded = True
        self._become(State.DEGRADED)

    def _become(self, state: State) -> None:
        self.state = state
        self._changed.set()

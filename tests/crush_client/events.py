"""The client's event stream: its line parser (§7.2) and its endless reconnect loop (§14.2).

Owns one subscription at a time and its channel of 100 events. The effect of the events on the
screen is in `screen.py`; the owner makes the calls of a recovery, by the `StreamOwner` protocol.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from enum import Enum, auto
from typing import Protocol

from tests.crush_client.api import CallError, StatusError
from tests.crush_client.golang import Decoded, RawValue, fill, record, unmarshal
from tests.crush_client.screen import Event
from tests.crush_client.syntax import DecodeError
from tests.crush_client.transport import Body, TransportError
from tests.crush_client.types import ENVELOPE, EVENT_PAYLOADS, event_type

log = logging.getLogger(__name__)

BACKOFF_S, BACKOFF_MAX_S = 0.25, 10.0
CHANNEL_EVENTS = 100
RECREATE_S = 30.0
RECREATES_SHOWN = 20  # After this many failures a toast is shown.

Sleep = Callable[[float], Awaitable[None]]


def parse_line(line: bytes) -> Event | None:
    """Parse one line of the stream; None for one that the client skips."""
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
    # A payload that does not decode is delivered partly filled.
    inner = fill(raw.node, event_type(kind)) if isinstance(raw, RawValue) else _empty_event(kind)
    event = record(inner.value)
    if inner.error is not None:
        log.error("decoding %s: %s", kind, inner.error)
    return Event(kind, event.text("type"), event.record("payload"), inner.error)


def _empty_event(kind: str) -> Decoded:
    error = DecodeError("syntax", "unexpected end of JSON input")
    return Decoded(event_type(kind).zero(), error)


async def read_lines(body: Body) -> AsyncGenerator[bytes]:
    """Yield every whole line; ends at a clean EOF, where an unfinished line is lost."""
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
    DEGRADED = auto()  # The server is lost; the client will retry.
    RECREATING = auto()
    # A read failed other than by EOF: the client reads the same dead body every 2 s forever, until
    # the program is restarted.
    HUNG = auto()


class StreamOwner(Protocol):
    """The owner of the stream."""

    async def subscribe(self) -> Body: ...
    async def unsubscribe(self, body: Body) -> None: ...
    async def recreate(self) -> None:
        """Register the workspace again from the snapshot; raises `CallError`."""
        ...

    async def recovered(self) -> None:
        """Send again which session is open, and reload it."""
        ...

    def show(self, text: str) -> None: ...


class EventLoop:
    def __init__(self, owner: StreamOwner, sleep: Sleep) -> None:
        self.channel: asyncio.Queue[Event] = asyncio.Queue(CHANNEL_EVENTS)
        self.state = State.CONNECTING
        self.degraded = False
        self.connections = 0  # Subscriptions that were answered with 200.
        self.lines: list[bytes] = []  # All lines received so far.
        self.recreated = 0
        self._owner = owner
        self._sleep = sleep
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Run until canceled."""
        backoff_s, failures = BACKOFF_S, 0
        while True:
            try:
                body = await self._owner.subscribe()
            except CallError as exc:
                self._disconnected()
                gone = isinstance(exc, StatusError) and exc.status == 404
                if gone and await self._try_recreate():
                    failures = 0
                    continue
                failures += gone
                if failures == RECREATES_SHOWN:
                    self._owner.show("can't restore the workspace")
                await self._sleep(backoff_s)
                backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
                continue
            backoff_s = BACKOFF_S
            await self._stream(body)
            self._disconnected()
            await self._sleep(BACKOFF_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a change of state makes `condition` true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _stream(self, body: Body) -> None:
        """Consume one subscription to its clean end."""
        try:
            # Reading continues while the recovery makes its calls, as in two goroutines.
            async with asyncio.TaskGroup() as tasks:
                if self.degraded:
                    tasks.create_task(self._recover(), name="recover")
                else:
                    self._connected()
                tasks.create_task(self._consume(body), name="consume")
        finally:
            await self._owner.unsubscribe(body)

    async def _recover(self) -> None:
        await self._owner.recovered()
        self.degraded = False
        self._connected()

    def _connected(self) -> None:
        self.connections += 1
        self._set_state(State.STREAMING)

    async def _consume(self, body: Body) -> None:
        try:
            async for line in read_lines(body):
                self.lines.append(line)
                if event := parse_line(line):
                    await self.channel.put(
                        event
                    )  # While it is full, nothing is read from the socket.
        except TransportError as exc:
            log.error("reading events: %s", exc)
            self._set_state(State.HUNG)
            await asyncio.Event().wait()

    async def _try_recreate(self) -> bool:
        self._set_state(State.RECREATING)
        try:
            async with asyncio.timeout(RECREATE_S):
                await self._owner.recreate()
        except (CallError, TimeoutError):
            self._set_state(State.DEGRADED)
            return False
        self.recreated += 1
        return True

    def _disconnected(self) -> None:
        self.degraded = True
        self._set_state(State.DEGRADED)

    def _set_state(self, state: State) -> None:
        self.state = state
        self._changed.set()

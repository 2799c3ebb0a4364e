"""Outgoing frames: the outbox of one connection, the events of one run on their way into it, and
the encoding of an executor's values.
"""

import asyncio
import json
import logging
import re
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, cast

from msgspec import Raw

from culm.clock import Clock, Timer
from culm.errors import TooLarge
from culm.fleet.executor import RunEnded
from culm.fleet.protocol.batching import EventBatcher, qos_of
from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    REQUEST_BYTES_MAX,
    Batch,
    ChildFrame,
    EventBatch,
    EventFrame,
    Qos,
    RunSpec,
    encode_frame,
)
from culm.wire.codec import Json, encodable, encode

log = logging.getLogger(__name__)

REQUESTS_MAX: Final = 32
FRAMES_MAX: Final = 64  # For events; an ending always has room.
BYTES_MAX: Final = 4 << 20  # For waiting events, unless a single one is larger.
EVENTS_MAX: Final = 256  # Events of one run that are not in the outbox yet; further ones wait.
SINK_BYTES_MAX: Final = 8 << 20  # For these, unless a single one is larger.
BATCH_BYTES_MAX: Final = 256 << 10  # A larger batch is not delayed.
TURN_EVENTS: Final = 64  # After this many events without a pause, other tasks get a turn.
EVENT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (1 << 20)  # The enclosing frame fits as well ...
ASKED_BYTES_MAX: Final = REQUEST_BYTES_MAX - (64 << 10)  # ... as does that of a request.
LEVELS_MAX: Final = 100  # Some parsers allow 127, and the enclosing frame has a few.

_SCALARS: Final = frozenset((str, int, float, bool, type(None)))
_HALF_PAIR: Final = re.compile(rb"\\u[dD]")  # Or a complete pair: the slow parser decides.


class FrameOutbox:
    """The frames to be written on one connection: requests to the host first, then the rest.

    Events and endings keep their order; a request may overtake them, since a run waits for its
    answer. Both queues are bounded.
    """

    def __init__(self) -> None:
        self._requests: deque[bytes] = deque()
        self._frames: deque[bytes] = deque()
        self._bytes = 0  # Total size of the frames.
        self._awaited: asyncio.Future[None] | None = None  # Set while the writer waits for a frame.
        self._room = asyncio.Event()  # Room for a request.
        self._room.set()
        self.on_room: Callable[[], None] | None = None  # Called when there is room for an event.
        self.frames_put = 0
        self.frames_taken = 0

    @property
    def has_room(self) -> bool:
        return len(self._frames) < FRAMES_MAX and self._bytes < BYTES_MAX

    def put_nowait(self, frame: bytes) -> None:
        """Add an event, if there is room, or an ending."""
        self._frames.append(frame)
        self._bytes += len(frame)
        self.frames_put += 1
        self._wake()

    async def request_room(self) -> None:
        """Wait until a request has room."""
        while len(self._requests) >= REQUESTS_MAX:
            self._room.clear()
            await self._room.wait()

    def put_request_nowait(self, frame: bytes) -> None:
        """Add a request. Call only with room, and without an await since there was."""
        self._requests.append(frame)
        self._wake()

    def drop_requests(self) -> None:
        """Drop the requests of a run that is over: nobody waits for their answers."""
        self._requests.clear()
        self._room.set()

    def take_nowait(self, room: int = 0) -> list[bytes]:
        """Take what to write next: a request, or one frame, or several that fit into `room`."""
        if self._requests:
            self._room.set()
            return [self._requests.popleft()]
        frames: list[bytes] = []
        size = 0
        while self._frames and (not frames or size + len(self._frames[0]) <= room):
            frames.append(self._frames.popleft())
            size += len(frames[-1])
        self._bytes -= size
        self.frames_taken += len(frames)
        if frames and self.on_room is not None:
            self.on_room()
        return frames

    async def filled(self) -> None:
        """Wait until there is a frame to write. Only the writer calls it."""
        while not self._requests and not self._frames:
            self._awaited = asyncio.get_running_loop().create_future()
            await self._awaited

    def _wake(self) -> None:
        if self._awaited is not None:
            if not self._awaited.done():
                self._awaited.set_result(None)
            self._awaited = None


class RunEventSink:
    """Implements `EventSink`: bounded, in order, none after the end.

    A host that counts attempts gets events in numbered batches, and droppable ones are dropped
    while the outbox is full; their number is reported before the ending. Any other host gets one
    frame per event, and all events wait.
    """

    def __init__(self, spec: RunSpec, outbox: FrameOutbox, clock: Clock) -> None:
        self._spec = spec
        self._outbox = outbox
        self._clock = clock
        self._batcher = EventBatcher(spec) if spec.execution_epoch > 0 else None
        self._events: deque[tuple[bytes, Qos]] = deque()
        self._events_bytes = 0
        self._ready: deque[Batch] = deque()  # Numbered batches that wait for room.
        self._gathered_bytes = 0  # Bytes in the batcher.
        self._linger: Timer | None = None
        self._changed = asyncio.Event()
        self._emitted = 0
        self._is_over = False
        self._dropped_batches = 0
        self._dropped_events = 0

    async def emit(self, event: Mapping[str, Json]) -> None:
        if self._is_over:
            raise RunEnded("the run is over")
        qos: Qos = "durable" if self._batcher is None else qos_of(event)
        try:
            data = fit(event)
        except TooDeep as exc:
            data = encode({"type": event.get("type", ""), "error": exc.message})
        while len(self._events) >= EVENTS_MAX or self._events_bytes >= SINK_BYTES_MAX:
            await self._change()
            if self._is_over:
                raise RunEnded("the run is over")
        self._events.append((data, qos))
        self._events_bytes += len(data)
        self._pump()
        self._emitted += 1
        if self._emitted % TURN_EVENTS == 0:
            await asyncio.sleep(0)

    def finish(self) -> None:
        """Accept no more events; those accepted, and the report about dropped ones, are sent."""
        if not self._is_over:
            self._is_over = True
            self._changed.set()
            self._pump()

    def discard(self) -> None:
        """Discard all waiting events, because the host is gone."""
        self._is_over = True
        self._events.clear()
        self._events_bytes = 0
        self._ready.clear()
        self._dropped_events = self._dropped_batches = 0
        self._batcher = None
        self._stop_linger()
        self._outbox.on_room = None
        self._changed.set()

    async def drained(self) -> None:
        """Wait until all events are in the outbox. Only after `finish` or `discard`."""
        while not self.is_drained:
            await self._change()

    @property
    def is_drained(self) -> bool:
        return self._is_over and not self._events and not self._ready and not self._gathered_bytes

    # --- below, nothing waits

    def _pump(self) -> None:
        """Move as many events as possible into the outbox."""
        if self._batcher is None:
            while self._events and self._outbox.has_room:
                self._outbox.put_nowait(encode_frame(EventFrame(Raw(self._next()[0]))))
        else:
            self._pump_batches(self._batcher)
        is_waiting = bool(self._events or self._ready)
        self._outbox.on_room = self._pump if is_waiting else None
        if self._is_over and not is_waiting:
            self._changed.set()

    def _pump_batches(self, batcher: EventBatcher) -> None:
        self._offer()
        while self._events and not self._ready:
            data, qos = self._next()
            if qos == "durable" and batcher.due_s is None and self._outbox.has_room:
                # Nothing is in the batcher, so it need not wait.
                self._outbox.put_nowait(encode_frame(EventBatch(batcher.alone(Raw(data)))))
                continue
            self._form(batcher.add(Raw(data), qos, self._clock.monotonic_s()))
            self._gathered_bytes += len(data)
            if batcher.due_s is None:
                self._gathered_bytes = 0
            elif self._gathered_bytes > BATCH_BYTES_MAX:
                self._form(batcher.flush())
        if self._is_over and not self._ready:
            self._form(batcher.flush())
            if self._dropped_events:
                self._form([batcher.alone(Raw(self._drop_report()))])
        if batcher.due_s is not None and self._linger is None:
            delay_s = max(0.0, batcher.due_s - self._clock.monotonic_s())
            self._linger = self._clock.call_later(delay_s, self._on_linger)

    def _on_linger(self) -> None:
        self._linger = None
        if self._batcher is not None:
            self._form(self._batcher.flush())

    def _form(self, batches: list[Batch]) -> None:
        """Queue complete batches; the batcher is empty except for later events."""
        if batches:
            self._gathered_bytes = 0
            self._stop_linger()
            self._ready += batches
            self._offer()

    def _offer(self) -> None:
        while self._ready:
            batch = self._ready[0]
            if self._outbox.has_room:
                self._outbox.put_nowait(encode_frame(EventBatch(batch)))
            elif batch.qos == "durable":
                return
            else:
                self._dropped_batches += 1
                self._dropped_events += len(batch.events)
            self._ready.popleft()

    def _drop_report(self) -> bytes:
        """Encode the report about dropped events and reset the counts."""
        log.info("%d events were dropped: the host reads too slowly", self._dropped_events)
        session = self._spec.logical_session
        report = {
            "type": "runner_progress",
            "session_id": "" if session is None else session.session_id,
            "round_count": 0,
            "dropped_events": self._dropped_events,
            "dropped_batches": self._dropped_batches,
        }
        self._dropped_events = self._dropped_batches = 0
        return encode(report)

    def _next(self) -> tuple[bytes, Qos]:
        event = self._events.popleft()
        self._events_bytes -= len(event[0])
        self._changed.set()
        return event

    def _stop_linger(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()


# --- values that fit the wire: other hosts of this protocol end a run over surrogates or nesting


class TooDeep(TooLarge):
    def __init__(self) -> None:
        super().__init__(f"a value may be nested at most {LEVELS_MAX} levels deep")


def fit(value: Mapping[str, Json], bytes_max: int = EVENT_BYTES_MAX) -> bytes:
    """Encode as JSON; raises `TooLarge`, `TooDeep`, and TypeError for values JSON cannot hold."""
    try:
        data = _encoded(value)
        # Nearly all events are flat; only the others are checked.
        if not _SCALARS.issuperset(map(type, value.values())):
            data = _checked(data)
    except RecursionError as exc:
        raise TooDeep from exc
    if len(data) > bytes_max:
        raise TooLarge(f"at most {bytes_max} bytes can be sent at once, not {len(data)}")
    return data


def encode_safely(frame: ChildFrame) -> bytes:
    """Encode a frame; an unpaired surrogate in one of its texts is replaced."""
    try:
        return encode_frame(frame)
    except UnicodeEncodeError:
        return encode_frame(encodable(frame))


def _encoded(value: Mapping[str, Json]) -> bytes:
    try:
        return encode(value)
    except UnicodeEncodeError:
        return encode(encodable(dict(value)))


def _checked(data: bytes) -> bytes:
    # An unpaired surrogate may also occur, as an escape, in JSON that was only forwarded.
    if _HALF_PAIR.search(data):
        data = encode(encodable(json.loads(data)))
    has_many = data.count(b"{") + data.count(b"[") > LEVELS_MAX
    if has_many and _levels(json.loads(data), LEVELS_MAX) < 0:
        raise TooDeep
    return data


def _levels(value: Json, left: int) -> int:
    """Return how many more levels fit; below 0 if there are too many."""
    if left < 0 or not isinstance(value, dict | list):
        return left
    inner = cast("list[Json]", [*value.values()] if isinstance(value, dict) else value)
    return min((_levels(one, left - 1) for one in inner), default=left - 1)

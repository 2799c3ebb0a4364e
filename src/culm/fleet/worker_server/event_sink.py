"""The events of one run on their way into the outbox: bounded, in order, none after the end.

A host that counts attempts gets them in numbered batches, and droppable ones are dropped while the
outbox is full; their number is reported before the ending. Any other host gets one frame per event,
and all events wait.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import Final

from msgspec import Raw

from culm.clock import Clock, Timer
from culm.fleet.executor import RunEnded
from culm.fleet.protocol.batching import EventBatcher, qos_of
from culm.fleet.protocol.frames import (
    Batch,
    EventBatch,
    EventFrame,
    Qos,
    RunSpec,
    encode_frame,
)
from culm.fleet.worker_server.outbox import FrameOutbox
from culm.fleet.worker_server.sanitize import TooDeep, fit
from culm.wire.codec import Json, encode

log = logging.getLogger(__name__)

EVENTS_MAX: Final = 256  # Events of one run that are not in the outbox yet; further ones wait.
BYTES_MAX: Final = 8 << 20  # For these, unless a single one is larger.
BATCH_BYTES_MAX: Final = 256 << 10  # A larger batch is not delayed.
TURN_EVENTS: Final = 64  # After this many events without a pause, other tasks get a turn.


class RunEventSink:
    """Implements `EventSink`."""

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
        while len(self._events) >= EVENTS_MAX or self._events_bytes >= BYTES_MAX:
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
            self._form(batcher.add(Raw(data), qos, self._clock.now_s()))
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
            delay_s = max(0.0, batcher.due_s - self._clock.now_s())
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

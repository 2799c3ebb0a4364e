"""Send the events of a run to its host: in order, without loss, and without delaying the model.

Owns the queue of unsent events. Text grows in plain functions and is sent by a task of the run;
pieces are joined while the host is slower. Every other event can be awaited until it was sent,
together with all events before it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from typing import Literal

from msgspec import Struct, field

from culm.errors import TooLarge
from culm.fleet.executor import EventSink, RunEnded
from culm.wire.codec import Json, clean

log = logging.getLogger(__name__)

EVENT_CHARS_MAX = 64 << 10  # Text joined into one event.
# Unsent output of calls; more is dropped. It is for display only: results contain it, too.
OUTPUT_CHARS_MAX = 256 << 10

Growing = Literal["token", "reasoning_token", "tool_token"]


class _QueuedEvent(Struct):
    """One unsent event: complete, or a text that may still grow."""

    event: dict[str, Json]
    pieces: list[str] = field(default_factory=list[str])
    chars: int = 0
    sent: asyncio.Future[None] | None = None  # Set if a sender waits.

    def grow(self, text: str) -> None:
        self.pieces.append(text)
        self.chars += len(text)

    def complete(self) -> Mapping[str, Json]:
        return {**self.event, "content": "".join(self.pieces)} if self.pieces else self.event


class EventSender:
    """The events of one run; created by `open_event_sender`."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._queue: deque[_QueuedEvent] = deque()
        self._has_work = asyncio.Event()
        self._output_chars = 0  # Output of calls in the queue.
        self._is_over = False

    def grow(self, kind: Growing, text: str, tool_call_id: str = "") -> None:
        """Append to a text; it is sent soon."""
        if not text or self._is_over:
            return
        if kind == "tool_token":
            text = clean(text)[: max(0, OUTPUT_CHARS_MAX - self._output_chars)]
            self._output_chars += len(text)
            if not text:
                return
        event: dict[str, Json] = {"type": kind}
        if tool_call_id:
            event["tool_call_id"] = tool_call_id
        last = self._queue[-1] if self._queue else None
        if last is None or last.event != event or last.chars >= EVENT_CHARS_MAX:
            last = self._put(_QueuedEvent(event))
        last.grow(text)

    def send_nowait(self, event: dict[str, Json]) -> None:
        """Queue an event; it is sent soon, in order."""
        if not self._is_over:
            self._put(_QueuedEvent(event))

    async def send(self, event: dict[str, Json]) -> None:
        """Wait until the event and all before it were sent; raises `RunEnded`.

        If this is cancelled, the event is still sent while the run continues.
        """
        if self._is_over:
            raise RunEnded
        sent: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_QueuedEvent(event, sent=sent))
        await sent

    def _put(self, queued: _QueuedEvent) -> _QueuedEvent:
        self._queue.append(queued)
        self._has_work.set()
        return queued

    async def pump(self) -> None:
        """Send queued events until this is cancelled or the host ends the run."""
        current: _QueuedEvent | None = None
        try:
            while True:
                while not self._queue:
                    self._has_work.clear()
                    await self._has_work.wait()
                current = self._queue.popleft()
                if current.event["type"] == "tool_token":
                    self._output_chars -= current.chars
                await self._send_next(current.complete())
                if current.sent is not None and not current.sent.done():
                    current.sent.set_result(None)
        except RunEnded:
            pass  # Waiting and later senders get the exception.
        finally:
            self._is_over = True
            for queued in (current, *self._queue):
                if queued is not None and queued.sent is not None and not queued.sent.done():
                    queued.sent.set_exception(RunEnded())
            self._queue.clear()

    async def _send_next(self, event: Mapping[str, Json]) -> None:
        try:
            await self._events.emit(event)
        except TooLarge as exc:  # Each field has a limit; their sum being too large is a bug.
            log.error("cannot send an event %s: %s", event["type"], exc.message)


@asynccontextmanager
async def open_event_sender(events: EventSink) -> AsyncGenerator[EventSender]:
    """Send events within the block; those that were not awaited may be lost at its end."""
    async with asyncio.TaskGroup() as tasks:
        sender = EventSender(events)
        pump = tasks.create_task(sender.pump(), name="events of a run")
        try:
            yield sender
        finally:
            pump.cancel()

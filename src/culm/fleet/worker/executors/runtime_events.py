"""What a run tells its host: in order, without loss, and never so that the run's model must wait.

Owns what is not told yet. Text grows in plain functions and is told by a task of the run, joined
where the host is slower; whatever else is said waits until it was told, and with it all before it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal

from culm.errors import TooLarge
from culm.fleet.executor import EventSink, RunEnded
from culm.wire.codec import Json, clean

log = logging.getLogger(__name__)

EVENT_CHARS_MAX = 64 << 10  # Of text joined into one event.
# Of what calls put out, not told yet; more is dropped. It is to be watched: results have it, too.
OUTPUT_CHARS_MAX = 256 << 10

Growing = Literal["token", "reasoning_token", "tool_token"]


@dataclass(slots=True)
class _Told:
    """One event that is not told yet: whole, or a text that may still grow."""

    event: dict[str, Json]
    pieces: list[str] = field(default_factory=list[str])
    chars: int = 0
    heard: asyncio.Future[None] | None = None  # Somebody waits until it was told.

    def grow(self, text: str) -> None:
        self.pieces.append(text)
        self.chars += len(text)

    def whole(self) -> Mapping[str, Json]:
        return {**self.event, "content": "".join(self.pieces)} if self.pieces else self.event


class EventSender:
    """Made by `open_telling`."""

    def __init__(self, events: EventSink) -> None:
        self._events = events
        self._line: deque[_Told] = deque()
        self._has_work = asyncio.Event()
        self._output_chars = 0  # In the line, of what calls put out.
        self._is_over = False

    def grow(self, kind: Growing, text: str, tool_call_id: str = "") -> None:
        """Let a text grow; it is told soon."""
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
        last = self._line[-1] if self._line else None
        if last is None or last.event != event or last.chars >= EVENT_CHARS_MAX:
            last = self._put(_Told(event))
        last.grow(text)

    def send_nowait(self, event: dict[str, Json]) -> None:
        """It is told soon, in its place among all that is said."""
        if not self._is_over:
            self._put(_Told(event))

    async def send(self, event: dict[str, Json]) -> None:
        """Returns when it was told, and all before it; raises `RunOver`.

        If this is cancelled it is still told, as long as the run goes on.
        """
        if self._is_over:
            raise RunEnded
        heard: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._put(_Told(event, heard=heard))
        await heard

    def _put(self, told: _Told) -> _Told:
        self._line.append(told)
        self._has_work.set()
        return told

    async def pump(self) -> None:
        """Tell what there is, until this is cancelled or nobody listens any more."""
        telling: _Told | None = None
        try:
            while True:
                while not self._line:
                    self._has_work.clear()
                    await self._has_work.wait()
                telling = self._line.popleft()
                if telling.event["type"] == "tool_token":
                    self._output_chars -= telling.chars
                await self._send_next(telling.whole())
                if telling.heard is not None and not telling.heard.done():
                    telling.heard.set_result(None)
        except RunEnded:
            pass  # Who says something is told so.
        finally:
            self._is_over = True
            for told in (telling, *self._line):
                if told is not None and told.heard is not None and not told.heard.done():
                    told.heard.set_exception(RunEnded())
            self._line.clear()

    async def _send_next(self, event: Mapping[str, Json]) -> None:
        try:
            await self._events.emit(event)
        except TooLarge as exc:  # Everything in it has a bound; it is a mistake that they add up.
            log.error("a %s cannot be told: %s", event["type"], exc.message)


@asynccontextmanager
async def open_event_sender(events: EventSink) -> AsyncGenerator[EventSender]:
    """Within the block a run can tell things; what was not waited for may be lost at its end."""
    async with asyncio.TaskGroup() as tasks:
        telling = EventSender(events)
        pump = tasks.create_task(telling.pump(), name="what a run tells")
        try:
            yield telling
        finally:
            pump.cancel()

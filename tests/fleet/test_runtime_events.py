"""Events of a run for a host that is slow or gone."""

import asyncio
from collections.abc import Awaitable

import pytest

from culm.fleet.executor import RunEnded
from culm.fleet.worker.executors.runtime_events import (
    EVENT_CHARS_MAX,
    OUTPUT_CHARS_MAX,
    open_event_sender,
)
from tests.fleet.runtime_harness import Event, RecordingEventSink
from tests.support import WAIT_S


class BlockedEventSink(RecordingEventSink):
    """Receives nothing until the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_receive = asyncio.Event()

    async def emit(self, event: Event) -> None:
        await self.may_receive.wait()
        await super().emit(event)


async def test_text_for_a_slow_host_is_merged_and_only_output_is_dropped() -> None:
    sink = BlockedEventSink()
    async with asyncio.timeout(WAIT_S), open_event_sender(sink) as sender:
        for n in range(1000):
            sender.grow("token", f"{n} ")
        sender.grow("tool_token", "x" * OUTPUT_CHARS_MAX * 2, "a")
        sender.grow("tool_token", "lost", "a")
        sender.send_nowait({"type": "runner_progress"})
        sender.grow("token", "y" * EVENT_CHARS_MAX)
        sender.grow("token", "z")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(sender.send({"type": "complete"}))
            sink.may_receive.set()
        expected: list[Event] = [
            {"type": "token", "content": "".join(f"{n} " for n in range(1000))},
            {"type": "tool_token", "tool_call_id": "a", "content": "x" * OUTPUT_CHARS_MAX},
            {"type": "runner_progress"},
            {"type": "token", "content": "y" * EVENT_CHARS_MAX},
            {"type": "token", "content": "z"},
            {"type": "complete"},
        ]
        assert sink.events == expected


async def test_pending_send_fails_when_the_host_is_gone() -> None:
    class ClosedEventSink(BlockedEventSink):
        async def emit(self, event: Event) -> None:
            await super().emit(event)
            raise RunEnded

    sink = ClosedEventSink()
    async with asyncio.timeout(WAIT_S), open_event_sender(sink) as sender:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(_outcome(sender.send({"type": "error"})))
            second = tasks.create_task(_outcome(sender.send({"type": "error"})))
            sink.may_receive.set()
        assert (first.result(), second.result()) == ("over", "over")
        sender.grow("token", "nobody hears this")
        with pytest.raises(RunEnded):
            await sender.send({"type": "error"})
    assert len(sink.events) == 1


async def _outcome(sending: Awaitable[None]) -> str:
    try:
        await sending
    except RunEnded:
        return "over"
    return "heard"

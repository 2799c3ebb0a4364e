"""What a run tells its host, while that one is slow or gone."""

import asyncio
from collections.abc import Awaitable

import pytest

from culm.fleet.executor import RunEnded
from culm.fleet.worker.executors.runtime_events import (
    EVENT_CHARS_MAX,
    OUTPUT_CHARS_MAX,
    open_event_sender,
)
from tests.fleet.runtime_stage import Ear, Event
from tests.support import WAIT_S


class Slow(Ear):
    """Hears nothing until it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.may_hear = asyncio.Event()

    async def emit(self, event: Event) -> None:
        await self.may_hear.wait()
        await super().emit(event)


async def test_what_grows_while_a_host_is_slow_is_joined_in_order_and_only_output_is_dropped() -> (
    None
):
    ear = Slow()
    async with asyncio.timeout(WAIT_S), open_event_sender(ear) as telling:
        for n in range(1000):
            telling.grow("token", f"{n} ")
        telling.grow("tool_token", "x" * OUTPUT_CHARS_MAX * 2, "a")
        telling.grow("tool_token", "lost", "a")
        telling.send_nowait({"type": "runner_progress"})
        telling.grow("token", "y" * EVENT_CHARS_MAX)
        telling.grow("token", "z")
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(telling.send({"type": "complete"}))
            ear.may_hear.set()
        expected: list[Event] = [
            {"type": "token", "content": "".join(f"{n} " for n in range(1000))},
            {"type": "tool_token", "tool_call_id": "a", "content": "x" * OUTPUT_CHARS_MAX},
            {"type": "runner_progress"},
            {"type": "token", "content": "y" * EVENT_CHARS_MAX},
            {"type": "token", "content": "z"},
            {"type": "complete"},
        ]
        assert ear.events == expected


async def test_whoever_waits_to_be_heard_learns_that_the_host_is_gone() -> None:
    class Gone(Slow):
        async def emit(self, event: Event) -> None:
            await super().emit(event)
            raise RunEnded

    ear = Gone()
    async with asyncio.timeout(WAIT_S), open_event_sender(ear) as telling:
        async with asyncio.TaskGroup() as tasks:
            first = tasks.create_task(_outcome(telling.send({"type": "error"})))
            second = tasks.create_task(_outcome(telling.send({"type": "error"})))
            ear.may_hear.set()
        assert (first.result(), second.result()) == ("over", "over")
        telling.grow("token", "nobody hears this")
        with pytest.raises(RunEnded):
            await telling.send({"type": "error"})
    assert len(ear.events) == 1


async def _outcome(saying: Awaitable[None]) -> str:
    try:
        await saying
    except RunEnded:
        return "over"
    return "heard"

"""The executor that repeats its assignment: without dependencies, to test that a worker works."""

import asyncio
import re
from typing import Final

from culm.clock import Clock, within
from culm.fleet.executor import (
    CANCELLED,
    CancelToken,
    EventSink,
    Outcome,
    RunHost,
    SteerInbox,
    completed,
)
from culm.fleet.protocol.frames import RunSpec

_SLEEP: Final = re.compile(r"__sleep_ms:([0-9]{1,9})")


class EchoExecutor:
    """Implements `Executor`. The first `__sleep_ms:<n>` in the assignment is a delay, not text."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        words, delay_s = parse_assignment(spec.assignment)
        if delay_s:
            await within(self._clock, delay_s, cancel.wait())
        for word in words:
            if cancel.is_set():
                return CANCELLED
            await events.emit({"type": "token", "content": f"{word} "})
            await asyncio.sleep(0)
        if cancel.is_set():
            return CANCELLED
        await events.emit({"type": "complete"})
        return completed(f"echo: {' '.join(words)}")


def parse_assignment(assignment: str) -> tuple[list[str], float]:
    """Split an assignment into its words and the delay before them."""
    words = assignment.split()
    for number, word in enumerate(words):
        if found := _SLEEP.fullmatch(word):
            return words[:number] + words[number + 1 :], int(found[1]) / 1000
    return words, 0.0

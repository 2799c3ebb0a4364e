"""Time as a value that is passed in: the real one here, a hand-wound one in tests."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since 1970."""
        ...

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` on the event loop after `delay_s`."""
        ...


class LoopClock:
    """The wall clock, with timers on the running event loop."""

    def now_s(self) -> float:
        return time.time()  # noqa: TID251 - this is the clock that the others take

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, action)


async def pause(clock: Clock, delay_s: float) -> None:
    """Wait for so long by that clock."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    timer = clock.call_later(delay_s, end)
    try:
        await over
    finally:
        timer.cancel()

"""Waiting for something, but no longer than so long by a clock that is passed in."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from culm.clock import Clock

T = TypeVar("T")


async def within(clock: Clock, seconds: float, wait: Awaitable[T]) -> T | None:
    """What `wait` comes to; None if it takes longer, and then it is cancelled."""
    loop = asyncio.get_running_loop()
    bound = asyncio.timeout(None)
    try:
        async with bound:
            timer = clock.call_later(seconds, lambda: bound.reschedule(loop.time()))
            try:
                return await wait
            finally:
                timer.cancel()
    except TimeoutError:
        if not bound.expired():
            raise
        return None

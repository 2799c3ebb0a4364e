"""Time as a dependency: the real clock here, a manual one in tests."""

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Protocol, TypeVar

T = TypeVar("T")


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds since 1970, for times that are shown or stored. It jumps when the time is set."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that only ever increase, for durations. Equal in all processes of a machine."""
        ...

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        """Run `action` on the event loop after `delay_s`."""
        ...


class LoopClock:
    """The wall clock, with timers on the running event loop."""

    def now_s(self) -> float:
        return time.time()  # noqa: TID251 - all others use this clock

    def monotonic_s(self) -> float:
        return time.monotonic()  # noqa: TID251 - all others use this clock

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        return asyncio.get_running_loop().call_later(delay_s, action)


async def pause(clock: Clock, delay_s: float) -> None:
    """Wait for `delay_s` on this clock."""
    over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def end() -> None:
        if not over.done():
            over.set_result(None)

    timer = clock.call_later(delay_s, end)
    try:
        await over
    finally:
        timer.cancel()


@asynccontextmanager
async def time_limit(clock: Clock, seconds: float) -> AsyncGenerator[asyncio.Timeout]:
    """Limit the time of the block by that clock, as `asyncio.timeout` does; raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as bound:
        timer = clock.call_later(seconds, lambda: bound.reschedule(loop.time()))
        try:
            yield bound
        finally:
            timer.cancel()


async def within(clock: Clock, seconds: float, wait: Awaitable[T]) -> T | None:
    """Return the result of `wait`; cancel it after that time by the clock and return None."""
    bound: asyncio.Timeout | None = None
    try:
        async with time_limit(clock, seconds) as bound:
            return await wait
    except TimeoutError:
        if bound is None or not bound.expired():
            raise
        return None


def format_time(at_s: float) -> str:
    """Format a time as RFC 3339 in UTC, to the millisecond and with a `Z`."""
    text = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def parse_time(text: str) -> float | None:
    """Parse an RFC 3339 time into seconds since 1970; None if it is malformed."""
    try:
        found = datetime.fromisoformat(text.upper())  # RFC 3339 allows lowercase `t` and `z`.
        return found.timestamp() if found.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None

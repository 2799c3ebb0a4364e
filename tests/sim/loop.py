"""A reproducible event loop: the seed decides the order, and time is virtual."""

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from tests.support import BREADTH

T = TypeVar("T")

# The number of seeds per test; `make soak` continues from there.
SEEDS_MAX = max(1, int(60 * BREADTH))


class Deadlock(Exception):
    """All tasks wait and no timer is armed."""


class _VirtualSelector(selectors.SelectSelector):
    """Waiting costs nothing: the clock jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock
        self.now_s += max(0.0, timeout)
        return []


class SimLoop(asyncio.SelectorEventLoop):
    """Runs ready callbacks in a seeded order; threads become delays."""

    def __init__(self, seed: int) -> None:
        self._virtual = _VirtualSelector()
        super().__init__(self._virtual)
        self.random = random.Random(seed)
        self.time_set_by_s = 0.0  # The time of day was changed by so much in all ...
        self.time_set_at_s = -math.inf  # ... most recently then.

    def time(self) -> float:
        return self._virtual.now_s

    def set_time(self, by_s: float) -> None:
        """Change the time of day, as a person or a time server does; no timer notices it."""
        self.time_set_by_s += by_s
        self.time_set_at_s = self.time()

    def _run_once(self) -> None:
        ready: list[object] = list(self._ready)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
        self.random.shuffle(ready)
        self._ready.clear()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        self._ready.extend(ready)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType]

    def run_in_executor(
        self,
        executor: object,
        func: Callable[..., T],
        *args: Any,  # noqa: ANN401
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as exc:
                future.set_exception(exc)

        self.call_later(self.random.random() * 0.01, run)
        return future


class SimClock:
    """The loop's virtual time as a clock."""

    def __init__(self, loop: SimLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return 1_800_000_000.0 + self._loop.time() + self._loop.time_set_by_s

    def monotonic_s(self) -> float:
        return self._loop.time()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, action)


def simulate(seed: int, scenario: Callable[[SimLoop], Coroutine[Any, Any, T]]) -> T:
    """Run one world to its end; the seed is in the error if it fails."""
    loop = SimLoop(seed)
    problems: list[str] = []
    loop.set_exception_handler(lambda _, context: problems.append(str(context)))
    try:
        result = loop.run_until_complete(scenario(loop))
    except BaseException as exc:
        exc.add_note(f"seed {seed}")
        raise
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(1))
        loop.close()
    assert not problems, f"seed {seed}: {problems}"
    return result

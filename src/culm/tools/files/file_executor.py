"""File work off the event loop: a few threads, and jobs with a deadline and a stop flag."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from culm.clock import Clock

T = TypeVar("T")

WALL_S = 10.0  # Per call; then it returns a partial result.
GRACE_S = 2.0  # For a job to notice the flag; one that does not hangs in the kernel.
THREADS = 4  # More would not make the disk faster, and the event loop needs the interpreter.
SEARCHES_MAX = 2  # Each uses a core.


class StopFlag:
    """A stop signal, set once: a job polls it in every loop, or registers an action."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._action: Callable[[], None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._lock:
            self._is_set = True
            self._act()

    @contextmanager
    def calling(self, action: Callable[[], None]) -> Generator[None]:
        """Within the block, call `action`, which must not wait, once the flag is set.

        After the block no thread calls it any more.
        """
        with self._lock:
            self._action = action
            if self._is_set:
                self._act()
        try:
            yield
        finally:
            with self._lock:
                self._action = None

    def _act(self) -> None:
        action, self._action = self._action, None
        if action is not None:
            action()


class FileExecutor:
    """The threads for file work; made by `open_file_executor`, one per process."""

    def __init__(self, clock: Clock, wall_s: float) -> None:
        self.wall_s = wall_s
        self.searches = asyncio.Semaphore(SEARCHES_MAX)
        self._clock = clock
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="culm-file")
        # The time of a job starts when a thread is free: no job uses up the time of another.
        self._room = asyncio.Semaphore(THREADS)
        self._stops: set[StopFlag] = set()

    async def run(self, job: Callable[[StopFlag], T]) -> T:
        """Run `job` in a thread. Past its deadline it has to stop and return a partial result.

        Cancelling this stops it, too, and waits for it to end. Raises the exceptions of the job,
        and `TimeoutError` if it does not stop.
        """
        async with self._room:
            stop = StopFlag()
            future = asyncio.get_running_loop().run_in_executor(self._pool, job, stop)
            self._stops.add(stop)
            timers = (
                self._clock.call_later(self.wall_s, stop.set),
                self._clock.call_later(self.wall_s + GRACE_S, lambda: _give_up(future)),
            )
            try:
                await asyncio.wait({future})
            except asyncio.CancelledError:
                stop.set()
                await asyncio.wait({future}, timeout=GRACE_S)
                _give_up(future)
                raise
            finally:
                for timer in timers:
                    timer.cancel()
                self._stops.discard(stop)
            if future.cancelled():
                raise TimeoutError
            return future.result()

    async def close(self) -> None:
        """Stop all jobs and wait for them, unless one hangs."""
        for stop in self._stops:
            stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for _ in range(THREADS):
                    await self._room.acquire()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _give_up(future: asyncio.Future[T]) -> None:
    if not future.cancel() and not future.cancelled():
        future.exception()  # Retrieved so that asyncio does not log it.


@asynccontextmanager
async def open_file_executor(clock: Clock, wall_s: float = WALL_S) -> AsyncGenerator[FileExecutor]:
    """Open the threads for the file tools of a process; they have ended after the block."""
    executor = FileExecutor(clock, wall_s)
    try:
        yield executor
    finally:
        await executor.close()

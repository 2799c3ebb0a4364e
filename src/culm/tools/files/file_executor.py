"""File work off the event loop: a few threads, each job bounded in time and told when to stop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import TypeVar

from culm.clock import Clock

T = TypeVar("T")

WALL_S = 10.0  # For one call; then it answers with what it has.
GRACE_S = 2.0  # For a job to see that it shall stop; one that does not hangs in the kernel.
THREADS = 4  # The disk does not get faster by more, and the event loop wants the interpreter, too.
SEARCHES_MAX = 2  # Each keeps a core busy.


class StopFlag:
    """The word to stop, given once: a job asks for it in every loop, or is called."""

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
        """Within the block, call `action`, which does not wait, when the word comes or has come.

        After the block it is not called any more, by any thread.
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
    """Made by `open_file_work`; one a process."""

    def __init__(self, clock: Clock, wall_s: float) -> None:
        self.wall_s = wall_s
        self.searches = asyncio.Semaphore(SEARCHES_MAX)
        self._clock = clock
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="culm-file")
        # Time runs from here, not from when a thread is free: nobody's wait eats another's bound.
        self._room = asyncio.Semaphore(THREADS)
        self._stops: set[StopFlag] = set()

    async def run(self, job: Callable[[StopFlag], T]) -> T:
        """Do `job` in a thread. Out of time it is told to stop, and returns what it has.

        Cancelling this stops it, too, and waits for it to end. Raises what the job raises, and
        `TimeoutError` if it does not stop.
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
        """Stop all jobs and see them end, unless one hangs."""
        for stop in self._stops:
            stop.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE_S):
                for _ in range(THREADS):
                    await self._room.acquire()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _give_up(future: asyncio.Future[T]) -> None:
    if not future.cancel() and not future.cancelled():
        future.exception()  # Nobody wants to know any more.


@asynccontextmanager
async def open_file_executor(clock: Clock, wall_s: float = WALL_S) -> AsyncGenerator[FileExecutor]:
    """The threads for the file tools of a process; at the end of the block they are done."""
    work = FileExecutor(clock, wall_s)
    try:
        yield work
    finally:
        await work.close()

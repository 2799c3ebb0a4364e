"""File work in threads: bounded in time, stopped by a cancel, nothing left running."""

import asyncio
import threading

import pytest

from culm.tools.files.file_executor import GRACE_S, THREADS, WALL_S, StopFlag, open_file_executor
from tests.support import WAIT_S, FakeClock


class Job:
    """Runs in a thread until it is asked to stop; one that `hangs` also needs `release`."""

    def __init__(self, *, hangs: bool = False) -> None:
        self._loop = asyncio.get_running_loop()
        self._hangs = hangs
        self.began = asyncio.Event()
        self._stop_requested = threading.Event()
        self._released = threading.Event()
        self.is_over = False

    def __call__(self, stop: StopFlag) -> str:
        self._loop.call_soon_threadsafe(self.began.set)
        with stop.calling(self._stop_requested.set):
            self._stop_requested.wait(WAIT_S)
        if self._hangs:
            self._released.wait(WAIT_S)
        self.is_over = True
        return "what there is"

    def release(self) -> None:
        self._released.set()


async def test_a_job_past_its_time_limit_is_stopped_and_its_result_returned() -> None:
    clock = FakeClock()
    async with (
        asyncio.timeout(WAIT_S),
        open_file_executor(clock) as work,
        asyncio.TaskGroup() as group,
    ):
        job = Job()
        task = group.create_task(work.run(job))
        await job.began.wait()
        clock.advance(WALL_S)
        assert await task == "what there is"
        assert clock.armed() == 0


async def test_a_job_that_ignores_the_stop_flag_raises_timeout() -> None:
    clock = FakeClock()
    async with asyncio.timeout(WAIT_S), open_file_executor(clock) as work:
        job = Job(hangs=True)

        async def run() -> None:
            with pytest.raises(TimeoutError):
                await work.run(job)

        async with asyncio.TaskGroup() as group:
            group.create_task(run())
            await job.began.wait()
            clock.advance(WALL_S + GRACE_S)
        job.release()


async def test_a_cancel_stops_the_job() -> None:
    clock = FakeClock()
    async with asyncio.timeout(WAIT_S), open_file_executor(clock) as work:
        job = Job()
        async with asyncio.TaskGroup() as group:
            task = group.create_task(work.run(job))
            await job.began.wait()
            task.cancel()
        assert (task.cancelled(), job.is_over, clock.armed()) == (True, True, 0)


async def test_leaving_the_block_stops_running_jobs() -> None:
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
        async with open_file_executor(FakeClock()) as work:
            job = Job()
            task = group.create_task(work.run(job))
            await job.began.wait()
        assert job.is_over
        assert await task == "what there is"


async def test_the_time_limit_starts_when_a_job_gets_a_thread() -> None:
    clock = FakeClock()
    async with (
        asyncio.timeout(WAIT_S),
        open_file_executor(clock) as work,
        asyncio.TaskGroup() as group,
    ):
        first = [Job() for _ in range(THREADS)]
        tasks = [group.create_task(work.run(job)) for job in first]
        for job in first:
            await job.began.wait()
        late = Job()
        task = group.create_task(work.run(late))
        clock.advance(WALL_S)
        await asyncio.wait(tasks)
        await late.began.wait()
        assert not task.done()
        clock.advance(WALL_S)
        assert await task == "what there is"


async def test_an_exception_of_a_job_is_raised_to_the_caller() -> None:
    def fail(_: StopFlag) -> None:
        raise ValueError("as it is")

    async with open_file_executor(FakeClock()) as work:
        with pytest.raises(ValueError, match="as it is"):
            await work.run(fail)


def test_a_stop_callback_runs_at_once_if_set_and_never_after_its_block() -> None:
    stop, calls = StopFlag(), list[str]()
    with stop.calling(lambda: calls.append("within")):
        pass
    stop.set()
    with stop.calling(lambda: calls.append("late")):
        stop.set()
    assert calls == ["late"]

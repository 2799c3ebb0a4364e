"""The background jobs of one workspace.

A job outlives its call and its run. It ends with its session, with its workspace and with the
server, or when it is killed; its output stays readable for a while.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Iterable
from contextlib import asynccontextmanager

from msgspec import Struct, field

from culm.tools.files.safe_open import shown
from culm.tools.process.output import CommandOutput
from culm.tools.process.running import CommandResult, RunningCommand

RUNNING_MAX = 50  # A project has a few servers and watchers; more is a loop.
FINISHED_MAX = 50  # Kept for reading, at most 30,000 bytes each; the oldest are dropped first.
LISTED_MAX = 20
COMMAND_CHARS_LISTED = 60


class BackgroundJob(Struct):
    """A command in the background, and its output."""

    id: str
    session_id: str
    command: str
    description: str
    cwd: str
    running: RunningCommand
    output: CommandOutput
    ended: CommandResult | None = None
    seen_bytes: int = 0  # Of the output, read by its own session.
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class BackgroundJobs:
    """The jobs of a workspace. The owner of the task group calls `end`; see also `open_jobs`."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._running: dict[str, BackgroundJob] = {}
        self._finished: dict[str, BackgroundJob] = {}
        self._supervisors: dict[str, asyncio.Task[None]] = {}
        self._count = 0
        self._closing = False

    def has_room(self) -> bool:
        return not self._closing and len(self._running) < RUNNING_MAX

    def adopt(
        self,
        running: RunningCommand,
        output: CommandOutput,
        *,
        session_id: str,
        command: str,
        description: str,
        cwd: str,
    ) -> BackgroundJob | None:
        """Take over a running command; None if there is no room, and the caller keeps it."""
        if not self.has_room():
            return None
        self._count += 1
        job = BackgroundJob(
            f"job-{self._count}", session_id, command, description, cwd, running, output
        )
        self._running[job.id] = job
        task = self._tasks.create_task(
            self._supervise(job), name=f"{job.id} of session {session_id}"
        )
        self._supervisors[job.id] = task
        return job

    def find(self, job_id: str) -> BackgroundJob | None:
        return self._running.get(job_id) or self._finished.get(job_id)

    def described(self) -> str:
        """List the jobs for a caller that named an unknown one; the newest first."""
        known = [*reversed(self._running.values()), *reversed(self._finished.values())]
        if not known:
            return "There are no background jobs."
        lines = [
            f"{job.id} ({'done' if job.ended else 'running'}): {_short(job.command)}"
            for job in known[:LISTED_MAX]
        ]
        return "\n".join(("The jobs of this workspace:", *lines))

    async def kill(self, job: BackgroundJob) -> CommandResult:
        """End a job and verify it; a job that has ended is left as it is."""
        if job.ended is not None:
            return job.ended
        ended = self._finish(job, await job.running.kill())
        if supervisor := self._supervisors.pop(job.id, None):
            supervisor.cancel()  # It would wait forever for a process that cannot be ended.
        return ended

    async def end_sessions(self, session_ids: Collection[str]) -> None:
        """End and forget all jobs of deleted sessions."""
        await self._end(job for job in self._running.values() if job.session_id in session_ids)
        for job in list(self._finished.values()):
            if job.session_id in session_ids:
                del self._finished[job.id]

    async def end(self) -> None:
        """End all jobs and accept no more."""
        self._closing = True
        await self._end(self._running.values())

    async def _end(self, jobs: Iterable[BackgroundJob]) -> None:
        async with asyncio.TaskGroup() as kills:
            for job in tuple(jobs):
                kills.create_task(self.kill(job), name=f"end {job.id}")

    async def _supervise(self, job: BackgroundJob) -> None:
        self._finish(job, await job.running.ended())
        self._supervisors.pop(job.id, None)

    def _finish(self, job: BackgroundJob, ended: CommandResult) -> CommandResult:
        """Record the end of a job once, from the first caller."""
        if job.ended is None:
            job.ended = ended
            job.output.close()
            del self._running[job.id]
            self._finished[job.id] = job
            while len(self._finished) > FINISHED_MAX:
                del self._finished[next(iter(self._finished))]
            job.is_over.set()
        return job.ended


def _short(command: str) -> str:
    text = shown(" ".join(command.split()))
    cut = len(text) > COMMAND_CHARS_LISTED
    return f"{text[:COMMAND_CHARS_LISTED]}…" if cut else text


@asynccontextmanager
async def open_jobs() -> AsyncGenerator[BackgroundJobs]:
    """Open the background jobs of a workspace; they have all ended when the block ends."""
    async with asyncio.TaskGroup() as tasks:
        jobs = BackgroundJobs(tasks)
        try:
            yield jobs
        finally:
            await jobs.end()

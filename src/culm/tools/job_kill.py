"""`job_kill`: end a background job, for certain."""

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from culm.model.base import ToolSpec
from culm.tools.arguments import BadArguments, make_spec, metadata, parse_arguments
from culm.tools.base import Action, Call, Plan, Result
from culm.tools.files.safe_open import shown
from culm.tools.job_output import unknown_job
from culm.tools.process.exit_text import exit_words
from culm.tools.process.jobs import Job, Jobs
from culm.wire.runs import CrashPolicy

DESCRIPTION = (
    "End a background job and everything it started. What it put out can still be read with "
    "job_output."
)


class JobKillArguments(Struct, frozen=True):
    shell_id: Annotated[str, Meta(max_length=100, description="The job, such as job-1.")]


SPEC = make_spec("job_kill", DESCRIPTION, JobKillArguments)


@dataclass(frozen=True, slots=True)
class JobKill:
    jobs: Jobs
    spec: ToolSpec
    parallel: bool = False
    crash: CrashPolicy = "again"  # After a crash there is no job left.

    async def prepare(self, call: Call) -> Plan | Result:
        try:
            given = parse_arguments(call.arguments or {}, JobKillArguments)
        except BadArguments as exc:
            return Result(f"{call.name}: {exc}", is_error=True)
        job = self.jobs.find(given.shell_id)
        if job is None:
            return unknown_job(self.jobs, given.shell_id)
        # What a session started it may end; another one may still need it.
        is_own = job.session_id == call.session_id
        action = Action(
            call.name,
            "kill",
            description=f"End the background job {job.id}: {job.command}",
            path=shown(job.cwd),
            params={"shell_id": job.id, "command": job.command},
            resolved={"shell_id": job.id, "command": job.command, "session": job.session_id},
            is_free=is_own,
            grains=(f"kill:{job.id}",),
            why="" if is_own else "The job belongs to another session.",
        )
        return Plan(action, lambda _: self._run(job))

    async def _run(self, job: Job) -> Result:
        about = metadata(shell_id=job.id, command=job.command, description=job.description)
        if job.ended is not None:
            words = exit_words(job.ended.exit) or "Exit code 0"
            return Result(f"{job.id} had ended already.\n{words}", metadata=about)
        ended = await self.jobs.kill(job)
        if ended.exit.left:
            return Result(exit_words(ended.exit), is_error=True, metadata=about)
        return Result(f"{job.id} was ended, and everything it had started.", metadata=about)


def make_job_kill(jobs: Jobs) -> JobKill:
    return JobKill(jobs, SPEC)

"""`job_kill`: end a background job, and verify that it has ended."""

from typing import Annotated

from msgspec import Meta, Struct

from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction
from culm.tools.files.safe_open import shown
from culm.tools.job_output import unknown_job
from culm.tools.process.jobs import BackgroundJob, BackgroundJobs
from culm.tools.process.running import exit_text
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

DESCRIPTION = (
    "End a background job and everything it started. Its output can still be read with job_output."
)


class JobKillArguments(Struct, frozen=True):
    shell_id: Annotated[str, Meta(max_length=100, description="The job, such as job-1.")]


SPEC = make_spec(
    "job_kill",
    DESCRIPTION,
    JobKillArguments,
    ToolFacts(kind="execute", shown_arguments=("shell_id",)),
)


class JobKillTool(Struct, frozen=True):
    jobs: BackgroundJobs
    spec: ToolSpec
    parallel: bool = False
    crash: CrashPolicy = "again"  # After a crash no job is left.

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, JobKillArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        job = self.jobs.find(arguments.shell_id)
        if job is None:
            return unknown_job(self.jobs, arguments.shell_id)
        # A session may end its own jobs; another session may still need them.
        is_own = job.session_id == call.session_id
        action = ResolvedAction(
            call.name,
            "kill",
            description=f"End the background job {job.id}: {job.command}",
            path=shown(job.cwd),
            params={"shell_id": job.id, "command": job.command},
            resolved={"shell_id": job.id, "command": job.command, "session": job.session_id},
            is_free=is_own,
            coverage=(f"kill:{job.id}",),
            why="" if is_own else "The job belongs to another session.",
        )
        return CallPlan(action, lambda _: self._run(job))

    async def _run(self, job: BackgroundJob) -> CallResult:
        about = metadata(shell_id=job.id, command=job.command, description=job.description)
        if job.ended is not None:
            text = exit_text(job.ended.exit) or "Exit code 0"
            return CallResult(f"{job.id} had ended already.\n{text}", metadata=about)
        ended = await self.jobs.kill(job)
        if ended.exit.left:
            return CallResult(exit_text(ended.exit), is_error=True, metadata=about)
        return CallResult(f"{job.id} was ended, and everything it had started.", metadata=about)


def make_job_kill(jobs: BackgroundJobs) -> JobKillTool:
    return JobKillTool(jobs, SPEC)

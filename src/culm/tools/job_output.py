"""`job_output`: the output of a background job, and whether it has ended."""

from typing import Annotated

from msgspec import Meta, Struct

from culm.clock import Clock, within
from culm.model.base import ToolSpec
from culm.tools.arguments import InvalidArguments, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, free_plan
from culm.tools.files.safe_open import shown
from culm.tools.process.jobs import BackgroundJob, BackgroundJobs
from culm.tools.process.running import exit_text
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

WAIT_S = 120.0  # Then the result reports that it is still running, and the model decides.
DESCRIPTION = (
    "Read the output of a background job since you last looked, and whether it has ended. With "
    f"wait, wait for it to end, at most {WAIT_S:g} seconds."
)


class JobOutputArguments(Struct, frozen=True):
    shell_id: Annotated[str, Meta(max_length=100, description="The job, such as job-1.")]
    wait: Annotated[bool, Meta(description="Whether to wait for its end. Default: false.")] = False


SPEC = make_spec(
    "job_output",
    DESCRIPTION,
    JobOutputArguments,
    ToolFacts(kind="read", shown_arguments=("shell_id",)),
)


class JobOutputTool(Struct, frozen=True):
    jobs: BackgroundJobs
    clock: Clock
    spec: ToolSpec
    parallel: bool = True
    crash: CrashPolicy = "again"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, JobOutputArguments)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        return free_plan(call, lambda _: self._run(call.session_id, arguments))

    async def _run(self, session_id: str, arguments: JobOutputArguments) -> CallResult:
        job = self.jobs.find(arguments.shell_id)
        if job is None:
            return unknown_job(self.jobs, arguments.shell_id)
        if arguments.wait and job.ended is None:
            await within(self.clock, WAIT_S, job.is_over.wait())
        return _result(job, session_id)


def make_job_output(jobs: BackgroundJobs, clock: Clock) -> JobOutputTool:
    return JobOutputTool(jobs, clock, SPEC)


def unknown_job(jobs: BackgroundJobs, job_id: str) -> CallResult:
    return CallResult(f"There is no job {shown(job_id)}. {jobs.described()}", is_error=True)


def _result(job: BackgroundJob, session_id: str) -> CallResult:
    # Another session has not seen the output that its own session has read.
    is_own = session_id == job.session_id
    mark = job.seen_bytes if is_own else 0
    text = job.output.text_since(mark).rstrip("\n")
    if is_own:
        job.seen_bytes = job.output.count
    ending = None if job.ended is None else exit_text(job.ended.exit) or "Exit code 0"
    nothing = "(no output since you last looked)" if mark else "(no output)"
    about = metadata(
        shell_id=job.id,
        command=job.command,
        description=job.description,
        done=job.ended is not None,
        working_directory=shown(job.cwd),
    )
    return CallResult(f"{text or nothing}\n{ending or 'Still running'}", metadata=about)

"""`bash`: run a command, and wait for it or leave it running in the background.

Owns the arguments of the tool and the text of its results. `culm.shell` judges the commands that
are free.
"""

import hashlib
import math
import re
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from culm.clock import within
from culm.model.base import ToolSpec
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.shell.judge import Judgement, judge
from culm.tools.arguments import InvalidArguments, PathText, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, ToolContext, Watch
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.process.environment import (
    WorkingDirectories,
    command_env,
    unasked_env,
    why_git_asks,
)
from culm.tools.process.jobs import RUNNING_MAX, BackgroundJob, BackgroundJobs
from culm.tools.process.output import CommandOutput, make_room, name_output
from culm.tools.process.running import (
    COMMAND_BYTES_MAX,
    CommandRequest,
    CommandResult,
    LiveOutput,
    RunningCommand,
    exit_text,
    has_bash,
    output_receiver,
    start,
)
from culm.wire.codec import printable
from culm.wire.runs import CrashPolicy
from culm.wire.tools import ToolFacts

FOREGROUND_S = 120  # After this time a command becomes a job, unless the call sets another.
SECONDS_MAX = 3600  # For every time that a call may set; nobody waits longer for an answer.
BACKGROUND_LOOK_S = 0.5  # A job that fails usually fails at once, and the result can include it.
DESCRIPTION_CHARS_MAX = 1000
SUMMARY_CHARS_MAX = 500  # For a command on one line; the dialog also shows it in full.
DIGEST_CHARS = 32  # 128 bits: no other command has the same digest.
LEFT_HINT = "Use run_in_background for a process that must keep running."
_NO_ANSWER = "The disk did not answer in time; nothing was run."
_GIT = re.compile(r"(?:^|[\s/])git(?:\s|$)")
DESCRIPTION = (
    "Run a command in bash, without a terminal and without input. It starts where the last one "
    "of the session ended, if that is in the workspace. When it ends, everything it started is "
    "ended, too; use run_in_background for a process that must keep running (a server, a "
    f"watcher). A command that takes longer than {FOREGROUND_S} seconds becomes a background job, "
    "which job_output reads and job_kill ends. Long output is cut in the middle; a file has all of "
    "it."
)


class BashArguments(Struct, frozen=True):
    command: Annotated[str, Meta(description="The command to run.")]
    description: Annotated[
        str,
        Meta(max_length=DESCRIPTION_CHARS_MAX, description="A short description of its effect."),
    ] = ""
    working_dir: Annotated[
        PathText,
        Meta(
            description="Where to run this one command; the next starts where it would have "
            "without. Default: where the last one ended."
        ),
    ] = ""
    run_in_background: Annotated[
        bool, Meta(description="Whether to let it go on and return at once. Default: false.")
    ] = False
    auto_background_after: Annotated[
        int,
        Meta(
            ge=0,
            le=SECONDS_MAX,
            description="After how many seconds it becomes a background job. "
            f"Default, and 0: {FOREGROUND_S}, or never if there is a timeout.",
        ),
    ] = 0
    timeout: Annotated[
        int,
        Meta(
            ge=0,
            le=SECONDS_MAX,
            description="After how many seconds it is killed, unless it is a background job by "
            "then. Default, and 0: never.",
        ),
    ] = 0


SPEC = make_spec(
    "bash", DESCRIPTION, BashArguments, ToolFacts(kind="execute", command_argument="command")
)


class _Limits(Struct, frozen=True):
    """The time until a command becomes a job, and the time until it is killed."""

    background_s: float
    kill_s: float


def _limits_of(arguments: BashArguments) -> _Limits:
    if arguments.run_in_background:
        return _Limits(BACKGROUND_LOOK_S, math.inf)
    kill_s = arguments.timeout or SECONDS_MAX
    otherwise = math.inf if arguments.timeout else FOREGROUND_S
    return _Limits(arguments.auto_background_after or otherwise, kill_s)


class _PlannedCommand(Struct, frozen=True):
    """A resolved call."""

    call: CallRequest
    arguments: BashArguments
    cwd: str
    unasked: bool = False


class BashTool(Struct, frozen=True):
    context: ToolContext
    jobs: BackgroundJobs
    directories: WorkingDirectories
    spec: ToolSpec
    parallel: bool = False
    crash: CrashPolicy = "ask"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            arguments = parse_arguments(call.arguments or {}, BashArguments)
            _check(arguments.command)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        if not arguments.command.strip():
            return CallResult("(no output: the command is empty)")
        try:
            return await self.context.executor.run(lambda _: self._resolve(call, arguments))
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            return CallResult(_NO_ANSWER, is_error=True)

    def _resolve(self, call: CallRequest, arguments: BashArguments) -> CallPlan:
        """Judge the command and make its plan. Runs in a thread."""
        cwd = self.directories.resolve(call.session_id, arguments.working_dir)
        readable = (self.context.paths.root, self.context.outputs)
        judged = judge(arguments.command, Path(cwd), readable)
        action = _action(self.context, arguments, cwd, judged)
        planned = _PlannedCommand(call, arguments, cwd, unasked=action.is_free)
        return CallPlan(action, lambda watch: self._run(planned, watch))

    async def _run(self, planned: _PlannedCommand, watch: Watch) -> CallResult:
        try:
            command = await self.context.executor.run(lambda _: self._command(planned))
        except (OpenRefused, TimeoutError) as exc:
            return CallResult(str(exc) or _NO_ANSWER, is_error=True)
        if planned.arguments.run_in_background and not self.jobs.has_room():
            return _no_room()
        clock = self.context.clock
        shown_start_s = clock.now_s()
        output = CommandOutput(lambda: self._overflow(planned.call.session_id))
        live = LiveOutput(watch, clock)
        try:
            running = await start(
                self.context.processes,
                command,
                output_receiver(output, live),
                clock.monotonic_s(),
            )
            return await _Waiting(self, planned, running, output, shown_start_s).result()
        except ProcessStartFailed as exc:
            return CallResult(f"The command could not be started: {exc}", is_error=True)
        finally:
            live.close()

    def _command(self, planned: _PlannedCommand) -> CommandRequest:
        """Return the planned command after checking its directory again. Runs in a thread."""
        self.directories.check(planned.cwd)
        call = planned.call
        kind = "job" if planned.arguments.run_in_background else "call"
        owner = ProcessOwner(self.context.workspace_id, kind, call.session_id, call.run_id, call.id)
        env = command_env(self.context.env(), planned.cwd)
        if planned.unasked:
            env = unasked_env(env, self.context.paths.root)
        return CommandRequest(planned.arguments.command, planned.cwd, env, owner)

    def _overflow(self, session_id: str) -> Path:
        make_room(self.context.outputs)
        return name_output(self.context.outputs, session_id, self.context.ids.file())


class _Waiting(Struct, frozen=True):
    """A running command, and the call that waits for it."""

    bash: BashTool
    planned: _PlannedCommand
    running: RunningCommand
    output: CommandOutput
    started_s: float  # Seconds since 1970.

    async def result(self) -> CallResult:
        """Wait and return the result. On any other exit the command is killed."""
        async with AsyncExitStack() as ending:
            ending.callback(self.output.close)
            ending.push_async_callback(self.running.kill)
            limits = _limits_of(self.planned.arguments)
            ended = await self._wait(min(limits.background_s, limits.kill_s))
            if ended is None and limits.background_s < limits.kill_s:
                job = self._become_job()
                if job is not None:
                    ending.pop_all()
                    return self._job_result(job)
                if self.planned.arguments.run_in_background:
                    return _no_room()
                ended = await self._wait(limits.kill_s - limits.background_s)
            if ended is not None:
                return self._result(ended)
            return self._result(await self.running.kill(), timeout_s=limits.kill_s)

    async def _wait(self, seconds: float) -> CommandResult | None:
        return await within(self.bash.context.clock, seconds, self.running.ended())

    def _become_job(self) -> BackgroundJob | None:
        arguments, session_id = self.planned.arguments, self.planned.call.session_id
        return self.bash.jobs.adopt(
            self.running,
            self.output,
            session_id=session_id,
            command=arguments.command,
            description=arguments.description,
            cwd=self.planned.cwd,
        )

    def _job_result(self, job: BackgroundJob) -> CallResult:
        text = self.output.text().rstrip("\n")
        job.seen_bytes = self.output.count
        arguments = self.planned.arguments
        why = "" if arguments.run_in_background else "It has not ended yet. "
        note = (
            f"{why}It goes on in the background as {job.id}; job_output reads what it puts out, "
            "job_kill ends it."
        )
        about = self._about(text, job.id)
        return CallResult(f"{text}\n{note}" if text else note, metadata=about)

    def _result(self, ended: CommandResult, timeout_s: float | None = None) -> CallResult:
        text = self.output.text().rstrip("\n")
        lines: list[str] = []
        if timeout_s is not None:
            lines.append(f"It did not end within {timeout_s:g} s and was killed.")
        swept = ended.exit.swept and not ended.exit.lost
        hint = LEFT_HINT if swept else ""
        lines += [line for line in (self._moved(ended), exit_text(ended.exit), hint) if line]
        is_error = timeout_s is not None or ended.exit.lost
        about = self._about("\n".join([text, *lines] if text else lines))
        return CallResult("\n".join([text or "(no output)", *lines]), is_error, about)

    def _moved(self, ended: CommandResult) -> str:
        """Remember the final directory for the next command; return a note if it has changed."""
        arguments, session_id = self.planned.arguments, self.planned.call.session_id
        if ended.directory is None or arguments.working_dir or arguments.run_in_background:
            return ""
        where = shown(ended.directory)
        if not self.bash.directories.move(session_id, ended.directory):
            return f"It ended in {where}, outside the workspace; the next one starts inside again."
        return "" if ended.directory == self.planned.cwd else f"The next one starts in {where}."

    def _about(self, text: str, job_id: str | None = None) -> str:
        return metadata(
            start_time=int(self.started_s * 1000),
            end_time=int(self.bash.context.clock.now_s() * 1000),
            output=text,
            description=self.planned.arguments.description,
            working_directory=shown(self.planned.cwd),
            background=None if job_id is None else True,
            shell_id=job_id,
        )


def make_bash(context: ToolContext, jobs: BackgroundJobs) -> BashTool:
    spec = SPEC
    return BashTool(context, jobs, WorkingDirectories(context.paths), spec)


def _check(command: str) -> None:
    if "\0" in command:
        raise InvalidArguments("command: it contains a NUL character, which no shell accepts")
    if (size := len(command.encode())) > COMMAND_BYTES_MAX:
        raise InvalidArguments(
            f"command: it has {size:,} bytes, more than {COMMAND_BYTES_MAX:,}; write a script first"
        )


def _no_room() -> CallResult:
    text = f"{RUNNING_MAX} background jobs are running; end one with job_kill first."
    return CallResult(text, is_error=True)


def _action(
    context: ToolContext, arguments: BashArguments, cwd: str, judged: Judgement
) -> ResolvedAction:
    why = _why_asked(context, cwd, judged)
    where = shown(cwd)
    coverage = tuple(f"{entry} @ {where}" for entry in judged.coverage)
    return ResolvedAction(
        "bash",
        "execute",
        description=f"Execute command: {_on_one_line(arguments.command)}",
        path=where,
        params={
            "description": arguments.description,
            "command": arguments.command,
            "working_dir": arguments.working_dir,
            "run_in_background": arguments.run_in_background,
            "auto_background_after": arguments.auto_background_after,
        },
        resolved={
            "command": arguments.command,
            "cwd": where,
            "background": arguments.run_in_background,
        },
        is_free=not why,
        paths=tuple(dict.fromkeys((where, *map(shown, judged.paths)))),
        commands=None if judged.commands is None else judged.asked,
        seen=judged.seen,
        coverage=coverage or (f"exactly {_exactly(arguments.command)} @ {where}",),
        why=why,
    )


def _why_asked(context: ToolContext, cwd: str, judged: Judgement) -> str:
    """Return the reason for asking; empty if the command is free. Does blocking disk I/O."""
    if not judged.is_free:
        return judged.why or "It may change something."
    if not context.paths.contains(cwd):
        return f"{shown(cwd)} is outside the workspace."
    if not has_bash(context.env()):
        return "bash is not installed, and another shell may parse the command differently."
    if any(_GIT.search(command) for command in judged.commands or ()):
        return why_git_asks((cwd, *judged.paths))
    return ""


def _exactly(command: str) -> str:
    """Identify exactly this command in a short text."""
    digest = hashlib.sha256(command.encode()).hexdigest()[:DIGEST_CHARS]
    return f"{_on_one_line(command)} ({digest})"


def _on_one_line(command: str) -> str:
    line = printable(command.strip())
    return line if len(line) <= SUMMARY_CHARS_MAX else f"{line[:SUMMARY_CHARS_MAX]}…"

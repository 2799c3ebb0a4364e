"""`bash`: run a command, wait for it or let it go on in the background.

Owns the tool's arguments and its words. What a command may do unasked is `culm.shell`'s judgement.
"""

import hashlib
import math
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct

from culm.model.base import ToolSpec
from culm.processes.base import ProcessOwner, ProcessStartFailed
from culm.shell.judge import Judgement, judge
from culm.tools.arguments import InvalidArguments, PathText, make_spec, metadata, parse_arguments
from culm.tools.base import CallPlan, CallRequest, CallResult, ResolvedAction, Watch
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.process.directories import WorkingDirectories
from culm.tools.process.environment import command_env, unasked_env, why_git_asks
from culm.tools.process.exit_text import exit_text
from culm.tools.process.jobs import RUNNING_MAX, BackgroundJob, BackgroundJobs
from culm.tools.process.output import CommandOutput, make_room
from culm.tools.process.running import (
    COMMAND_BYTES_MAX,
    CommandRequest,
    CommandResult,
    LiveOutput,
    RunningCommand,
    has_bash,
    output_receiver,
    start,
)
from culm.tools.process.waiting import within
from culm.tools.tool_context import ToolContext
from culm.wire.codec import printable
from culm.wire.runs import CrashPolicy

FOREGROUND_S = 120  # Then a command becomes a job, unless the call says otherwise.
SECONDS_MAX = 3600  # Of anything a call may ask for; nobody waits longer for an answer.
BACKGROUND_LOOK_S = 0.5  # A job that fails does so at once, and then the result says it.
DESCRIPTION_CHARS_MAX = 1000
SUMMARY_CHARS_MAX = 500  # Of a command on one line; the dialog has all of it besides.
DIGEST_CHARS = 32  # 128 bits: nobody finds another command with the same.
LEFT_HINT = "What shall go on running needs run_in_background."
_NO_ANSWER = "The disk did not answer in time; nothing was run."
_GIT = re.compile(r"(?:^|[\s/])git(?:\s|$)")
DESCRIPTION = (
    "Run a command in bash, without a terminal and without input. It starts where the last one "
    "of the session ended, if that is in the workspace. When it ends, everything it started is "
    "ended, too; what shall keep running (a server, a watcher) goes into run_in_background. "
    f"A command that takes longer than {FOREGROUND_S} seconds goes on as a background job, which "
    "job_output reads and job_kill ends. Long output is cut in the middle, and a file keeps it."
)


class BashArguments(Struct, frozen=True):
    command: Annotated[str, Meta(description="What to run.")]
    description: Annotated[
        str,
        Meta(max_length=DESCRIPTION_CHARS_MAX, description="What it does, in a few words."),
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


SPEC = make_spec("bash", DESCRIPTION, BashArguments)


@dataclass(frozen=True, slots=True)
class _Limits:
    """How long a command is waited for, and when that is its end."""

    background_s: float
    kill_s: float


def _limits_of(given: BashArguments) -> _Limits:
    if given.run_in_background:
        return _Limits(BACKGROUND_LOOK_S, math.inf)
    kill_s = given.timeout or SECONDS_MAX
    otherwise = math.inf if given.timeout else FOREGROUND_S
    return _Limits(given.auto_background_after or otherwise, kill_s)


@dataclass(frozen=True, slots=True)
class _Ordered:
    """A call, resolved."""

    call: CallRequest
    given: BashArguments
    cwd: str
    unasked: bool = False


@dataclass(frozen=True, slots=True)
class BashTool:
    context: ToolContext
    jobs: BackgroundJobs
    directories: WorkingDirectories
    spec: ToolSpec
    parallel: bool = False
    crash: CrashPolicy = "ask"

    async def prepare(self, call: CallRequest) -> CallPlan | CallResult:
        try:
            given = parse_arguments(call.arguments or {}, BashArguments)
            _check(given.command)
        except InvalidArguments as exc:
            return CallResult(f"{call.name}: {exc}", is_error=True)
        if not given.command.strip():
            return CallResult("(no output: the command is empty)")
        try:
            return await self.context.work.run(lambda _: self._resolve(call, given))
        except OpenRefused as exc:
            return CallResult(str(exc), is_error=True)
        except TimeoutError:
            return CallResult(_NO_ANSWER, is_error=True)

    def _resolve(self, call: CallRequest, given: BashArguments) -> CallPlan:
        """Runs in a thread."""
        cwd = self.directories.resolve(call.session_id, given.working_dir)
        readable = (self.context.inside.root, self.context.outputs)
        judged = judge(given.command, Path(cwd), readable)
        action = _action(self.context, given, cwd, judged)
        ordered = _Ordered(call, given, cwd, unasked=action.is_free)
        return CallPlan(action, lambda watch: self._run(ordered, watch))

    async def _run(self, ordered: _Ordered, watch: Watch) -> CallResult:
        try:
            command = await self.context.work.run(lambda _: self._command(ordered))
        except (OpenRefused, TimeoutError) as exc:
            return CallResult(str(exc) or _NO_ANSWER, is_error=True)
        if ordered.given.run_in_background and not self.jobs.has_room():
            return _no_room()
        started_s = self.context.clock.now_s()
        output = CommandOutput(self._overflow)
        live = LiveOutput(watch, self.context.clock)
        try:
            running = await start(
                self.context.processes, command, output_receiver(output, live), started_s
            )
            return await _Waiting(self, ordered, running, output, started_s).result()
        except ProcessStartFailed as exc:
            return CallResult(f"The command could not be started: {exc}", is_error=True)
        finally:
            live.close()

    def _command(self, ordered: _Ordered) -> CommandRequest:
        """What was planned, if the world still is as it was. Runs in a thread."""
        self.directories.check(ordered.cwd)
        call = ordered.call
        kind = "job" if ordered.given.run_in_background else "call"
        owner = ProcessOwner(self.context.workspace_id, kind, call.session_id, call.run_id, call.id)
        env = command_env(self.context.env(), ordered.cwd)
        if ordered.unasked:
            env = unasked_env(env, self.context.inside.root)
        return CommandRequest(ordered.given.command, ordered.cwd, env, owner)

    def _overflow(self) -> Path:
        make_room(self.context.outputs)
        return self.context.outputs / f"{self.context.ids.file()}.txt"


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A command that runs, and the call that waits for it."""

    bash: BashTool
    ordered: _Ordered
    running: RunningCommand
    output: CommandOutput
    started_s: float

    async def result(self) -> CallResult:
        """Wait, and say what came of it. On any other way out the command is ended."""
        async with AsyncExitStack() as ending:
            ending.callback(self.output.close)
            ending.push_async_callback(self.running.kill)
            limits = _limits_of(self.ordered.given)
            ended = await self._wait(min(limits.background_s, limits.kill_s))
            if ended is None and limits.background_s < limits.kill_s:
                job = self._become_job()
                if job is not None:
                    ending.pop_all()
                    return self._job_result(job)
                if self.ordered.given.run_in_background:
                    return _no_room()
                ended = await self._wait(limits.kill_s - limits.background_s)
            if ended is not None:
                return self._result(ended)
            return self._result(await self.running.kill(), timeout_s=limits.kill_s)

    async def _wait(self, seconds: float) -> CommandResult | None:
        return await within(self.bash.context.clock, seconds, self.running.ended())

    def _become_job(self) -> BackgroundJob | None:
        given, session_id = self.ordered.given, self.ordered.call.session_id
        return self.bash.jobs.adopt(
            self.running,
            self.output,
            session_id=session_id,
            command=given.command,
            description=given.description,
            cwd=self.ordered.cwd,
        )

    def _job_result(self, job: BackgroundJob) -> CallResult:
        text = self.output.text().rstrip("\n")
        job.seen_bytes = self.output.count
        given = self.ordered.given
        why = "" if given.run_in_background else "It has not ended yet. "
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
        """Keep where it ended for the next command, and say so if that is somewhere else."""
        given, session_id = self.ordered.given, self.ordered.call.session_id
        if ended.directory is None or given.working_dir or given.run_in_background:
            return ""
        where = shown(ended.directory)
        if not self.bash.directories.move(session_id, ended.directory):
            return f"It ended in {where}, outside the workspace; the next one starts inside again."
        return "" if ended.directory == self.ordered.cwd else f"The next one starts in {where}."

    def _about(self, text: str, job_id: str | None = None) -> str:
        return metadata(
            start_time=int(self.started_s * 1000),
            end_time=int(self.bash.context.clock.now_s() * 1000),
            output=text,
            description=self.ordered.given.description,
            working_directory=shown(self.ordered.cwd),
            background=None if job_id is None else True,
            shell_id=job_id,
        )


def make_bash(context: ToolContext, jobs: BackgroundJobs) -> BashTool:
    spec = SPEC
    return BashTool(context, jobs, WorkingDirectories(context.inside), spec)


def _check(command: str) -> None:
    if "\0" in command:
        raise InvalidArguments("command: it has a NUL character, which no shell takes")
    if (size := len(command.encode())) > COMMAND_BYTES_MAX:
        raise InvalidArguments(
            f"command: it has {size:,} bytes, more than {COMMAND_BYTES_MAX:,}; write a script first"
        )


def _no_room() -> CallResult:
    text = f"{RUNNING_MAX} background jobs are running; end one with job_kill first."
    return CallResult(text, is_error=True)


def _action(
    context: ToolContext, given: BashArguments, cwd: str, judged: Judgement
) -> ResolvedAction:
    why = _why_asked(context, cwd, judged)
    where = shown(cwd)
    grains = tuple(f"{grain} @ {where}" for grain in judged.coverage)
    return ResolvedAction(
        "bash",
        "execute",
        description=f"Execute command: {_on_one_line(given.command)}",
        path=where,
        params={
            "description": given.description,
            "command": given.command,
            "working_dir": given.working_dir,
            "run_in_background": given.run_in_background,
            "auto_background_after": given.auto_background_after,
        },
        resolved={
            "command": given.command,
            "cwd": where,
            "background": given.run_in_background,
        },
        is_free=not why,
        paths=tuple(dict.fromkeys((where, *map(shown, judged.paths)))),
        commands=None if judged.commands is None else judged.asked,
        seen=judged.seen,
        coverage=grains or (f"exactly {_exactly(given.command)} @ {where}",),
        why=why,
    )


def _why_asked(context: ToolContext, cwd: str, judged: Judgement) -> str:
    """Empty if nobody need be asked. Blocks as the disk does."""
    if not judged.is_free:
        return judged.why or "It may change something."
    if not context.inside.contains(cwd):
        return f"{shown(cwd)} is outside the workspace."
    if not has_bash(context.env()):
        return "There is no bash here, and another shell may read the command in another way."
    if any(_GIT.search(command) for command in judged.commands or ()):
        return why_git_asks((cwd, *judged.paths))
    return ""


def _exactly(command: str) -> str:
    """This command and no other, in few words."""
    digest = hashlib.sha256(command.encode()).hexdigest()[:DIGEST_CHARS]
    return f"{_on_one_line(command)} ({digest})"


def _on_one_line(command: str) -> str:
    line = printable(command.strip())
    return line if len(line) <= SUMMARY_CHARS_MAX else f"{line[:SUMMARY_CHARS_MAX]}…"

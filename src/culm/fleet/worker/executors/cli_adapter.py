"""The executor that has a command-line agent do the work: one process in custody a run.

Owns the pipes between it and us. How a program is started and what its lines mean is
`cli_profiles.py`'s. Such an agent hears its assignment and nothing after it, and asks nobody.
"""

import asyncio
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from culm.fleet.environment import keyless_env
from culm.fleet.executor import (
    CANCELLED,
    CancelToken,
    EventSink,
    Outcome,
    RunEnded,
    RunHost,
    SteerInbox,
    completed,
    failed,
)
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import ClaudeKind, CliKind, CodexKind, Provision
from culm.fleet.tail import StderrTail
from culm.fleet.worker.executors.base import WorkerServices, execution_started
from culm.fleet.worker.executors.cli_pipes import LinePipe
from culm.fleet.worker.executors.cli_profiles import AgentOutput, CliProfile, profile_of
from culm.processes.base import (
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.tools.process.child import open_memory
from culm.tools.process.environment import command_env
from culm.wire.codec import Json

RESULT_CHARS_MAX: Final = 1 << 20  # Of what it said; the end of it, where the answer is.
KILL_GRACE_S: Final = 0.5  # A cancelled run has three seconds in all.


def make_cli_adapter(
    kind: CliKind | ClaudeKind | CodexKind, provision: Provision, services: WorkerServices
) -> "CliAdapter":
    """Raises `BadProvision`."""
    spoken = profile_of(kind, read_only=provision.capabilities.is_read_only)
    return CliAdapter(spoken, provision, services)


class CliAdapter:
    """Implements `Executor`."""

    def __init__(self, spoken: CliProfile, provision: Provision, services: WorkerServices) -> None:
        self._spoken = spoken
        self._processes = services.processes
        self._clock = services.clock
        self._agent_id = provision.identity.child_id
        self._cwd = provision.workspace or _working_directory()
        given = provision.culm.env or {}
        self._env = env_of(os.environ, given, spoken.forward_env, self._cwd)

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        if cancel.is_set():
            return CANCELLED
        with ExitStack() as ours:
            output, errors = LinePipe(), StderrTail()
            ours.callback(output.close)
            ours.callback(errors.close)
            await events.emit(self._begun(spec))
            try:
                held = await self._start(spec, output, errors)
            except ProcessStartFailed as exc:
                return failed(str(exc))
            answer = _Answer()
            how = await _follow(held, output, self._spoken, events, cancel, answer)
            if how is None or cancel.is_set():
                return CANCELLED
            return answer.outcome(how, self._spoken.argv[0], errors.text())

    def _begun(self, spec: RunSpec) -> dict[str, Json]:
        session = spec.logical_session
        session_id = "" if session is None else session.session_id
        return execution_started(spec.activation_run_id or "", session_id, self._clock.now_s())

    async def _start(self, spec: RunSpec, output: LinePipe, errors: StderrTail) -> ProcessHandle:
        spoken = self._spoken
        words = (spec.assignment,) if spoken.in_argument else ()
        given = b"" if spoken.in_argument else spec.assignment.encode()
        with ExitStack() as theirs:
            theirs.callback(errors.close_mouth)
            descriptors = (
                theirs.enter_context(open_memory(given)),
                output.open(theirs),
                errors.mouth,
            )
            owner = ProcessOwner(self._agent_id, "agent")
            title = " ".join(spoken.argv)
            order = ProcessRequest(
                [*spoken.argv, *words], self._cwd, self._env, owner, descriptors, title
            )
            return await self._processes.start(order)


def env_of(
    own: Mapping[str, str], given: Mapping[str, str], forward: tuple[str, ...], cwd: str
) -> dict[str, str]:
    """The little that every program needs, what the provision gives, and what it names."""
    return command_env({**keyless_env(own, also=forward), **given}, cwd)


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # Somebody removed it.
        return "/"


async def _follow(
    held: ProcessHandle,
    output: LinePipe,
    spoken: CliProfile,
    events: EventSink,
    cancel: CancelToken,
    answer: "_Answer",
) -> ProcessExit | None:
    """Tell what it says until it has ended with all it started. A cancel ends all of it.

    None if nobody is left to be told; then it is ended, too.
    """
    how: ProcessExit | None = None
    try:
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(_stop(held, cancel), name="cancel")
            waiting = group.create_task(held.wait(), name="exit")
            # Something that got away may hold the pipe for ever.
            waiting.add_done_callback(lambda _: output.end())
            with suppress(RunEnded):
                while (line := await output.line()) is not None:
                    told = spoken.read(line)
                    for event in told.events:
                        await events.emit(event)
                    answer.take(told)
                if answer.usage is not None and not cancel.is_set():
                    await events.emit({"type": "complete", "usage": answer.usage})
                how = await waiting
            stopping.cancel()
            waiting.cancel()
        return how
    finally:
        if how is None:
            await held.kill(0.0)


async def _stop(held: ProcessHandle, cancel: CancelToken) -> None:
    await cancel.wait()
    await held.kill(KILL_GRACE_S)


class _Answer:
    """What a program has said so far of how it will end."""

    def __init__(self) -> None:
        self.usage: dict[str, int] | None = None
        self._texts: list[str] = []
        self._chars = 0
        self._result: str | None = None
        self._error: str | None = None

    def take(self, told: AgentOutput) -> None:
        if told.text:
            self._texts.append(told.text)
            self._chars += len(told.text)
            if self._chars > 2 * RESULT_CHARS_MAX:
                self._texts = [self._text()]
                self._chars = len(self._texts[0])
        if told.result is not None:
            self._result = told.result[-RESULT_CHARS_MAX:]
        if told.error is not None:
            self._error = told.error
        if told.usage is not None:
            given, said = told.usage
            self.usage = {
                "prompt_tokens": given,
                "completion_tokens": said,
                "total_tokens": given + said,
            }

    def _text(self) -> str:
        return "".join(self._texts)[-RESULT_CHARS_MAX:]

    def outcome(self, how: ProcessExit, name: str, last_words: str) -> Outcome:
        if self._error is not None:
            return failed(f"`{name}` failed: {self._error}")
        if how.code != 0:
            words = f": {last_words}" if last_words else ""
            return failed(f"`{name}` {_ending(how)}{words}")
        return completed(self._text().strip("\n") if self._result is None else self._result)


def _ending(how: ProcessExit) -> str:
    if how.lost:
        return "was ended with the keeper of its process; what it had done is not known"
    return f"ended with status {how.code}" if how.signal is None else f"died of signal {how.signal}"

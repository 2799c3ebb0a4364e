"""The executor that delegates to a command-line agent: one supervised process per run.

Owns the pipes to that process. The command line and the meaning of its output belong to
`cli_profiles.py`. Such an agent gets its assignment only: it cannot be steered, and it sends no
approval requests.
"""

import asyncio
import os
from collections import deque
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

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
from culm.fleet.provision import ClaudeKind, CliKind, CodexKind, Provision, keyless_env
from culm.fleet.tail import StderrTail
from culm.fleet.worker.executors.base import WorkerServices, execution_started
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

RESULT_CHARS_MAX: Final = 1 << 20  # The end of the output is kept, because the answer is there.
KILL_GRACE_S: Final = 0.5  # A cancelled run has three seconds in total.
LINE_BYTES_MAX: Final = 1 << 20  # The rest of a longer line is read and discarded.
READ_BYTES: Final = 64 << 10
# Read after the end: more than a pipe holds, but limited, as an escaped process may write for ever.
DRAIN_BYTES_MAX: Final = 8 << 20


class LinePipe:
    """The output of a process, line by line; while none are read, the process blocks."""

    def __init__(self) -> None:
        self._ours = -1
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lines: deque[str] = deque()
        self._partial = bytearray()
        self._is_over = False  # The process is gone; the pipe holds the rest of its output.
        self._is_complete = False
        self._drained = 0

    def open(self, theirs: ExitStack) -> int:
        """Open the pipe and return the process's end, which `theirs` closes."""
        self._ours, other = os.pipe()
        theirs.callback(os.close, other)
        os.set_blocking(self._ours, False)
        return other

    async def line(self) -> str | None:
        """Return the next line without its line break; None after the last."""
        while not self._lines:
            if self._is_complete:
                return None
            data = await self._read()
            if data:
                self._split(data)
                continue
            self._is_complete = True
            if self._partial:
                self._end_line()
        return self._lines.popleft()

    def end(self) -> None:
        self._is_over = True
        self._wake.set()

    def close(self) -> None:
        if self._ours >= 0:
            self._loop.remove_reader(self._ours)
            os.close(self._ours)
            self._ours = -1

    async def _read(self) -> bytes:
        """Read the next bytes; empty at the end."""
        while True:
            try:
                data = os.read(self._ours, READ_BYTES)
            except BlockingIOError:
                if self._is_over:
                    return b""
            else:
                if self._is_over:
                    self._drained += len(data)
                return data if self._drained <= DRAIN_BYTES_MAX else b""
            self._wake.clear()
            self._loop.add_reader(self._ours, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                self._loop.remove_reader(self._ours)

    def _split(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self._grow(first)
        for piece in rest:
            self._end_line()
            self._grow(piece)

    def _grow(self, piece: bytes) -> None:
        self._partial += piece[: LINE_BYTES_MAX - len(self._partial)]

    def _end_line(self) -> None:
        self._lines.append(self._partial.decode(errors="replace").removesuffix("\r"))
        self._partial.clear()


class CliAdapter:
    """Implements `Executor`."""

    def __init__(
        self,
        kind: CliKind | ClaudeKind | CodexKind,
        provision: Provision,
        services: WorkerServices,
    ) -> None:
        """Raises `BadProvision`."""
        self._profile = profile_of(kind, read_only=provision.capabilities.is_read_only)
        self._processes = services.processes
        self._clock = services.clock
        self._agent_id = provision.identity.child_id
        self._cwd = provision.workspace or _working_directory()
        provided = provision.culm.env or {}
        self._env = env_of(os.environ, provided, self._profile.forward_env, self._cwd)

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
                process = await self._start(spec, output, errors)
            except ProcessStartFailed as exc:
                return failed(str(exc))
            answer = _Answer()
            exit_ = await _follow(process, output, self._profile, events, cancel, answer)
            if exit_ is None or cancel.is_set():
                return CANCELLED
            return answer.outcome(exit_, self._profile.argv[0], errors.text())

    def _begun(self, spec: RunSpec) -> dict[str, Json]:
        session = spec.logical_session
        session_id = "" if session is None else session.session_id
        return execution_started(spec.activation_run_id or "", session_id, self._clock.now_s())

    async def _start(self, spec: RunSpec, output: LinePipe, errors: StderrTail) -> ProcessHandle:
        profile = self._profile
        args = (spec.assignment,) if profile.in_argument else ()
        stdin = b"" if profile.in_argument else spec.assignment.encode()
        with ExitStack() as theirs:
            theirs.callback(errors.close_write_fd)
            descriptors = (
                theirs.enter_context(open_memory(stdin)),
                output.open(theirs),
                errors.write_fd,
            )
            owner = ProcessOwner(self._agent_id, "agent")
            title = " ".join(profile.argv)
            request = ProcessRequest(
                [*profile.argv, *args], self._cwd, self._env, owner, descriptors, title
            )
            return await self._processes.start(request)


def env_of(
    own: Mapping[str, str], provided: Mapping[str, str], forward: tuple[str, ...], cwd: str
) -> dict[str, str]:
    """Merge the basic variables, the named ones of the worker, and those of the provision."""
    return command_env({**keyless_env(own, also=forward), **provided}, cwd)


def _working_directory() -> str:
    try:
        return str(Path.cwd())
    except OSError:  # It was removed.
        return "/"


async def _follow(
    process: ProcessHandle,
    output: LinePipe,
    profile: CliProfile,
    events: EventSink,
    cancel: CancelToken,
    answer: "_Answer",
) -> ProcessExit | None:
    """Send the events of its output until it and all its processes have ended; a cancel kills them.

    Returns None if the host has ended the run; then they are killed, too.
    """
    exit_: ProcessExit | None = None
    try:
        async with asyncio.TaskGroup() as group:
            stopping = group.create_task(_stop(process, cancel), name="cancel")
            waiting = group.create_task(process.wait(), name="exit")
            # An escaped process may keep the pipe open for ever.
            waiting.add_done_callback(lambda _: output.end())
            with suppress(RunEnded):
                while (line := await output.line()) is not None:
                    parsed = profile.read(line)
                    for event in parsed.events:
                        await events.emit(event)
                    answer.add(parsed)
                if answer.usage is not None and not cancel.is_set():
                    await events.emit({"type": "complete", "usage": answer.usage})
                exit_ = await waiting
            stopping.cancel()
            waiting.cancel()
        return exit_
    finally:
        if exit_ is None:
            await process.kill(0.0)


async def _stop(process: ProcessHandle, cancel: CancelToken) -> None:
    await cancel.wait()
    await process.kill(KILL_GRACE_S)


class _Answer:
    """The result, error and usage collected from a program's output so far."""

    def __init__(self) -> None:
        self.usage: dict[str, int] | None = None
        self._texts: list[str] = []
        self._chars = 0
        self._result: str | None = None
        self._error: str | None = None

    def add(self, parsed: AgentOutput) -> None:
        if parsed.text:
            self._texts.append(parsed.text)
            self._chars += len(parsed.text)
            if self._chars > 2 * RESULT_CHARS_MAX:
                self._texts = [self._text()]
                self._chars = len(self._texts[0])
        if parsed.result is not None:
            self._result = parsed.result[-RESULT_CHARS_MAX:]
        if parsed.error is not None:
            self._error = parsed.error
        if parsed.usage is not None:
            tokens_in, tokens_out = parsed.usage
            self.usage = {
                "prompt_tokens": tokens_in,
                "completion_tokens": tokens_out,
                "total_tokens": tokens_in + tokens_out,
            }

    def _text(self) -> str:
        return "".join(self._texts)[-RESULT_CHARS_MAX:]

    def outcome(self, exit_: ProcessExit, name: str, errors: str) -> Outcome:
        if self._error is not None:
            return failed(f"`{name}` failed: {self._error}")
        if exit_.code != 0:
            details = f": {errors}" if errors else ""
            return failed(f"`{name}` {_describe_exit(exit_)}{details}")
        return completed(self._text().strip("\n") if self._result is None else self._result)


def _describe_exit(exit_: ProcessExit) -> str:
    if exit_.lost:
        return "was lost with the supervisor of its process; its effects are unknown"
    if exit_.signal is None:
        return f"ended with status {exit_.code}"
    return f"died of signal {exit_.signal}"

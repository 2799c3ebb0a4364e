"""One running command: its pipes, its live output, its final directory, and its end.

Also runs the user's own `!command`.

Owns the descriptors to a command; every one is closed on every path. Permission is decided
elsewhere, and the tool writes the result.
"""

import asyncio
import fcntl
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from pathlib import Path
from typing import TypeVar

from msgspec import Struct

from culm.clock import Clock, Timer, within
from culm.processes.base import (
    Processes,
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.tools.base import ToolContext, Watch
from culm.tools.process.environment import user_command_env
from culm.tools.process.output import CommandOutput, OutputSizes, fit

T = TypeVar("T")

READ_BYTES = 256 << 10
PIPE_BYTES = READ_BYTES  # Fewer reads for large output, where the system allows it.
DRAIN_BYTES_MAX = 8 << 20  # After the exit: more than a pipe holds; a process may have escaped.
LIVE_BYTES_MAX = 256 << 10  # Per command, shown while it runs; the result has the rest.
LIVE_EVERY_S = 0.1  # People do not read faster, and every piece is an event.
ESCAPE_BYTES = 32  # A longer escape that is cut in two is shown as it is.
DIRECTORY_BYTES_MAX = 16 << 10
PIDS_SHOWN_MAX = 20
COMMAND_BYTES_MAX = 120_000  # Linux allows 131,072 in one argument.

_PRELUDE = Path(__file__).with_name("prelude.bash")
# Without bash the command sees its own `$1`, and error messages mention `eval`.
_SH_PRELUDE = """trap '{ pwd -P >&3; } 2>/dev/null' 0; eval "$1\""""


class CommandResult(Struct, frozen=True):
    """The exit of a command, and its final directory."""

    exit: ProcessExit
    directory: str | None  # The directory at the exit of the shell, if reported.


class CommandRequest(Struct, frozen=True):
    """A command line to start."""

    text: str
    cwd: str
    env: Mapping[str, str]
    owner: ProcessOwner


class RunningCommand:
    """A command made by `start`. Its holder must await `ended` or `kill`."""

    def __init__(self, handle: ProcessHandle, pipes: "_Pipes") -> None:
        self._handle = handle
        self._pipes = pipes
        self._ended: CommandResult | None = None

    async def ended(self) -> CommandResult:
        """Wait for it and everything it started. Cancelling the wait leaves it running."""
        return self._end(await self._handle.wait())

    async def kill(self) -> CommandResult:
        """End it and everything it started; bounded and verified."""
        try:
            if self._ended is not None:
                return self._ended
            return self._end(await self._handle.kill())
        finally:
            self._pipes.close()

    def _end(self, exited: ProcessExit) -> CommandResult:
        if self._ended is None:
            self._ended = CommandResult(exited, self._pipes.finish())
        return self._ended


async def start(
    processes: Processes,
    command: CommandRequest,
    on_output: Callable[[bytes], None],
    started_s: float,
) -> RunningCommand:
    """Start a command; `on_output` gets all of its output. Raises `ProcessStartFailed`."""
    argv, env = shell_argv(command.text, command.env)
    with ExitStack() as closing:
        pipes = _Pipes(on_output)
        closing.callback(pipes.close)
        closing.callback(pipes.close_theirs)
        try:
            descriptors = pipes.open()
        except OSError as exc:
            raise ProcessStartFailed(f"cannot create a pipe: {exc.strerror}") from exc
        title = command.text
        request = ProcessRequest(
            argv, command.cwd, env, command.owner, descriptors, title, started_s
        )
        running = RunningCommand(await processes.start(request), pipes)
        closing.pop_all()
        pipes.close_theirs()
        return running


def shell_argv(text: str, env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the shell that runs a command unchanged and reports its final directory."""
    if not has_bash(env):
        return ("sh", "-c", _SH_PRELUDE, "sh", text), env
    own = {"CULM_BASH_ENV": env["BASH_ENV"]} if env.get("BASH_ENV") else {}
    return ("bash", "-c", text), {**env, **own, "BASH_ENV": str(_PRELUDE)}


def has_bash(env: Mapping[str, str]) -> bool:
    return shutil.which("bash", path=env.get("PATH", os.defpath)) is not None


class _Pipes:
    """Our ends of a command's pipes, and its ends until it starts."""

    def __init__(self, on_output: Callable[[bytes], None]) -> None:
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._output: int | None = None
        self._directory: int | None = None
        self._theirs: list[int] = []

    def open(self) -> Sequence[int]:
        """Return the descriptors for the command, from 0 on."""
        self._theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self._output, output = os.pipe()
        self._theirs.append(output)
        self._directory, directory = os.pipe()
        self._theirs.append(directory)
        for ours in (self._output, self._directory):
            os.set_blocking(ours, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # The user has reached the limit for large pipes.
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._loop.add_reader(self._output, self._read)
        nothing, output, directory = self._theirs
        return (nothing, output, output, directory)

    def close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def _read(self) -> int:
        """Read available data and return its size; 0 if none."""
        if self._output is None:
            return 0
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._on_output(data)
        else:
            self._close_output()
        return len(data)

    def finish(self) -> str | None:
        """Read the rest, close everything, and return the directory that the shell reported."""
        left = DRAIN_BYTES_MAX
        while left > 0 and (count := self._read()):
            left -= count
        reported = b""
        if self._directory is not None:
            with suppress(BlockingIOError):
                reported = os.read(self._directory, DIRECTORY_BYTES_MAX)
        self.close()
        return os.fsdecode(reported.removesuffix(b"\n")) or None

    def close(self) -> None:
        self._close_output()
        if self._directory is not None:
            os.close(self._directory)
            self._directory = None

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = None


class LiveOutput:
    """The output that watchers see while a command runs: bounded, in a limited number of pieces."""

    def __init__(self, watch: Watch, clock: Clock) -> None:
        self._watch = watch
        self._clock = clock
        self._room = LIVE_BYTES_MAX
        self._waiting = bytearray()
        self._timer: Timer | None = None

    def feed(self, data: bytes) -> None:
        if self._room <= 0:
            return
        self._waiting += data[: self._room]
        self._room -= len(data)
        if self._room <= 0:
            self._waiting += "\n[… the rest is shown at the end …]\n".encode()
        if self._timer is None:
            self._timer = self._clock.call_later(LIVE_EVERY_S, self._publish)

    def _publish(self) -> None:
        self._timer = None
        self._publish_until(_whole(self._waiting))

    def close(self) -> None:
        """Publish the rest, and nothing after it."""
        self._room = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._publish_until(len(self._waiting))

    def _publish_until(self, end: int) -> None:
        data = bytes(self._waiting[:end]).replace(b"\r\n", b"\n")
        del self._waiting[:end]
        # Overwritten text was published already: continue on a new line.
        if text := fit(data.replace(b"\r", b"\n")):
            self._watch(text)


def _whole(data: bytearray) -> int:
    """Return the length up to which no character and no escape is cut in two."""
    escape = data.rfind(b"\x1b", max(len(data) - ESCAPE_BYTES, 0))
    if escape >= 0:
        return escape
    for back in range(1, min(3, len(data)) + 1):
        if data[-back] >= 0xC0:
            return len(data) - back
        if data[-back] < 0x80:
            break
    return len(data)


def output_receiver(
    output: CommandOutput, live: LiveOutput | None = None
) -> Callable[[bytes], None]:
    """Return a function that feeds both the kept and the live output."""

    def on_output(data: bytes) -> None:
        output.feed(data)
        if live is not None:
            live.feed(data)

    return on_output


def exit_text(exited: ProcessExit) -> str:
    """Describe the end of a command to a model, one sentence a line; empty after a clean exit."""
    return "\n".join(
        line for line in (_left_behind(exited), _left(exited), status_text(exited)) if line
    )


def status_text(exited: ProcessExit) -> str:
    if exited.lost:
        return (
            "The command was ended because its supervisor died. Its effect until then is unknown: "
            "check before you repeat it."
        )
    if exited.signal is not None:
        return f"Ended by signal {exited.signal} ({_signal_name(exited.signal)})"
    return f"Exit code {exited.code}" if exited.code else ""


def _left_behind(exited: ProcessExit) -> str:
    if not exited.swept or exited.lost:
        return ""
    if exited.swept == 1:
        return "1 process it left behind was ended with it."
    return f"{exited.swept} processes it left behind were ended with it."


def _left(exited: ProcessExit) -> str:
    if not exited.left:
        return ""
    pids = ", ".join(map(str, exited.left[:PIDS_SHOWN_MAX]))
    more = (
        f" and {len(exited.left) - PIDS_SHOWN_MAX} more"
        if len(exited.left) > PIDS_SHOWN_MAX
        else ""
    )
    return f"Could not be ended, and may still be running: process {pids}{more}."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "no name"


# --- the user's own `!command`


WALL_S = 3600.0  # The user can leave earlier, which ends it, too.
SHOWN_BYTES_MAX = 512 << 10  # The output becomes part of a message.
NOT_STARTED = 126  # The exit code of a shell for a command that cannot be run.
TIMED_OUT = 124  # The exit code of `timeout`.
SIGNALLED = 128  # Plus the signal, as in shells.


async def run_user_command(
    context: ToolContext, command: str, cwd: str, term_width: int, session_id: str = ""
) -> tuple[str, int]:
    """Run a command to its end; cancelling ends it and all it started. Output may have colors."""
    if "\0" in command:
        return "The command contains a NUL character.\n", NOT_STARTED
    output = CommandOutput(None, OutputSizes(SHOWN_BYTES_MAX))
    env = user_command_env(context.env(), cwd, term_width)
    request = CommandRequest(
        command, cwd, env, ProcessOwner(context.workspace_id, "shell", session_id)
    )
    try:
        running = await start(
            context.processes, request, output_receiver(output), context.clock.monotonic_s()
        )
    except ProcessStartFailed as exc:
        return f"The command could not be started: {exc}\n", NOT_STARTED
    async with AsyncExitStack() as ending:
        ending.push_async_callback(running.kill)
        result = await within(context.clock, WALL_S, running.ended())
        text = output.text(keeps_colours=True)
        if result is None:
            return f"{text}\nIt did not end within {WALL_S:g} seconds.\n", TIMED_OUT
        ending.pop_all()
    ended = result.exit
    notes = exit_text(ProcessExit(0, swept=ended.swept, left=ended.left, lost=ended.lost))
    return (f"{text.rstrip()}\n{notes}\n" if notes else text), _code_of(ended)


def _code_of(ended: ProcessExit) -> int:
    if ended.signal is not None:
        return SIGNALLED + ended.signal
    return ended.code if ended.code is not None else 1

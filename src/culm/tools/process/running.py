"""One command under custody: its pipes, its output as it comes, where it ended, and its end.

Owns the descriptors between a command and us; every one is closed on every way out. Who may run
what is decided elsewhere, and what a result says is the tool's business.
"""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from culm.clock import Clock, Timer
from culm.processes.base import (
    Processes,
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.tools.base import Watch
from culm.tools.process.output import CommandOutput, fit

READ_BYTES = 256 << 10
PIPE_BYTES = READ_BYTES  # Fewer turns for a lot of output, where the system allows it.
DRAIN_BYTES_MAX = 8 << 20  # After the end: more than a pipe holds. What got away may write on.
LIVE_BYTES_MAX = 256 << 10  # Of one command, shown while it runs; the result has the rest.
LIVE_EVERY_S = 0.1  # People do not read faster, and every piece is an event.
ESCAPE_BYTES = 32  # A longer one that is cut in two is shown as it comes.
DIRECTORY_BYTES_MAX = 16 << 10
COMMAND_BYTES_MAX = 120_000  # Linux takes 131,072 in one argument.

_PRELUDE = Path(__file__).with_name("prelude.bash")
# Without bash: its own `$1` is seen by the command, and errors speak of `eval`.
_SH_PRELUDE = """trap '{ pwd -P >&3; } 2>/dev/null' 0; eval "$1\""""


@dataclass(frozen=True, slots=True)
class CommandResult:
    exit: ProcessExit
    directory: str | None  # Where the shell was at its end, if it said so.


@dataclass(frozen=True, slots=True)
class CommandRequest:
    text: str
    cwd: str
    env: Mapping[str, str]
    owner: ProcessOwner


class RunningCommand:
    """Made by `start`. Whoever has it sees to it that `ended` or `kill` is awaited."""

    def __init__(self, held: ProcessHandle, pipes: "_Pipes") -> None:
        self._held = held
        self._pipes = pipes
        self._ended: CommandResult | None = None

    async def ended(self) -> CommandResult:
        """Wait for it and all it started. Cancelling the wait leaves it running."""
        return self._end(await self._held.wait())

    async def kill(self) -> CommandResult:
        """End it and all it started; bounded, and verified."""
        try:
            if self._ended is not None:
                return self._ended
            return self._end(await self._held.kill())
        finally:
            self._pipes.close()

    def _end(self, how: ProcessExit) -> CommandResult:
        if self._ended is None:
            self._ended = CommandResult(how, self._pipes.finish())
        return self._ended


async def start(
    processes: Processes, command: CommandRequest, hear: Callable[[bytes], None], started_s: float
) -> RunningCommand:
    """Start it; `hear` gets all that it puts out. Raises `StartFailed`."""
    argv, env = shell_argv(command.text, command.env)
    with ExitStack() as closing:
        pipes = _Pipes(hear)
        closing.callback(pipes.close)
        closing.callback(pipes.close_theirs)
        try:
            descriptors = pipes.open()
        except OSError as exc:
            raise ProcessStartFailed(f"there is no pipe for it: {exc.strerror}") from exc
        title = command.text
        order = ProcessRequest(argv, command.cwd, env, command.owner, descriptors, title, started_s)
        running = RunningCommand(await processes.start(order), pipes)
        closing.pop_all()
        pipes.close_theirs()
        return running


def shell_argv(text: str, env: Mapping[str, str]) -> tuple[Sequence[str], Mapping[str, str]]:
    """How a shell is given a command as it stands, and is made to say where it ends."""
    if not has_bash(env):
        return ("sh", "-c", _SH_PRELUDE, "sh", text), env
    own = {"CULM_BASH_ENV": env["BASH_ENV"]} if env.get("BASH_ENV") else {}
    return ("bash", "-c", text), {**env, **own, "BASH_ENV": str(_PRELUDE)}


def has_bash(env: Mapping[str, str]) -> bool:
    return shutil.which("bash", path=env.get("PATH", os.defpath)) is not None


class _Pipes:
    """Our ends of what a command writes, and its ends until it has them."""

    def __init__(self, hear: Callable[[bytes], None]) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._output: int | None = None
        self._directory: int | None = None
        self._theirs: list[int] = []

    def open(self) -> Sequence[int]:
        """The descriptors for the command, from 0 on."""
        self._theirs.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        self._output, output = os.pipe()
        self._theirs.append(output)
        self._directory, directory = os.pipe()
        self._theirs.append(directory)
        for ours in (self._output, self._directory):
            os.set_blocking(ours, False)
        if hasattr(fcntl, "F_SETPIPE_SZ"):
            with suppress(OSError):  # The user has many large ones already.
                fcntl.fcntl(self._output, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self._loop.add_reader(self._output, self._read)
        nothing, output, directory = self._theirs
        return (nothing, output, output, directory)

    def close_theirs(self) -> None:
        while self._theirs:
            os.close(self._theirs.pop())

    def _read(self) -> int:
        """Take what is there; 0 if it is nothing."""
        if self._output is None:
            return 0
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self._hear(data)
        else:
            self._close_output()
        return len(data)

    def finish(self) -> str | None:
        """Read the rest, close everything, and say where the shell was."""
        left = DRAIN_BYTES_MAX
        while left > 0 and (count := self._read()):
            left -= count
        said = b""
        if self._directory is not None:
            with suppress(BlockingIOError):
                said = os.read(self._directory, DIRECTORY_BYTES_MAX)
        self.close()
        return os.fsdecode(said.removesuffix(b"\n")) or None

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
    """What watchers see while a command runs: bounded, and in pieces that are not too many."""

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
            self._waiting += "\n[… what follows is shown at the end …]\n".encode()
        if self._timer is None:
            self._timer = self._clock.call_later(LIVE_EVERY_S, self._publish)

    def _publish(self) -> None:
        self._timer = None
        self._publish_until(_whole(self._waiting))

    def close(self) -> None:
        """Tell what is left, and nothing after."""
        self._room = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._publish_until(len(self._waiting))

    def _publish_until(self, end: int) -> None:
        data = bytes(self._waiting[:end]).replace(b"\r\n", b"\n")
        del self._waiting[:end]
        # What is written over was told already: it goes on in a new line.
        if text := fit(data.replace(b"\r", b"\n")):
            self._watch(text)


def _whole(data: bytearray) -> int:
    """Up to where nothing is cut in two: no character, and no escape."""
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
    def hear(data: bytes) -> None:
        output.feed(data)
        if live is not None:
            live.feed(data)

    return hear

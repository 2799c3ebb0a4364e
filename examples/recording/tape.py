"""Commands at a terminal with their input, output and timing.

Each command runs on its own pseudo-terminal, which is its controlling terminal. Its output is
recorded as it is; the typing is simulated.
"""

import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from examples.recording.screen import Screen

PROMPT = "\x1b[1;32m$\x1b[0m "
TYPING_S = 0.035  # Between two keys.
ENTER_S = 0.4
IDLE_S_MAX = 0.8  # Longer pauses of a program are shortened.
STEP_S_MAX = 60.0
READ_BYTES = 65_536
# The first terminal that a session leader opens becomes its controlling terminal.
_ON_TERMINAL = 'exec <"$0" >"$0" 2>&1; exec sh -c "$1"'


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that are typed while a command runs, as soon as a text is shown."""

    after: str  # A text on the screen since the last keys.
    text: str
    pause_s: float = 1.0  # Before typing.


@dataclass(frozen=True, slots=True)
class Step:
    command: str
    keys: Sequence[Keys] = ()
    read_s: float = 2.0  # A pause after its output.
    shown: str = ""  # Shown as typed instead of the command.


@dataclass(frozen=True, slots=True)
class Beat:
    """A pause, and the output after it."""

    pause_s: float
    data: bytes


class Stuck(Exception):
    """A command does not end, or an expected text does not appear; has its output."""


def play(
    steps: Sequence[Step],
    folder: Path,
    environ: Mapping[str, str],
    columns: int = 80,
    rows: int = 24,
) -> Iterator[Beat]:
    """Run the steps in order; raise `Stuck`. No command is left running."""
    yield Beat(0.0, PROMPT.encode())
    for step in steps:
        yield Beat(ENTER_S, b"")
        for key in step.shown or step.command:
            yield Beat(TYPING_S, key.encode())
        yield Beat(ENTER_S, b"\r\n")
        yield from _run(step, folder, environ, columns, rows)
        yield Beat(0.0, PROMPT.encode())
        yield Beat(step.read_s, b"")


def _run(
    step: Step, folder: Path, environ: Mapping[str, str], columns: int, rows: int
) -> Iterator[Beat]:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    process = subprocess.Popen(
        ["sh", "-c", _ON_TERMINAL, os.ttyname(theirs), step.command],
        cwd=folder,
        env={**environ, "COLUMNS": str(columns), "LINES": str(rows), "TERM": "xterm-256color"},
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # Keep `theirs` open, so that `ours` can be read to the end after the command.
        yield from _watch(step, process, ours, Screen(columns, rows))
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(ours)
        os.close(theirs)


def _watch(
    step: Step, process: subprocess.Popen[bytes], terminal: int, screen: Screen
) -> Iterator[Beat]:
    keys = list(step.keys)
    began_s = last_s = time.perf_counter()
    seen = ""
    while True:
        is_over = process.poll() is not None
        ready, _, _ = select.select([terminal], [], [], 0 if is_over else 0.05)
        now_s = time.perf_counter()
        if ready:
            data = os.read(terminal, READ_BYTES)
            screen.feed(data)
            seen = "\n".join(screen.lines())
            yield Beat(min(now_s - last_s, IDLE_S_MAX), data)
            last_s = now_s
        elif is_over:
            break
        elif keys and keys[0].after in seen:
            key = keys.pop(0)
            yield Beat(key.pause_s, b"")
            os.write(terminal, key.text.encode())
            screen, seen = Screen(screen.columns, screen.rows), ""
            last_s = time.perf_counter()
        if now_s - began_s > STEP_S_MAX:
            raise Stuck(f"`{step.command}` does not end; it shows:\n{seen}")
    if keys:
        raise Stuck(f"`{step.command}` never showed {keys[0].after!r}, but:\n{seen}")

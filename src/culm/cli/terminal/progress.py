"""A progress bar for work that takes more than a second.

It is drawn only if stderr is a terminal, with nothing but carriage returns and spaces, so that it
works on every terminal.
"""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from culm.clock import Clock, LoopClock

AFTER_S = 1.0  # Faster work needs no bar.
EVERY_S = 0.1  # Nobody sees faster changes.
WIDTH = 80  # For a terminal of unknown size.
BAR_MAX = 40  # A longer bar is not easier to read.
BAR_MIN = 4  # A shorter bar shows nothing useful.

Step = Callable[[int], None]


@contextmanager
def progress(
    label: str, total: int = 0, *, stream: TextIO | None = None, clock: Clock | None = None
) -> Generator[Step]:
    """Yield a `step(n)` that reports n more completed items; a `total` of 0 means unknown.

    Nothing is drawn within the first second, and the bar is erased after the block.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield lambda n: None
        return
    bar = _Bar(label, total, out, clock or LoopClock())
    try:
        yield bar.step
    finally:
        bar.erase()


class _Bar:
    def __init__(self, label: str, total: int, out: TextIO, clock: Clock) -> None:
        self._label = label
        self._total = total
        self._out = out
        self._clock = clock
        self._done = 0
        self._due_s = clock.monotonic_s() + AFTER_S
        self._drawn = 0  # Number of columns.

    def step(self, n: int) -> None:
        self._done += n
        now_s = self._clock.monotonic_s()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            line = bar_line(self._label, self._done, self._total, _width_of(self._out))
            self._put(f"\r{line.ljust(self._drawn)}")
            self._drawn = len(line)

    def erase(self) -> None:
        if self._drawn:
            self._put(f"\r{' ' * self._drawn}\r")

    def _put(self, text: str) -> None:
        with suppress(OSError):  # A bar that cannot be drawn must not stop the work.
            self._out.write(text)
            self._out.flush()


def bar_line(label: str, done: int, total: int, width: int) -> str:
    """The bar in less than `width` columns: text in the last one would start a new line."""
    room = max(width - 1, 0)
    if total <= 0:
        return f"{label} {done:,}"[:room]
    done = min(done, total)
    counts = f" {done:,}/{total:,}"
    columns = min(BAR_MAX, room - len(label) - len(counts) - len(" []"))
    if columns < BAR_MIN:
        return f"{label}{counts}"[:room]
    full = columns * done // total
    return f"{label} [{'#' * full}{'.' * (columns - full)}]{counts}"


def _width_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH

"""A bar for whatever takes longer than a person waits without asking what goes on.

It is drawn on stderr if that is a terminal, and only there; by nothing but a carriage return and
spaces, so that no terminal is too simple and no colour is missing where none is wanted.
"""

import os
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from typing import TextIO

from culm.clock import Clock, LoopClock

AFTER_S = 1.0  # What is done by then was not waited for.
EVERY_S = 0.1  # More often nobody sees.
WIDTH = 80  # Of a terminal that does not say.
BAR_MAX = 40  # A longer one is no easier to read.
BAR_MIN = 4  # A shorter one says nothing.

Step = Callable[[int], None]


@contextmanager
def progress(
    words: str, total: int = 0, *, stream: TextIO | None = None, clock: Clock | None = None
) -> Generator[Step]:
    """Within the block, `step(n)` says that n more are done; of a `total` of 0 nobody knows it.

    Nothing is drawn within the first second, and what was drawn is gone after the block.
    """
    out = sys.stderr if stream is None else stream
    if not out.isatty():
        yield lambda n: None
        return
    bar = _Bar(words, total, out, clock or LoopClock())
    try:
        yield bar.step
    finally:
        bar.erase()


class _Bar:
    def __init__(self, words: str, total: int, out: TextIO, clock: Clock) -> None:
        self._words = words
        self._total = total
        self._out = out
        self._clock = clock
        self._done = 0
        self._due_s = clock.now_s() + AFTER_S
        self._drawn = 0  # How many columns.

    def step(self, n: int) -> None:
        self._done += n
        now_s = self._clock.now_s()
        if now_s >= self._due_s:
            self._due_s = now_s + EVERY_S
            line = bar_line(self._words, self._done, self._total, _width_of(self._out))
            self._put(f"\r{line.ljust(self._drawn)}")
            self._drawn = len(line)

    def erase(self) -> None:
        if self._drawn:
            self._put(f"\r{' ' * self._drawn}\r")

    def _put(self, text: str) -> None:
        with suppress(OSError):  # A bar that cannot be seen stops no work.
            self._out.write(text)
            self._out.flush()


def bar_line(words: str, done: int, total: int, width: int) -> str:
    """How far it is, in less than `width` columns: the last one would begin a new line."""
    room = max(width - 1, 0)
    if total <= 0:
        return f"{words} {done:,}"[:room]
    done = min(done, total)
    counts = f" {done:,}/{total:,}"
    columns = min(BAR_MAX, room - len(words) - len(counts) - len(" []"))
    if columns < BAR_MIN:
        return f"{words}{counts}"[:room]
    full = columns * done // total
    return f"{words} [{'#' * full}{'.' * (columns - full)}]{counts}"


def _width_of(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError):
        return WIDTH

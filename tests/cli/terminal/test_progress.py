"""A progress bar appears only on a terminal, and only for slow work."""

import fcntl
import io
import os
import struct
import termios
from collections.abc import Generator
from contextlib import contextmanager
from typing import TextIO

import pytest

from culm.cli.terminal.progress import bar_line, progress
from tests.support import FakeClock


@contextmanager
def open_terminal(columns: int) -> Generator[tuple[TextIO, int]]:
    """Open a terminal of that width: a stream to write to, and the descriptor of its other side."""
    other, inner = os.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("4H", 24, columns, 0, 0))
    os.set_blocking(other, False)
    try:
        with os.fdopen(inner, "w") as stream:
            yield stream, other
    finally:
        os.close(other)


def seen(other: int) -> str:
    try:
        return os.read(other, 1 << 16).decode()
    except BlockingIOError:
        return ""


def test_bar_is_drawn_after_a_second_at_10_hz_and_then_erased() -> None:
    clock = FakeClock()
    with open_terminal(30) as (stream, other):
        with progress("exporting", 100, stream=stream, clock=clock) as step:
            step(10)
            clock.advance(0.99)
            step(10)
            assert seen(other) == ""
            clock.advance(0.02)
            step(30)
            assert seen(other) == "\rexporting [#####.....] 50/100"
            clock.advance(0.05)
            step(10)
            assert seen(other) == ""
            clock.advance(0.06)
            step(40)
            assert seen(other) == "\rexporting [#########] 100/100"
        assert seen(other) == f"\r{' ' * 29}\r"


def test_bar_is_not_drawn_for_quick_work_or_without_a_terminal() -> None:
    clock = FakeClock()
    with open_terminal(80) as (stream, other):
        with progress("exporting", 2, stream=stream, clock=clock) as step:
            step(2)
        assert seen(other) == ""
    file = io.StringIO()
    with progress("exporting", 2, stream=file, clock=clock) as step:
        clock.advance(5)
        step(1)
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "width", "line"),
    [
        (0, 80, "reading 7"),
        (0, 6, "readi"),
        (10, 80, "reading [############################............] 7/10"),
        (10, 20, "reading [##..] 7/10"),
        (10, 15, "reading 7/10"),
        (10, 8, "reading"),
        (5, 20, "reading [#####] 5/5"),
        (10, 0, ""),
    ],
)
def test_bar_is_narrower_than_the_terminal(total: int, width: int, line: str) -> None:
    assert bar_line("reading", 7, total, width) == line

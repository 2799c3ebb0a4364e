"""The standard streams: what is done when one is closed, or cannot be written."""

import io
import os
import shutil
import sys
from contextlib import suppress
from typing import IO, TYPE_CHECKING, AnyStr

import click

from culm.cli.exits import EXIT_CLOSED, EXIT_FAILED

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer as Buffer


class CannotWrite(Exception):
    """Whoever read the answer has left, or there is no room for it. Says which."""

    def __init__(self, exc: OSError) -> None:
        has_left = isinstance(exc, BrokenPipeError)
        words = "nobody reads the answer any more" if has_left else f"cannot write: {exc.strerror}"
        super().__init__(words)
        self.status = EXIT_CLOSED if has_left else EXIT_FAILED


def fill_streams() -> None:
    """Take the place of those that were closed.

    Else a socket gets the number, and what a library or a child prints there. In `sys` they are
    still None, but for stderr: who closes that does not want to hear what is noted.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    elif sys.stderr is sys.__stderr__ and not sys.stderr.isatty():
        written = io.BufferedWriter(_Unheard(2, "w", closefd=False))
        encoding, errors = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = io.TextIOWrapper(written, encoding, errors, line_buffering=True)


class _Unheard(io.FileIO):
    """A stderr that may be full, or whose reader has left.

    What is noted there is lost then, and the answer is not; nor is the exit status.
    """

    def write(self, data: "Buffer", /) -> int:
        with suppress(OSError):
            if (count := super().write(data)) is not None:
                return count
        return len(memoryview(data))


def need_output() -> None:
    """Leave if nobody could read the answer."""
    if sys.stdout is None:
        sys.exit(EXIT_CLOSED)


def is_terminal() -> bool:
    """Whether a person can be asked here."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def output_width() -> int:
    """How many columns the terminal has that stdout is; 0 if it is none, and nothing is cut."""
    if sys.stdout is None or not sys.stdout.isatty():
        return 0
    return shutil.get_terminal_size().columns


def write(stream: IO[AnyStr], data: AnyStr) -> None:
    """Raises `CannotWrite`."""
    try:
        stream.write(data)
        stream.flush()
    except OSError as exc:
        raise CannotWrite(exc) from exc


def write_note(words: str) -> None:
    """Tell a person; a message may repeat what a file, a model or a server said."""
    from culm.wire.codec import printable  # Not needed by whoever says nothing.

    click.echo("\n".join(map(printable, words.split("\n"))), err=True)


def let_go(exc: CannotWrite, fate: str = "") -> int:
    """Say that nothing more will be written, and what becomes of the run; returns the status."""
    # Else the interpreter tries once more to write what is left, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):  # It may be stderr that cannot be written.
        click.echo("; ".join(filter(None, (f"culm: {exc}", fate))), err=True)
    return exc.status

"""The standard streams: writing to them, and handling a closed or broken one."""

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
    """A stream cannot be written: its reader has closed it, or the disk is full."""

    def __init__(self, exc: OSError) -> None:
        is_closed = isinstance(exc, BrokenPipeError)
        super().__init__("the output was closed" if is_closed else f"cannot write: {exc.strerror}")
        self.status = EXIT_CLOSED if is_closed else EXIT_FAILED


def replace_closed_streams() -> None:
    """Open /dev/null in place of standard streams that were closed.

    Otherwise a socket would get the number, and receive everything that a library or a child prints
    there. In `sys` stdin and stdout stay None; stderr is replaced, because a user who closes it
    wants to lose the notes.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # This is now the lowest free number, which `open` returns.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # noqa: FBT003
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
    elif sys.stderr is sys.__stderr__ and not sys.stderr.isatty():
        written = io.BufferedWriter(_BestEffortFile(2, "w", closefd=False))
        encoding, errors = sys.stderr.encoding, sys.stderr.errors
        sys.stderr = io.TextIOWrapper(written, encoding, errors, line_buffering=True)


class _BestEffortFile(io.FileIO):
    """A stderr that drops output when it cannot be written.

    Notes are lost then, but neither the answer nor the exit status is affected.
    """

    def write(self, data: "Buffer", /) -> int:
        with suppress(OSError):
            if (count := super().write(data)) is not None:
                return count
        return len(memoryview(data))


def require_output() -> None:
    """Exit if stdout is closed."""
    if sys.stdout is None:
        sys.exit(EXIT_CLOSED)


def is_terminal() -> bool:
    """Return True if stdin and stderr are a terminal, so that a person can be asked."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty()


def output_width() -> int:
    """The columns of stdout if it is a terminal, else 0, which means that nothing is cut."""
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


def print_output(text: str) -> None:
    """Write to stdout, escaped if its encoding cannot represent the text.

    Raises `CannotWrite`.
    """
    try:
        write(sys.stdout, text)
    except UnicodeEncodeError:
        write(sys.stdout, text.encode("ascii", "backslashreplace").decode())


def print_json(value: object) -> None:
    """Write indented JSON to stdout; raises `CannotWrite`."""
    import msgspec  # Most commands do not need it to start.

    print_output(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_note(text: str) -> None:
    """Print a note on stderr, without control characters of a file, a model or a server."""
    from culm.wire.codec import printable  # Commands without notes need not import it.

    click.echo("\n".join(map(printable, text.split("\n"))), err=True)


def close_output(exc: CannotWrite, consequence: str = "") -> int:
    """Report that output has ended, with the consequence for the run; return the exit status."""
    # Otherwise the interpreter tries to flush stdout at exit, and prints an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):  # It may be stderr that cannot be written.
        click.echo("; ".join(filter(None, (f"culm: {exc}", consequence))), err=True)
    return exc.status

"""This process as its caller sees it: exit statuses, standard streams, signals.

Imports little when it is loaded: every command needs it at its start.
"""

import io
import os
import shutil
import signal
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import IO, TYPE_CHECKING, AnyStr

import click

if TYPE_CHECKING:
    import asyncio

    from _typeshed import ReadableBuffer as Buffer

    from culm.wire.runs import Run

EXIT_FAILED = 1
EXIT_USAGE = 2  # The same as click's.
EXIT_DENIED = 3
EXIT_CANCELED = 4
EXIT_SPENT = 5  # A budget or the time limit.
EXIT_NO_SERVER = 6
EXIT_INTERRUPTED = 130  # By Ctrl-C while there was nothing to cancel.
EXIT_CLOSED = 141  # The conventional status after the reader has closed the pipe.

_STATUS = {
    "end_turn": 0,
    "denied": EXIT_DENIED,
    "canceled": EXIT_CANCELED,
    "budget": EXIT_SPENT,
}


def run_status(run: "Run") -> int:
    """The exit status for a run that has ended."""
    return _STATUS.get(run.outcome or "", EXIT_FAILED)


def ending_text(run: "Run") -> tuple[str, str]:
    """The reason why a run did not end well, and a hint."""
    go_on = f"`culm run --session {run.session_id} 'go on'` continues from here"
    # The details of a failure may end with a hint of their own, on its own line.
    reason, _, own = ": ".join(filter(None, (run.title, run.details))).partition("\nhint: ")
    if run.state == "held":
        return f"the run is held: {reason}", f"{go_on}; the held prompt can be started or dropped"
    match run.outcome:
        case "canceled":
            return "canceled", go_on
        case "max_tokens":
            return "the answer was cut off at the output limit of the model", go_on
        case "denied":
            return "the run ended because a call was denied", go_on
        case _:
            return reason or f"the run ended: {run.outcome}", own or go_on


# --- streams


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
    """Write indented JSON to stdout, as bytes: JSON is UTF-8, whatever the encoding there."""
    import msgspec  # Most commands do not need it to start.

    click.echo(msgspec.json.format(msgspec.json.encode(value), indent=2))


def write_note(text: str) -> None:
    """Print a note on stderr, without control characters of a file, a model or a server.

    Raises `CannotWrite`.
    """
    from culm.wire.codec import printable  # Commands without notes need not import it.

    lines = "\n".join(map(printable, text.split("\n")))
    try:
        write(sys.stderr, f"{lines}\n")
    except UnicodeEncodeError:
        write(sys.stderr, lines.encode("ascii", "backslashreplace").decode() + "\n")


def report_error(message: str, hint: str = "") -> None:
    write_note(f"culm: {message}")
    if hint:
        write_note(f"hint: {hint}")


def close_output(exc: CannotWrite, consequence: str = "") -> int:
    """Report that output has ended, with the consequence for the run; return the exit status."""
    # Otherwise the interpreter tries to flush stdout at exit, and prints an error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    with suppress(OSError):  # It may be stderr that cannot be written.
        click.echo("; ".join(filter(None, (f"culm: {exc}", consequence))), err=True)
    return exc.status


# --- signals


# One request may arrive as two signals: `timeout` signals the process and its process group.
ECHO_S = 0.2


@contextmanager
def cancelling(
    loop: "asyncio.AbstractEventLoop",
    cancel: Callable[[], None],
    leave: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """Call `cancel` at the first signal within the block, and exit at once at the second.

    `cancel` is called in the loop, which may run in another thread; `leave` just before the exit.
    """
    first_s: float | None = None

    def on_signal(number: int, _: FrameType | None) -> None:
        # Not a handler of the loop: it must run even while a write to stdout blocks.
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            loop.call_soon_threadsafe(cancel)
        elif loop.time() - first_s > ECHO_S:
            leave()
            os._exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

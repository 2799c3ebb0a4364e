"""`culm logs`: what the server has noted, and what it notes from now on."""

import os
import select
import sys
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import click

from culm.cli.exits import EXIT_CLOSED
from culm.cli.log_entries import LogFilter, LogTail, entries_of, last_entries, level_of
from culm.cli.render.printed import put
from culm.cli.terminal.streams import CannotWrite, need_output
from culm.errors import Failed
from culm.wire.codec import printable

LOOK_EVERY_S = 0.2  # A person who follows does not see the difference.


def show_logs(file: Path, wish: LogFilter, count: int, *, follow: bool) -> int:
    """Print the last entries, and with `follow` those to come; returns the exit status.

    Raises `Failed` if there is no log. A reader that leaves is no failure worth a word.
    """
    need_output()
    try:
        entries, end = last_entries(file, wish, count, follow=follow)
        tail = LogTail(file, end) if follow else None
    except OSError as exc:
        raise _no_log(file, exc) from exc
    try:
        _show(line for entry in entries for line in entry)
        if tail is not None:
            with closing(tail):
                return _follow(tail, wish)
    except CannotWrite as exc:
        if exc.status != EXIT_CLOSED:
            raise
        return _leave()
    if not entries and count:
        click.echo("nothing in the log is like that", err=True)
    return 0


def _follow(tail: LogTail, wish: LogFilter) -> int:
    """Until somebody interrupts, or nobody reads any more."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # It tells only that the other side has gone.
    is_wanted = False  # Whether the entry is that has begun.
    while True:
        lines = tail.read()
        for entry in entries_of(lines):
            # What begins with no entry goes on with the one before.
            if level_of(entry[0]) is not None:
                is_wanted = wish.wants(entry)
            if is_wanted:
                _show(entry)
        if not lines and reader.poll(LOOK_EVERY_S * 1000):
            return _leave()


def _show(lines: Iterable[str]) -> None:
    is_screen = sys.stdout.isatty()
    # A traceback may repeat what a file or a model said; a terminal would obey it.
    text = "".join(f"{printable(line.expandtabs(4)) if is_screen else line}\n" for line in lines)
    if text:
        put(text)


def _leave() -> int:
    # Else the interpreter tries once more to write what is left, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED


def _no_log(file: Path, exc: OSError) -> Failed:
    shown = printable(str(file))
    if isinstance(exc, FileNotFoundError):
        hint = "a server begins one when it starts; $XDG_STATE_HOME says where"
        return Failed(f"there is no log: {shown}", hint=hint)
    return Failed(f"cannot read {shown}: {exc.strerror}", hint="is it yours?")

"""`culm logs`: the log of the server, read from its end and followed.

An entry is everything that was logged at once: a line that begins with a time or is JSON, and the
lines after it, such as a traceback.
"""

import json
import logging
import os
import re
import select
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import BinaryIO, cast

import click
from msgspec import Struct

from culm.cli.terminal.process import EXIT_CLOSED, CannotWrite, print_output, require_output
from culm.errors import Failed
from culm.logs import FILES_KEPT
from culm.settings import default_state_dir
from culm.wire.codec import Json, printable

LEVELS = ("debug", "info", "warning", "error", "critical")
LOOK_EVERY_S = 0.2  # Short enough to look immediate.
BLOCK_BYTES = 64 << 10  # Read at once, from the end.
LINE_BYTES_MAX = 1 << 20  # A longer line is split; the server does not log such lines.
READ_BYTES = 1 << 20
_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ")
_JSON = re.compile(r'\{"time": "[^"]*", "level": "')
Entry = Sequence[str]  # Its lines.


def level_of(line: str) -> int | None:
    """The level of the entry that begins with this line; None if none begins here."""
    levels = logging.getLevelNamesMapping()
    if found := _TEXT.match(line):
        return levels.get(found[1], 0)
    if _JSON.match(line):
        try:
            value: Json = json.loads(line)
        except ValueError:
            return None
        return levels.get(str(cast("dict[str, Json]", value).get("level")).upper(), 0)
    return None


class LogFilter(Struct, frozen=True):
    """The entries to show."""

    level: int = 0
    text: str = ""

    def wants(self, entry: Entry) -> bool:
        """Return whether the level is high enough and the text occurs, in any case."""
        level = level_of(entry[0]) or 0
        text = self.text.lower()
        return level >= self.level and any(text in line.lower() for line in entry)


class LogTail:
    """New lines of a log, across rotation and truncation."""

    def __init__(self, file: Path, start: int) -> None:
        """Raises `OSError`."""
        self._file = file
        self._source = file.open("rb")
        self._source.seek(start)
        self._rest = b""  # An incomplete line.

    def close(self) -> None:
        self._source.close()

    def read(self) -> list[str]:
        """The complete lines that have arrived; empty if there are none yet."""
        lines = self._split(self._source.read(READ_BYTES))
        if lines:
            return lines
        try:
            now = self._file.stat()
        except OSError:
            return []  # It was rotated, and nothing has been logged since.
        own = os.fstat(self._source.fileno())
        if (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino):
            # The writer may have written once more before the rotation.
            last = self._source.read(READ_BYTES)
            return self._split(last) if last else self._begin_again()
        if now.st_size < self._source.tell():
            self._source.seek(0)
            self._rest = b""
        return []

    def _begin_again(self) -> list[str]:
        try:
            source = self._file.open("rb")
        except OSError:
            return []
        self._source.close()
        self._source = source
        self._rest = b""
        return self._split(source.read(READ_BYTES))

    def _split(self, data: bytes) -> list[str]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > LINE_BYTES_MAX:
            lines, self._rest = [*lines, self._rest], b""
        return [line.decode(errors="replace") for line in lines]


@click.command()
@click.argument("text", required=False, default="", metavar="[TEXT]")
@click.option(
    "--lines",
    "-n",
    "count",
    type=click.IntRange(min=0),
    default=50,
    show_default=True,
    help="Number of entries.",
)
@click.option("--follow", "-f", is_flag=True, help="Keep printing new entries.")
@click.option(
    "--level",
    type=click.Choice(LEVELS, case_sensitive=False),
    default="debug",
    help="Minimum level. Default: debug.",
)
@click.pass_context
def logs(ctx: click.Context, text: str, count: int, follow: bool, level: str) -> None:
    """Show the server log, the latest entries last.

    With TEXT, show only entries that contain it. Entries are shown whole, with their tracebacks.
    The log is culm.log in $XDG_STATE_HOME/culm, or in ~/.local/state/culm, with its rotated files.

    \b
    Example:
      culm logs
      culm logs -f --level warning
      culm logs -n 5 'cannot start'
    """
    least = logging.getLevelNamesMapping()[level.upper()]
    wanted = LogFilter(0 if level.lower() == "debug" else least, text)
    file = default_state_dir(os.environ) / "culm.log"
    ctx.exit(show_logs(file, wanted, count, follow=follow))


def show_logs(file: Path, wanted: LogFilter, count: int, *, follow: bool) -> int:
    """Print the last entries, and with `follow` the new ones; returns the exit status.

    Raises `Failed` if there is no log. A reader that closes the pipe is not an error.
    """
    require_output()
    try:
        entries, end = last_entries(file, wanted, count, follow=follow)
        tail = LogTail(file, end) if follow else None
    except OSError as exc:
        raise _no_log(file, exc) from exc
    try:
        _show(line for entry in entries for line in entry)
        if tail is not None:
            with closing(tail):
                return _follow(tail, wanted)
    except CannotWrite as exc:
        if exc.status != EXIT_CLOSED:
            raise
        return _leave()
    if not entries and count:
        click.echo("no matching entries in the log", err=True)
    return 0


def _follow(tail: LogTail, wanted: LogFilter) -> int:
    """Print new entries until an interrupt, or until the reader closes the pipe."""
    reader = select.poll()
    reader.register(sys.stdout.fileno(), 0)  # Reports only that the reader has gone.
    is_wanted = False  # The current entry matches the filter.
    while True:
        lines = tail.read()
        for entry in entries_of(lines):
            # Lines without a beginning continue the entry before them.
            if level_of(entry[0]) is not None:
                is_wanted = wanted.wants(entry)
            if is_wanted:
                _show(entry)
        if not lines and reader.poll(LOOK_EVERY_S * 1000):
            return _leave()


def _show(lines: Iterable[str]) -> None:
    is_screen = sys.stdout.isatty()
    # A traceback may contain control characters from a file or a model.
    text = "".join(f"{printable(line.expandtabs(4)) if is_screen else line}\n" for line in lines)
    if text:
        print_output(text)


def _leave() -> int:
    # Otherwise the interpreter tries to flush the rest at exit, and complains.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return EXIT_CLOSED


def _no_log(file: Path, exc: OSError) -> Failed:
    shown = printable(str(file))
    if isinstance(exc, FileNotFoundError):
        hint = "check $XDG_STATE_HOME; a server creates the file when it starts"
        return Failed(f"no log file: {shown}", hint=hint)
    return Failed(f"cannot read {shown}: {exc.strerror}", hint="check its permissions")


def entries_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """Group lines into entries; lines before the first beginning are an entry as well."""
    entry: list[str] = []
    for line in lines:
        if entry and level_of(line) is not None:
            yield entry
            entry = []
        entry.append(line)
    if entry:
        yield entry


def _entries_backwards(lines: Iterable[str]) -> Iterator[list[str]]:
    entry: list[str] = []
    for line in lines:
        entry.append(line)
        if level_of(line) is not None:
            yield entry[::-1]
            entry = []
    if entry:
        yield entry[::-1]


def _lines_backwards(file: BinaryIO, end: int) -> Iterator[str]:
    """The lines before `end`, the last first; reads no more than is consumed."""
    rest, offset = b"", end
    while offset > 0:
        size = min(BLOCK_BYTES, offset)
        offset -= size
        file.seek(offset)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from (line.decode(errors="replace") for line in reversed(lines))
        if len(rest) > LINE_BYTES_MAX:
            yield rest.decode(errors="replace")
            rest = b""
    if rest or end > 0:
        yield rest.decode(errors="replace")


def last_entries(
    file: Path, wanted: LogFilter, count: int, *, follow: bool = False
) -> tuple[list[Entry], int]:
    """The last matching entries, also from rotated files, and the position to `follow` from.

    That position is after a complete line; an incomplete one is left to the follower. Raises
    `OSError` if the file does not exist or cannot be read.
    """
    found: list[Entry] = []
    known: set[int] = set()  # A file that is rotated in the meantime appears twice.
    end_of_all = 0
    names = [file, *(file.with_name(f"{file.name}.{n + 1}") for n in range(FILES_KEPT))]
    for path in names:
        try:
            source = path.open("rb")
        except FileNotFoundError:
            if path == file:
                raise
            continue
        with source:
            status = os.fstat(source.fileno())
            if status.st_ino in known:
                continue
            known.add(status.st_ino)
            end = _end_of(source, status.st_size)
            end_of_all = end if path == file else end_of_all
            is_left = end == status.st_size or (follow and path == file)
            stop = end - 1 if is_left else status.st_size
            for entry in _entries_backwards(_lines_backwards(source, stop)):
                if len(found) < count and wanted.wants(entry):
                    found.append(entry)
                if len(found) >= count:
                    return found[::-1], end_of_all
    return found[::-1], end_of_all


def _end_of(source: BinaryIO, size: int) -> int:
    """The end of the last complete line: the next one may be in the middle of a write."""
    start = max(size - LINE_BYTES_MAX, 0)
    source.seek(start)
    at = source.read(size - start).rfind(b"\n")
    return size if at < 0 and start else start + at + 1

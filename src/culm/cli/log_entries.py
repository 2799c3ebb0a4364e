"""The server's log, read from its end, and followed from there. Decides nothing about a screen.

An entry is what was logged at once: a line that begins with a time, or is JSON, and what follows
it, such as a traceback.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from culm.logs import FILES_KEPT
from culm.wire.codec import Json

BLOCK_BYTES = 64 << 10  # What is read at once from the end.
LINE_BYTES_MAX = 1 << 20  # Of a longer one the pieces are lines: nobody logs such.
READ_BYTES = 1 << 20

_TEXT = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ([A-Z]+) ")
_JSON = re.compile(r'\{"time": "[^"]*", "level": "')

Entry = Sequence[str]  # Its lines.


def level_of(line: str) -> int | None:
    """How grave an entry is that begins so; None if none begins here."""
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


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which entries are wanted."""

    level: int = 0
    text: str = ""

    def wants(self, entry: Entry) -> bool:
        """At least that grave, and with that text in it, whatever its case."""
        level = level_of(entry[0]) or 0
        text = self.text.lower()
        return level >= self.level and any(text in line.lower() for line in entry)


def entries_of(lines: Iterable[str]) -> Iterator[list[str]]:
    """In their order; what comes before the first beginning is an entry, too."""
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
    """The lines before `end`, the last first; no more is read than is asked for."""
    rest, place = b"", end
    while place > 0:
        size = min(BLOCK_BYTES, place)
        place -= size
        file.seek(place)
        rest, *lines = (file.read(size) + rest).split(b"\n")
        yield from (line.decode(errors="replace") for line in reversed(lines))
        if len(rest) > LINE_BYTES_MAX:
            yield rest.decode(errors="replace")
            rest = b""
    if rest or end > 0:
        yield rest.decode(errors="replace")


def last_entries(
    file: Path, wish: LogFilter, count: int, *, follow: bool = False
) -> tuple[list[Entry], int]:
    """The last that are wanted, also of files that were moved aside; and where to `follow` from.

    That is after a whole line: what is behind it is then left to who follows. Raises `OSError` if
    there is no file, or it cannot be read.
    """
    found: list[Entry] = []
    known: set[int] = set()  # A file that is moved aside meanwhile is met again.
    end_of_all = 0
    names = [file, *(file.with_name(f"{file.name}.{n + 1}") for n in range(FILES_KEPT))]
    for place in names:
        try:
            source = place.open("rb")
        except FileNotFoundError:
            if place == file:
                raise
            continue
        with source:
            status = os.fstat(source.fileno())
            if status.st_ino in known:
                continue
            known.add(status.st_ino)
            end = _end_of(source, status.st_size)
            end_of_all = end if place == file else end_of_all
            is_left = end == status.st_size or (follow and place == file)
            stop = end - 1 if is_left else status.st_size
            for entry in _entries_backwards(_lines_backwards(source, stop)):
                if len(found) < count and wish.wants(entry):
                    found.append(entry)
                if len(found) >= count:
                    return found[::-1], end_of_all
    return found[::-1], end_of_all


def _end_of(source: BinaryIO, size: int) -> int:
    """After the last whole line: somebody may be writing the next one."""
    start = max(size - LINE_BYTES_MAX, 0)
    source.seek(start)
    at = source.read(size - start).rfind(b"\n")
    return size if at < 0 and start else start + at + 1


class LogTail:
    """What is logged from now on, also when the file is moved aside or emptied."""

    def __init__(self, file: Path, start: int) -> None:
        """Raises `OSError`."""
        self._file = file
        self._source = file.open("rb")
        self._source.seek(start)
        self._rest = b""  # A line that is not whole yet.

    def close(self) -> None:
        self._source.close()

    def read(self) -> list[str]:
        """The lines that have come, whole ones only; none if there are none yet."""
        lines = self._split(self._source.read(READ_BYTES))
        if lines:
            return lines
        try:
            now = self._file.stat()
        except OSError:
            return []  # It was moved aside, and nobody has logged since.
        own = os.fstat(self._source.fileno())
        if (now.st_dev, now.st_ino) != (own.st_dev, own.st_ino):
            # Whoever moved it may have written once more before.
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

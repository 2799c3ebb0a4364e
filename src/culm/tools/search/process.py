"""The process that `grep` searches in: it reads one request, writes its matches, and exits.

Python's `re` cannot be interrupted and holds the interpreter lock while it matches: `(a+)+$`
against a few dozen letters would block the server for hours. So the pattern of a model is compiled
and matched only here, where a kill ends it. The process gets an open directory to walk and cannot
be sent elsewhere. Half of its time is its start, so it imports little: no dataclasses (they load
`inspect`), no pathlib, nothing outside the standard library.
"""

import json
import os
import re
import resource
import signal
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from typing import BinaryIO, NamedTuple

from culm.tools.files.safe_open import OpenRefused, TreeWalk, open_file
from culm.tools.search.patterns import Glob, combine_gitignores, parse_glob

FILE_BYTES_MAX = 2 << 20  # Larger files are data or generated.
LINE_CHARS_SHOWN = 500
MEMORY_BYTES_MAX = 1 << 30  # A pattern can need any amount.
NICENESS = 5  # The server comes first.


class SearchQuery(NamedTuple):
    """A search; `descriptor` is a file, or a directory to walk."""

    descriptor: int
    parts: tuple[str, ...]  # Its path, from the workspace down.
    is_directory: bool
    pattern: str
    literal: bool
    include: str
    gitignores: Sequence[str]  # Of the directories above, from the root down.
    nested_rules: bool  # Whether the .gitignore files found on the way count, too.
    matches_max: int
    wall_s: float


class SearchMatch(NamedTuple):
    """One matching line."""

    path: str
    line: int  # From 1.
    text: str


class SearchEnd(NamedTuple):
    """The last message. Without it the search is incomplete."""

    problem: str = ""  # The reason why the pattern cannot be used.
    skipped: int = 0  # Files that are too large, or cannot be read.
    unread: int = 0
    is_cut: bool = False  # A directory has too many entries.
    has_more: bool = False


def main() -> None:
    """Run the search from standard input; write one JSON object a line to standard output."""
    query = SearchQuery(**json.loads(sys.stdin.buffer.read()))
    # The server kills this process in time. If the server is gone, this signal does; nothing
    # catches it.
    signal.setitimer(signal.ITIMER_REAL, query.wall_s + 1)
    os.nice(NICENESS)
    with suppress(ValueError, OSError):  # Not every system has this limit.
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES_MAX, MEMORY_BYTES_MAX))
    out = sys.stdout.buffer
    try:
        end = _search(query, out)
    except BrokenPipeError:
        os._exit(0)  # The reader is gone; there is nothing to flush.
    _write(out, end)


def _write(out: BinaryIO, message: SearchMatch | SearchEnd) -> None:
    # ASCII, so that a name that is not UTF-8 passes.
    out.write(json.dumps(message._asdict()).encode() + b"\n")
    out.flush()


def _search(query: SearchQuery, out: BinaryIO) -> SearchEnd:
    try:
        expression = re.compile(re.escape(query.pattern) if query.literal else query.pattern)
    except (re.error, OverflowError, RecursionError, MemoryError) as exc:
        return SearchEnd(problem=str(exc) or type(exc).__name__)
    needle = query.pattern.encode(errors="surrogatepass") if query.literal else b""
    walked = TreeWalk(lambda: False, hidden=True, nested_rules=query.nested_rules)
    skipped = found = 0
    with closing(_files(query, walked)) as files:
        for path, data in files:
            if data is None:
                skipped += 1
                continue
            if needle and needle not in data:
                continue
            for match in _matches(expression, path, data):
                if found == query.matches_max:
                    return SearchEnd("", skipped, walked.unread, walked.is_cut, has_more=True)
                found += 1
                _write(out, match)
    return SearchEnd("", skipped, walked.unread, walked.is_cut)


def _files(query: SearchQuery, walked: TreeWalk) -> Generator[tuple[str, bytes | None]]:
    """Yield each file with its path; None for one that is not searched."""
    include = parse_glob(query.include, hidden=True) if query.include else None
    if not query.is_directory:
        size = os.fstat(query.descriptor).st_size
        yield "/".join(query.parts), _read(query.descriptor, size)
        return
    start = tuple(query.parts)
    entries = walked.files(query.descriptor, start, combine_gitignores(query.gitignores))
    with closing(entries):
        for entry in entries:
            if entry.is_link or (include and not is_included(include, entry.parts, len(start))):
                continue
            path = "/".join(entry.parts)
            try:
                descriptor, status = open_file(entry.name, entry.within, path)
            except OpenRefused:
                continue  # Not a regular file.
            except OSError:
                yield path, None
                continue
            try:
                yield path, _read(descriptor, status.st_size)
            finally:
                os.close(descriptor)


def is_included(include: Glob, parts: Sequence[str], skip: int) -> bool:
    """Match a glob against the name of a file, or its path without the first `skip` parts."""
    return include.matches(parts[-1:]) or include.matches(parts[skip:])


def _read(descriptor: int, size: int) -> bytes | None:
    if size > FILE_BYTES_MAX:
        return None
    try:
        data = os.read(descriptor, FILE_BYTES_MAX)
    except OSError:
        return None
    return b"" if b"\0" in data else data  # Not text.


def _matches(expression: re.Pattern[str], path: str, data: bytes) -> Generator[SearchMatch]:
    text = data.decode(errors="replace").replace("\r\n", "\n")
    text = text.removesuffix("\n").removesuffix("\r")
    for number, line in enumerate(text.split("\n") if data else (), 1):
        found = expression.search(line)
        if found is not None:
            yield SearchMatch(path, number, around(line, found.start()))


def around(line: str, start: int) -> str:
    """Return the line; if it is long, the part around the match."""
    if len(line) <= LINE_CHARS_SHOWN:
        return line
    begin = max(0, min(start - LINE_CHARS_SHOWN // 4, len(line) - LINE_CHARS_SHOWN))
    cut = line[begin : begin + LINE_CHARS_SHOWN]
    return f"{'… ' if begin else ''}{cut}{' …' if begin + len(cut) < len(line) else ''}"

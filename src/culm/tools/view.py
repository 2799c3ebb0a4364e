"""`view`: the lines of a text file, numbered, read only as far as they are wanted."""

import difflib
import os
from collections.abc import Generator
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.base import Result
from culm.tools.file_tool import FileTool, PathText, make_spec, metadata
from culm.tools.inside import Inside, Missing, Place
from culm.tools.opening import Refused, shown
from culm.tools.walk import list_directory
from culm.tools.work import FileWork, Stop

LINES = 2000  # Without a limit; what the Crush client shows at most.
LINE_CHARS_MAX = 2000
LINE_CUT = " … (cut)"
RESULT_BYTES_MAX = 256 << 10
WHOLE_BYTES_MAX = 5 << 20  # Larger files are data; whoever wants them says which lines.
CHUNK_BYTES = 64 << 10
SIMILAR_MAX = 3
NAMES_COMPARED_MAX = 2000  # Comparing takes time, and a longer list is no help.
_KEPT_BYTES = 4 * LINE_CHARS_MAX + 4  # Enough for that many characters of any kind, and one more.
_IMAGES = (b"\x89PNG\r\n", b"\xff\xd8\xff", b"GIF87a", b"GIF89a", b"BM", b"II*\0", b"MM\0*")
_KINDS = (
    (b"%PDF-", "a PDF document"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"\x7fELF", "a program"),
    (b"SQLite format 3\0", "an SQLite database"),
    (b"\xff\xfe", "UTF-16 text"),
    (b"\xfe\xff", "UTF-16 text"),
)
DESCRIPTION = (
    "Read a text file of the workspace. Answers with numbered lines; the number and the bar are "
    f"not part of the file. Without limit at most {LINES} lines; go on with offset."
)


class ViewArguments(Struct, frozen=True):
    file_path: Annotated[PathText, Meta(min_length=1, description="The file, in the workspace.")]
    offset: Annotated[int, Meta(ge=0, description="How many lines to skip. Default: 0.")] = 0
    limit: Annotated[
        int, Meta(ge=0, description=f"How many lines to read. Default, and 0: {LINES}.")
    ] = 0


@dataclass(frozen=True, slots=True)
class _Seen:
    """What was read: some lines, how many there were up to here, and why it ended."""

    lines: list[str]
    passed: int
    has_more: bool
    is_stopped: bool


def make_view(inside: Inside, work: FileWork) -> FileTool[ViewArguments]:
    spec = make_spec("view", DESCRIPTION, ViewArguments)
    return FileTool(spec, ViewArguments, work, lambda given, stop: _view(inside, given, stop))


def _view(inside: Inside, given: ViewArguments, stop: Stop) -> Result:
    try:
        with inside.open(given.file_path) as place:
            if place.is_directory:
                raise Refused(f"{place.shown} is a directory; use ls to list it.")
            _check_text(place)
            if place.status.st_size > WHOLE_BYTES_MAX and not (given.offset or given.limit):
                size = size_text(place.status.st_size)
                raise Refused(f"{place.shown} has {size}. Say which lines: give offset and limit.")
            seen = _read(place.descriptor, given.offset, given.limit or LINES, stop)
            return _result(inside, place, given.offset, seen)
    except Missing as missing:
        raise Refused(f"{missing}{_similar(inside, missing, stop)}") from missing


def _check_text(place: Place) -> None:
    """Refuse what is no text, by how it begins."""
    head = os.pread(place.descriptor, 8192, 0)
    size = size_text(place.status.st_size)
    is_image = head.startswith(_IMAGES) or (head[:4] == b"RIFF" and head[8:12] == b"WEBP")
    if is_image and b"\0" in head:  # A text may begin with the same letters.
        raise Refused(f"{place.shown} is an image ({size}); this version cannot show images.")
    kind = next((word for magic, word in _KINDS if head.startswith(magic)), None)
    if kind is None and b"\0" in head:
        kind = "binary data"
    if kind is not None:
        raise Refused(f"{place.shown} is {kind} ({size}), not text.")


def _read(descriptor: int, offset: int, limit: int, stop: Stop) -> _Seen:
    lines: list[str] = []
    size = number = 0
    for number, raw in _lines(descriptor, offset, stop):
        if raw is None:
            continue
        line = _decode(raw, is_first=number == 1)
        size += len(line.encode()) + 8  # Its number, the bar and the line's end.
        if len(lines) == limit or size > RESULT_BYTES_MAX:
            return _Seen(lines, number - 1, has_more=True, is_stopped=False)
        lines.append(line)
    return _Seen(lines, number, has_more=False, is_stopped=stop.is_set())


def _lines(descriptor: int, offset: int, stop: Stop) -> Generator[tuple[int, bytes | None]]:
    """Each line from `offset` on with its number, from 1; None stands for all that were skipped.

    Of a line no more is kept than is shown, however long it is.
    """
    number, rest, is_open = 0, b"", False  # Open: the last line has no end yet.
    while not stop.is_set() and (chunk := os.read(descriptor, CHUNK_BYTES)):
        is_open = not chunk.endswith(b"\n")
        if number + (ends := chunk.count(b"\n")) < offset:
            number += ends
            continue
        pieces = chunk.split(b"\n")
        for piece in pieces[:-1]:
            number += 1
            if number > offset:
                yield number, rest + piece[: _KEPT_BYTES - len(rest)]
            rest = b""
        rest += pieces[-1][: _KEPT_BYTES - len(rest)]
    if is_open and not stop.is_set():
        number += 1
        yield number, (rest if number > offset else None)
    else:
        yield number, None


def _decode(raw: bytes, *, is_first: bool) -> str:
    line = raw.removesuffix(b"\r").decode(errors="replace").replace("\0", "\ufffd")
    if is_first:
        line = line.removeprefix("\ufeff")
    return line if len(line) <= LINE_CHARS_MAX else line[:LINE_CHARS_MAX] + LINE_CUT


def _result(inside: Inside, place: Place, offset: int, seen: _Seen) -> Result:
    if not seen.lines:
        if seen.is_stopped:
            raise Refused(f"Line {offset + 1} of {place.shown} was not reached in time.")
        if seen.passed:
            raise Refused(f"{place.shown} ends with line {seen.passed}.")
        text = "(the file is empty)"
    else:
        numbered = [f"{n:>6}|{line}" for n, line in enumerate(seen.lines, offset + 1)]
        after = offset + len(seen.lines)
        if seen.has_more:
            numbered.append(f"(more lines follow; go on with offset {after})")
        elif seen.is_stopped:
            numbered.append(f"(time was over; go on with offset {after})")
        else:
            numbered.append(f"(end of file, line {seen.passed})")
        text = "\n".join(numbered)
    path = shown(str(inside.root.joinpath(*place.parts)))
    goes_on = seen.has_more or seen.is_stopped
    about = metadata(
        file_path=path,
        content="\n".join(seen.lines),
        truncated=goes_on,
        number_of_lines=None if goes_on else seen.passed,
    )
    return Result(text, metadata=about)


def _similar(inside: Inside, missing: Missing, stop: Stop) -> str:
    """A hint at the names that were perhaps meant."""
    try:
        with inside.open(str(inside.root.joinpath(*missing.within))) as place:
            entries, _ = list_directory(place.descriptor, place.parts, stop.is_set)
    except (Refused, OSError):
        return ""
    names = {entry.name.casefold(): entry.parts for entry in entries[:NAMES_COMPARED_MAX]}
    close = difflib.get_close_matches(missing.name.casefold(), names, SIMILAR_MAX)
    if not close:
        return ""
    return f" Similar: {', '.join(shown('/'.join(names[name])) for name in close)}."


def size_text(size: int) -> str:
    if size < 1024:
        return f"{size} bytes"
    return f"{size / 1024:.1f} KiB" if size < 1 << 20 else f"{size / (1 << 20):.1f} MiB"

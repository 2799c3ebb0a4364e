"""`view`: numbered lines of a text file, read only as far as needed; or an image."""

import base64
import os
from collections.abc import Generator, Iterable
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import FilePath, make_spec, metadata
from culm.tools.base import CallResult
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.kinds import UTF16_BOMS, check_text, image_type, read_head, size_text
from culm.tools.files.paths import OpenPath, PathTarget, WorkspacePaths
from culm.tools.files.read_tool import FileAccess, ReadResult, ReadTool, stamp_of
from culm.tools.files.safe_open import OpenRefused, shown
from culm.wire.tools import ToolFacts

LINES = 2000  # Without a limit; the maximum that the Crush client shows.
LINE_CHARS_MAX = 2000
LINE_CUT = " … (cut)"
RESULT_BYTES_MAX = 256 << 10
WHOLE_BYTES_MAX = 5 << 20  # Larger files are data; the call must name the lines.
IMAGE_BYTES_MAX = 5 << 20  # The limit of providers.
CHUNK_BYTES = 64 << 10
_KEPT_BYTES = 4 * LINE_CHARS_MAX + 4  # Enough for that many characters of any kind, and one more.
DESCRIPTION = (
    "Read a text file. Returns numbered lines; the number and the bar are not part of the "
    f"file. Without limit at most {LINES} lines; continue with offset. Shows PNG, JPEG, GIF and "
    "WebP images, too. A file has to be viewed before it is edited. Outside the workspace a person "
    "is asked first."
)


class ViewArguments(Struct, frozen=True):
    file_path: FilePath
    offset: Annotated[int, Meta(ge=0, description="How many lines to skip. Default: 0.")] = 0
    limit: Annotated[
        int, Meta(ge=0, description=f"How many lines to read. Default, and 0: {LINES}.")
    ] = 0


SPEC = make_spec(
    "view", DESCRIPTION, ViewArguments, ToolFacts(kind="read", path_arguments=("file_path",))
)


class _Seen(Struct, frozen=True):
    """The lines read, the number of lines passed, and why reading ended."""

    lines: list[str]
    passed: int
    has_more: bool
    is_stopped: bool


def make_view(context: FileAccess) -> ReadTool[ViewArguments]:
    return ReadTool(
        context,
        SPEC,
        ViewArguments,
        lambda arguments: arguments.file_path,
        lambda arguments, target, stop: _view(context.paths, arguments, target, stop),
        path_field="file_path",
    )


def _view(
    paths: WorkspacePaths, arguments: ViewArguments, target: PathTarget, stop: StopFlag
) -> ReadResult:
    with paths.open_real(target.path) as opened:
        if opened.is_directory:
            raise OpenRefused(f"{opened.shown} is a directory; use ls to list it.")
        head = read_head(opened)
        kind = image_type(head)
        if kind is not None:
            result = _image(opened, kind)
        else:
            check_text(head, opened)
            size = opened.status.st_size
            is_wide = head[:2] in UTF16_BOMS  # It is converted to UTF-8 as a whole.
            if size > WHOLE_BYTES_MAX and (is_wide or not (arguments.offset or arguments.limit)):
                hint = "UTF-16 is too large." if is_wide else "Set offset and limit to read a part."
                raise OpenRefused(f"{opened.shown} has {size_text(size)}. {hint}")
            chunks = _wide_chunks(opened) if is_wide else _chunks(opened.descriptor, stop)
            seen = _read(chunks, arguments.offset, arguments.limit or LINES, stop)
            result = _result(opened, arguments.offset, seen)
        # The state before reading: a later change is detected.
        return ReadResult(result, target.path, stamp_of(opened.status))


def _image(opened: OpenPath, kind: str) -> CallResult:
    size = size_text(opened.status.st_size)
    if opened.status.st_size > IMAGE_BYTES_MAX:
        raise OpenRefused(f"{opened.shown} is an image of {size}; the maximum is 5 MiB.")
    with open(opened.descriptor, "rb", closefd=False) as file:
        data = file.read(IMAGE_BYTES_MAX)
    return CallResult(
        f"{opened.shown} is an image ({kind}, {size}).",
        metadata=metadata(file_path=shown(opened.path), content=""),
        data=base64.b64encode(data).decode(),
        mime_type=kind,
    )


def _chunks(descriptor: int, stop: StopFlag) -> Generator[bytes]:
    while not stop.is_set() and (chunk := os.read(descriptor, CHUNK_BYTES)):
        yield chunk


def _wide_chunks(opened: OpenPath) -> list[bytes]:
    with open(opened.descriptor, "rb", closefd=False) as file:
        return [file.read(WHOLE_BYTES_MAX).decode("utf-16", errors="replace").encode()]


def _read(chunks: Iterable[bytes], offset: int, limit: int, stop: StopFlag) -> _Seen:
    lines: list[str] = []
    size = number = 0
    for number, raw in _lines(chunks, offset, stop):
        if raw is None:
            continue
        line = _decode(raw, is_first=number == 1)
        size += len(line.encode()) + 8  # Its number, the bar and the line end.
        if len(lines) == limit or size > RESULT_BYTES_MAX:
            return _Seen(lines, number - 1, has_more=True, is_stopped=False)
        lines.append(line)
    return _Seen(lines, number, has_more=False, is_stopped=stop.is_set())


def _lines(
    chunks: Iterable[bytes], offset: int, stop: StopFlag
) -> Generator[tuple[int, bytes | None]]:
    """Yield each line from `offset` on with its number, from 1; None for all skipped lines.

    However long a line is, only the part to be shown is kept.
    """
    number, rest, is_open = 0, b"", False  # Open: the last line has no end yet.
    for chunk in chunks:
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


def _result(opened: OpenPath, offset: int, seen: _Seen) -> CallResult:
    if not seen.lines:
        if seen.is_stopped:
            raise OpenRefused(f"Line {offset + 1} of {opened.shown} was not reached in time.")
        if seen.passed:
            raise OpenRefused(f"{opened.shown} ends with line {seen.passed}.")
        text = "(the file is empty)"
    else:
        numbered = [f"{n:>6}|{line}" for n, line in enumerate(seen.lines, offset + 1)]
        after = offset + len(seen.lines)
        if seen.has_more:
            numbered.append(f"(more lines follow; continue with offset {after})")
        elif seen.is_stopped:
            numbered.append(f"(out of time; continue with offset {after})")
        else:
            numbered.append(f"(end of file, line {seen.passed})")
        text = "\n".join(numbered)
    is_partial = seen.has_more or seen.is_stopped
    about = metadata(
        file_path=shown(opened.path),
        content="\n".join(seen.lines),
        truncated=is_partial,
        number_of_lines=None if is_partial else seen.passed,
    )
    return CallResult(text, metadata=about)

"""The bounded output of a process: beginning and end in memory, all of it in a file.

Owns how output is kept and how it is prepared for a model. Everything a process writes is read at
once, so that it never waits; data beyond the bounds is counted and dropped.
"""

import os
import re
from collections.abc import Callable, Collection
from pathlib import Path

from msgspec import Struct

MODEL_BYTES_MAX = 30_000  # Per result: about eight thousand tokens.
FILE_BYTES_MAX = 64 << 20  # Per command; redirect the output to get more.
FILES_MAX = 100  # Per folder; the oldest are removed first ...
FOLDER_BYTES_MAX = 1 << 30  # ... also when all files together exceed this.
LINE_LOST_MAX = 2_000  # A cut moves to the end of a line if it loses no more than this.

# Terminal escapes: colors and positions (CSI), titles and links (OSC and similar), others.
_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\n\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])?"
)
_COLOURS = re.compile(r"\x1b\[[\d;:]*m")
_STRUCK = re.compile("[^\n\b]\b")  # Underlined and bold text of manual pages.
_UNFIT = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ufffd]+")
_UNFIT_BUT_ESCAPES = re.compile("[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f-\x9f\ufffd]+")


class OutputSizes(Struct, frozen=True):
    """The limits of kept output; the beginning and the end get half each."""

    shown_bytes: int = MODEL_BYTES_MAX
    file_bytes: int = FILE_BYTES_MAX


MODEL_SIZES = OutputSizes()


class CommandOutput:
    """The output of one process. `file` provides a path if the output gets too long."""

    def __init__(self, file: Callable[[], Path] | None, sizes: OutputSizes = MODEL_SIZES) -> None:
        self.count = 0  # Bytes so far.
        self._make_file = file
        self._sizes = sizes
        self._head = bytearray()
        self._tail = bytearray()  # Empty until the head is full.
        self._file: _Overflow | None = None

    def feed(self, data: bytes) -> None:
        if self._file is None and self._make_file and self.count + len(data) > self._shown_max:
            self._file = _Overflow(self._make_file, self._sizes.file_bytes)
            self._file.write(bytes(self._head + self._tail))
        if self._file is not None:
            self._file.write(data)
        self.count += len(data)
        room = self._shown_max // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data[-self._tail_max :]
        # Trimmed at twice the limit: otherwise every small piece would move all of it.
        if len(self._tail) > 2 * self._tail_max:
            del self._tail[: -self._tail_max]

    def close(self) -> None:
        """Close the file after the last data."""
        if self._file is not None:
            self._file.close()

    def text(self, *, keeps_colours: bool = False) -> str:
        """Return all of the output; if it is too long, its beginning, a note, and its end."""
        if self.count <= self._shown_max:
            return fit(bytes(self._head + self._tail), keeps_colours=keeps_colours)
        head = _until_line_end(bytes(self._head))
        tail = _from_line_start(bytes(self._tail[-self._tail_max :]))
        left_out = self.count - len(head) - len(tail)
        note = f"[… {left_out:,} bytes are left out here{self._where()} …]"
        parts = (fit(part, keeps_colours=keeps_colours).rstrip("\n") for part in (head, tail))
        return f"\n{note}\n".join(parts)

    def text_since(self, mark: int) -> str:
        """Return the output after the first `mark` bytes; if it is too long, only its end."""
        if mark == 0:
            return self.text()
        wanted = self.count - mark
        if self.count <= self._shown_max:
            return fit(bytes(self._head + self._tail)[mark:])
        if wanted <= min(len(self._tail), self._tail_max):
            return fit(bytes(self._tail[len(self._tail) - wanted :]))
        tail = _from_line_start(bytes(self._tail[-self._tail_max :]))
        return f"[… {wanted - len(tail):,} bytes are left out here{self._where()} …]\n{fit(tail)}"

    @property
    def _shown_max(self) -> int:
        return self._sizes.shown_bytes

    @property
    def _tail_max(self) -> int:
        return self._sizes.shown_bytes // 2

    def _where(self) -> str:
        return "" if self._file is None else f"; {self._file.described()}"


class _Overflow:
    """The file of output that is too long. A full disk loses the file, not the call."""

    def __init__(self, make_file: Callable[[], Path], bytes_max: int) -> None:
        self._path: Path | None = None
        self._descriptor: int | None = None
        self._room = bytes_max
        self._bytes_max = bytes_max
        self._problem = ""
        try:
            self._path = make_file()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(self._path, flags, 0o600)
        except OSError as exc:
            self._problem = exc.strerror or str(exc)

    def write(self, data: bytes) -> None:
        if self._descriptor is None:
            return
        data = data[: self._room]
        self._room -= len(data)
        try:
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError as exc:
            self._problem = exc.strerror or str(exc)
            self.close()
        if self._room == 0:
            self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def described(self) -> str:
        if self._problem:
            return f"they could not be kept: {self._problem}"
        if self._room == 0:
            return f"the first {self._bytes_max:,} bytes of the output are in {self._path}"
        return f"all of the output is in {self._path}"


def fit(data: bytes, *, keeps_colours: bool = False) -> str:
    """Convert the output of a process to text without terminal escapes and control characters.

    A line that was overwritten, as progress bars do, appears once, in its last state.
    """
    text = data.decode(errors="replace")
    if "\r" in text:
        text = text.replace("\r\n", "\n")
        text = "\n".join(_last_seen(line) if "\r" in line else line for line in text.split("\n"))
    if "\x1b" in text:
        text = _ESCAPES.sub(_colour if keeps_colours else "", text)
    if "\b" in text:
        text = _STRUCK.sub("", text)
    return (_UNFIT_BUT_ESCAPES if keeps_colours else _UNFIT).sub("\ufffd", text)


def _colour(found: re.Match[str]) -> str:
    return found[0] if _COLOURS.fullmatch(found[0]) else ""


def _last_seen(line: str) -> str:
    return next((piece for piece in reversed(line.split("\r")) if piece), "")


def _until_line_end(data: bytes) -> bytes:
    end = data.rfind(b"\n") + 1
    return data[:end] if end and len(data) - end <= LINE_LOST_MAX else _until_character(data)


def _from_line_start(data: bytes) -> bytes:
    start = data.find(b"\n", 0, LINE_LOST_MAX) + 1
    while not start and data and data[0] & 0xC0 == 0x80:  # In the middle of a character.
        data = data[1:]
    return data[start:]


def _until_character(data: bytes) -> bytes:
    """Remove an incomplete character at the end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            needed = 2 + (byte >= 0xE0) + (byte >= 0xF0)
            return data[:-back] if needed > back else data
        if byte < 0x80:
            break
    return data


def name_output(folder: Path, session_id: str, file_id: str) -> Path:
    return folder / f"{session_id}.{file_id}.txt"


def sessions_with_output(folder: Path) -> set[str]:
    return {path.name.split(".")[0] for path in folder.glob("*.*.txt")}


def remove_outputs(folder: Path, session_ids: Collection[str]) -> None:
    """Remove the files of deleted sessions."""
    for path in folder.glob("*.*.txt"):
        if path.name.split(".")[0] in session_ids:
            path.unlink(missing_ok=True)


def make_room(folder: Path) -> None:
    """Create the folder and remove old files until one more fits."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.scandir(folder) as entries:
        found = [(entry, entry.stat(follow_symlinks=False)) for entry in entries]
    found.sort(key=lambda pair: pair[1].st_mtime_ns)
    count, size = len(found), sum(status.st_size for _, status in found)
    for entry, status in found:
        if count < FILES_MAX and size + FILE_BYTES_MAX <= FOLDER_BYTES_MAX:
            break
        Path(entry.path).unlink(missing_ok=True)
        count, size = count - 1, size - status.st_size

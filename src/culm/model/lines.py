"""Lines out of a stream of bytes, however it was cut on the way.

What a line means is its reader's business; the `\\r` of a `\\r\\n` stays on, as JSON ignores it.
"""

import msgspec

# What reading a line may raise: bad JSON, JSON of another shape, bytes that are no text, brackets
# without end, endless numbers.
UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError, OverflowError)

# A line is one delta. Even a whole file that a model writes in one call stays far below it.
LINE_BYTES_MAX = 1 << 20


class LineSplitter:
    """Keeps what has not ended yet, and never more of it than a line may have."""

    def __init__(self, line_bytes_max: int = LINE_BYTES_MAX) -> None:
        self.overflowed = False  # A line was too long; it and all that followed is dropped.
        self._line_bytes_max = line_bytes_max
        self._held: list[bytes] = []  # Joined once: a long line in small chunks stays linear.
        self._held_bytes = 0

    def feed(self, chunk: bytes) -> list[bytes]:
        """The lines that `chunk` completes, without their `\\n`."""
        if self.overflowed:
            return []
        if b"\n" not in chunk:
            self._hold(chunk)
            return []
        if self._held:
            chunk = b"".join((*self._held, chunk))
            self._held.clear()
            self._held_bytes = 0
        lines = chunk.split(b"\n")
        rest = lines.pop()
        if len(chunk) > self._line_bytes_max:
            lines = self._until_too_long(lines)
        if rest and not self.overflowed:
            self._hold(rest)
        return lines

    def rest(self) -> bytes:
        """What came after the last line end."""
        return b"".join(self._held)

    def _hold(self, piece: bytes) -> None:
        self._held.append(piece)
        self._held_bytes += len(piece)
        if self._held_bytes > self._line_bytes_max:
            self._overflow()

    def _until_too_long(self, lines: list[bytes]) -> list[bytes]:
        for n, line in enumerate(lines):
            if len(line) > self._line_bytes_max:
                self._overflow()
                return lines[:n]
        return lines

    def _overflow(self) -> None:
        self.overflowed = True
        self._held.clear()


def is_whole(line: bytes) -> bool:
    """Whether an event without its end lacks nothing else."""
    payload = line.partition(b":")[2].strip()
    try:
        msgspec.json.decode(payload, type=msgspec.Raw)
    except UNREADABLE:
        return payload == b"[DONE]"
    return True

"""The output of one process, line by line, read without blocking and within limits."""

import asyncio
import os
from collections import deque
from contextlib import ExitStack
from typing import Final

LINE_BYTES_MAX: Final = 1 << 20  # The rest of a longer line is read and discarded.
READ_BYTES: Final = 64 << 10
# Read after the end: more than a pipe holds, but limited, as an escaped process may write for ever.
DRAIN_BYTES_MAX: Final = 8 << 20


class LinePipe:
    """Lines on demand; while none are read, the process blocks."""

    def __init__(self) -> None:
        self._ours = -1
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lines: deque[str] = deque()
        self._partial = bytearray()
        self._is_over = False  # The process is gone; the pipe holds the rest of its output.
        self._is_complete = False
        self._drained = 0

    def open(self, theirs: ExitStack) -> int:
        """Open the pipe and return the process's end, which `theirs` closes."""
        self._ours, other = os.pipe()
        theirs.callback(os.close, other)
        os.set_blocking(self._ours, False)
        return other

    async def line(self) -> str | None:
        """Return the next line without its line break; None after the last."""
        while not self._lines:
            if self._is_complete:
                return None
            data = await self._read()
            if data:
                self._split(data)
                continue
            self._is_complete = True
            if self._partial:
                self._end_line()
        return self._lines.popleft()

    def end(self) -> None:
        self._is_over = True
        self._wake.set()

    def close(self) -> None:
        if self._ours >= 0:
            self._loop.remove_reader(self._ours)
            os.close(self._ours)
            self._ours = -1

    async def _read(self) -> bytes:
        """Read the next bytes; empty at the end."""
        while True:
            try:
                data = os.read(self._ours, READ_BYTES)
            except BlockingIOError:
                if self._is_over:
                    return b""
            else:
                if self._is_over:
                    self._drained += len(data)
                return data if self._drained <= DRAIN_BYTES_MAX else b""
            self._wake.clear()
            self._loop.add_reader(self._ours, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                self._loop.remove_reader(self._ours)

    def _split(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self._grow(first)
        for piece in rest:
            self._end_line()
            self._grow(piece)

    def _grow(self, piece: bytes) -> None:
        self._partial += piece[: LINE_BYTES_MAX - len(self._partial)]

    def _end_line(self) -> None:
        self._lines.append(self._partial.decode(errors="replace").removesuffix("\r"))
        self._partial.clear()

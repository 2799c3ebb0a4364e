"""The output of one process, line by line, read without blocking and within bounds."""

import asyncio
import os
from collections import deque
from contextlib import ExitStack
from typing import Final

LINE_BYTES_MAX: Final = 1 << 20  # The rest of a longer one is read and forgotten.
READ_BYTES: Final = 64 << 10
DRAIN_BYTES_MAX: Final = 8 << 20  # After the end: more than a pipe holds. What got away writes on.


class LinePipe:
    """Lines as somebody takes them; while nobody does, the process waits."""

    def __init__(self) -> None:
        self._ours = -1
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._lines: deque[str] = deque()
        self._begun = bytearray()
        self._is_over = False  # The process is gone; what is in the pipe is the last of it.
        self._is_whole = False
        self._drained = 0

    def open(self, theirs: ExitStack) -> int:
        """The end for the process, which `theirs` closes."""
        self._ours, other = os.pipe()
        theirs.callback(os.close, other)
        os.set_blocking(self._ours, False)
        return other

    async def line(self) -> str | None:
        """The next line without its end; None after the last."""
        while not self._lines:
            if self._is_whole:
                return None
            data = await self._read()
            if data:
                self._take(data)
                continue
            self._is_whole = True
            if self._begun:
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
        """What comes next; nothing at the end."""
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

    def _take(self, data: bytes) -> None:
        first, *rest = data.split(b"\n")
        self._grow(first)
        for piece in rest:
            self._end_line()
            self._grow(piece)

    def _grow(self, piece: bytes) -> None:
        self._begun += piece[: LINE_BYTES_MAX - len(self._begun)]

    def _end_line(self) -> None:
        self._lines.append(self._begun.decode(errors="replace").removesuffix("\r"))
        self._begun.clear()

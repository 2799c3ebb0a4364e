"""Reads all of a process's stderr and keeps its end."""

import asyncio
import os
from contextlib import suppress
from typing import Final

KEPT_BYTES: Final = 8 << 10
FINAL_WAIT_S: Final = 0.25  # For the last output of a process that is about to close its stderr.
_READ_BYTES: Final = 64 << 10
_LAST_READS_MAX: Final = 16  # More than any pipe holds.
_PAUSE_S: Final = 0.01  # After a full read, so that a flood costs us at most 6 MB per second.


class StderrTail:
    """A pipe for the process's stderr, of which only the last 8 KiB are kept."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        os.set_blocking(self._read_fd, False)
        self._kept = b""
        self._is_open = True
        self._at_end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._read_fd, self._read)

    def close_write_fd(self) -> None:
        """Close our copy of the write end; the last copy to close ends the stream."""
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def text(self) -> str:
        """Return the output so far, including what is still in the pipe."""
        for _ in range(_LAST_READS_MAX):
            if not self._is_open or not self._read_once():
                break
        return self._kept.decode("utf-8", "replace").strip()

    async def final_text(self) -> str:
        """Return the output once the stream has ended or `FINAL_WAIT_S` has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(FINAL_WAIT_S):
                await self._at_end.wait()
        return self.text()

    def close(self) -> None:
        """Close the pipe; `text` stays available."""
        self.close_write_fd()
        self.text()
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._read_fd)
            os.close(self._read_fd)
            self._at_end.set()

    def _read(self) -> None:
        if self._read_once() == _READ_BYTES:
            self._loop.remove_reader(self._read_fd)
            self._loop.call_later(_PAUSE_S, self._resume)

    def _read_once(self) -> int:
        """Read once; return the number of bytes."""
        try:
            part = os.read(self._read_fd, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not part:
            self._close()
        self._kept = (self._kept + part)[-KEPT_BYTES:]
        return len(part)

    def _resume(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._read_fd, self._read)

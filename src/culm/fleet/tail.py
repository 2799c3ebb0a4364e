"""What a process prints on stderr: all of it is read, the end of it is kept."""

import asyncio
import os
from contextlib import suppress
from typing import Final

KEPT_BYTES: Final = 8 << 10
MOMENT_S: Final = 0.25  # For the last words of somebody who is about to be silent.
_READ_BYTES: Final = 64 << 10
_LAST_READS_MAX: Final = 16  # More than any pipe holds.
_PAUSE_S: Final = 0.01  # After a full read: a flood gets no more of us than 6 MB a second.


class StderrTail:
    """A pipe; `mouth` is for the process. Nothing is kept but its last 8 KiB."""

    def __init__(self) -> None:
        self._ear, self.mouth = os.pipe()
        os.set_blocking(self._ear, False)
        self._kept = b""
        self._is_open = True
        self._silent = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._ear, self._read)

    def close_mouth(self) -> None:
        """Our copy of it; when the last one is closed, there is silence."""
        if self.mouth >= 0:
            os.close(self.mouth)
            self.mouth = -1

    def text(self) -> str:
        """All that has been said until now is in it, also what is still in the pipe."""
        for _ in range(_LAST_READS_MAX):
            if not self._is_open or not self._take():
                break
        return self._kept.decode("utf-8", "replace").strip()

    async def final_text(self) -> str:
        """Once nobody can say more, or a moment has passed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(MOMENT_S):
                await self._silent.wait()
        return self.text()

    def close(self) -> None:
        """What was said until now can still be asked for."""
        self.close_mouth()
        self.text()
        self._close()

    def _close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._ear)
            os.close(self._ear)
            self._silent.set()

    def _read(self) -> None:
        if self._take() == _READ_BYTES:
            self._loop.remove_reader(self._ear)
            self._loop.call_later(_PAUSE_S, self._go_on)

    def _take(self) -> int:
        """How much there was."""
        try:
            part = os.read(self._ear, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not part:
            self._close()
        self._kept = (self._kept + part)[-KEPT_BYTES:]
        return len(part)

    def _go_on(self) -> None:
        if self._is_open:
            self._loop.add_reader(self._ear, self._read)

"""Keys typed during a run: Escape stops the run, other text is kept for the next prompt.

Owns the mode of the terminal, and always restores it.
"""

import asyncio
import os
import re
import signal
import termios
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

KEYS_BYTES_MAX = 1024
_BACKSPACE = re.compile("[^\x7f\b]?[\x7f\b]")
ESCAPE = b"\x1b"  # Only when alone: with more bytes it is an arrow key or pasted text.


class KeyListener:
    """Reads single keys from a terminal. Use `paused` while the user types a line."""

    def __init__(self, descriptor: int, on_escape: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_escape = on_escape
        self._typed = b""  # Text for the next prompt.
        self._is_listening = False
        self._typing = termios.tcgetattr(descriptor)  # The mode for typing lines.
        self._listening = termios.tcgetattr(descriptor)
        # Ctrl-C and Ctrl-Z still send signals.
        self._listening[3] &= ~(termios.ICANON | termios.ECHO)

    @contextmanager
    def listening(self) -> Generator[None]:
        """Read keys within the block, which runs in an event loop."""
        self._listen()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Restore line mode within the block."""
        self._stop()
        try:
            yield
        finally:
            self._listen()

    def typed(self) -> str:
        """The text typed so far, as one line."""
        text = self._typed.decode(errors="replace")
        while "\x7f" in text or "\b" in text:  # Backspace removes the character before it.
            text = _BACKSPACE.sub("", text, count=1)
        return " ".join("".join(one for one in text if one.isprintable() or one.isspace()).split())

    @contextmanager
    def stopping(self) -> Generator[None]:
        """Restore the terminal before Ctrl-Z stops the process, within a block of the main thread.

        After the process is resumed it reads keys again: shells do not restore the mode.
        """

        def stop(*_: object) -> None:
            self.restore()
            os.kill(os.getpid(), signal.SIGSTOP)  # Returns when the process is resumed.
            with suppress(OSError):
                # In the background the terminal belongs to another process.
                if self._is_listening and os.tcgetpgrp(self._descriptor) == os.getpgrp():
                    self._set(self._listening)

        before = signal.signal(signal.SIGTSTP, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)

    def restore(self) -> None:
        """Restore the mode of the terminal; callable from any thread."""
        self._set(self._typing)

    def _set(self, mode: list[int | list[bytes | int]]) -> None:
        with suppress(termios.error):  # The terminal is gone.
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, mode)

    def _listen(self) -> None:
        self._is_listening = True
        self._set(self._listening)
        asyncio.get_running_loop().add_reader(self._descriptor, self._read)

    def _stop(self) -> None:
        self._is_listening = False
        asyncio.get_running_loop().remove_reader(self._descriptor)
        self.restore()

    def _read(self) -> None:
        try:
            keys = os.read(self._descriptor, KEYS_BYTES_MAX)
        except OSError:
            keys = b""
        if not keys:  # The terminal was closed.
            asyncio.get_running_loop().remove_reader(self._descriptor)
        elif not keys.strip(ESCAPE):  # Pressed once, or repeatedly in a hurry.
            self._on_escape()
        elif ESCAPE not in keys:  # Arrow keys and the like have no meaning here.
            self._typed = (self._typed + keys)[:KEYS_BYTES_MAX]

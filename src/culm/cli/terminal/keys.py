"""Keys that a person types while a run goes on: Escape stops it, the rest is for the next prompt.

Owns the mode of the terminal: as it was is how it is left, whatever happens in between.
"""

import asyncio
import os
import re
import signal
import termios
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

KEYS_BYTES_MAX = 1024
_TAKEN_BACK = re.compile("[^\x7f\b]?[\x7f\b]")
ESCAPE = b"\x1b"  # Alone: more behind it is an arrow, or something pasted.


class KeyListener:
    """Listens to a terminal. `paused` while somebody types a line."""

    def __init__(self, descriptor: int, on_escape: Callable[[], None]) -> None:
        self._descriptor = descriptor
        self._on_escape = on_escape
        self._typed = b""  # What may be meant for the next prompt.
        self._is_listening = False
        self._typing = termios.tcgetattr(descriptor)  # As it is for whoever types lines.
        self._listening = termios.tcgetattr(descriptor)
        # Ctrl-C and Ctrl-Z are signals still.
        self._listening[3] &= ~(termios.ICANON | termios.ECHO)

    @contextmanager
    def listening(self) -> Generator[None]:
        """Within the block, which runs in an event loop."""
        self._listen()
        try:
            yield
        finally:
            self._stop()

    @contextmanager
    def paused(self) -> Generator[None]:
        """Within the block lines are typed as always."""
        self._stop()
        try:
            yield
        finally:
            self._listen()

    def typed(self) -> str:
        """What was typed meanwhile, as one line."""
        text = self._typed.decode(errors="replace")
        while "\x7f" in text or "\b" in text:  # What was taken back.
            text = _TAKEN_BACK.sub("", text, count=1)
        return " ".join("".join(one for one in text if one.isprintable() or one.isspace()).split())

    @contextmanager
    def stopping(self) -> Generator[None]:
        """Within the block, of the main thread, Ctrl-Z stops us with the terminal as it was.

        Whoever goes on is listened to again: shells do not bring the mode back.
        """

        def stop(*_: object) -> None:
            self.restore()
            os.kill(os.getpid(), signal.SIGSTOP)  # Until somebody wants us to go on.
            with suppress(OSError):
                # In the background the terminal is another's.
                if self._is_listening and os.tcgetpgrp(self._descriptor) == os.getpgrp():
                    self._set(self._listening)

        before = signal.signal(signal.SIGTSTP, stop)
        try:
            yield
        finally:
            signal.signal(signal.SIGTSTP, before)

    def restore(self) -> None:
        """Leave the terminal as it was; from any thread."""
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
        if not keys:  # Nobody sits there any more.
            asyncio.get_running_loop().remove_reader(self._descriptor)
        elif not keys.strip(ESCAPE):  # Once, or more than once by who is in a hurry.
            self._on_escape()
        elif ESCAPE not in keys:  # An arrow has nothing to move in.
            self._typed = (self._typed + keys)[:KEYS_BYTES_MAX]

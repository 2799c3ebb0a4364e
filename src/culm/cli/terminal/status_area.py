"""The last lines of a terminal, drawn in place: they are erased before anything else is printed.

Owns what stands there. The cursor rests where they begin, so that all that is drawn is below it: a
terminal that is made narrower breaks those lines as it likes, and they are erased all the same.
"""

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol, TextIO

from culm.cli.terminal.status_lines import RunStatus, lines_of
from culm.cli.terminal.streams import write

DRAW_S = 0.1  # Ten times a second looks alive, and costs a slow line 10 KB/s at most.
_END_OF_LINE, _BELOW = "\x1b[K", "\x1b[J"  # Erase to there.
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"

Size = tuple[int, int]  # Columns and rows.


class StatusArea:
    """Below what was printed on a terminal. Whatever prints there has it erased before."""

    def __init__(
        self, stream: TextIO, size: Callable[[], Size], *, has_colour: bool = False
    ) -> None:
        self._stream = stream
        self._size = size
        self._has_colour = has_colour
        self._stands = False

    def show(self, doing: RunStatus) -> None:
        """Draw what goes on, as wide as the terminal is by now."""
        self.draw(lines_of(doing, self._size()[0] - 1))

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines and no others, from where the cursor is; it must be at column 0.

        None may be as wide as the terminal: terminals differ in where the cursor is after that.
        """
        shown = lines[: max(self._size()[1] - 1, 1)]  # The cursor cannot go up beyond the screen.
        if not shown:
            self.erase()
            return
        text = f"{_END_OF_LINE}\r\n".join(map(self._styled, shown))
        back = f"\x1b[{len(shown) - 1}A" if len(shown) > 1 else ""
        self._stands = True
        write(self._stream, f"\r{text}{_BELOW}{back}\r")

    def erase(self) -> None:
        """Leave nothing of it, and the cursor where it began."""
        if self._stands:
            self._stands = False
            write(self._stream, f"\r{_BELOW}")

    def _styled(self, line: str) -> str:
        # What a terminal cannot show takes no more room than it would have.
        encoding = self._stream.encoding or "ascii"
        known = line.encode(encoding, "replace").decode(encoding)
        return f"{_DIM}{known}{_PLAIN}" if self._has_colour else known


def find_region(stream: TextIO, environ: Mapping[str, str]) -> StatusArea | None:
    """Where something can be drawn in place; None if that is no terminal, or one that cannot."""
    if not stream.isatty() or environ.get("TERM", "") in ("", "dumb"):
        return None

    def size() -> Size:
        with suppress(OSError):  # It was closed: then nobody looks.
            columns, rows = os.get_terminal_size(stream.fileno())
            if columns and rows:  # A terminal of which nobody has said how large it is has none.
                return columns, rows
        return 80, 24

    return StatusArea(stream, size, has_colour=not environ.get("NO_COLOR"))


class StatusSource(Protocol):
    """Who prints on the same terminal, and knows when there is room to draw."""

    def draw(self, doing: RunStatus) -> None: ...
    def erase(self) -> None: ...


async def redraw_until_done(
    face: StatusSource, look: Callable[[], RunStatus], stop: asyncio.Event
) -> None:
    """Draw what goes on until told to stop, or cancelled; nothing of it is left then."""
    try:
        while not stop.is_set():
            face.draw(look())
            with suppress(TimeoutError):
                async with asyncio.timeout(DRAW_S):
                    await stop.wait()
    finally:
        face.erase()

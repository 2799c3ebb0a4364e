"""Rows that fit a terminal: what is least worth its room is left out, and the last cell is cut."""

import shutil
import sys
import unicodedata
from collections.abc import Sequence

from culm.wire.codec import printable

GAP = "  "
LAST_MIN = 12  # Columns for the last cell, which says what a row is about.


def screen_width() -> int | None:
    """How wide stdout is; None if it is no terminal: what is piped is never cut."""
    if sys.stdout is None or not sys.stdout.isatty():
        return None
    return shutil.get_terminal_size().columns


def table(
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> list[str]:
    """Rows as lines of at most `width` columns, the cells of `right` flush with their right side.

    Where the last cell would have too little room, the cells of `spare` are left out, in order.
    """
    cells = [[printable(" ".join(cell.split())) for cell in row] for row in rows]
    widths = [max(map(cells_of, column)) for column in zip(*cells, strict=True)]
    kept = list(range(len(widths)))
    for one in spare:
        if width is not None and _before_last(kept, widths) + LAST_MIN > width:
            kept.remove(one)
    room = None if width is None else max(width - _before_last(kept, widths), 0)
    lines: list[str] = []
    for row in cells:
        *first, last = kept
        padded = [_padded(row[n], widths[n], to_right=n in right) for n in first]
        line = GAP.join([*padded, row[last] if room is None else cut_to(row[last], room)])
        lines.append((line if width is None else cut_to(line, width)).rstrip())
    return lines


def _before_last(kept: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[n] + len(GAP) for n in kept[:-1])


def _padded(text: str, width: int, *, to_right: bool) -> str:
    space = " " * (width - cells_of(text))
    return space + text if to_right else text + space


def cells_of(text: str) -> int:
    """How many columns a terminal needs for it."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def _cells(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Cf", "Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def cut_to(text: str, width: int) -> str:
    """As much of it as fits, with a sign if there was more."""
    if cells_of(text) <= width:
        return text
    used, kept = 1, ""  # The sign takes one.
    for character in text:
        used += _cells(character)
        if used > width:
            break
        kept += character
    return f"{kept}…" if width else ""

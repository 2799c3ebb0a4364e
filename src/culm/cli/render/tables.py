"""Rows that fit a terminal: what is least worth its room is left out, and the last cell is cut."""

from collections.abc import Sequence

from culm.cli.render.cells import cells_of, fit
from culm.wire.codec import printable

GAP = "  "
LAST_MIN = 12  # Columns for the last cell, which says what a row is about.


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
        line = GAP.join([*padded, row[last] if room is None else fit(row[last], room)])
        lines.append((line if width is None else fit(line, width)).rstrip())
    return lines


def _before_last(kept: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[n] + len(GAP) for n in kept[:-1])


def _padded(text: str, width: int, *, to_right: bool) -> str:
    space = " " * (width - cells_of(text))
    return space + text if to_right else text + space

"""Rows as aligned columns of a terminal, and the order of rows that form a tree.

Pure. Two layouts: `columns` and `table` never cut the first cell and wrap a row that is too wide,
`fitted_table` keeps each row on one line and leaves out the columns that matter least.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from culm.cli.render.text import cells_of, fit
from culm.wire.codec import printable

GAP = "  "
LAST_WIDTH_MIN = 16  # A last column with less room is useless, so the row wraps instead.
MORE_INDENT = "    "  # Indents the further lines of a row.
FITTED_LAST_MIN = 12  # Columns for the last cell of `fitted_table`, which describes the row.


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 0) -> list[str]:
    """The rows as `columns`, below a header."""
    return columns([head, *rows], width=width)


def columns(rows: Iterable[Sequence[str]], indent: str = "", width: int = 0) -> list[str]:
    """Rows as lines; every column but the last is as wide as its widest cell.

    With a `width` no line is wider, except for the first cell of a row: people copy and paste it,
    so it is never cut. The last column is cut first; where too little of it would be left, each
    row takes several lines, the further ones indented.
    """
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(cells_of, column)) for column in zip(*cells, strict=True)]
    if not widths or not width:
        return [_line(row, widths, indent) for row in cells]
    before = len(indent) + sum(widths[:-1]) + len(GAP) * (len(widths) - 1)
    if before + min(widths[-1], LAST_WIDTH_MIN) <= width:
        fitting = [[*row[:-1], fit(row[-1], width - before)] for row in cells]
        return [_line(row, widths, indent) for row in fitting]
    return [line for row in cells for line in _wrapped(row, widths, indent, width)]


def fitted_table(
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    *,
    right: Sequence[int] = (),
    spare: Sequence[int] = (),
) -> list[str]:
    """One line per row, at most `width` columns wide; the cells of `right` are right-aligned.

    Where the last cell would have too little room, the cells of `spare` are left out, in order.
    """
    cells = [[printable(" ".join(cell.split())) for cell in row] for row in rows]
    widths = [max(map(cells_of, column)) for column in zip(*cells, strict=True)]
    kept = list(range(len(widths)))
    for one in spare:
        if width is not None and _before_last(kept, widths) + FITTED_LAST_MIN > width:
            kept.remove(one)
    room = None if width is None else max(width - _before_last(kept, widths), 0)
    lines: list[str] = []
    for row in cells:
        *first, last = kept
        padded = [_padded(row[n], widths[n], to_right=n in right) for n in first]
        line = GAP.join([*padded, row[last] if room is None else fit(row[last], room)])
        lines.append((line if width is None else fit(line, width)).rstrip())
    return lines


def in_tree_order(parents: Mapping[str, str]) -> Iterator[tuple[int, str]]:
    """Each id once, below its parent, with its depth; siblings in the order given.

    An id whose parent is missing is at the top.
    """
    below: dict[str, list[str]] = {}
    for one, parent in parents.items():
        below.setdefault(parent if parent in parents else "", []).append(one)
    shown: set[str] = set()
    for start in (*below.get("", ()), *parents):  # Ids that form a cycle come last.
        left = [(0, start)]
        while left:
            depth, one = left.pop()
            if one not in shown:
                shown.add(one)
                yield depth, one
                left += [(depth + 1, child) for child in reversed(below.get(one, ()))]


def _line(row: Sequence[str], widths: Sequence[int], indent: str) -> str:
    return (indent + GAP.join(map(_padded, row, widths))).rstrip() if any(row) else ""


def _wrapped(row: Sequence[str], widths: Sequence[int], indent: str, width: int) -> Iterator[str]:
    """One row: as many aligned columns as fit on its first line, and the rest below."""
    first, left = [_padded(row[0], widths[0])], list[str]()
    used = len(indent) + widths[0]
    for cell, wide in zip(row[1:-1], widths[1:-1], strict=True):
        if used + len(GAP) + wide <= width:
            first.append(_padded(cell, wide))
            used += len(GAP) + wide
        else:
            left.append(cell)
    yield (indent + GAP.join(first)).rstrip()
    deeper = indent + MORE_INDENT
    room = max(width - len(deeper), 1)
    line = ""
    for cell in filter(None, (*left, *row[1:][-1:])):
        more = f"{line}{GAP}{cell}" if line else cell
        if line and cells_of(more) > room:
            yield deeper + line
            more = cell
        line = fit(more, room)
    if line:
        yield deeper + line


def _before_last(kept: Sequence[int], widths: Sequence[int]) -> int:
    return sum(widths[n] + len(GAP) for n in kept[:-1])


def _padded(text: str, width: int, *, to_right: bool = False) -> str:
    space = " " * (width - cells_of(text))
    return space + text if to_right else text + space

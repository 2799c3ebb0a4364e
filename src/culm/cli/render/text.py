"""Text on a terminal: columns that line up, and nothing in them that the terminal would obey.

Pure: how wide a terminal is, whoever prints knows (`streams.output_width`).
"""

from collections.abc import Iterable, Iterator, Sequence

from culm.cli.render.cells import cells_of, fit
from culm.wire.codec import printable

GAP = "  "
LAST_WIDTH_MIN = 16  # Of a last column that is cut: less says nothing, and has a line of its own.
MORE_INDENT = "    "  # Of what has no room on the first line of a row.


def cut(text: str, chars_max: int) -> str:
    """The beginning of a text, and how much is missing."""
    missing = len(text) - chars_max
    return text if missing <= 0 else f"{text[:chars_max]}… ({missing:,} more characters)"


def counted(number: int, one: str, many: str) -> str:
    """A number and the words for as many."""
    return f"{number:,} {one if number == 1 else many}"


def age_text(age_s: float) -> str:
    minutes, seconds = divmod(max(0, int(age_s)), 60)
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    if days:
        return f"{days}d {rest}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def size_text(size_bytes: int) -> str:
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], width: int = 0) -> list[str]:
    """As `columns`, below their names."""
    return columns([head, *rows], width=width)


def columns(rows: Iterable[Sequence[str]], indent: str = "", width: int = 0) -> list[str]:
    """Rows as lines; every column but the last is as wide as its widest cell.

    With a `width` no line is wider, unless the first cell of a row is: that is what people paste,
    and it is never cut. First the last column is cut; where too little of it would be left, each
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
    return [line for row in cells for line in _lines(row, widths, indent, width)]


def _line(row: Sequence[str], widths: Sequence[int], indent: str) -> str:
    return (indent + GAP.join(map(_padded, row, widths))).rstrip() if any(row) else ""


def _lines(row: Sequence[str], widths: Sequence[int], indent: str, width: int) -> Iterator[str]:
    """One row: as many columns as line up on its first line, and what is left below."""
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


def _padded(cell: str, width: int) -> str:
    return cell + " " * (width - cells_of(cell))

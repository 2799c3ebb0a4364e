"""Text on a terminal: columns that line up, and nothing in them that the terminal would obey."""

from collections.abc import Iterable, Sequence

from culm.wire.codec import printable


def cut(text: str, chars_max: int) -> str:
    """The beginning of a text, and how much is missing."""
    missing = len(text) - chars_max
    return text if missing <= 0 else f"{text[:chars_max]}… ({missing:,} more characters)"


def counted(number: int, one: str, many: str) -> str:
    """A number and the words for as many."""
    return f"{number:,} {one if number == 1 else many}"


def columns(rows: Iterable[Sequence[str]], indent: str = "") -> list[str]:
    """Rows as lines; every column but the last is as wide as its widest cell."""
    cells = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        indent + "  ".join(map(str.ljust, row, widths)).rstrip() if any(row) else ""
        for row in cells
    ]

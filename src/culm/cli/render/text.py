"""Short texts and tables for a terminal: measured, cut to fit, and free of control characters.

Pure. The width of the terminal comes from the caller (`process.output_width`). Two layouts of rows:
`columns` and `table` never cut the first cell and wrap a row that is too wide, `fitted_table` keeps
each row on one line and leaves out the columns that matter least.
"""

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime

from culm.wire.agents import Agent
from culm.wire.codec import printable

HEAD_CHARS = 200  # Limit of a one-line excerpt of an input, an error or a prompt.
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
LABEL_CHARS = 20  # A label is a margin, not a title.
ID_CHARS = 8
AGO_DAYS_MAX = 30  # Beyond this a date is more useful than a number of days.
GAP = "  "
LAST_WIDTH_MIN = 16  # A last column with less room is useless, so the row wraps instead.
MORE_INDENT = "    "  # Indents the further lines of a row.
FITTED_LAST_MIN = 12  # Columns for the last cell of `fitted_table`, which describes the row.

# Control characters except tab and newline, line and paragraph separators, characters that change
# the direction of text, and lone surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
_TRAILING = " \"'`([{<,;:.-*"  # Removed from the end of a name that is cut.
_EMOJI = "\ufe0f"  # Turns the character before it into an emoji, which takes one more column.
_FLAGS = range(0x1F1E6, 0x1F200)  # Two of these letters form a flag; alone, each takes two columns.


def without_controls(text: str) -> str:
    return _CONTROL.sub("", text)


def head_of(text: str) -> str:
    """The beginning of a text on one line, without control characters."""
    line = without_controls(" ".join(text[: 2 * HEAD_CHARS].split()))
    return line if len(line) <= HEAD_CHARS else line[: HEAD_CHARS - 1] + "…"


def cut(text: str, chars_max: int) -> str:
    """The beginning of a text, followed by the number of characters left out."""
    missing = len(text) - chars_max
    return text if missing <= 0 else f"{text[:chars_max]}… ({missing:,} more characters)"


def cells_of(text: str) -> int:
    """The columns that a text without control characters takes.

    Where terminals disagree the wider result counts: a line that is cut early is better than one
    that wraps.
    """
    return len(text) if text.isascii() else sum(map(_cells, text))


def fit(text: str, cells_max: int) -> str:
    """The text, or its beginning and an ellipsis; never wider than `cells_max`."""
    if cells_of(text) <= cells_max:
        return text
    taken, kept = 1, 0  # The ellipsis takes one column.
    for one in text:
        taken += _cells(one)
        if taken > cells_max:
            break
        kept += 1
    return f"{text[:kept].rstrip()}…" if cells_max > 0 else ""


def _cells(one: str) -> int:
    if one == _EMOJI:
        return 1
    if unicodedata.category(one) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(one) in "WF" or ord(one) in _FLAGS else 1


def counted(number: int, one: str, many: str) -> str:
    """A number followed by the noun in the singular or the plural."""
    return f"{number:,} {one if number == 1 else many}"


def age_text(age_s: float) -> str:
    minutes, seconds = divmod(max(0, int(age_s)), 60)
    hours, minutes = divmod(minutes, 60)
    days, rest = divmod(hours, 24)
    if days:
        return f"{days}d {rest}h"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def ago_text(at: int, now_s: float) -> str:
    """The time since `at`; a time in the future, by another machine's clock, is "now"."""
    age_s = int(now_s) - at
    if age_s < MINUTE_S:
        return "now"
    if age_s < HOUR_S:
        return f"{age_s // MINUTE_S} min ago"
    if age_s < DAY_S:
        return f"{age_s // HOUR_S} h ago"
    if age_s < AGO_DAYS_MAX * DAY_S:
        return f"{age_s // DAY_S} d ago"
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"


def size_text(size_bytes: int) -> str:
    if size_bytes < 1 << 30:
        return f"{size_bytes / (1 << 20):.1f} MiB"
    return f"{size_bytes / (1 << 30):.1f} GiB"


def label_of(agent: Agent, taken: Collection[str]) -> str:
    """A short name that is not in `taken`."""
    name = head_of(agent.name) or agent.role or agent.agent_id[:ID_CHARS]
    short = name if len(name) <= LABEL_CHARS else name[: LABEL_CHARS - 1].rstrip(_TRAILING) + "…"
    number, label = 1, short
    while label in taken:
        number += 1
        label = f"{short} {number}"
    return label


def used_text(tokens: int, cost: float) -> str:
    return f"{tokens:,} {'token' if tokens == 1 else 'tokens'}, ${cost:.4f}"


# --- tables


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

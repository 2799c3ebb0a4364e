"""Short texts for a terminal: measured, cut to fit, and free of control characters.

Pure. The width of the terminal comes from the caller (`streams.output_width`).
"""

import re
import unicodedata
from datetime import UTC, datetime

HEAD_CHARS = 200  # Limit of a one-line excerpt of an input, an error or a prompt.
MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
AGO_DAYS_MAX = 30  # Beyond this a date is more useful than a number of days.

# Control characters except tab and newline, line and paragraph separators, characters that change
# the direction of text, and lone surrogates.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)
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

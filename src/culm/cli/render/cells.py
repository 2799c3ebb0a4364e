"""How many columns of a terminal a text takes, and how it is cut to fit.

Where terminals differ the wider one counts: a line that is cut early is better than one that wraps.
"""

import unicodedata

_EMOJI = "\ufe0f"  # Makes the sign before it an emoji, which takes two.
_FLAGS = range(0x1F1E6, 0x1F200)  # Letters of which two are a flag; alone each takes two.


def cells_of(text: str) -> int:
    """Of a text without control characters."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def fit(text: str, cells_max: int) -> str:
    """The text, or its beginning with a sign that more is missing; never wider than told."""
    if cells_of(text) <= cells_max:
        return text
    taken, kept = 1, 0  # The sign takes one.
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

"""Replacement of a text that occurs exactly once, regardless of line ends.

Pure. `mismatch.py` explains a text that does not occur.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from culm.tools.files.mismatch import explain_miss

LINES_NAMED_MAX = 10
_PAIR = re.compile("\r\n")


class ReplaceFailed(Exception):
    """The reason why an edit cannot be made, and how to fix it, for the model."""


def replaced(text: str, old: str, new: str, *, everywhere: bool, explain: bool = True) -> str:
    """Return `text` with `old` replaced by `new`; raises `ReplaceFailed`.

    A line end in `old` matches either kind in the text. Inserted lines end like the lines they
    replace; nothing else changes. Without `explain` a miss is reported quickly.
    """
    if not old:
        raise ReplaceFailed(
            "old_string is empty. To create a new file, use a path that does not exist."
        )
    wanted, inserted = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if old == new or wanted == inserted:
        raise ReplaceFailed("old_string and new_string are the same, so nothing would change.")
    has_pairs = "\r\n" in text
    flat = text.replace("\r\n", "\n") if has_pairs else text
    starts = _find(flat, wanted)
    if not starts:
        raise ReplaceFailed(explain_miss(flat, wanted) if explain else "old_string was not found.")
    if len(starts) > 1 and not everywhere:
        raise ReplaceFailed(_ambiguous(flat, starts))
    if not has_pairs:
        put = (
            inserted if "\r\n" in old else new
        )  # In a file without pairs it is inserted as written.
        return put.join(_around(text, starts, len(wanted)))
    pieces: list[str] = []
    done = 0
    borders = [at for start in starts for at in (start, start + len(wanted))]
    offsets = _raw_offsets(text, flat, borders)
    for begin, end in zip(offsets[::2], offsets[1::2], strict=True):
        pieces += (text[done:begin], inserted.replace("\n", _ending(text, begin, end)))
        done = end
    return "".join((*pieces, text[done:]))


def _raw_offsets(text: str, flat: str, borders: Sequence[int]) -> list[int]:
    """Map offsets of `flat`, in order, to `text`; an offset before a pair stays before both."""
    if text.count("\n") > len(text) - len(flat):  # Line ends are mixed: each one is checked.
        pairs = [found.start() - n for n, found in enumerate(_PAIR.finditer(text))]
        return [at + bisect_left(pairs, at) for at in borders]
    offsets: list[int] = []
    passed = before = 0
    for at in borders:
        passed += flat.count("\n", before, at)
        before = at
        offsets.append(at + passed)
    return offsets


def _find(text: str, wanted: str) -> list[int]:
    starts: list[int] = []
    at = text.find(wanted)
    while at >= 0:
        starts.append(at)
        at = text.find(wanted, at + len(wanted))
    return starts


def _around(text: str, starts: Sequence[int], length: int) -> list[str]:
    ends = [0, *(start + length for start in starts)]
    return [text[end:start] for end, start in zip(ends, (*starts, len(text)), strict=True)]


def _ending(text: str, begin: int, end: int) -> str:
    """Return the line end of a span in a text with both kinds: its own first, or the next."""
    at = text.find("\n", begin, end)
    if at < 0:
        at = text.find("\n", end)
    if at < 0:
        at = text.rfind("\n", 0, begin)
    return "\r\n" if at > 0 and text[at - 1] == "\r" else "\n"


def _ambiguous(text: str, starts: Sequence[int]) -> str:
    lines: list[str] = []
    number, before = 1, 0
    for start in starts[:LINES_NAMED_MAX]:
        number += text.count("\n", before, start)
        before = start
        lines.append(str(number))
    more = ", …" if len(starts) > LINES_NAMED_MAX else ""
    return (
        f"old_string was found {len(starts)} times, at lines {', '.join(lines)}{more}. Add lines "
        "around it until it is unique, or set replace_all to replace every one."
    )

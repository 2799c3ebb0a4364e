"""Replacing one text by another where it stands exactly once, whatever the lines end with.

Pure. What is said when it stands nowhere is `misses.py`.
"""

import re
from bisect import bisect_left
from collections.abc import Sequence

from culm.tools.files.mismatch import explain_miss

LINES_NAMED_MAX = 10
_PAIR = re.compile("\r\n")


class ReplaceFailed(Exception):
    """Why an edit cannot be made, and how to mend it. The words are for the model."""


def replaced(text: str, old: str, new: str, *, everywhere: bool, explain: bool = True) -> str:
    """`text` with `old` replaced by `new`; raises `Miss`.

    A line's end in `old` fits either kind in the text. What is put in ends its lines like what it
    replaces; nothing else is touched. Without `explain` a miss is said quickly.
    """
    if not old:
        raise ReplaceFailed(
            "old_string is empty. To make a new file, name one that does not exist."
        )
    wanted, given = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if old == new or wanted == given:
        raise ReplaceFailed("old_string and new_string are the same, so nothing would change.")
    has_pairs = "\r\n" in text
    flat = text.replace("\r\n", "\n") if has_pairs else text
    starts = _find(flat, wanted)
    if not starts:
        raise ReplaceFailed(explain_miss(flat, wanted) if explain else "old_string was not found.")
    if len(starts) > 1 and not everywhere:
        raise ReplaceFailed(_ambiguous(flat, starts))
    if not has_pairs:
        put = given if "\r\n" in old else new  # In a file without pairs it is as it was written.
        return put.join(_around(text, starts, len(wanted)))
    pieces: list[str] = []
    done = 0
    borders = [at for start in starts for at in (start, start + len(wanted))]
    places = _raw_places(text, flat, borders)
    for begin, end in zip(places[::2], places[1::2], strict=True):
        pieces += (text[done:begin], given.replace("\n", _ending(text, begin, end)))
        done = end
    return "".join((*pieces, text[done:]))


def _raw_places(text: str, flat: str, borders: Sequence[int]) -> list[int]:
    """Where places of `flat`, in order, are in `text`; in front of a pair is in front of both."""
    if text.count("\n") > len(text) - len(flat):  # Some lines end otherwise: each is looked at.
        pairs = [found.start() - n for n, found in enumerate(_PAIR.finditer(text))]
        return [at + bisect_left(pairs, at) for at in borders]
    places: list[int] = []
    passed = before = 0
    for at in borders:
        passed += flat.count("\n", before, at)
        before = at
        places.append(at + passed)
    return places


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
    """How lines end in a span of a text that has both kinds: as its own first, or the next."""
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

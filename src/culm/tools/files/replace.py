"""Replacement of a text that occurs exactly once, regardless of line ends.

Pure. For a text that does not occur it explains the likely mistake and shows the nearest lines, in
a time that grows linearly with the file.
"""

import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

from msgspec import Struct

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


# --- the explanation for a text that is not in a file


LINES_SHOWN_MAX = 25
LINE_CHARS_MAX = 300
COMPARED_CHARS_MAX = 2 << 20  # In larger texts only the quick checks are made.
LIKENESS_MIN = 0.4  # Of the wanted words; fewer are a coincidence.
_NUMBERED = re.compile(r"^ *\d+\|", re.MULTILINE)
_WORD = re.compile(r"\w+")


class _Line(Struct, frozen=True):
    number: int  # From 1.
    text: str
    bare: str  # With every run of blanks reduced to one, and none at its ends.


def explain_miss(text: str, wanted: str) -> str:
    """Explain why `wanted` was not found, to a model that will try again."""
    if not text:
        return "old_string was not found: the file is empty."
    bare = _NUMBERED.sub("", wanted)
    if bare != wanted and bare in text:
        return (
            "old_string was not found; it is in the file without the line numbers that view adds. "
            "Leave out the number and the bar of each line."
        )
    if "\ufffd" in wanted and "\ufffd" not in text:
        return (
            "old_string was not found. It contains \ufffd, which view shows for bytes that are "
            "not UTF-8: choose a text without it."
        )
    if len(text) > COMPARED_CHARS_MAX:
        return "old_string was not found. Search the file with grep, then view those lines."
    lines, asked = _lines(text), _lines(wanted)
    return (
        _but_for_blanks(lines, asked)
        or _nearest(lines, asked)
        or "old_string was not found, nor anything like it. View the file again."
    )


def _lines(text: str) -> list[_Line]:
    return [
        _Line(number, line, " ".join(line.split()))
        for number, line in enumerate(text.split("\n"), 1)
    ]


def _but_for_blanks(lines: Sequence[_Line], asked: Sequence[_Line]) -> str | None:
    """Find lines that differ only in blanks and empty lines."""
    full = [line for line in lines if line.bare]
    wanted = [line for line in asked if line.bare]
    if not wanted:
        return "old_string has only blanks, and the file has different ones."
    haystack = "\n".join(line.bare for line in full)
    at = haystack.find("\n".join(line.bare for line in wanted))
    if at < 0:
        return None
    first = haystack.count("\n", 0, at)
    found = full[first : first + len(wanted)]
    differences = _differences(found, wanted)
    counts = found[-1].number - found[0].number, wanted[-1].number - wanted[0].number
    if counts[0] != counts[1]:
        differences.append("the empty lines between")
    nearest = lines[found[0].number - 1 : found[-1].number]
    return (
        f"old_string was not found, but at {_line_range(nearest)} there is the same with other "
        f"blanks{': ' if differences else ''}{', '.join(differences)}. The file has:\n"
        f"{_shown(nearest)}"
    )


def _differences(found: Sequence[_Line], wanted: Sequence[_Line]) -> list[str]:
    kinds: dict[str, None] = {}  # In order of appearance.
    last = len(wanted) - 1
    for at, (actual, expected) in enumerate(zip(found, wanted, strict=True)):
        indents = _indent(actual.text), _indent(expected.text)
        trails = _trail(actual.text), _trail(expected.text)
        # old_string may begin and end within a line.
        if indents[0] != indents[1] and (at or not indents[0].endswith(indents[1])):
            kinds[_about_indents(*indents)] = None
        if trails[0] != trails[1] and (at < last or not trails[0].startswith(trails[1])):
            kinds["blanks at the end of a line"] = None
        if expected.text.strip() not in actual.text:
            odd = next((c for c in actual.text if c.isspace() and c not in " \t"), None)
            name = "blanks within a line"
            kinds[name if odd is None else f"{name} (the file has U+{ord(odd):04X})"] = None
    return list(kinds)


def _about_indents(actual: str, expected: str) -> str:
    if "\t" in actual and "\t" not in expected:
        return "the file is indented with tabs, old_string is not"
    if "\t" in expected and "\t" not in actual:
        return "old_string is indented with tabs, the file is not"
    return f"the indentation ({len(actual)} in the file, {len(expected)} in old_string)"


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _trail(line: str) -> str:
    return line[len(line.rstrip()) :]


def _nearest(lines: Sequence[_Line], asked: Sequence[_Line]) -> str | None:
    """Find the lines that share most words with the wanted text; rare words count more."""
    words = {word for line in asked for word in _WORD.findall(line.bare)}
    there = [words.intersection(_WORD.findall(line.bare)) for line in lines]
    seen = Counter(word for found in there for word in found)
    worth = [sum(1 / seen[word] for word in found) for found in there]
    size = min(len(asked), len(lines))
    total = best = sum(worth[:size])
    start = 0
    for at in range(size, len(lines)):
        total += worth[at] - worth[at - size]
        if total > best + 1e-9:
            best, start = total, at - size + 1
    common = set[str]().union(*there[start : start + size])
    if not words or len(common) / len(words) < LIKENESS_MIN:
        return None
    nearest = lines[start : start + size]
    return (
        f"old_string was not found. The nearest is at {_line_range(nearest)}; copy from it "
        f"exactly, or view the file again:\n{_shown(nearest)}"
    )


def _line_range(lines: Sequence[_Line]) -> str:
    first, last = lines[0].number, lines[-1].number
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _shown(lines: Sequence[_Line]) -> str:
    shown = [f"{line.number:>6}|{_cut(line.text)}" for line in lines[:LINES_SHOWN_MAX]]
    if len(lines) > LINES_SHOWN_MAX:
        shown.append(f"({len(lines) - LINES_SHOWN_MAX} more lines)")
    return "\n".join(shown)


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]} … (cut)"

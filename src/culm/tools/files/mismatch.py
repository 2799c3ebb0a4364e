"""What to say of a text that is not in a file: what it was probably taken for, and where that is.

Pure, and bounded: a miss is answered in a time that grows with the file, and no faster.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LINES_SHOWN_MAX = 25
LINE_CHARS_MAX = 300
COMPARED_CHARS_MAX = 2 << 20  # In larger texts only what is quick to find is looked for.
LIKENESS_MIN = 0.4  # Of the words asked for; with fewer it is a chance resemblance.
_NUMBERED = re.compile(r"^ *\d+\|", re.MULTILINE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class _Line:
    number: int  # From 1.
    text: str
    bare: str  # With every run of blanks made one, and none at its ends.


def explain_miss(text: str, wanted: str) -> str:
    """Why `wanted` was not found, for a model that will try again."""
    if not text:
        return "old_string was not found: the file is empty."
    bare = _NUMBERED.sub("", wanted)
    if bare != wanted and bare in text:
        return (
            "old_string was not found as it is, but without the line numbers that view puts in "
            "front. Leave out the number and the bar of each line."
        )
    if "\ufffd" in wanted and "\ufffd" not in text:
        return (
            "old_string was not found. It has the mark \ufffd, which view shows for bytes that "
            "are no UTF-8: choose a text without it."
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
    """The place where everything but the blanks and the empty lines is the same."""
    full = [line for line in lines if line.bare]
    wanted = [line for line in asked if line.bare]
    if not wanted:
        return "old_string has nothing but blanks, and the file has them otherwise."
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
    place = lines[found[0].number - 1 : found[-1].number]
    return (
        f"old_string was not found, but at {_place(place)} there is the same with other blanks"
        f"{': ' if differences else ''}{', '.join(differences)}. The file has:\n{_shown(place)}"
    )


def _differences(found: Sequence[_Line], wanted: Sequence[_Line]) -> list[str]:
    kinds: dict[str, None] = {}  # In the order they are seen.
    last = len(wanted) - 1
    for at, (there, given) in enumerate(zip(found, wanted, strict=True)):
        indents = _indent(there.text), _indent(given.text)
        trails = _trail(there.text), _trail(given.text)
        # old_string may begin and end within a line, whose rest then says nothing.
        if indents[0] != indents[1] and (at or not indents[0].endswith(indents[1])):
            kinds[_about_indents(*indents)] = None
        if trails[0] != trails[1] and (at < last or not trails[0].startswith(trails[1])):
            kinds["blanks at the end of a line"] = None
        if given.text.strip() not in there.text:
            odd = next((c for c in there.text if c.isspace() and c not in " \t"), None)
            name = "blanks within a line"
            kinds[name if odd is None else f"{name} (the file has U+{ord(odd):04X})"] = None
    return list(kinds)


def _about_indents(there: str, given: str) -> str:
    if "\t" in there and "\t" not in given:
        return "the file is indented with tabs, old_string is not"
    if "\t" in given and "\t" not in there:
        return "old_string is indented with tabs, the file is not"
    return f"the indentation ({len(there)} in the file, {len(given)} in old_string)"


def _indent(line: str) -> str:
    return line[: len(line) - len(line.lstrip())]


def _trail(line: str) -> str:
    return line[len(line.rstrip()) :]


def _nearest(lines: Sequence[_Line], asked: Sequence[_Line]) -> str | None:
    """The run of lines that has most of the words that were asked for; rare ones count more."""
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
    place = lines[start : start + size]
    return (
        f"old_string was not found. The nearest is at {_place(place)}; copy from it exactly, or "
        f"view the file again:\n{_shown(place)}"
    )


def _place(lines: Sequence[_Line]) -> str:
    first, last = lines[0].number, lines[-1].number
    return f"line {first}" if first == last else f"lines {first} to {last}"


def _shown(lines: Sequence[_Line]) -> str:
    shown = [f"{line.number:>6}|{_cut(line.text)}" for line in lines[:LINES_SHOWN_MAX]]
    if len(lines) > LINES_SHOWN_MAX:
        shown.append(f"({len(lines) - LINES_SHOWN_MAX} more lines)")
    return "\n".join(shown)


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARS_MAX else f"{line[:LINE_CHARS_MAX]} … (cut)"

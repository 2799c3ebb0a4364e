"""The explanation for a text that is not in a file: the likely mistake, and the nearest lines.

Pure and bounded: the time grows linearly with the file.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

LINES_SHOWN_MAX = 25
LINE_CHARS_MAX = 300
COMPARED_CHARS_MAX = 2 << 20  # In larger texts only the quick checks are made.
LIKENESS_MIN = 0.4  # Of the wanted words; fewer are a coincidence.
_NUMBERED = re.compile(r"^ *\d+\|", re.MULTILINE)
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class _Line:
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

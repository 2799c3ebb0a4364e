"""The check of one simple command against its entry in the read-only table.

Options are matched exactly. An abbreviated long option, an unexpected value and an unlisted option
each need approval, and so does every path that is not inside the workspace.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from culm.shell.paths import NULL, ReadablePaths
from culm.shell.table import ReadOnlyEntry
from culm.shell.words import Directories, Word

_NUMBER = re.compile(r"-[0-9]+")


class NotReadOnly(Exception):
    """The reason for asking, as the end of a sentence that begins with the command."""


@dataclass(slots=True)
class ReadOnlyCheck:
    """The check of one command; collects the resolved paths that it names."""

    readable: ReadablePaths
    directories: Directories
    real: list[str] = field(default_factory=list[str])
    outside: list[str] = field(default_factory=list[str])

    def check_directories(self) -> Sequence[str]:
        """Check the working directory, which many commands read by default."""
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        self.outside += [path for path in self.directories if not self.readable.contains(path)]
        return self.directories

    def path(self, text: str) -> None:
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        for directory in self.directories:
            real = self.readable.real(directory, text)
            if real is None:
                raise NotReadOnly(f"names a path that cannot be resolved: {_short(text)}")
            self.real.append(real)
            if real != NULL and not self.readable.contains(real):
                self.outside.append(real)

    def with_entries(self, text: str) -> list[str]:
        """Return a path, and its entries if it is a directory."""
        found = [text]
        for directory in self.directories or ():
            names = self.readable.names(directory, text)
            if names is None:
                raise NotReadOnly(f"names a directory with too many entries: {_short(text)}")
            found += [f"{text}/{name}" for name in names]
        return found

    def known(self, word: Word) -> str:
        if word.text is None:
            raise NotReadOnly(f"has an argument with an unknown value: {_short(word.raw)}")
        return word.text

    def expanded(self, word: Word) -> list[str]:
        """Return the words that the shell replaces this one with."""
        text = self.known(word)
        if not word.is_pattern:
            return [text]
        if self.directories is None:
            raise NotReadOnly("runs in an unknown directory")
        found: list[str] = []
        for directory in self.directories:
            matches = self.readable.matches(directory, text)
            if matches is None:
                raise NotReadOnly(f"has a pattern that matches too many files: {_short(text)}")
            found += matches
        for match in found:
            # A file name can look like an option, and a match may be anywhere.
            if match.startswith("-"):
                raise NotReadOnly(f"has a pattern that matches an option: {_short(match)}")
            self.path(match)
        return found


@dataclass(slots=True)
class ParsedOptions:
    """The words of a command, sorted into options and operands."""

    options: list[tuple[str, str | None]] = field(default_factory=list[tuple[str, str | None]])
    operands: list[str] = field(default_factory=list[str])

    def has(self, *names: str) -> bool:
        return any(option in names for option, _ in self.options)


def parse_options(
    entry: ReadOnlyEntry, words: Sequence[Word], reading: ReadOnlyCheck
) -> ParsedOptions:
    """Sort the words after the name. Raises `NotReadOnly` on one that the entry does not list."""
    parsed = ParsedOptions()
    pending = list(reversed(words))
    while pending:
        word = pending.pop()
        text = reading.known(word)
        if word.is_pattern:
            parsed.operands += reading.expanded(word)
        elif text == "--":
            while pending:
                parsed.operands += reading.expanded(pending.pop())
        elif text == "-" or not text.startswith("-"):
            parsed.operands.append(text)
        elif entry.numbers and _NUMBER.fullmatch(text):
            parsed.options.append((text, None))
        elif text.startswith("--"):
            _long(entry, text, pending, parsed, reading)
        else:
            _cluster(entry, text, pending, parsed, reading)
    if len(parsed.operands) > entry.operands_max:
        raise NotReadOnly("has more operands than it reads")
    return parsed


def _long(
    entry: ReadOnlyEntry,
    text: str,
    pending: list[Word],
    parsed: ParsedOptions,
    reading: ReadOnlyCheck,
) -> None:
    name, equals, value = text.partition("=")
    if equals and (name in entry.values or name in entry.optional):
        parsed.options.append((name, value))
    elif equals and name in entry.paths:
        reading.path(value)
        parsed.options.append((name, value))
    elif not equals and (name in entry.flags or name in entry.optional):
        parsed.options.append((name, None))
    elif not equals and (name in entry.values or name in entry.paths):
        parsed.options.append((name, _value(entry, name, pending, parsed, reading)))
    else:
        raise NotReadOnly(f"has an option that is not in the table: {_short(name)}")


def _cluster(
    entry: ReadOnlyEntry,
    text: str,
    pending: list[Word],
    parsed: ParsedOptions,
    reading: ReadOnlyCheck,
) -> None:
    """Parse a cluster of short options: `-la`, `-n5`, `-n 5`."""
    if text in entry.flags:
        parsed.options.append((text, None))
        return
    for index, letter in enumerate(text[1:], 2):
        name = f"-{letter}"
        rest = text[index:]
        if name in entry.flags:
            parsed.options.append((name, None))
            continue
        if name in entry.optional:
            parsed.options.append((name, rest))
        elif name in entry.values or name in entry.paths:
            if rest and name in entry.paths:
                reading.path(rest)
            value = rest or _value(entry, name, pending, parsed, reading)
            parsed.options.append((name, value))
        else:
            raise NotReadOnly(f"has an option that is not in the table: {_short(name)}")
        return


def _value(
    entry: ReadOnlyEntry,
    name: str,
    pending: list[Word],
    parsed: ParsedOptions,
    reading: ReadOnlyCheck,
) -> str:
    if not pending:
        raise NotReadOnly(f"has an option without its value: {name}")
    word = pending.pop()
    value = reading.known(word)
    if word.is_pattern:
        raise NotReadOnly(f"has a pattern as the value of an option: {_short(value)}")
    # If the program on this machine takes no value here, or stops parsing options at its first
    # operand, the word is an operand: it must be harmless as a path, too.
    is_pattern = name in entry.patterns and not parsed.operands
    if name in entry.paths or not (is_pattern or len(value) == 1):
        reading.path(value)
    return value


def check_operands(entry: ReadOnlyEntry, parsed: ParsedOptions, reading: ReadOnlyCheck) -> None:
    """Check the operands of an entry without a check of its own."""
    match entry.operands:
        case "paths":
            paths = parsed.operands
        case "pattern":
            named = parsed.has(*entry.patterns, "-f", "--file", "--files", "--type-list")
            paths = parsed.operands if named else parsed.operands[1:]
        case "none" if parsed.operands:
            raise NotReadOnly(f"has an operand: {_short(parsed.operands[0])}")
        case _:
            paths = []
    for path in paths:
        reading.path(path)


def _short(text: str) -> str:
    shown = text if len(text) <= 60 else f"{text[:57]}…"
    return f"`{shown}`"

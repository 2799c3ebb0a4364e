"""Words and simple commands: the values that the walk over a shell command reports.

Owns quoting. The syntax tree gives the extent of a word and the expansions in it. The scanner here
parses the rest of the word again, so that a word counts as known only where the grammar and the
scanner agree.
"""

import re
from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

# Marks that replace the expansions of a word before it is scanned.
UNKNOWN = "\x00"  # Any value.
OUTPUT = "\x01"  # The output of commands that are judged themselves.
NUMBER = "\x02"  # A number or another harmless value, such as `$?`.

# The possible working directories of a command; None if they are unknown.
Directories = tuple[str, ...] | None
Outcome = tuple[Directories, Directories]  # After success, and after failure.

DIRECTORIES_MAX = 8  # A text that can reach more directories is not free.

PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,^-][A-Za-z0-9_./:@%+,^=-]*")
_META = frozenset("|&;()<>$`\"'\\ \t\n")
_PATTERN = frozenset("*?[]")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


class Word(Struct, frozen=True):
    raw: str  # The source text, with its quotes.
    text: str | None  # Its value; None if the source text does not determine it.
    is_pattern: bool = False  # It contains an unquoted `*` or `?`: the shell expands it to files.
    # The value is unknown, but it is one word made of judged output and numbers only: it may be
    # printed.
    is_printable: bool = False


class VariableAssignment(Struct, frozen=True):
    name: str
    value: Word
    raw: str  # The whole assignment in the source text.


class SimpleCommand(Struct, frozen=True):
    """A simple command as written, before its wrappers are removed."""

    words: tuple[Word, ...]  # Empty if it only sets variables.
    assignments: tuple[VariableAssignment, ...]
    directories: Directories


class CommandVisitor(Protocol):
    """The receiver of everything that the walk over a command finds."""

    def unclear(self, why: str) -> None:
        """Report that the text does not determine the commands that would run."""
        ...

    def define(self, name: str) -> None:
        """Report a function definition; the commands of its body are reported, too."""
        ...

    def simple(self, command: SimpleCommand) -> Outcome: ...

    def test(self, words: Sequence[Word], directories: Directories) -> None:
        """Report `[ … ]` or `[[ … ]]`, brackets included."""
        ...

    def redirect(self, operator: str, target: Word, directories: Directories) -> None:
        """Report a redirection; `<<<` also stands for a here-document."""
        ...


class UnexpectedWord(Exception):
    """Text that cannot be a word: the grammar has misread the command."""


def names(text: str) -> frozenset[str]:
    """Split a string of names separated by blanks into a set."""
    return frozenset(text.split())


def union(*several: Directories) -> Directories:
    found: dict[str, None] = {}
    for directories in several:
        if directories is None:
            return None
        found.update(dict.fromkeys(directories))
    return tuple(found) if len(found) <= DIRECTORIES_MAX else None


def scan(masked: str, raw: str) -> Word:
    """Parse one word whose expansions are masked. Raises `UnexpectedWord`."""
    return _Scanner(masked).scan(raw)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[str] = []
        self._live = ""  # The unquoted characters, which the shell expands after it removes quotes.
        self._quoted_pattern = False
        self._unknown = False
        self._unprintable = False

    def scan(self, raw: str) -> Word:
        text, end = self._text, len(self._text)
        if text.startswith("#"):
            raise UnexpectedWord("a comment")
        while self._at < end:
            char = text[self._at]
            if char == "'":
                self._single()
            elif char == '"':
                self._double()
            elif char == "$" and text.startswith("$'", self._at):
                self._ansi()
            elif char == "$" and text[self._at + 1 : self._at + 2] in ("", "/", ".", ":", "%", ","):
                self._unquoted(char)
            elif char == "\\":
                self._escaped()
            elif char in (UNKNOWN, OUTPUT, NUMBER):
                self._unknown = True
                self._unprintable |= char != NUMBER
                self._live += "x"
                self._at += 1
            elif char in _META:
                raise UnexpectedWord(f"{char!r} in a word")
            else:
                self._unquoted(char)
        return self._word(raw)

    def _word(self, raw: str) -> Word:
        live = self._live
        is_pattern = "*" in live or "?" in live
        if self._unknown:
            return Word(
                raw, None, is_printable=not (self._unprintable or is_pattern or "~" in live)
            )
        if _leaves_text(live) or (is_pattern and self._quoted_pattern):
            return Word(raw, None)
        return Word(raw, "".join(self._out), is_pattern)

    def _unquoted(self, char: str) -> None:
        self._out.append(char)
        self._live += char
        self._at += 1

    def _quoted(self, text: str) -> None:
        self._out.append(text)
        # Stands for the quoted text, so that `a"x"~` is not taken for a tilde at the start.
        self._live += "x"
        self._quoted_pattern |= not _PATTERN.isdisjoint(text)

    def _single(self) -> None:
        end = self._text.find("'", self._at + 1)
        if end < 0:
            raise UnexpectedWord("an open quote")
        self._quoted(self._text[self._at + 1 : end])
        self._at = end + 1

    def _escaped(self) -> None:
        following = self._text[self._at + 1 : self._at + 2]
        if not following:
            raise UnexpectedWord("a trailing backslash")
        if following != "\n":  # A line continuation leaves nothing.
            self._quoted(following)
        self._at += 2

    def _double(self) -> None:
        text, at = self._text, self._at + 1
        out: list[str] = []
        while True:
            char = text[at : at + 1]
            if char == "":
                raise UnexpectedWord("an open quote")
            if char == '"':
                break
            following = text[at + 1 : at + 2]
            if char == "\\" and following and following in '$`"\\\n':
                out.append("" if following == "\n" else following)
                at += 2
                continue
            if char == "`" or (char == "$" and (following.isalnum() or following in "_({@*#?$!-[")):
                if not (char == "$" and following == ""):
                    raise UnexpectedWord("an expansion the grammar does not see")
            elif char in (UNKNOWN, OUTPUT, NUMBER):
                self._unknown = True
                self._unprintable |= char == UNKNOWN
            out.append(char)
            at += 1
        self._quoted("".join(out))
        self._at = at + 1

    def _ansi(self) -> None:
        text, at = self._text, self._at + 2
        out: list[str] = []
        while (char := text[at : at + 1]) != "'":
            if char == "":
                raise UnexpectedWord("an open quote")
            if char == "\\":
                at += 1
                escape = _SIMPLE_ESCAPES.get(text[at : at + 1])
                if escape is None:
                    self._unknown = self._unprintable = True
                char = escape or ""
            out.append(char)
            at += 1
        self._quoted("".join(out))
        self._at = at + 1


def _leaves_text(live: str) -> bool:
    """Return True if the shell replaces the word: by braces, a tilde or `[…]`."""
    if live.startswith("~") or "=~" in live or ":~" in live:
        return True
    opened = live.find("{")
    if opened >= 0:
        inner = live[opened + 1 : max(live.rfind("}"), 0)]
        if "," in inner or ".." in inner:
            return True
    opened = live.find("[")
    return opened >= 0 and "]" in live[opened + 1 :]

"""One word of a shell command: its value, where the text alone tells it.

Owns quoting. The tree says where a word begins and ends and which expansions it holds; the scanner
here reads the rest again, so that a word is known only where the grammar and we agree on it.
"""

import re
from dataclasses import dataclass

# What the walker puts in the place of an expansion before a word is scanned.
UNKNOWN = "\x00"  # It may be anything.
OUTPUT = "\x01"  # What commands put out that are judged themselves.
NUMBER = "\x02"  # A number or another harmless bit, such as `$?`.

PLAIN = re.compile(r"[A-Za-z0-9_./:@%+,^-][A-Za-z0-9_./:@%+,^=-]*")
_META = frozenset("|&;()<>$`\"'\\ \t\n")
_PATTERN = frozenset("*?[]")
_SIMPLE_ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True, slots=True)
class Word:
    raw: str  # As it is written.
    text: str | None  # Its value; None if the text does not tell it.
    is_pattern: bool = False  # It holds `*` or `?` unquoted: files are put in its place.
    # Not known, but one word that is no more than judged output and numbers: it may be printed.
    is_printable: bool = False


class UnexpectedWord(Exception):
    """The text of a word is not what a word can be: the grammar took it for something else."""


def names(text: str) -> frozenset[str]:
    """A set of words, written as people write them."""
    return frozenset(text.split())


def scan(masked: str, raw: str) -> Word:
    """Read one word, its expansions masked. Raises `Odd`."""
    return _Scanner(masked).scan(raw)


class _Scanner:
    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._out: list[str] = []
        self._live = ""  # The unquoted characters, for what is expanded after the quotes are read.
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
        # Stands for what was quoted, so that `a"x"~` is not taken for a tilde at the start.
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
        if following != "\n":  # A joined line leaves nothing.
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
    """Whether the shell puts something else in the word's place: braces, a tilde, `[…]`."""
    if live.startswith("~") or "=~" in live or ":~" in live:
        return True
    opened = live.find("{")
    if opened >= 0:
        inner = live[opened + 1 : max(live.rfind("}"), 0)]
        if "," in inner or ".." in inner:
            return True
    opened = live.find("[")
    return opened >= 0 and "]" in live[opened + 1 :]

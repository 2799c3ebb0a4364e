"""Translation of regular expressions from Python to ripgrep, where both mean the same.

Pure. The pattern of a model is in the syntax of Python; ripgrep uses that of Rust. The common
subset is translated piece by piece; for the rest (look-around, back-references, flags in the
middle, errors) the result is None, and our own search takes the pattern as it is. So a pattern
means the same on every machine, except for the letters of rare scripts.
"""

import re
from typing import Literal

_META = frozenset("\\.+*?()|[]{}^$#&-~")
_FLAGS = re.compile(r"\(\?([ims]+)\)")
_REPEAT = re.compile(r"(?:[*+?]|\{(\d*)(,?)(\d*)\})\??")
_CODE = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})")
_CONTROLS = {"t": "\t", "f": "\f", "v": "\v", "a": "\a"}
_SETS = frozenset("dDwWsS")
_CODE_POINT_MAX = 0x10FFFF
# A return before the end of a line is not part of the line; our own search never sees it.
_BUT_RETURN = r"--[\r]]"


class _Unknown(Exception):
    """A construct that is not common to both, or an error."""


def for_ripgrep(pattern: str, *, literal: bool) -> str | None:
    """Translate a pattern to the syntax of Rust; None if that is not possible."""
    try:
        return "".join(map(_literal, pattern)) if literal else _Reader(pattern).read()
    except _Unknown:
        return None


def _literal(character: str) -> str:
    if character in "\n\r\0" or "\ud800" <= character <= "\udfff":
        raise _Unknown  # It is in no line, or cannot be passed as an argument.
    if character in _META:
        return f"\\{character}"
    return character if character.isprintable() else f"\\x{{{ord(character):x}}}"


class _Reader:
    """Translates a pattern from left to right, once."""

    def __init__(self, pattern: str) -> None:
        flags = _FLAGS.match(pattern)
        self._text = pattern
        self._at = flags.end() if flags else 0
        # The other flags have no effect within one line.
        self._written = ["(?i)"] if flags and "i" in flags[1] else []

    def read(self) -> str:
        depth = 0
        # A repetition may follow a piece that matches text and is not repeated yet.
        before: Literal["piece", "other"] = "other"
        while self._at < len(self._text):
            if self._repeat(may_repeat=before == "piece"):
                before = "other"
                continue
            character = self._next()
            before = "other" if character in "^$|(" else "piece"
            if character == "(":
                depth += 1
                self._written.append(self._group())
            elif character == ")":
                depth -= 1
                if depth < 0:
                    raise _Unknown
                self._written.append(")")
            elif character in "^$|":
                self._written.append(character)
            elif character == ".":
                self._written.append(r"[^\r\n]")
            elif character == "[":
                self._written.append(self._set())
            elif character == "\\" and self._text[self._at : self._at + 1] == "b":
                self._at += 1
                self._written.append(r"\b")
                before = "other"
            elif character == "\\":
                self._written.append(self._escape())
            else:
                self._written.append(_literal(character))
        if depth:
            raise _Unknown
        return "".join(self._written)

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise _Unknown
        self._at += 1
        return self._text[self._at - 1]

    def _repeat(self, *, may_repeat: bool) -> bool:
        found = _REPEAT.match(self._text, self._at)
        if found is None or found[0] in ("{}", "{}?"):
            return False
        if not may_repeat:
            raise _Unknown
        self._at = found.end()
        if not found[0].startswith("{"):
            self._written.append(found[0])
            return True
        low, comma, high = found[1] or "0", found[2], found[3]
        if comma and high and int(low) > int(high):
            raise _Unknown
        lazy = "?" if found[0].endswith("?") else ""
        self._written.append(f"{{{low}{comma}{high}}}{lazy}")
        return True

    def _group(self) -> str:
        if self._text.startswith("?:", self._at):
            self._at += 2
        elif self._text.startswith("?", self._at):
            raise _Unknown
        return "(?:"

    def _escape(self) -> str:
        character = self._next()
        if character in _SETS:
            return f"[\\{character}{_BUT_RETURN}"
        self._at -= 1
        return _literal(self._escaped())

    def _escaped(self) -> str:
        """Return the character that an escape stands for; its backslash is consumed."""
        code = _CODE.match(self._text, self._at)
        if code is not None:
            self._at = code.end()
            number = int(code[1] or code[2] or code[3], 16)
            if number > _CODE_POINT_MAX:
                raise _Unknown
            return chr(number)
        character = self._next()
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character.isalnum():
            raise _Unknown
        return character

    def _set(self) -> str:
        negated = self._text.startswith("^", self._at)
        self._at += negated
        items: list[str] = []
        while not items or not self._text.startswith("]", self._at):
            items.append(self._item())
        self._at += 1
        return f"[[{'^' if negated else ''}{''.join(items)}]{_BUT_RETURN}"

    def _item(self) -> str:
        low = self._member()
        rest = self._text[self._at : self._at + 2]
        if not rest.startswith("-") or rest in ("-]", "-"):
            return low if len(low) > 1 else _literal(low)
        self._at += 1
        high = self._member()
        if len(low) > 1 or len(high) > 1 or low > high:
            raise _Unknown
        return f"{_literal(low)}-{_literal(high)}"

    def _member(self) -> str:
        """Read a member of a set: one character, or a backslash and the letter of a class."""
        character = self._next()
        if character != "\\":
            return character
        if self._text[self._at : self._at + 1] in _SETS:
            return f"\\{self._next()}"
        return self._escaped()

"""JSON as the scanner of Go's encoding/json accepts it, parsed into a tree of the original text.

Owns the grammar: syntax errors and truncated text. The assignment of numbers and strings to
fields is in `golang.py`. Without recursion, because Go allows 10,000 levels.
"""

import codecs
import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

DEPTH_MAX = 10_000  # encoding/json: maxNestingDepth.

Kind = Literal["syntax", "eof", "unexpected eof", "type", "custom"]


class DecodeError(Exception):
    """The error of Go's decoder; `kind` is its error family."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind: Kind = kind
        self.text = text


@dataclass(frozen=True, slots=True)
class Number:
    text: str  # `1`, `1.0` and `1e0` are not the same to an int field.


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    raw: str  # Between the quotes, escapes as written: a time.Time reads this.


@dataclass(frozen=True, slots=True)
class Object:
    members: list[tuple[str, "Node"]]  # In order, with every duplicate.


Node: TypeAlias = "bool | Number | Text | list[Node] | Object | None"

_SPACE = re.compile(r"[ \t\r\n]*+")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+)"')
# The valid next character depends on the number so far: `1.` is broken, `1.5.` is 1.5 and a dot.
_NUMBER = re.compile(
    r"-?(?:0|[1-9][0-9]*+)"
    r"(?:\.[0-9]++(?:[eE][+-]?[0-9]++|(?![eE]))|[eE][+-]?[0-9]++|(?![.eE]))"
)
_LITERAL = re.compile(r"true|false|null")
_LITERALS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
# Prefixes of a scalar that is truncated by the end of the text.
_CUT = re.compile(
    r'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4}))*+(?:\\(?:u[0-9A-Fa-f]{0,3})?)?'
    r"|-?(?:(?:0|[1-9][0-9]*+)(?:\.(?:[0-9]++[eE][+-]?)?|[eE][+-]?)?)?"
    r"|t(?:r(?:u)?)?|f(?:a(?:l(?:s)?)?)?|n(?:u(?:l)?)?"
)
_ESCAPE = re.compile(r'\\(?:u([0-9A-Fa-f]{4})|(["\\/bfnrt]))')
_PLAIN = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_PAIR = re.compile("([\ud800-\udbff])([\udc00-\udfff])|[\ud800-\udfff]")


def _go_replace(error: UnicodeError) -> tuple[str, int]:
    """Emit one U+FFFD for every byte that is not UTF-8; Python's own handler emits fewer."""
    assert isinstance(error, UnicodeDecodeError), "only used to decode"
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error("go-replace", _go_replace)


def parse_whole(data: bytes) -> Node:
    """Parse as json.Unmarshal does: exactly one value, followed only by space."""
    text = data.decode("utf-8", "go-replace")
    try:
        node, end = _parse(text)
    except DecodeError as exc:
        if exc.kind in ("eof", "unexpected eof"):
            raise DecodeError("syntax", "unexpected end of JSON input") from exc
        raise
    end = _skip(text, end)
    if end < len(text):
        raise _invalid(text, end, "after top-level value")
    return node


def parse_first(data: bytes) -> Node:
    """Parse as json.Decoder.Decode does: the first value; the rest is ignored."""
    return _parse(data.decode("utf-8", "go-replace"))[0]


class _Open:
    """An object or an array that is not closed yet."""

    def __init__(self, opener: str) -> None:
        self.is_object = opener == "{"
        self.closer = "}" if self.is_object else "]"
        self.members: list[tuple[str, Node]] = []
        self.items: list[Node] = []
        self.key = ""

    @property
    def node(self) -> Node:
        return Object(self.members) if self.is_object else self.items

    def add(self, node: Node) -> None:
        if self.is_object:
            self.members.append((self.key, node))
        else:
            self.items.append(node)

    def read_key(self, text: str, at: int) -> int:
        """Read `"key":` if this is an object; returns where its value begins."""
        if not self.is_object:
            return at
        at = _skip(text, at)
        found = _STRING.match(text, at)
        if found is None:
            cut = text[at : at + 1] in ('"', "") and _CUT.fullmatch(text, at) is not None
            raise _ended() if cut else _invalid(text, at, "looking for object key string")
        self.key = _unquote(found[1])
        at = _skip(text, found.end())
        if text[at : at + 1] != ":":
            raise _ended() if at == len(text) else _invalid(text, at, "after object key")
        return at + 1


def _parse(text: str) -> tuple[Node, int]:
    at = _skip(text, 0)
    if at == len(text):
        raise DecodeError("eof", "EOF")
    stack: list[_Open] = []
    while True:
        at = _skip(text, at)
        if text[at : at + 1] in ("{", "["):
            if len(stack) >= DEPTH_MAX:
                raise DecodeError("syntax", "exceeded max depth")
            opened = _Open(text[at])
            at = _skip(text, at + 1)
            if text[at : at + 1] != opened.closer:
                stack.append(opened)
                at = opened.read_key(text, at)
                continue
            node, at = opened.node, at + 1
        else:
            node, at = _scalar(text, at)
        while stack:  # A value is complete: add it to its container.
            stack[-1].add(node)
            at = _skip(text, at)
            char = text[at : at + 1]
            if char == ",":
                at = stack[-1].read_key(text, at + 1)
                break
            if char != stack[-1].closer:
                raise _invalid(text, at, "after a value") if char else _ended()
            node, at = stack.pop().node, at + 1
        else:
            return node, at


def _scalar(text: str, at: int) -> tuple[Node, int]:
    if found := _STRING.match(text, at):
        return Text(_unquote(found[1]), found[1]), found.end()
    if found := _NUMBER.match(text, at):
        return Number(found[0]), found.end()
    if found := _LITERAL.match(text, at):
        return _LITERALS[found[0]], found.end()
    if _CUT.fullmatch(text, at):
        raise _ended()
    raise _invalid(text, at, "looking for beginning of value")


def _unquote(raw: str) -> str:
    if "\\" not in raw:
        return raw
    text = _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _PLAIN[m[2]], raw)
    return _PAIR.sub(_join, text)


def _join(pair: re.Match[str]) -> str:
    if pair[1] is None:
        return "\ufffd"  # Half a surrogate pair.
    return chr(0x10000 + ((ord(pair[1]) - 0xD800) << 10) + ord(pair[2]) - 0xDC00)


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None, "it also matches the empty string"
    return found.end()


def _ended() -> DecodeError:
    return DecodeError("unexpected eof", "unexpected EOF")


def _invalid(text: str, at: int, where: str) -> DecodeError:
    return DecodeError("syntax", f"invalid character {text[at : at + 1]!r} {where}")

"""JSON with comments, trailing commas and a byte order mark, as people write it.

Parses such a text, finds the line of a key, and changes one key without touching anything else.
Pure functions over text. Files, and the meaning of keys, belong to other modules.
"""

import json
import math
import re
from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec
from msgspec import Struct

from culm.wire.codec import Json, Steps

Path = Steps

NESTING_MAX = 100  # Configuration has about six levels; recursive parsers can take a thousand.
INDENT = "  "  # For a file without indentation of its own.
_BOM = "\ufeff"
_WHITE = " \t\r\n"


class InvalidJson(Exception):
    """The text is not valid JSON. Lines and columns start at 1, without a byte order mark."""

    def __init__(self, line: int, column: int, message: str) -> None:
        super().__init__(f"line {line}, column {column}: {message}")
        self.line = line
        self.column = column
        self.message = message


class NotAnObject(Exception):
    """The value at `path` is not an object, so no key can be set inside it."""

    def __init__(self, path: tuple[str, ...]) -> None:
        super().__init__(f"{'.'.join(path) or 'the document'} is not an object")
        self.path = path


class Unwritable(ValueError):
    """The value cannot be written in a form that can be read again."""


def parse(text: str) -> Json:
    """Parse `text`; the last of duplicate keys wins. Raises `InvalidJson`."""
    return _read(text)[0]


def line_of(text: str, path: Path) -> int:
    """The line of the key or item at `path`, or of the deepest part of it that exists, or 1."""
    return lines_of(text, [path])[0]


def lines_of(text: str, paths: Iterable[Path]) -> list[int]:
    """The line of each path, as `line_of`; the text is parsed only once."""
    plain = _read(text)[1]
    root = _root(plain)
    found = [_walk(text, plain, root, path) for path in paths]
    return [1 if len(nodes) == 1 else _line_and_column(text, nodes[-1].at)[0] for nodes in found]


def set_value(text: str, path: tuple[str, ...], value: Json) -> str:
    """`text` with `value` at `path`; missing objects on the path are created.

    Raises `InvalidJson` for the text, `NotAnObject` for the path and `Unwritable` for the value.
    """
    found = [] if _is_empty(text) else _follow(text, path)
    exists = len(found) > len(path)
    if found and not exists and text[found[-1].start] != "{":
        raise NotAnObject(path[: len(found) - 1])
    try:
        for key in reversed(path[len(found) :]):
            value = {key: value}
        if exists:
            node = found[-1]
            shown = _shown(text, value, _indent_at(text, node.at))
            changed = text[: node.start] + shown + text[node.end :]
        elif found:
            changed = _added(text, found, path[len(found) - 1], value)
        else:
            changed = _with_first_value(text, value)
        parse(changed)  # Refuses values that are nested too deeply, too large, or not characters.
    except (InvalidJson, ValueError, RecursionError) as exc:
        raise Unwritable(f"the value cannot be written as JSON: {exc}") from exc
    return changed


def remove_value(text: str, path: tuple[str, ...]) -> str:
    """`text` without the key at `path`, including duplicates of it. Raises `InvalidJson`."""
    assert path, "the document itself is not removed"
    if _is_empty(text):
        return text
    found = _follow(text, path)
    return _removed(text, found[-2], path[-1]) if len(found) > len(path) else text


# --- reading: comments and trailing commas become spaces, so that positions stay the same

_COMMENT = r"//[^\r\n]*+|/\*(?s:.*?)\*/"
_GAP = re.compile(rf"(?:[ \t\r\n]++|{_COMMENT})*+")
_STRING = r'"[^"\\\r\n]*+(?:\\.[^"\\\r\n]*+)*+"?'
# Matches as much plain JSON as possible, or else a comment or a trailing comma. A comma right after
# an opening bracket is not a trailing comma. An unterminated comment is matched as a whole, because
# otherwise the rest of the text would be searched for each slash in it.
_PIECE = re.compile(
    rf'(?:[^"/,\[{{]++|{_STRING}|,(?!{_GAP.pattern}[\]}}])|[\[{{](?!{_GAP.pattern},))++'
    rf"|(?P<blank>{_COMMENT}|,(?={_GAP.pattern}[\]}}]))"
    rf"|/\*(?s:.*+)|[\[{{]{_GAP.pattern},"
)
_NO_LINE_END = re.compile(r"[^\r\n]")
_LINE_END = re.compile(r"\r\n?|\n")
_BLANKS = re.compile(r"[ \t]*+")
_NO_BRACKETS = re.compile(rf'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|{_COMMENT}|/\*.*+', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_LEVELS = {"[": 1, "{": 1, "]": -1, "}": -1}


def _read(text: str) -> tuple[Json, str]:
    """The value of `text`, and the text as plain JSON of the same length."""
    plain = text  # Most texts are plain JSON already.
    if text.count("[") + text.count("{") <= NESTING_MAX or _nesting(text) <= NESTING_MAX:
        for reading in (str, _plain):
            try:
                plain = reading(text)
                return msgspec.json.decode(plain), plain
            except (msgspec.DecodeError, UnicodeEncodeError):
                continue
    _Checker(text).check()  # The slower parser can read every text that passes.
    return json.loads(plain), plain


def _start(text: str) -> int:
    return 1 if text.startswith(_BOM) else 0


def _is_empty(text: str) -> bool:
    """Return True if `text` has nothing but comments."""
    return _GAP.fullmatch(text, _start(text)) is not None


def _plain(text: str) -> str:
    """`text` as plain JSON. An invalid text stays invalid, at the same position."""
    blanked = _PIECE.sub(lambda m: _NO_LINE_END.sub(" ", m[0]) if m["blank"] else m[0], text)
    return " " + blanked[1:] if text.startswith(_BOM) else blanked


def _nesting(text: str) -> int:
    brackets = _BRACKET.findall(_NO_BRACKETS.sub("", text))
    return max(accumulate(_LEVELS[x] for x in brackets), default=0)


def _line_and_column(text: str, at: int) -> tuple[int, int]:
    ends = [end.end() for end in _LINE_END.finditer(text, 0, at)]
    return len(ends) + 1, at - (ends[-1] if ends else _start(text)) + 1


# --- finding: the positions of values in a valid text


class _Node(Struct):
    """A value with its position. `at` is the start of its key, or of the value if it has none."""

    key: str | int
    at: int
    start: int
    end: int
    comma: int = -1  # The position of the comma after it, or -1.
    children: Sequence["_Node"] = ()  # Filled in when a path leads through this node.


_READER = json.JSONDecoder()
_COLON = re.compile(r"[ \t\r\n]*+:[ \t\r\n]*+")
_COMMA = re.compile(r"[ \t\r\n]*+,?[ \t\r\n]*+")


def _follow(text: str, path: Path) -> list[_Node]:
    """The document, and the value at each step of `path` that exists."""
    plain = _read(text)[1]
    return _walk(text, plain, _root(plain), path)


def _root(plain: str) -> _Node:
    return _Node("", 0, len(plain) - len(plain.lstrip(_WHITE)), len(plain.rstrip(_WHITE)))


def _walk(text: str, plain: str, root: _Node, path: Path) -> list[_Node]:
    """Follow `path` from a root, whose nodes cache their children."""
    found = [root]
    for step in path:
        node = found[-1]
        if plain[node.start] != ("{" if isinstance(step, str) else "["):
            break
        node.children = node.children or _children(text, plain, node.start)
        child = next((x for x in reversed(node.children) if x.key == step), None)
        if child is None:
            break
        found.append(child)
    return found


def _children(text: str, plain: str, start: int) -> list[_Node]:
    """The values in the object or list that begins at `start`."""
    children: list[_Node] = []
    is_object = plain[start] == "{"
    at = _end(_GAP, plain, start + 1)
    while plain[at] not in "]}":
        key, value_start = len(children), at
        if is_object:
            key, end = _READER.raw_decode(plain, at)
            value_start = _end(_COLON, plain, end)
        end = _READER.raw_decode(plain, value_start)[1]  # Skipped by a parser written in C.
        child = _Node(key, at, value_start, end)
        children.append(child)
        at = _end(_COMMA, plain, end)
        child.comma = plain.find(",", end, at)
    if children and children[-1].comma < 0:
        after = _end(_GAP, text, children[-1].end)  # `plain` has no trailing commas.
        children[-1].comma = after if text[after] == "," else -1
    return children


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The end of a match that starts at `at`, or `at` if there is none."""
    match = pattern.match(text, at)
    return match.end() if match else at


# --- checking: the first error in a text, with its position

_IN_STRING = re.compile(
    r'"[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})[^"\\\x00-\x1f]*+)*+'
)
_SCALAR = re.compile(  # The look-ahead keeps `01` from being read as a 0 before something else.
    rf'{_IN_STRING.pattern}"'
    r"|(?:-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?|true|false|null)(?![\w.+-])"
)
_TOKEN = re.compile(r"[^\s,:\[\]{}\"/]{1,20}")  # As much as an error message quotes.
_NO_COMMENT = "comments start with // or /*"
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Checker:
    """A scan of a text from left to right up to the first error; `_at` is the next character."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = _start(text)

    def check(self) -> None:
        """Raise `InvalidJson` if the text is invalid."""
        if surrogate := _SURROGATE.search(self._text):
            self._at = surrogate.start()
            raise self._bad("an unpaired surrogate is not a character")
        self._pass_gap()
        self._pass_value(1)
        self._pass_gap()
        if self._at < len(self._text):
            extra = "unexpected text after the end of the document"
            raise self._bad(_NO_COMMENT if self._text[self._at] in "#/" else extra)

    def _pass_value(self, level: int) -> None:
        if scalar := _SCALAR.match(self._text, self._at):
            self._pass_scalar(scalar[0])
        elif self._text.startswith(("{", "["), self._at):
            self._pass_container(level)
        else:
            raise self._bad(_value_problem(self._text, self._at))

    def _pass_container(self, level: int) -> None:
        if level > NESTING_MAX:
            raise self._bad(f"the nesting is deeper than {NESTING_MAX} levels")
        text, start = self._text, self._at
        closer = "}" if text[start] == "{" else "]"
        self._at += 1
        self._pass_gap()
        while not text.startswith(closer, self._at):
            if self._at == len(text):
                raise self._bad(self._unclosed(start))
            if closer == "}":
                self._pass_key()
            self._pass_value(level + 1)
            self._pass_gap()
            if text.startswith(",", self._at):
                self._at += 1
                self._pass_gap()
            elif not text.startswith(closer, self._at):
                raise self._bad(self._comma_problem(start))
        self._at += 1

    def _pass_key(self) -> None:
        """Skip a key and its colon."""
        scalar = _SCALAR.match(self._text, self._at)
        if scalar is None or not scalar[0].startswith('"'):
            raise self._bad(_key_problem(self._text, self._at))
        self._pass_scalar(scalar[0])
        self._pass_gap()
        if not self._text.startswith(":", self._at):
            raise self._bad("a colon is missing after the key")
        self._at += 1
        self._pass_gap()

    def _pass_scalar(self, scalar: str) -> None:
        """Skip a scalar; refuse one that is well-formed but has no value."""
        if scalar[0] != '"':
            if _is_huge(scalar):
                raise self._bad("the number is too large")
        elif "\\" in scalar and _SURROGATE.search(json.loads(scalar)):
            raise self._bad("the string contains an unpaired surrogate")
        self._at += len(scalar)

    def _pass_gap(self) -> None:
        self._at = _end(_GAP, self._text, self._at)
        if self._text.startswith("/*", self._at):
            raise self._bad("the comment does not end")

    def _bad(self, message: str) -> InvalidJson:
        return InvalidJson(*_line_and_column(self._text, self._at), message)

    def _unclosed(self, start: int) -> str:
        kind = "object" if self._text[start] == "{" else "list"
        line = _line_and_column(self._text, start)[0]
        return f"the {kind} that begins in line {line} does not end"

    def _comma_problem(self, start: int) -> str:
        following = self._text[self._at : self._at + 1]
        if following in "]}":  # Also true at the end of the text.
            return self._unclosed(start) + (f" before this {following}" if following else "")
        if following in "#/":
            return _NO_COMMENT
        if following == ":":
            return "a colon is only allowed after a key"
        return f"a comma is missing before the next {'key' if self._text[start] == '{' else 'item'}"


def _is_huge(number: str) -> bool:
    try:
        value = json.loads(number)
    except ValueError:  # Python refuses integers of more than about 4300 digits.
        return True
    return isinstance(value, float) and math.isinf(value)


def _key_problem(text: str, at: int) -> str:
    if text[at] == '"':
        return _string_problem(text, at)
    if text[at] in ",:":
        return "a key is missing"
    if text[at] == "]":
        return "the object ends with }, not with ]"
    return "keys must be in double quotes"


def _value_problem(text: str, at: int) -> str:
    first = text[at : at + 1]
    if first == '"':
        return _string_problem(text, at)
    if first in ",:]}":  # Also true at the end of the text.
        return "a value is missing"
    if first in "#/":
        return _NO_COMMENT
    if not first.isprintable():
        return f"the character U+{ord(first):04X} is not valid JSON"
    shown = text[at : _end(_TOKEN, text, at)]
    if shown.lstrip("+-") in ("NaN", "Infinity"):
        return f"{shown} is not valid JSON"
    if first in "+-.0123456789":
        return f"{shown} is not a JSON number"
    if shown.lower() in ("true", "false", "null", "none"):
        return f"{shown} is not valid JSON; use true, false or null"
    return "strings must be in double quotes"


def _string_problem(text: str, at: int) -> str:
    good_end = _end(_IN_STRING, text, at)
    following = text[good_end : good_end + 2]
    if following[:1] == "\\" and following[1:] not in ("", "\r", "\n"):
        return f"the escape {following} is unknown or incomplete"
    if following[:1] in ("", "\r", "\n", "\\"):
        return "the string does not end"
    return f"a control character in a string must be written \\u{ord(following[0]):04x}"


# --- adding a key

_FIRST_INDENT = re.compile(r'^(\t| +)[ \t]*["{\[]', re.MULTILINE)


def _line_start(text: str, at: int) -> int:
    start = max(text.rfind("\n", 0, at), text.rfind("\r", 0, at)) + 1
    return start or _start(text)


def _indent_at(text: str, at: int) -> str:
    """The indentation of the line of this position."""
    start = _line_start(text, at)
    return text[start : _end(_BLANKS, text, start)]


def _unit(text: str) -> str:
    """The indentation of one level."""
    first = _FIRST_INDENT.search(text)
    return first[1] if first else INDENT


def _line_end(text: str) -> str:
    first = _LINE_END.search(text)
    return first[0] if first else "\n"


def _shown(text: str, value: Json, indent: str) -> str:
    """`value` as JSON for a line with this indentation."""
    lines = json.dumps(value, ensure_ascii=False, indent=_unit(text), allow_nan=False)
    return lines.replace("\n", _line_end(text) + indent)


def _with_first_value(text: str, value: Json) -> str:
    """A text of nothing but comments, with a value added."""
    kept, line_end = text.rstrip(_WHITE), _line_end(text)
    head = kept + line_end if kept.lstrip(_BOM) else kept
    return head + _shown(text, value, "") + line_end


def _added(text: str, found: list[_Node], key: str, value: Json) -> str:
    """`text` with a key at the end of the last object of `found`."""
    node = found[-1]
    last = node.children[-1] if node.children else None
    end, missing_comma, trailing_comma = node.start + 1, "", ""
    if last is not None and last.comma < 0:
        end, missing_comma = last.end, ","  # Before a comment, which would swallow it.
    elif last is not None:
        end, trailing_comma = last.comma + 1, ","
    rest = text[end : node.end - 1]
    comments = rest.rstrip(_WHITE)
    space = rest[len(comments) :]
    name = json.dumps(key, ensure_ascii=False) + ": "
    if _keeps_to_one_line(text, found) and (not isinstance(value, dict | list) or not value):
        before = " " if last or comments else space
        member = before + name + _shown(text, value, "") + trailing_comma
        return text[:end] + missing_comma + comments + member + space + text[node.end - 1 :]

    line_end, outer = _line_end(text), _indent_at(text, node.start)
    # A key on the line of its bracket does not show the indentation of keys.
    shows = last is not None and _line_start(text, last.at) > node.start
    inner = _indent_at(text, last.at) if last and shows else outer + _unit(text)
    head = text[:end]
    if last and not _LINE_END.search(text, node.start, node.end):
        keys = text[node.start + 1 : end].lstrip(_WHITE)
        head = text[: node.start + 1] + line_end + inner + keys
    member = line_end + inner + name + _shown(text, value, inner) + trailing_comma
    space = space if _LINE_END.search(space) else line_end + outer
    return head + missing_comma + comments + member + space + text[node.end - 1 :]


def _keeps_to_one_line(text: str, found: list[_Node]) -> bool:
    """Return True if the last object and its keys, or its siblings if it is empty, share a line."""
    kept = False
    for node in found:
        kept = (kept or bool(node.children)) and not _LINE_END.search(text, node.start, node.end)
    return kept


# --- removing a key

# The rest of a member's line if it has nothing but comments and the comma.
_LINE_REST = re.compile(r"(?:[ \t]++|,|/\*(?:[^*\r\n]|\*(?!/))*+\*/)*+(?://[^\r\n]*+)?(?=[\r\n])")


def _removed(text: str, parent: _Node, key: str) -> str:
    """`text` without the members of `parent` that have this key."""
    children = parent.children
    cuts: list[tuple[int, int]] = []
    for child in children:
        if child.key == key:
            cuts += _cuts(text, child, is_last=child is children[-1])
    kept = [child for child in children if child.key != key]
    if kept and children[-1].key == key and children[-1].comma < 0:
        # The new last key has no comma, as the old one had none.
        cuts.append((kept[-1].comma, kept[-1].comma + 1))
    return _without(text, cuts)


def _cuts(text: str, child: _Node, *, is_last: bool) -> list[tuple[int, int]]:
    """The spans to remove with a member: its line, or its part of a shared line."""
    start, end = child.at, child.end
    blanks_start = start
    while text[blanks_start - 1] in " \t":
        blanks_start -= 1
    rest = _LINE_REST.match(text, end)
    if rest is not None:
        start, end = blanks_start, rest.end()
        if text[start - 1] in "\r\n":
            end = _end(_LINE_END, text, end)
    elif is_last:
        start = blanks_start
    elif not text[end : child.comma].strip(_WHITE):
        end = _end(_BLANKS, text, child.comma + 1)
    cuts = [(start, end)]
    if child.comma >= end:  # There are comments or a line end between the value and its comma.
        cuts.append((child.comma, child.comma + 1))
    return cuts


def _without(text: str, cuts: list[tuple[int, int]]) -> str:
    """`text` without these spans, which may overlap."""
    kept: list[str] = []
    at = 0
    for start, end in sorted(cuts):
        kept.append(text[at:start])
        at = max(at, end)
    return "".join(kept) + text[at:]

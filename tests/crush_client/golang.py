"""Go's encoding/json (v1) decoding into typed values: fails where Go fails, fills what Go fills.

Owns the rules of assignment. The types of the Crush wire are in `types.py`; they are declared
there a second time on purpose, so that the server's own types are checked independently.

A mismatch does not stop Go: it continues and returns the first error with a partly filled value.
An error of a type's own UnmarshalJSON (a time, a message) stops it immediately.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast

from tests.crush_client.syntax import (
    DecodeError,
    Node,
    Number,
    Object,
    Text,
    parse_first,
    parse_whole,
)

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
ZERO_TIME = "0001-01-01T00:00:00Z"
_INT = re.compile(r"-?[0-9]+")
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{4})*+(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_TIME = re.compile(
    r"([0-9]{4})-([0-9]{2})-([0-9]{2})T([0-9]{1,2}):([0-9]{2}):([0-9]{2})(?:[.,][0-9]+)?"
    r"(?:Z|[+-]([0-9]{2}):([0-9]{2}))"
)
_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
# The two letters outside ASCII that fold onto ASCII ones.
_FOLDED = str.maketrans({"\u017f": "S", "\u212a": "K"})


@dataclass(slots=True)
class Faults:
    """The first error of one decode, and a flag that it ended the decode."""

    error: DecodeError | None = None
    aborted: bool = False

    def mismatch(self, node: Node, wanted: str) -> None:
        self.note(DecodeError("type", f"json: cannot unmarshal {_named(node)} into {wanted}"))

    def note(self, error: DecodeError) -> None:
        self.error = self.error or error

    def abort(self, error: DecodeError) -> None:
        self.error, self.aborted = self.error or error, True


class GoType(Protocol):
    def zero(self) -> object: ...

    def load(self, node: Node, old: object, faults: Faults) -> object:
        """Assign `node` to a variable that holds `old`; returns its new value."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    value: object
    error: DecodeError | None

    def must(self) -> object:
        if self.error is not None:
            raise self.error
        return self.value


def unmarshal(data: bytes, kind: GoType) -> Decoded:
    """json.Unmarshal into a fresh variable."""
    return _decode(parse_whole, data, kind)


def decode(data: bytes, kind: GoType) -> Decoded:
    """json.NewDecoder(body).Decode into a fresh variable."""
    return _decode(parse_first, data, kind)


def _decode(parse: Callable[[bytes], Node], data: bytes, kind: GoType) -> Decoded:
    try:
        node = parse(data)
    except DecodeError as exc:  # Go checks the whole text before it fills anything.
        return Decoded(kind.zero(), exc)
    return fill(node, kind)


def fill(node: Node, kind: GoType) -> Decoded:
    faults = Faults()
    value = kind.load(node, kind.zero(), faults)
    return Decoded(value, faults.error)


def encode(value: object) -> bytes:
    """json.Marshal of plain values: compact, with HTML and line separators escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text.encode()


def _named(node: Node) -> str:
    match node:
        case None:
            return "null"
        case bool():
            return "bool"
        case Number():
            return f"number {node.text}"
        case Text():
            return "string"
        case Object():
            return "object"
        case _:
            return "array"


# --- scalars


@dataclass(frozen=True, slots=True)
class Str:
    def zero(self) -> object:
        return ""

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if isinstance(node, Text):
            return node.text
        if node is not None:
            faults.mismatch(node, "string")
        return old


@dataclass(frozen=True, slots=True)
class Bool:
    def zero(self) -> object:
        return False

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if isinstance(node, bool):
            return node
        if node is not None:
            faults.mismatch(node, "bool")
        return old


@dataclass(frozen=True, slots=True)
class Int:
    low: int = INT64_MIN
    high: int = INT64_MAX

    def zero(self) -> object:
        return 0

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if isinstance(node, Number) and _INT.fullmatch(node.text):
            value = int(node.text) if len(node.text) < 25 else INT64_MAX + 1
            # An unsigned number has no sign, not even before zero.
            if self.low <= value <= self.high and not (self.low == 0 and node.text[0] == "-"):
                return value
        if node is not None:
            faults.mismatch(node, "int")
        return old


@dataclass(frozen=True, slots=True)
class Float:
    def zero(self) -> object:
        return 0.0

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if isinstance(node, Number) and math.isfinite(value := float(node.text)):
            return value
        if node is not None:
            faults.mismatch(node, "float64")
        return old


@dataclass(frozen=True, slots=True)
class Bytes:
    """[]byte: standard base64 with padding; line ends inside are ignored."""

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if node is None:
            return None
        if isinstance(node, list):  # A slice of numbers after all.
            octets = [Int(0, 255).load(item, 0, faults) for item in node]
            return bytes(octet for octet in octets if isinstance(octet, int))
        if not isinstance(node, Text):
            faults.mismatch(node, "[]uint8")
            return old
        text = node.text.replace("\r", "").replace("\n", "")
        if _BASE64.fullmatch(text) is None:
            faults.note(DecodeError("type", "illegal base64 data"))
            return old
        return base64.b64decode(text)


@dataclass(frozen=True, slots=True)
class Time:
    """time.Time: strict RFC 3339, on the characters as written. Kept as that text."""

    def zero(self) -> object:
        return ZERO_TIME

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if node is None:
            return old
        if not isinstance(node, Text):
            text = "Time.UnmarshalJSON: input is not a JSON string"
            faults.abort(DecodeError("custom", text))
        elif not is_rfc3339(node.raw):
            faults.abort(DecodeError("custom", f'parsing time "{node.raw}"'))
        else:
            return node.raw
        return old


def is_rfc3339(text: str) -> bool:
    found = _TIME.fullmatch(text)
    if found is None:
        return False
    year, month, day, hour, minute, second, *zone = (int(part or 0) for part in found.groups())
    leap = month == 2 and year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)
    return (
        1 <= month <= 12
        and 1 <= day <= _DAYS[month - 1] + leap
        and hour < 24
        and max(minute, second) < 60
        and zone[0] <= 24  # Go's own bounds.
        and zone[1] <= 60
    )


@dataclass(frozen=True, slots=True)
class Raw:
    """json.RawMessage: the syntax tree, to be filled into a type later; None if never set."""

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        return RawValue(node)


@dataclass(frozen=True, slots=True)
class RawValue:
    node: Node


@dataclass(frozen=True, slots=True)
class Any:
    """interface{}: plain values, every number a float64."""

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        match node:
            case Text():
                return node.text
            case Number():
                return Float().load(node, 0.0, faults)
            case Object():
                return {key: self.load(item, None, faults) for key, item in node.members}
            case list():
                return [self.load(item, None, faults) for item in node]
            case _:
                return node


# --- containers


@dataclass(frozen=True, slots=True)
class Slice:
    item: GoType

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if node is None:
            return None
        if not isinstance(node, list):
            faults.mismatch(node, "slice")
            return old
        items: list[object] = []
        for element in node:
            items.append(self.item.load(element, self.item.zero(), faults))
            if faults.aborted:
                break
        return items


@dataclass(frozen=True, slots=True)
class Map:
    item: GoType
    check_key: Callable[[str], bool] | None = None  # For keys with their own UnmarshalText.

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if node is None:
            return None
        if not isinstance(node, Object):
            faults.mismatch(node, "map")
            return old
        # A map holds only what this class put into it.
        found = dict(cast("dict[str, object]", old)) if isinstance(old, dict) else {}
        for key, element in node.members:
            value = self.item.load(element, self.item.zero(), faults)
            if self.check_key is not None and not self.check_key(key):
                faults.abort(DecodeError("custom", f"invalid key {key!r}"))
            if faults.aborted:
                break
            found[key] = value
        return found


@dataclass(frozen=True, slots=True)
class Ptr:
    item: GoType

    def zero(self) -> object:
        return None

    def load(self, node: Node, old: object, faults: Faults) -> object:
        if node is None:
            return None
        return self.item.load(node, self.item.zero() if old is None else old, faults)


@dataclass(frozen=True, slots=True)
class Struct:
    """Fields by their JSON name; a name that ends in `?` is left out when it is empty."""

    name: str
    fields: Mapping[str, GoType]

    def zero(self) -> object:
        return Record(self, {name.rstrip("?"): kind.zero() for name, kind in self.fields.items()})

    def load(self, node: Node, old: object, faults: Faults) -> object:
        assert isinstance(old, Record), "made by zero"
        if node is None:
            return old
        if not isinstance(node, Object):
            faults.mismatch(node, f"Go value of type {self.name}")
            return old
        for key, element in node.members:
            found = self._find(key)
            if found is not None:
                name, kind = found
                old.values[name] = kind.load(element, old.values[name], faults)
            if faults.aborted:
                break
        return old

    def _find(self, key: str) -> tuple[str, GoType] | None:
        """The field of exactly this name, else the first that differs in case only."""
        names = {name.rstrip("?"): kind for name, kind in self.fields.items()}
        if key in names:
            return key, names[key]
        folded = fold(key)
        return next(((n, kind) for n, kind in names.items() if fold(n) == folded), None)


def fold(name: str) -> str:
    """Fold a key as Go does; `ß` is unchanged, so this is not `str.upper`."""
    return "".join(c.upper() if c.isascii() else c for c in name.translate(_FOLDED))


@dataclass(slots=True)
class Record:
    """A struct's value. Its accessors fail on a field that is not of the type asked for."""

    kind: Struct
    values: dict[str, object] = field(default_factory=dict[str, object])

    def text(self, name: str) -> str:
        value = self.values[name]
        assert isinstance(value, str), f"{self.kind.name}.{name} is {value!r}"
        return value

    def integer(self, name: str) -> int:
        value = self.values[name]
        assert isinstance(value, int), f"{self.kind.name}.{name} is {value!r}"
        return value

    def flag(self, name: str) -> bool:
        value = self.values[name]
        assert isinstance(value, bool), f"{self.kind.name}.{name} is {value!r}"
        return value

    def find_record(self, name: str) -> "Record | None":
        value = self.values[name]
        assert value is None or isinstance(value, Record), f"{self.kind.name}.{name}: {value!r}"
        return value

    def record(self, name: str) -> "Record":
        found = self.find_record(name)
        assert found is not None, f"{self.kind.name}.{name} is nil"
        return found

    def records(self, name: str) -> list["Record"]:
        return records(self.values[name])

    def mapping(self, name: str) -> dict[str, object]:
        return mapping(self.values[name])


def record(value: object) -> Record:
    assert isinstance(value, Record), f"{value!r} is not a struct"
    return value


def items(value: object) -> list[object]:
    """A slice, nil as empty."""
    assert value is None or isinstance(value, list), f"{value!r} is not a slice"
    return cast("list[object]", value or [])  # Every item is an object.


def records(value: object) -> list[Record]:
    return [record(item) for item in items(value)]


def texts(value: object) -> list[str]:
    return [str(item) for item in items(value)]


def mapping(value: object) -> dict[str, object]:
    """A map, nil as empty."""
    assert value is None or isinstance(value, dict), f"{value!r} is not a map"
    return cast("dict[str, object]", value or {})  # Its keys are strings by construction.


def to_json(value: object) -> object:
    """Convert a decoded value as json.Marshal does, to plain values for `encode`."""
    whole: object = value  # A narrowed list or dict has items of unknown type.
    match value:
        case Record():
            named = [(name, value.values[name.rstrip("?")]) for name in value.kind.fields]
            kept = [(name, v) for name, v in named if not name.endswith("?") or v]
            return {name.rstrip("?"): to_json(v) for name, v in kept}
        case list():
            return [to_json(item) for item in items(whole)]
        case dict():
            return {key: to_json(item) for key, item in mapping(whole).items()}
        case bytes():
            return base64.b64encode(value).decode()
        case float() if value.is_integer() and abs(value) < 1e21:
            return int(value)  # Go writes 0, not 0.0.
        case _:
            return value

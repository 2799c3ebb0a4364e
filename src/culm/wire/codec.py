"""JSON encoding and decoding with the rules of Go's `encoding/json`.

Crush clients were written against that package, so request bodies are read as Go reads them: a
body is one JSON value and anything after it is ignored, absent and null fields are zero values,
field names match regardless of case, an integer is never a float and fits 64 bits. No other module
knows these rules. One rule differs: invalid UTF-8 is refused, where Go would silently replace it.
"""

import json
import math
import re
import string
import sys
from collections.abc import Iterator
from functools import cache
from itertools import accumulate, islice
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from culm.errors import InvalidRequest, TooLarge

T = TypeVar("T")
Json = Any  # Any JSON value, where the wire leaves it open.
Steps = tuple[str | int, ...]  # The path to a value inside another.

INT_MAX = (1 << 63) - 1
DIGITS_MAX = 310  # A float64 has no more digits before the decimal point.
NESTING_MAX = 500  # No client sends deeper values, and parsers written in C have no limit.
PIECES_MAX = 100_000  # In one body; real lists of files, variables and models have hundreds.

encode = msgspec.json.Encoder().encode


def decode(data: bytes | str, kind: type[T]) -> T:
    """Decode JSON that culm itself encoded; raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=kind)


def doc(description: str) -> msgspec.Meta:
    """The description of a field, for JSON schemas and the generated pages."""
    return msgspec.Meta(description=description)


def parse_body(data: bytes, kind: type[T]) -> T:
    """Decode a request body; raises `TooLarge`, or `InvalidRequest` with the error's position."""
    _check_size(data)
    try:
        try:
            value = msgspec.json.decode(data)
        except (msgspec.DecodeError, ValueError):
            value = _read_slowly(data)
        return fit(value, kind)
    except RecursionError as exc:
        raise InvalidRequest("failed to decode request: nested too deeply") from exc


def fit(value: Json, kind: type[T]) -> T:
    """Read a JSON value as Go would read it into `kind`; raises `InvalidRequest`."""
    try:
        return msgspec.convert(_as_go_reads(value, _type_info(kind)), kind)
    except (msgspec.ValidationError, _Misfit) as exc:
        raise InvalidRequest(f"failed to decode request: {exc}") from exc


def clean(text: str) -> str:
    """Text that can be encoded as UTF-8: a lone surrogate becomes U+FFFD, as in Go."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def printable(text: str) -> str:
    """The text on one line, with invisible and text-direction characters escaped."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def encodable(value: T) -> T:
    """`value` itself, or a copy in which every string went through `clean`."""
    try:
        encode(value)
    except UnicodeEncodeError:
        return msgspec.convert(_cleaned(msgspec.to_builtins(value)), type(value))
    return value


def strings_in(value: Json, path: Steps = ()) -> Iterator[tuple[Steps, str]]:
    """Every string of a document, with the path to it."""
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for name, inner in cast("dict[str, Json]", value).items():
            yield from strings_in(inner, (*path, name))
    elif isinstance(value, list):
        for n, inner in enumerate(cast("list[Json]", value)):
            yield from strings_in(inner, (*path, n))


def is_deeper(value: Json, levels: int) -> bool:
    """Return True if lists and objects are nested deeper than `levels`."""
    if isinstance(value, dict):
        inner = [*cast("dict[str, Json]", value).values()]
    elif isinstance(value, list):
        inner = cast("list[Json]", value)
    else:
        return False
    return not levels or any(is_deeper(one, levels - 1) for one in inner)


_SURROGATES = re.compile("[\ud800-\udfff]")
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_BRACKET = re.compile(r"[\[\]{}]")
_PIECES = re.compile(rb'[,\[{]|"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)


class _Misfit(Exception):
    """A value does not fit its field. The path to it is collected while the exception unwinds."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[str] = []

    def __str__(self) -> str:
        return f"{self.problem} - at `${''.join(reversed(self.steps))}`"


def _check_size(data: bytes) -> None:
    """Refuse a body with very many values: decoded, each takes a hundred times its encoded size."""
    # The plain count is cheap and enough for most bodies. Only a body above the limit, such as
    # source code full of brackets, is scanned with strings counted as one piece.
    if data.count(b",") + data.count(b"[") + data.count(b"{") + data.count(b'"') > PIECES_MAX:
        beyond = islice(_PIECES.finditer(data), PIECES_MAX, None)
        if next(beyond, None) is not None:
            raise TooLarge(f"a body may have at most {PIECES_MAX} strings, commas and brackets")


# --- fallback for bodies that msgspec refuses and Go accepts: trailing bytes, lone surrogates


def _read_slowly(data: bytes) -> Json:
    """Decode the first JSON value of `data`; raises `InvalidRequest`."""
    try:
        text = data.decode()
        if _nesting(text) > NESTING_MAX:
            raise RecursionError
        start = len(text) - len(text.lstrip(" \t\r\n"))
        return _cleaned(_READER.raw_decode(text, start)[0])
    except UnicodeDecodeError as exc:
        problem = f"not valid UTF-8 at byte {exc.start}"
    except json.JSONDecodeError as exc:
        problem = f"not valid JSON: {exc.msg} at character {exc.pos}"
    except ValueError as exc:
        problem = f"not valid JSON: {exc}"
    raise InvalidRequest(f"failed to decode request: {problem if data else 'the body is empty'}")


def _nesting(text: str) -> int:
    brackets = _BRACKET.findall(_STRING.sub("", text))
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)


def _refuse_constant(name: str) -> Json:
    raise ValueError(f"{name} is not a number")


def _whole(digits: str) -> float:
    """Parse an integer. One too long for any field is allowed, since its field may be unknown."""
    return int(digits) if len(digits) <= DIGITS_MAX else math.inf


_READER = json.JSONDecoder(parse_constant=_refuse_constant, parse_int=_whole)


def _cleaned(value: Json) -> Json:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        fields = cast("dict[str, Json]", value)
        return {clean(key): _cleaned(x) for key, x in fields.items()}
    if isinstance(value, list):
        return [_cleaned(item) for item in cast("list[Json]", value)]
    return value


# --- Go's rules, applied by the expected type

_type_info = cache(inspect.type_info)
# Go folds ASCII letters, and the two other letters that fold onto ASCII ones.
_FOLD = str.maketrans(string.ascii_uppercase + "\u017f\u212a", string.ascii_lowercase + "sk")
_NO_LINE_ENDS = str.maketrans("", "", "\r\n")


def _as_go_reads(value: Json, kind: inspect.Type) -> Json:
    """`value` prepared for msgspec: field names in our spelling, null as the zero value."""
    match kind:
        case inspect.Metadata(type=inner):
            return _as_go_reads(value, inner)
        case inspect.UnionType() | inspect.AnyType() if value is None:
            return None
        case inspect.UnionType(types=types):
            others = [t for t in types if not isinstance(t, inspect.NoneType)]
            return _as_go_reads(value, others[0]) if len(others) == 1 else value
        case _ if value is None:
            return _zero(kind)
        case inspect.StructType() if isinstance(value, dict):
            return _fields(cast("dict[str, Json]", value), kind)
        case inspect.DictType(value_type=inner) if isinstance(value, dict):
            entries = cast("dict[str, Json]", value)
            return {k: _inside(f".{k}", v, inner) for k, v in entries.items()}
        case inspect.ListType(item_type=inner) if isinstance(value, list):
            items = cast("list[Json]", value)
            return [_inside(n, v, inner) for n, v in enumerate(items)]
        case inspect.IntType() if isinstance(value, int) and not -INT_MAX - 1 <= value <= INT_MAX:
            raise _Misfit("the number does not fit 64 bits")
        case inspect.AnyType() | inspect.FloatType():
            _check_numbers(value, kind)
            return value
        case inspect.BytesType() if isinstance(value, str) and ("\n" in value or "\r" in value):
            return value.translate(_NO_LINE_ENDS)  # Go skips them in base64.
        case _:
            return value


def _inside(step: str | int, value: Json, kind: inspect.Type) -> Json:
    try:
        return _as_go_reads(value, kind)
    except _Misfit as exc:
        exc.steps.append(f"[{step}]" if isinstance(step, int) else step)
        raise


def _check_numbers(value: Json, kind: inspect.Type) -> None:
    """Refuse numbers outside the range of float64, as Go does for fields of any number type."""
    match value:
        case dict():
            for key, inner in cast("dict[str, Json]", value).items():
                _inside(f".{key}", inner, kind)
        case list():
            for n, inner in enumerate(cast("list[Json]", value)):
                _inside(n, inner, kind)
        case int() | float() if abs(value) > sys.float_info.max:
            raise _Misfit("the number is too large")
        case _:
            pass


def _fields(values: dict[str, Json], kind: inspect.StructType) -> dict[str, Json]:
    found: dict[str, Json] = {}
    names = _names(kind.cls)
    for name, value in values.items():
        field = names.get(name) or names.get(folded(name))
        if field is not None and value is not None:  # Null leaves a field at its zero value.
            spelled = field.encode_name
            found[spelled] = _inside(f".{spelled}", value, field.type)
    return found


def folded(name: str) -> str:
    """A key that is equal for two spellings of a name if Go treats them as one field."""
    return name.translate(_FOLD)


def spelled_as(steps: list[str], kind: type) -> list[str]:
    """A path of names through `kind`, with each field name in our spelling."""
    info: inspect.Type | None = _type_info(kind)
    spelled: list[str] = []
    for step in steps:
        if isinstance(info, inspect.Metadata):
            info = info.type
        field: inspect.Field | None = None
        if isinstance(info, inspect.StructType):
            field = _names(info.cls).get(folded(step))
            info = None if field is None else field.type
        else:  # The keys of a map are user data and stay as they are.
            info = info.value_type if isinstance(info, inspect.DictType) else None
        spelled.append(step if field is None else field.encode_name)
    return spelled


@cache
def _names(cls: type) -> dict[str, inspect.Field]:
    """The fields of a struct by their names, and by their folded names for other spellings."""
    kind = _type_info(cls)
    assert isinstance(kind, inspect.StructType)
    exact = {field.encode_name: field for field in kind.fields}
    return {folded(name): field for name, field in exact.items()} | exact


def _zero(kind: inspect.Type) -> Json:
    match kind:
        case inspect.StrType() | inspect.BytesType():
            return ""
        case inspect.BoolType():
            return False
        case inspect.IntType() | inspect.FloatType():
            return 0
        case inspect.ListType():
            return []
        case _:
            return {}

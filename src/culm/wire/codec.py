"""JSON in and out: msgspec inward, Go's reading habits at the rim.

The clients of this wire were written against Go's `encoding/json`; its rules are held here and
nowhere else: a body is one JSON value and what follows it is ignored, absent and null fields are
zero values, names are matched whatever their case, an integer is never a float and fits 64 bits.
One rule is ours: bytes that are no UTF-8 are refused, where Go would quietly replace them.
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
Steps = tuple[str | int, ...]  # The way to a value inside another.

INT_MAX = (1 << 63) - 1
DIGITS_MAX = 310  # A float64 has no more before its point.
NESTING_MAX = 500  # What is deeper than this no client sends, and readers in C have no bound.
PIECES_MAX = 100_000  # In one body: lists of files, variables and models have hundreds.

encode = msgspec.json.Encoder().encode


def decode(data: bytes | str, kind: type[T]) -> T:
    """Read what we wrote ourselves; raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=kind)


def parse_body(data: bytes, kind: type[T]) -> T:
    """Read a request body; raises `InvalidRequest` naming what is wrong and where, `TooLarge`."""
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
    """Text that UTF-8 can carry: half a surrogate pair becomes U+FFFD, as Go reads it."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def printable(text: str) -> str:
    """The text on one line. What cannot be seen, or turns the direction of reading, is escaped."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else _escaped(one) for one in text)


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")


def encodable(value: T) -> T:
    """`value` itself, or a copy with its texts made `clean`."""
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
    """Whether lists and objects of a document are in each other beyond so many levels."""
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
    """A value that its field cannot take; where it stands is noted on the way out."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem
        self.steps: list[str] = []

    def __str__(self) -> str:
        return f"{self.problem} - at `${''.join(reversed(self.steps))}`"


def _check_size(data: bytes) -> None:
    """Refuse a body of very many pieces: each costs a hundred times the bytes it came in."""
    # Most bodies are far from it; text full of brackets is looked at more closely.
    if data.count(b",") + data.count(b"[") + data.count(b"{") + data.count(b'"') > PIECES_MAX:
        beyond = islice(_PIECES.finditer(data), PIECES_MAX, None)
        if next(beyond, None) is not None:
            raise TooLarge(f"a body may have at most {PIECES_MAX} strings, commas and brackets")


# --- what the quick reader refuses and Go does not: trailing bytes, half a surrogate pair


def _read_slowly(data: bytes) -> Json:
    """Read the first value of `data`, or say in a sentence why there is none."""
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
    raise ValueError(f"{name} is no number")


def _whole(digits: str) -> float:
    """What is too long to be any field's number may still stand in one that nobody reads."""
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


# --- Go's rules, led by the type that is wanted

_type_info = cache(inspect.type_info)
# Go folds ASCII, and the two letters beyond it that fold onto it.
_FOLD = str.maketrans(string.ascii_uppercase + "\u017f\u212a", string.ascii_lowercase + "sk")
_NO_LINE_ENDS = str.maketrans("", "", "\r\n")


def _as_go_reads(value: Json, kind: inspect.Type) -> Json:
    """`value` as msgspec must see it: names as we spell them, null as the zero value."""
    match kind:
        case inspect.Metadata(type=inner):
            return _as_go_reads(value, inner)
        case inspect.UnionType() if value is None:
            return None
        case inspect.UnionType(types=types):
            given = [t for t in types if not isinstance(t, inspect.NoneType)]
            return _as_go_reads(value, given[0]) if len(given) == 1 else value
        case inspect.AnyType():
            _check_numbers(value)
            return value
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
        case inspect.FloatType():
            _check_numbers(value)
            return value
        case inspect.BytesType() if isinstance(value, str) and ("\n" in value or "\r" in value):
            return value.translate(_NO_LINE_ENDS)  # Go passes over them in base64.
        case _:
            return value


def _inside(step: str | int, value: Json, kind: inspect.Type) -> Json:
    try:
        return _as_go_reads(value, kind)
    except _Misfit as exc:
        exc.steps.append(f"[{step}]" if isinstance(step, int) else step)
        raise


def _check_numbers(value: Json) -> None:
    """Refuse what a float64 cannot hold, as Go does wherever a field takes any number."""
    step = ""
    try:
        match value:
            case dict():
                for key, inner in cast("dict[str, Json]", value).items():
                    step = f".{key}"
                    _check_numbers(inner)
            case list():
                for n, inner in enumerate(cast("list[Json]", value)):
                    step = f"[{n}]"
                    _check_numbers(inner)
            case int() | float() if abs(value) > sys.float_info.max:
                raise _Misfit("the number is too large")
            case _:
                pass
    except _Misfit as exc:
        exc.steps.append(step)
        raise


def _fields(given: dict[str, Json], kind: inspect.StructType) -> dict[str, Json]:
    found: dict[str, Json] = {}
    for name, value in given.items():
        field = _field(kind, name)
        if field is not None and value is not None:  # Null leaves a field as it was: zero.
            spelled = field.encode_name
            found[spelled] = _inside(f".{spelled}", value, field.type)
    return found


def folded(name: str) -> str:
    """The same for two spellings of a name that Go takes for one field."""
    return name.translate(_FOLD)


def _field(kind: inspect.StructType, name: str) -> inspect.Field | None:
    exact, by_fold = _names(kind.cls)
    return exact.get(name) or by_fold.get(folded(name))


def spelled_as(steps: list[str], kind: type) -> list[str]:
    """A path of names through `kind` with each name of a field spelled as we spell it."""
    info: inspect.Type | None = _type_info(kind)
    spelled: list[str] = []
    for step in steps:
        if isinstance(info, inspect.Metadata):
            info = info.type
        field: inspect.Field | None = None
        if isinstance(info, inspect.StructType):
            field = _field(info, step)
            info = None if field is None else field.type
        else:  # The names in a map are anybody's, and count as they are.
            info = info.value_type if isinstance(info, inspect.DictType) else None
        spelled.append(step if field is None else field.encode_name)
    return spelled


@cache
def _names(cls: type) -> tuple[dict[str, inspect.Field], dict[str, inspect.Field]]:
    kind = _type_info(cls)
    assert isinstance(kind, inspect.StructType)
    exact = {field.encode_name: field for field in kind.fields}
    return exact, {folded(name): field for name, field in exact.items()}


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

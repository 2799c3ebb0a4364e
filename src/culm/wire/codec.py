"""JSON in and out: msgspec inward, Go's reading habits at the rim.

The clients of this wire were written against Go's `encoding/json`; its rules are held here and
nowhere else: a body is one JSON value and what follows it is ignored, absent and null fields are
zero values, and an integer is never a float.
"""

import json
from typing import TypeVar, cast

import msgspec

from culm.errors import InvalidRequest

T = TypeVar("T")

encode = msgspec.json.Encoder().encode


def decode(data: bytes | str, kind: type[T]) -> T:
    """Read what we wrote ourselves; raises `msgspec.ValidationError`."""
    return msgspec.json.decode(data, type=kind)


def parse_body(data: bytes, kind: type[T]) -> T:
    """Read a request body; raises `InvalidRequest` naming the field that is wrong."""
    try:
        value, _ = _READER.raw_decode(data.decode().lstrip(" \t\r\n"))
    except ValueError as exc:
        raise InvalidRequest("failed to decode request: not valid JSON") from exc
    except RecursionError as exc:
        raise InvalidRequest("failed to decode request: nested too deeply") from exc
    try:
        return msgspec.convert(_without_nulls(value), kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"failed to decode request: {exc}") from exc


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_READER = json.JSONDecoder(parse_constant=_refuse_constant)


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {key: _without_nulls(item) for key, item in fields.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in cast("list[object]", value)]
    return value

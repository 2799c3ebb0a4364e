"""JSON in and out: msgspec inward, Go's reading habits at the rim.

The clients of this wire were written against Go's `encoding/json`; its rules are held here and
nowhere else: a body is one JSON value and what follows it is ignored, absent and null fields are
zero values, and an integer is never a float.
"""

import json
import re
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
        return msgspec.convert(_as_go_reads(value), kind)
    except msgspec.ValidationError as exc:
        raise InvalidRequest(f"failed to decode request: {exc}") from exc
    except ValueError as exc:
        raise InvalidRequest("failed to decode request: not valid JSON") from exc
    except RecursionError as exc:
        raise InvalidRequest("failed to decode request: nested too deeply") from exc


def clean(text: str) -> str:
    """Text that UTF-8 can carry: half a surrogate pair becomes U+FFFD, as Go reads it."""
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def encodable(value: T) -> T:
    """`value` itself, or a copy with its texts made `clean`."""
    try:
        encode(value)
    except UnicodeEncodeError:
        return msgspec.convert(_as_go_reads(msgspec.to_builtins(value)), type(value))
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


_READER = json.JSONDecoder(parse_constant=_refuse_constant)


_SURROGATES = re.compile("[\ud800-\udfff]")


def _as_go_reads(value: object) -> object:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        fields = cast("dict[str, object]", value)
        return {clean(key): _as_go_reads(x) for key, x in fields.items() if x is not None}
    if isinstance(value, list):
        return [_as_go_reads(item) for item in cast("list[object]", value)]
    return value

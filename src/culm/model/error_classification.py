"""Classification of a provider's error by its status, its codes and its message.

Pure. Every vendor phrases the same error differently, and many send it with a misleading status;
the tables in this module list the known phrases.
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import cast

import msgspec
from msgspec import Struct

from culm.wire.codec import Json, encode

ITEMS_MAX = 5  # Of a list of validation errors; more would not be read.


class ErrorClass(StrEnum):
    """Kinds of errors that need different reactions."""

    AUTH = "auth"
    QUOTA = "quota"  # No credit left; waiting does not help.
    CONTEXT = "context"  # More tokens than the model can read.
    LARGE = "large"  # More bytes than the provider takes.
    FILTER = "filter"
    MODEL = "model"
    ADDRESS = "address"  # Not found: the model, or the whole address.
    CALL = "call"  # The model wrote a call that its own provider cannot read.
    RATE = "rate"
    DOWN = "down"
    REFUSED = "refused"  # Everything else.


TRANSIENT = frozenset({ErrorClass.CALL, ErrorClass.RATE, ErrorClass.DOWN})


class ProviderError(Struct, frozen=True):
    """An error as the provider sent it."""

    message: str = ""
    codes: str = ""  # Its type, code and reasons, in lower case.
    status: int | None = None  # According to the body.
    is_error: bool = True  # False: a document without an error in it.

    @classmethod
    def of(cls, error: Json) -> "ProviderError":
        """Parse the value of `{"error": …}`."""
        codes = " ".join(_codes(error)).lower()
        return cls(_message(error), codes, _status(error))


def parse_problem(body: bytes) -> ProviderError:
    """Parse a response body of any form.

    Known forms are `{"error": {"message"}}`, `{"error": ""}`, `[{"error": …}]`, `{"message"}`,
    `{"detail"}`, `{"type": "error", "error": …}`, `{"object": "error", "message"}`, and HTML pages.
    """
    try:
        document: Json = msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        document = None
    match _first(document):
        case {"error": error} if error:
            return ProviderError.of(error)
        case {"object": "error"} | {"type": "error"}:
            return ProviderError.of(_first(document))
        case dict() | str():
            return msgspec.structs.replace(ProviderError.of(_first(document)), is_error=False)
        case _:
            return ProviderError(_text(body), is_error=False)


def _first(document: Json) -> Json:
    """The first item of a list, as Gemini sends its errors in one."""
    items = cast("list[Json]", document) if isinstance(document, list) else []
    return items[0] if items else cast("Json", document)


def _text(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return "an HTML page" if text[:1] == "<" else text


def _message(error: Json) -> str:
    match error:
        case str():
            return error
        case [*items]:
            return "; ".join(map(_message, items[:ITEMS_MAX]))
        case {"msg": str(text), "loc": [_, *_] as places}:
            return f"{'.'.join(map(str, places))}: {text}"
        # A router quotes the upstream provider, whose message is more specific.
        case {"message": str(text), "metadata": {"raw": str(raw)}}:
            return f"{text}: {raw}"
        case {"error": inner} | {"message": inner} | {"detail": inner} if inner:
            return _message(inner)
        case dict():
            return encode(error).decode()
        case _:
            return ""


def _codes(error: Json) -> list[str]:
    if not isinstance(error, dict):
        return []
    fields = cast("dict[str, Json]", error)
    codes = [str(fields[name]) for name in ("type", "code", "status", "reason") if name in fields]
    details = fields.get("details")
    for detail in cast("list[Json]", details) if isinstance(details, list) else []:
        codes += _codes(detail)
    return codes


def _status(error: Json) -> int | None:
    match error:
        case {"code": int(code)} | {"status": int(code)}:
            return code if 400 <= code < 600 else None
        case {"code": str(code)} if re.fullmatch(r"[45]\d\d", code):
            return int(code)
        case _:
            return None


# --- the signs of each trouble: parts of a code, and patterns in the words

_CODES: Mapping[ErrorClass, tuple[str, ...]] = {
    ErrorClass.QUOTA: ("insufficient_quota", "billing", "insufficient_credits", "payment_required"),
    ErrorClass.CONTEXT: ("context_length", "context_window", "context_size", "prompt_too_long"),
    ErrorClass.FILTER: ("content_filter", "content_policy", "moderation", "safety", "prohibited"),
    ErrorClass.MODEL: ("model_not_found", "invalid_model", "model_decommissioned"),
    ErrorClass.AUTH: ("authentication", "permission", "api_key", "unauthorized", "unauthenticated"),
    ErrorClass.CALL: ("tool_use_failed",),
    ErrorClass.RATE: ("rate_limit", "resource_exhausted", "too_many_requests"),
    ErrorClass.LARGE: ("request_too_large",),
    ErrorClass.DOWN: (
        "server_error",
        "internal",
        "overload",
        "timeout",
        "unavailable",
        "api_error",
    ),
}
_PHRASES: Mapping[ErrorClass, re.Pattern[str]] = {
    ErrorClass.QUOTA: re.compile(
        r"insufficient (balance|credit|funds)|credit balance is too low|requires more credits"
        r"|(out of|all available|not enough) credits|spending limit"
    ),
    ErrorClass.CONTEXT: re.compile(
        r"(maximum|exceeds?|available|greater than|over) (the )?(\w+ )?context"
        r"|context (length|window|size)|prompt is too long|maximum prompt length"
        r"|input token count|reduce the length of the (messages|prompt|input)"
        r"|too large for model with \d+ maximum"
    ),
    ErrorClass.FILTER: re.compile(
        r"content (management |filtering |usage )?polic|usage polic|content exists risk"
        r"|\b(was|were|been|is) flagged|blocked by .{0,40}(safety|moderation|filter)"
    ),
    ErrorClass.MODEL: re.compile(
        r"^model: |not a valid model|(invalid|unknown|no such) model|no models? (is )?loaded"
        r"|\bmodels?\b.{0,120}\b(not exist|not found|no longer|decommissioned|not available)"
        r"|try pulling it"
    ),
    ErrorClass.AUTH: re.compile(
        r"(incorrect|invalid|missing|expired|wrong) (x-)?api[- ]key"
        r"|api key (is )?(not valid|invalid|expired|not found|missing)"
    ),
}
_ALL = tuple(_CODES)


def classify(status: int | None, problem: ProviderError) -> ErrorClass:
    """The class of an error. The status, if there is one, limits the possible classes."""
    match status:
        case 402:
            return ErrorClass.QUOTA
        case 401 | 403:
            candidates, otherwise = _FORBIDDEN, ErrorClass.AUTH
        case 404:
            candidates, otherwise = (ErrorClass.MODEL,), ErrorClass.ADDRESS
        case 413:
            candidates, otherwise = (ErrorClass.CONTEXT,), ErrorClass.LARGE
        case 429:
            candidates, otherwise = (ErrorClass.QUOTA,), ErrorClass.RATE
        case int() if status in (408, 409, 425) or status >= 500:
            candidates, otherwise = (ErrorClass.CONTEXT, ErrorClass.CALL), ErrorClass.DOWN
        case _:
            candidates, otherwise = _ALL, ErrorClass.REFUSED
    message = problem.message[:4000].lower()
    return next((c for c in candidates if _matches(c, problem.codes, message)), otherwise)


_FORBIDDEN = (ErrorClass.QUOTA, ErrorClass.FILTER, ErrorClass.MODEL)


def _matches(kind: ErrorClass, codes: str, message: str) -> bool:
    if any(code in codes for code in _CODES[kind]):
        return True
    pattern = _PHRASES.get(kind)
    return pattern is not None and pattern.search(message) is not None

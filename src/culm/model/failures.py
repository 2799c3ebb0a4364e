"""Failures of a provider as errors for the person who must act on them.

Pure: a status, a body or an exception in, a `ModelFailed` out, with one thing to do as its hint.
Every vendor phrases the same error differently, and many send it with a misleading status; the
error classes list the known phrases. Text from a provider is quoted without secrets, in case it
echoes them.
"""

import math
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping
from email.utils import parsedate_to_datetime
from typing import cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aiohttp
import msgspec
from msgspec import Struct

from culm.errors import ModelFailed
from culm.model.base import ProviderAccess
from culm.redaction import RedactedStruct
from culm.wire.codec import Json, clean, encode, strings_in

QUOTE_CHARS_MAX = 2000  # Of a provider's message.
BROKE_OFF = "The provider reported an error"
ITEMS_MAX = 5  # Of a list of validation errors; more would not be read.
KEY_CHARS_MIN = 4  # Keys of local servers are "x" or "-"; removing those would garble every text.
TOKEN_CHARS_MIN = 12  # Of a token in a header or an address; shorter ones are names.


class ProviderPeer(RedactedStruct, frozen=True):
    """The receiver of a request: names to show, and secrets to hide."""

    provider: str
    host: str
    model_id: str
    secrets: tuple[str, ...] = ()

    def quote(self, text: str) -> str:
        """Text from the provider, fit to be shown."""
        for secret in self.secrets:
            text = text.replace(secret, "[secret]")
        text = clean(" ".join(text.split()))
        return text if len(text) <= QUOTE_CHARS_MAX else f"{text[:QUOTE_CHARS_MAX]}…"


def peer_of(access: ProviderAccess, model_id: str, provider: str) -> ProviderPeer:
    host = _host_of(access.base_url)
    secrets = {spelled for secret in _secrets_of(access) for spelled in (secret, quote(secret, ""))}
    # The longest first, because one may be a part of another.
    return ProviderPeer(
        provider or host, host, model_id, tuple(sorted(secrets, key=len, reverse=True))
    )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or "the provider"
    except ValueError:
        return "the provider"


def _secrets_of(access: ProviderAccess) -> Iterator[str]:
    """The key, and all values in headers, address and body that may be credentials."""
    key = access.api_key.strip()
    if len(key) >= KEY_CHARS_MIN:
        yield key
    tokens = [token for value in access.headers.values() for token in value.split()]
    try:
        url = urlsplit(access.base_url)
    except ValueError:
        url = urlsplit("")
    tokens += [value for _, value in parse_qsl(url.query)]
    tokens += [text for _, text in strings_in(access.body)]
    yield from (token for token in tokens if len(token) >= TOKEN_CHARS_MIN)
    for password in (url.password or "", unquote(url.password or "")):
        if len(password) >= KEY_CHARS_MIN:
            yield password
            # As in the Authorization header.
            yield b64encode(f"{unquote(url.username or '')}:{password}".encode()).decode()


# --- errors as providers send them


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


# --- classes of errors, which need different reactions


class ErrorClass(Struct, frozen=True):
    """One class: its texts for a person, and its signs in the codes and the message of an error."""

    title: str
    details: str
    hint: str = ""
    codes: tuple[str, ...] = ()  # Parts of a code.
    phrases: re.Pattern[str] | None = None
    transient: bool = False

    def matches(self, codes: str, message: str) -> bool:
        if any(code in codes for code in self.codes):
            return True
        return self.phrases is not None and self.phrases.search(message) is not None


_QUOTA = ErrorClass(  # Waiting does not help.
    "Out of credit",
    "the account at {who} has no credit left{status}: {message}",
    "top up the account at {who}, or choose another model: `culm models` lists them",
    codes=("insufficient_quota", "billing", "insufficient_credits", "payment_required"),
    phrases=re.compile(
        r"insufficient (balance|credit|funds)|credit balance is too low|requires more credits"
        r"|(out of|all available|not enough) credits|spending limit"
    ),
)
_CONTEXT = ErrorClass(  # More tokens than the model can read.
    "The conversation is too long",
    "it does not fit into the context window of {model}{status}: {message}",
    "summarize the session, or choose a model with a larger context",
    codes=("context_length", "context_window", "context_size", "prompt_too_long"),
    phrases=re.compile(
        r"(maximum|exceeds?|available|greater than|over) (the )?(\w+ )?context"
        r"|context (length|window|size)|prompt is too long|maximum prompt length"
        r"|input token count|reduce the length of the (messages|prompt|input)"
        r"|too large for model with \d+ maximum"
    ),
)
_FILTER = ErrorClass(
    "The content was refused",
    "{who} does not answer this{status}: {message}",
    "rephrase the prompt, or choose another model",
    codes=("content_filter", "content_policy", "moderation", "safety", "prohibited"),
    phrases=re.compile(
        r"content (management |filtering |usage )?polic|usage polic|content exists risk"
        r"|\b(was|were|been|is) flagged|blocked by .{0,40}(safety|moderation|filter)"
    ),
)
_MODEL = ErrorClass(
    "Model not found",
    "{who} does not offer the model {model}{status}: {message}",
    "`culm models {who}` lists what it offers",
    codes=("model_not_found", "invalid_model", "model_decommissioned"),
    phrases=re.compile(
        r"^model: |not a valid model|(invalid|unknown|no such) model|no models? (is )?loaded"
        r"|\bmodels?\b.{0,120}\b(not exist|not found|no longer|decommissioned|not available)"
        r"|try pulling it"
    ),
)
_AUTH = ErrorClass(
    "Authentication problem",
    "{who} refused the key{status}: {message}",
    "check the key of provider {who}: `culm models` shows where it comes from",
    codes=("authentication", "permission", "api_key", "unauthorized", "unauthenticated"),
    phrases=re.compile(
        r"(incorrect|invalid|missing|expired|wrong) (x-)?api[- ]key"
        r"|api key (is )?(not valid|invalid|expired|not found|missing)"
    ),
)
_CALL = ErrorClass(  # The model wrote a call that its own provider cannot read.
    "The model made a broken call",
    "{who} could not read a call that {model} made{status}: {message}",
    "ask again, or choose a model that is better with tools",
    codes=("tool_use_failed",),
    transient=True,
)
_RATE = ErrorClass(
    "Too many requests",
    "{who} limits the rate of requests{status}: {message}",
    "wait a moment, or choose another model",
    codes=("rate_limit", "resource_exhausted", "too_many_requests"),
    transient=True,
)
_LARGE = ErrorClass(  # More bytes than the provider takes.
    "The request is too large",
    "{who} does not take a request of this size{status}: {message}",
    "summarize the session, or send smaller attachments",
    codes=("request_too_large",),
)
_DOWN = ErrorClass(
    "The provider has a problem",
    "{who} failed{status}: {message}",
    "try again later, or choose another model",
    codes=("server_error", "internal", "overload", "timeout", "unavailable", "api_error"),
    transient=True,
)
_ADDRESS = ErrorClass(  # Not found: the model, or the whole address.
    "Model or address not found",
    "{host} has no model {model} at this address{status}: {message}",
    "check the base_url of provider {who}; `culm models {who}` lists what it offers",
)
_REFUSED = ErrorClass("The provider refused", "{who} refused{status}: {message}")

_BY_SIGNS = (_QUOTA, _CONTEXT, _FILTER, _MODEL, _AUTH, _CALL, _RATE, _LARGE, _DOWN)


def classify(status: int | None, problem: ProviderError) -> ErrorClass:
    """The class of an error. The status, if there is one, limits the possible classes."""
    match status:
        case 402:
            return _QUOTA
        case 401 | 403:
            candidates, otherwise = (_QUOTA, _FILTER, _MODEL), _AUTH
        case 404:
            candidates, otherwise = (_MODEL,), _ADDRESS
        case 413:
            candidates, otherwise = (_CONTEXT,), _LARGE
        case 429:
            candidates, otherwise = (_QUOTA,), _RATE
        case int() if status in (408, 409, 425) or status >= 500:
            candidates, otherwise = (_CONTEXT, _CALL), _DOWN
        case _:
            candidates, otherwise = _BY_SIGNS, _REFUSED
    message = problem.message[:4000].lower()
    return next((c for c in candidates if c.matches(problem.codes, message)), otherwise)


# --- error responses


def on_status(
    peer: ProviderPeer, status: int, headers: Mapping[str, str], body: bytes
) -> ModelFailed:
    """A response with a status other than 200."""
    if 300 <= status < 400:
        target = peer.quote(headers.get("Location", "")) or "an empty address"
        return ModelFailed(
            "The provider has moved",
            f"{peer.host} redirects to {target} ({status}). The redirect is not followed, because "
            "it would receive the key.",
            hint=f"set the base_url of provider {peer.provider} to its new address",
        )
    problem = parse_problem(body)
    return _failure(peer, problem, status, wait_s=retry_after_s(headers))


def on_stream_error(peer: ProviderPeer, error: Json) -> ModelFailed:
    """An error object inside a stream that began well."""
    problem = ProviderError.of(error)
    return _failure(peer, problem, problem.status)


def _failure(
    peer: ProviderPeer, problem: ProviderError, status: int | None, wait_s: float | None = None
) -> ModelFailed:
    kind = classify(status, problem)
    title, details, hint = kind.title, kind.details, kind.hint
    if status is None and kind in (_DOWN, _REFUSED):
        title, details, hint = BROKE_OFF, "{who} broke off its answer: {message}", ""
    names = {"who": peer.provider, "host": peer.host, "model": peer.model_id}
    message = peer.quote(problem.message) or "no details"
    return ModelFailed(
        title,
        details.format(status=f" ({status})" if status else "", message=message, **names),
        transient=kind.transient,
        retry_after_s=wait_s,
        hint=hint.format(**names),
    )


def on_no_stream(peer: ProviderPeer, kind: str, body: bytes) -> ModelFailed:
    """A 200 response that is not a stream: an error of some providers, or a wrong address."""
    problem = parse_problem(body)
    if problem.is_error:
        return _failure(peer, problem, problem.status)
    return on_unreadable(peer, f"{kind} instead of a stream", body)


def on_broken_off(peer: ProviderPeer, reason: str | None) -> ModelFailed:
    """An answer that ended with an error without a message."""
    return ModelFailed(
        BROKE_OFF,
        f"{peer.provider} broke off its answer: {peer.quote(reason or '')}",
        transient=True,
    )


# --- missing or incomplete answers


def on_exception(peer: ProviderPeer, exc: Exception) -> ModelFailed:
    """A connection that failed, before or during the answer."""
    reason = peer.quote(str(exc))
    address = f"check the base_url of provider {peer.provider}"
    match exc:
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return ModelFailed(
                "The provider's address is wrong",
                f"the base_url of provider {peer.provider} is not a usable URL",
                hint="use an address like https://api.example.com/v1",
            )
        case aiohttp.ClientConnectorDNSError():
            title, details = "Provider not found", f"the name {peer.host} cannot be resolved"
            hint = f"{address}, and the network"
        case aiohttp.ClientSSLError():
            title, details = "No secure connection", f"TLS with {peer.host} failed: {reason}"
            hint = f"{address}, and the certificates that this machine trusts"
        case aiohttp.ConnectionTimeoutError():
            title, details = "No connection", f"{peer.host} could not be reached in time"
            hint = f"check that it is running, or {address}"
        case aiohttp.ClientConnectorError(strerror=why):
            why = peer.quote(str(why or "")) or "no response"
            title, details = "No connection", f"{peer.host} cannot be reached: {why}"
            hint = f"check that it is running, or {address}"
        case aiohttp.ClientPayloadError():
            return on_cut(peer)
        case aiohttp.ClientResponseError():
            title, details = "Unreadable answer", f"{peer.host} does not speak HTTP: {reason}"
            hint = address
        case aiohttp.ClientConnectionError() | OSError():
            title, details = "Connection lost", f"{peer.host} closed the connection: {reason}"
            hint = ""
        case _:
            return ModelFailed(
                "The request cannot be sent",
                f"the key or a header of provider {peer.provider} does not fit into HTTP: {reason}",
                hint=f"check the API key and the headers of provider {peer.provider}",
            )
    return ModelFailed(title, details, transient=True, hint=hint)


def on_stall(peer: ProviderPeer, stall_s: float) -> ModelFailed:
    return ModelFailed(
        "The provider stopped answering",
        f"{peer.host} sent nothing for {stall_s:g} s",
        transient=True,
    )


def on_cut(peer: ProviderPeer) -> ModelFailed:
    return ModelFailed(
        "The stream was cut",
        f"the answer of {peer.provider} ended in the middle: the stream was cut",
        transient=True,
    )


def on_unreadable(peer: ProviderPeer, received: str, sample: bytes = b"") -> ModelFailed:
    """An answer that cannot be parsed; the same request would get the same answer."""
    quoted = peer.quote(parse_problem(sample).message)
    return ModelFailed(
        "Unreadable answer",
        f"{peer.provider} sent {received}" + (f": {quoted}" if quoted else ""),
        hint=f"check that provider {peer.provider} has the right type and base_url",
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """The wait that the provider asks for: milliseconds, seconds, or until a date."""
    if (millis := _number(headers.get("retry-after-ms", ""))) is not None:
        return millis / 1000
    value = headers.get("Retry-After", "")
    if (seconds := _number(value)) is not None:
        return seconds
    try:  # Relative to the provider's own clock, so that ours does not matter.
        until = parsedate_to_datetime(value)
        return max(0.0, (until - parsedate_to_datetime(headers.get("Date", ""))).total_seconds())
    except (ValueError, TypeError):  # Not dates, or only one of them with a zone.
        return None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None

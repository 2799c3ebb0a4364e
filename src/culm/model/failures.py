"""Failures of a provider as errors for the person who must act on them.

Pure: a status, a body or an exception in, a `ModelFailed` out, with one thing to do as its hint.
`error_classification.py` classifies the errors. Text from a provider is quoted without secrets,
in case it echoes them.
"""

import math
from base64 import b64encode
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import aiohttp

from culm.errors import ModelFailed
from culm.model.base import ProviderAccess
from culm.model.error_classification import (
    TRANSIENT,
    ErrorClass,
    ProviderError,
    classify,
    parse_problem,
)
from culm.wire.codec import Json, clean, strings_in

QUOTE_CHARS_MAX = 2000  # Of a provider's message.
KEY_CHARS_MIN = 4  # Keys of local servers are "x" or "-"; removing those would garble every text.
TOKEN_CHARS_MIN = 12  # Of a token in a header or an address; shorter ones are names.


@dataclass(frozen=True, slots=True)
class ProviderPeer:
    """The receiver of a request: names to show, and secrets to hide."""

    provider: str
    host: str
    model_id: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

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


# --- error responses


@dataclass(frozen=True, slots=True)
class _Texts:
    title: str
    details: str
    hint: str = ""


_TEXTS: Mapping[ErrorClass, _Texts] = {
    ErrorClass.AUTH: _Texts(
        "Authentication problem",
        "{who} refused the key{status}: {message}",
        "check the key of provider {who}: `culm models` shows where it comes from",
    ),
    ErrorClass.QUOTA: _Texts(
        "Out of credit",
        "the account at {who} has no credit left{status}: {message}",
        "top up the account at {who}, or choose another model: `culm models` lists them",
    ),
    ErrorClass.CONTEXT: _Texts(
        "The conversation is too long",
        "it does not fit into the context window of {model}{status}: {message}",
        "summarize the session, or choose a model with a larger context",
    ),
    ErrorClass.LARGE: _Texts(
        "The request is too large",
        "{who} does not take a request of this size{status}: {message}",
        "summarize the session, or send smaller attachments",
    ),
    ErrorClass.FILTER: _Texts(
        "The content was refused",
        "{who} does not answer this{status}: {message}",
        "rephrase the prompt, or choose another model",
    ),
    ErrorClass.MODEL: _Texts(
        "Model not found",
        "{who} does not offer the model {model}{status}: {message}",
        "`culm models {who}` lists what it offers",
    ),
    ErrorClass.ADDRESS: _Texts(
        "Model or address not found",
        "{host} has no model {model} at this address{status}: {message}",
        "check the base_url of provider {who}; `culm models {who}` lists what it offers",
    ),
    ErrorClass.CALL: _Texts(
        "The model made a broken call",
        "{who} could not read a call that {model} made{status}: {message}",
        "ask again, or choose a model that is better with tools",
    ),
    ErrorClass.RATE: _Texts(
        "Too many requests",
        "{who} limits the rate of requests{status}: {message}",
        "wait a moment, or choose another model",
    ),
    ErrorClass.DOWN: _Texts(
        "The provider has a problem",
        "{who} failed{status}: {message}",
        "try again later, or choose another model",
    ),
    ErrorClass.REFUSED: _Texts("The provider refused", "{who} refused{status}: {message}"),
}
_BROKE_OFF = _Texts(
    "The provider reported an error", "{who} broke off its answer{status}: {message}"
)


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
    texts = _TEXTS[kind]
    if status is None and kind in (ErrorClass.DOWN, ErrorClass.REFUSED):
        texts = _BROKE_OFF
    names = {"who": peer.provider, "host": peer.host, "model": peer.model_id}
    message = peer.quote(problem.message) or "no details"
    return ModelFailed(
        texts.title,
        texts.details.format(status=f" ({status})" if status else "", message=message, **names),
        transient=kind in TRANSIENT,
        retry_after_s=wait_s,
        hint=texts.hint.format(**names),
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
        _BROKE_OFF.title,
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

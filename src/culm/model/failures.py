"""What went wrong with a provider, in words for the person who must act on it.

Pure: a status, a body or an exception in, a `ModelFailed` out, with the one thing that mends it
as its hint. Which trouble an error is, is `troubles.py`. Text that is not ours is quoted without
the provider's secrets, whoever echoes them.
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

QUOTE_CHARS_MAX = 2000  # What a person may read of a provider's own words.
KEY_CHARS_MIN = 4  # Local servers want "x" or "-"; cutting that out would garble every text.
TOKEN_CHARS_MIN = 12  # Of a word in a header or an address; shorter ones are names.


@dataclass(frozen=True, slots=True)
class ProviderPeer:
    """Whom a request went to: names to show, and secrets that must not be."""

    provider: str
    host: str
    model_id: str
    secrets: tuple[str, ...] = field(default=(), repr=False)

    def quote(self, text: str) -> str:
        """Words of the other side, fit to be shown."""
        for secret in self.secrets:
            text = text.replace(secret, "[secret]")
        text = clean(" ".join(text.split()))
        return text if len(text) <= QUOTE_CHARS_MAX else f"{text[:QUOTE_CHARS_MAX]}…"


def peer_of(access: ProviderAccess, model_id: str, provider: str) -> ProviderPeer:
    host = _host_of(access.base_url)
    secrets = {spelled for secret in _secrets_of(access) for spelled in (secret, quote(secret, ""))}
    # The longest first: one may be a part of another.
    return ProviderPeer(
        provider or host, host, model_id, tuple(sorted(secrets, key=len, reverse=True))
    )


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or "the provider"
    except ValueError:
        return "the provider"


def _secrets_of(access: ProviderAccess) -> Iterator[str]:
    """The key, and whatever the headers, the address and the body hold that could be one."""
    key = access.api_key.strip()
    if len(key) >= KEY_CHARS_MIN:
        yield key
    words = [word for value in access.headers.values() for word in value.split()]
    try:
        url = urlsplit(access.base_url)
    except ValueError:
        url = urlsplit("")
    words += [value for _, value in parse_qsl(url.query)]
    words += [text for _, text in strings_in(access.body)]
    yield from (word for word in words if len(word) >= TOKEN_CHARS_MIN)
    for password in (url.password or "", unquote(url.password or "")):
        if len(password) >= KEY_CHARS_MIN:
            yield password
            # As it is sent.
            yield b64encode(f"{unquote(url.username or '')}:{password}".encode()).decode()


# --- an answer that is an error


@dataclass(frozen=True, slots=True)
class _Words:
    title: str
    details: str
    hint: str = ""


_WORDS: Mapping[ErrorClass, _Words] = {
    ErrorClass.AUTH: _Words(
        "Authentication problem",
        "{who} refused the key{status}: {said}",
        "check the key of provider {who}: `culm models` shows where it comes from",
    ),
    ErrorClass.QUOTA: _Words(
        "Out of credit",
        "the account at {who} has nothing left to spend{status}: {said}",
        "top up the account at {who}, or choose another model: `culm models` lists them",
    ),
    ErrorClass.CONTEXT: _Words(
        "The conversation is too long",
        "it does not fit into the context of {model}{status}: {said}",
        "summarize the session, or choose a model with a larger context",
    ),
    ErrorClass.LARGE: _Words(
        "The request is too large",
        "{who} does not take a request of this size{status}: {said}",
        "summarize the session, or send smaller attachments",
    ),
    ErrorClass.FILTER: _Words(
        "The content was refused",
        "{who} does not answer this{status}: {said}",
        "say it in other words, or choose another model",
    ),
    ErrorClass.MODEL: _Words(
        "Model not found",
        "{who} does not offer the model {model}{status}: {said}",
        "`culm models {who}` lists what it offers",
    ),
    ErrorClass.ADDRESS: _Words(
        "Model or address not found",
        "{host} has no model {model} at this address{status}: {said}",
        "check the base_url of provider {who}; `culm models {who}` lists what it offers",
    ),
    ErrorClass.CALL: _Words(
        "The model made a broken call",
        "{who} could not read a call that {model} made{status}: {said}",
        "ask again, or choose a model that is better with tools",
    ),
    ErrorClass.RATE: _Words(
        "Too many requests",
        "{who} asks for patience{status}: {said}",
        "wait a moment, or choose another model",
    ),
    ErrorClass.DOWN: _Words(
        "The provider has a problem",
        "{who} failed{status}: {said}",
        "try again later, or choose another model",
    ),
    ErrorClass.REFUSED: _Words("The provider refused", "{who} refused{status}: {said}"),
}
_BROKE_OFF = _Words("The provider reported an error", "{who} broke off its answer{status}: {said}")


def on_status(
    peer: ProviderPeer, status: int, headers: Mapping[str, str], body: bytes
) -> ModelFailed:
    """An answer that is not 200."""
    if 300 <= status < 400:
        target = peer.quote(headers.get("Location", "")) or "nowhere"
        return ModelFailed(
            "The provider has moved",
            f"{peer.host} redirects to {target} ({status}). It is not followed: the key would "
            "go with it.",
            hint=f"set the base_url of provider {peer.provider} to its new address",
        )
    problem = parse_problem(body)
    return _failure(peer, problem, status, wait_s=retry_after_s(headers))


def on_stream_error(peer: ProviderPeer, error: Json) -> ModelFailed:
    """An error object inside a stream that had begun well."""
    problem = ProviderError.of(error)
    return _failure(peer, problem, problem.status)


def _failure(
    peer: ProviderPeer, problem: ProviderError, status: int | None, wait_s: float | None = None
) -> ModelFailed:
    trouble = classify(status, problem)
    words = _WORDS[trouble]
    if status is None and trouble in (ErrorClass.DOWN, ErrorClass.REFUSED):
        words = _BROKE_OFF
    names = {"who": peer.provider, "host": peer.host, "model": peer.model_id}
    said = peer.quote(problem.message) or "it says no more"
    return ModelFailed(
        words.title,
        words.details.format(status=f" ({status})" if status else "", said=said, **names),
        transient=trouble in TRANSIENT,
        retry_after_s=wait_s,
        hint=words.hint.format(**names),
    )


def on_no_stream(peer: ProviderPeer, what: str, body: bytes) -> ModelFailed:
    """A 200 that is a document: an error of some providers, or the wrong address."""
    problem = parse_problem(body)
    if problem.is_error:
        return _failure(peer, problem, problem.status)
    return on_unreadable(peer, f"{what} instead of a stream", body)


def on_broken_off(peer: ProviderPeer, reason: str | None) -> ModelFailed:
    """An answer that ended with an error nobody put into words."""
    return ModelFailed(
        _BROKE_OFF.title,
        f"{peer.provider} broke off its answer: {peer.quote(reason or '')}",
        transient=True,
    )


# --- no answer, or half of one


def on_exception(peer: ProviderPeer, exc: Exception) -> ModelFailed:
    """No answer, or half of one."""
    reason = peer.quote(str(exc))
    address = f"check the base_url of provider {peer.provider}"
    match exc:
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return ModelFailed(
                "The provider's address is wrong",
                f"the base_url of provider {peer.provider} is not a usable URL",
                hint="it looks like https://api.example.com/v1",
            )
        case aiohttp.ClientConnectorDNSError():
            title, details = "Provider not found", f"the name {peer.host} cannot be looked up"
            hint = f"{address}, and the network"
        case aiohttp.ClientSSLError():
            title, details = "No secure connection", f"TLS with {peer.host} failed: {reason}"
            hint = f"{address}, and which certificates this machine trusts"
        case aiohttp.ConnectionTimeoutError():
            title, details = "No connection", f"{peer.host} could not be reached in time"
            hint = f"is it running? If not there, {address}"
        case aiohttp.ClientConnectorError(strerror=why):
            why = peer.quote(str(why or "")) or "nobody answers"
            title, details = "No connection", f"{peer.host} cannot be reached: {why}"
            hint = f"is it running? If not there, {address}"
        case aiohttp.ClientPayloadError():
            return on_cut(peer)
        case aiohttp.ClientResponseError():
            title, details = "Unreadable answer", f"{peer.host} does not answer in HTTP: {reason}"
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
        f"nothing came from {peer.host} for {stall_s:g} s",
        transient=True,
    )


def on_cut(peer: ProviderPeer) -> ModelFailed:
    return ModelFailed(
        "The stream was cut",
        f"the answer of {peer.provider} ended in the middle: the stream was cut",
        transient=True,
    )


def on_unreadable(peer: ProviderPeer, what: str, sample: bytes = b"") -> ModelFailed:
    """An answer that is not what was asked for; asking again gives the same."""
    quoted = peer.quote(parse_problem(sample).message)
    return ModelFailed(
        "Unreadable answer",
        f"{peer.provider} sent {what}" + (f": {quoted}" if quoted else ""),
        hint=f"check that provider {peer.provider} has the right type and base_url",
    )


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """How long the provider wishes us to wait: milliseconds, seconds, or until a date."""
    if (millis := _number(headers.get("retry-after-ms", ""))) is not None:
        return millis / 1000
    wish = headers.get("Retry-After", "")
    if (seconds := _number(wish)) is not None:
        return seconds
    try:  # Against the provider's own clock, so neither ours nor the difference matters.
        until = parsedate_to_datetime(wish)
        return max(0.0, (until - parsedate_to_datetime(headers.get("Date", ""))).total_seconds())
    except (ValueError, TypeError):  # No date, or one with and one without a zone.
        return None


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None

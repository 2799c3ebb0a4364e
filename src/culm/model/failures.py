"""What went wrong with a provider, in words for the person who must act on it.

Pure: a status, a body or an exception in, a `ModelFailed` out. Text that is not ours is quoted
without the provider's secrets, whoever echoes them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import aiohttp
import msgspec

from culm.errors import ModelFailed
from culm.model.base import Access
from culm.wire.codec import Json, clean, encode

QUOTE_CHARS_MAX = 2000  # What a person may read of a provider's own words.
KEY_CHARS_MIN = 4  # Local servers want "x" or "-"; cutting that out would garble every text.
TOKEN_CHARS_MIN = 12  # Of a word in a header; shorter ones are names.

_TRANSIENT = frozenset({408, 409, 425, 429})
# How providers name what passes, in the `type` or `code` of an error inside a stream.
_TRANSIENT_WORDS = ("server_error", "internal", "overload", "rate_limit", "timeout", "unavailable")
_SPENT = "insufficient_quota"  # Sent as 429, but waiting does not help.


@dataclass(frozen=True, slots=True)
class Peer:
    """Whom a request went to: names to show, and secrets that must not be."""

    provider: str
    host: str
    model_id: str
    secrets: tuple[str, ...] = ()

    def quote(self, text: str) -> str:
        """Words of the other side, fit to be shown."""
        for secret in self.secrets:
            text = text.replace(secret, "[secret]")
        text = clean(" ".join(text.split()))
        return text if len(text) <= QUOTE_CHARS_MAX else f"{text[:QUOTE_CHARS_MAX]}…"


def peer_of(access: Access, model_id: str, provider: str) -> Peer:
    host = _host_of(access.base_url)
    return Peer(provider or host, host, model_id, _secrets_of(access))


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).netloc.rpartition("@")[2] or "the provider"
    except ValueError:
        return "the provider"


def _secrets_of(access: Access) -> tuple[str, ...]:
    """The key, and whatever the headers hold that could be one; the longest first."""
    key = access.api_key.strip()
    words = [word for value in access.headers.values() for word in value.split()]
    secrets = {word for word in words if len(word) >= TOKEN_CHARS_MIN}
    if len(key) >= KEY_CHARS_MIN:
        secrets.add(key)
    return tuple(sorted(secrets, key=len, reverse=True))


def on_status(peer: Peer, status: int, headers: Mapping[str, str], body: bytes) -> ModelFailed:
    """An answer that is not 200."""
    if 300 <= status < 400:
        target = peer.quote(headers.get("Location", "")) or "nowhere"
        return ModelFailed(
            "The provider has moved",
            f"{peer.host} redirects to {target} ({status}). It is not followed: the key would "
            "go with it.",
            hint=f"set the base_url of provider {peer.provider} to its new address",
        )
    return _on_problem(peer, status, _json(body), _text(body), retry_after_s(headers))


def on_stream_error(peer: Peer, error: Json) -> ModelFailed:
    """An error object inside a stream that had begun well."""
    problem = {"error": error}
    status = _status_in(problem)
    if status is not None:
        return _on_problem(peer, status, problem, "", None)
    return ModelFailed(
        "The provider reported an error",
        f"{peer.provider} broke off its answer: {_words(peer, problem, '')}",
        transient=any(word in _kind(problem) for word in _TRANSIENT_WORDS),
    )


def on_exception(peer: Peer, exc: Exception) -> ModelFailed:
    """No answer, or half of one."""
    reason = peer.quote(str(exc))
    match exc:
        case aiohttp.InvalidURL() | aiohttp.NonHttpUrlClientError():
            return ModelFailed(
                "The provider's address is wrong",
                f"the base_url of provider {peer.provider} is not a usable URL",
                hint="it looks like https://api.example.com/v1",
            )
        case aiohttp.ClientConnectorDNSError():
            title, details = "Provider not found", f"the name {peer.host} cannot be looked up"
        case aiohttp.ClientSSLError():
            title, details = "No secure connection", f"TLS with {peer.host} failed: {reason}"
        case aiohttp.ConnectionTimeoutError():
            title, details = "No connection", f"{peer.host} could not be reached in time"
        case aiohttp.ClientConnectorError():
            title, details = "No connection", f"{peer.host} cannot be reached: {reason}"
        case aiohttp.ClientPayloadError():
            return on_cut(peer)
        case aiohttp.ClientResponseError():
            title, details = "Unreadable answer", f"{peer.host} does not answer in HTTP: {reason}"
        case aiohttp.ClientConnectionError() | OSError():
            title, details = "Connection lost", f"{peer.host} closed the connection: {reason}"
        case _:
            return ModelFailed(
                "The request cannot be sent",
                f"the key or a header of provider {peer.provider} does not fit into HTTP: {reason}",
                hint=f"check the API key and the headers of provider {peer.provider}",
            )
    return ModelFailed(title, details, transient=True)


def on_stall(peer: Peer, stall_s: float) -> ModelFailed:
    return ModelFailed(
        "The provider stopped answering",
        f"nothing came from {peer.host} for {stall_s:g} s",
        transient=True,
    )


def on_cut(peer: Peer) -> ModelFailed:
    return ModelFailed(
        "The stream was cut",
        f"the answer of {peer.provider} ended in the middle: the stream was cut",
        transient=True,
    )


def on_unreadable(peer: Peer, what: str, sample: bytes = b"") -> ModelFailed:
    """An answer that is not what was asked for; asking again gives the same."""
    quoted = peer.quote(_text(sample))
    return ModelFailed(
        "Unreadable answer",
        f"{peer.provider} sent {what}" + (f": {quoted}" if quoted else ""),
        hint=f"check that provider {peer.provider} has the right type and base_url",
    )


def on_no_stream(peer: Peer, content_type: str, body: bytes) -> ModelFailed:
    """A 200 that is a document: an error of some providers, or the wrong address."""
    match _json(body):
        case {"error": error} if error:
            return on_stream_error(peer, error)
        case _:
            return on_unreadable(peer, f"{content_type} instead of a stream", body)


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


def _on_problem(
    peer: Peer, status: int, problem: Json, text: str, wait_s: float | None
) -> ModelFailed:
    said = _words(peer, problem, text) or "it says no more"
    who = peer.provider
    match status:
        case 401 | 403:
            title, details = "Authentication problem", f"{who} refused the key ({status}): {said}"
            hint = f"check the API key of provider {who}"
        case 404:
            title = "Model or address not found"
            details = f"{peer.host} has no model {peer.model_id} at this address (404): {said}"
            hint = f"check the name of the model and the base_url of provider {who}"
        case 413:
            title = "The request is too large"
            details = f"{who} does not take a request of this size (413): {said}"
            hint = "shorten the session, or send smaller attachments"
        case 429:
            title, details = "Too many requests", f"{who} asks for patience (429): {said}"
            hint = ""
        case _ if status in _TRANSIENT or status >= 500:
            title, details = "The provider has a problem", f"{who} failed ({status}): {said}"
            hint = ""
        case _:
            title, details = "The provider refused", f"{who} refused ({status}): {said}"
            hint = ""
    transient = (status in _TRANSIENT or status >= 500) and _SPENT not in _kind(problem)
    return ModelFailed(title, details, transient=transient, retry_after_s=wait_s, hint=hint)


# --- what providers put into a body: {"error": {"message"}}, {"error": ""}, {"message"}, {"detail"}


def _json(body: bytes) -> Json:
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None


def _text(body: bytes) -> str:
    text = body.decode(errors="replace").strip()
    return "an HTML page" if text[:1] == "<" else text


def _words(peer: Peer, problem: Json, text: str) -> str:
    return peer.quote(_message(problem) or text)


def _message(problem: Json) -> str:
    match problem:
        case str():
            return problem
        case [first, *_]:
            return _message(first)
        case {"error": inner} | {"message": inner} | {"detail": inner} if inner:
            return _message(inner)
        case dict():
            return encode(problem).decode()
        case _:
            return ""


def _kind(problem: Json) -> str:
    match problem:
        case {"error": {"type": kind, "code": code}}:
            return f"{kind} {code}"
        case {"error": {"type": kind}} | {"error": {"code": kind}}:
            return f"{kind}"
        case _:
            return ""


def _status_in(problem: Json) -> int | None:
    match problem:
        case {"error": {"code": int(code)}} | {"error": {"status": int(code)}}:
            return code if 400 <= code < 600 else None
        case {"error": {"code": str(code)}} if code.isdecimal() and len(code) == 3:
            return int(code)
        case _:
            return None

"""The adapter for Anthropic's messages API, which some other providers offer, too.

`body.py` encodes requests, and `answer.py` parses answers.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from urllib.parse import urlsplit

from msgspec import structs

from culm.model import failures
from culm.model.anthropic.answer import AnthropicAnswer
from culm.model.anthropic.body import encode_body
from culm.model.base import ModelEvent, ModelRequest, ModelSetup
from culm.model.http import ProviderRequest, post_to
from culm.model.streaming import stream_answer

VERSION = "2023-06-01"  # Of the API. Other providers do not support later ones.
BEARER = "Bearer "  # Prefix of keys that are tokens, such as those of gateways and logins.


class AnthropicModel:
    """One model of one provider."""

    def __init__(self, setup: ModelSetup) -> None:
        access = setup.access
        key = access.api_key.strip()  # Keys are often pasted with their line end.
        token = key.removeprefix(BEARER).strip()
        self._headers = _headers(token, is_bearer=token != key)
        # Without "Bearer", so that the token itself is treated as a secret.
        bare = structs.replace(access, base_url=full_url(access.base_url), api_key=token)
        self._setup = replace(setup, access=bare)

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Send the request and yield the answer as it arrives; raises `ModelFailed`."""
        setup = self._setup
        peer = failures.peer_of(setup.access, setup.info.id, request.settings.provider)
        return stream_answer(
            setup, request, lambda: self._post(request), peer, AnthropicAnswer(peer)
        )

    def _post(self, request: ModelRequest) -> ProviderRequest:
        access, info = self._setup.access, self._setup.info
        body = encode_body(request, access, info)
        return post_to(access, "/messages", self._headers, body)


def full_url(base_url: str) -> str:
    """The address with `/v1`, which users omit, as they do for Anthropic's own tools."""
    try:
        parts = urlsplit(base_url.strip())
    except ValueError:
        return base_url  # Sending a request there fails with a clear error.
    if not parts.netloc or parts.path.strip("/"):
        return base_url
    return parts._replace(path="/v1").geturl()


def _headers(token: str, *, is_bearer: bool) -> dict[str, str]:
    headers = {"anthropic-version": VERSION}
    if token and is_bearer:
        headers["Authorization"] = BEARER + token
    elif token:
        headers["x-api-key"] = token
    return headers

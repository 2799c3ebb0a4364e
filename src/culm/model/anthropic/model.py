"""Models behind Anthropic's messages, which some other providers speak, too.

The words of a request are `anthropic_body.py`, those of the answer `anthropic_answer.py`.
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

VERSION = "2023-06-01"  # Of the dialect. A later one refuses what other providers still want.
BEARER = "Bearer "  # In front of a key that is a token, as those of gateways and logins are.


class AnthropicModel:
    """One model of one provider."""

    def __init__(self, setup: ModelSetup) -> None:
        access = setup.access
        key = access.api_key.strip()  # People paste it with its line end.
        token = key.removeprefix(BEARER).strip()
        self._headers = _headers(token, is_bearer=token != key)
        # The key without its "Bearer", so that it is known as a secret by itself.
        known = structs.replace(access, base_url=full_url(access.base_url), api_key=token)
        self._setup = replace(setup, access=known)

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Ask, and yield the answer as it comes; raises `ModelFailed`."""
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
    """The address with its `/v1`, which people leave out, as Anthropic's own programs do."""
    try:
        parts = urlsplit(base_url.strip())
    except ValueError:
        return base_url  # Whoever sends a request there says what is wrong with it.
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

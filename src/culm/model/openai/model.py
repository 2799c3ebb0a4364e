"""The adapter for OpenAI-style chat completions, which most providers and local servers offer.

`body.py` encodes requests, `answer.py` parses answers, and `vendor_quirks.py` lists the
deviations of vendors.
"""

from collections.abc import AsyncGenerator

from culm.model import failures
from culm.model.base import ModelEvent, ModelRequest, ModelSetup
from culm.model.http import ProviderRequest, post_to
from culm.model.openai.answer import OpenAiAnswer
from culm.model.openai.body import encode_body
from culm.model.openai.vendor_quirks import quirks_of
from culm.model.streaming import stream_answer


class OpenAiModel:
    """One model of one provider."""

    def __init__(self, setup: ModelSetup) -> None:
        self._setup = setup

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Send the request and yield the answer as it arrives; raises `ModelFailed`."""
        setup = self._setup
        peer = failures.peer_of(setup.access, setup.info.id, request.settings.provider)
        parser = OpenAiAnswer(peer, quirks_of(setup.access))
        return stream_answer(setup, request, lambda: self._post(request), peer, parser)

    def _post(self, request: ModelRequest) -> ProviderRequest:
        access, info = self._setup.access, self._setup.info
        key = access.api_key.strip()  # Keys are often pasted with their line end.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = encode_body(request, access, info)
        return post_to(access, "/chat/completions", headers, body, takes_document=True)

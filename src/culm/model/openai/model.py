"""Models behind OpenAI-style chat completions, which most providers and local servers speak.

The words of a request are `openai_body.py`, those of the answer `openai_answer.py`, and what is
different for a vendor is in `accents.py`.
"""

from collections.abc import AsyncGenerator

from culm.model import failures
from culm.model.base import ModelEvent, ModelRequest, ModelSetup
from culm.model.http import ProviderRequest, post_to
from culm.model.openai.answer import OpenAiAnswer
from culm.model.openai.body import encode_body
from culm.model.streaming import stream_answer
from culm.model.vendor_quirks import quirks_of


class OpenAiModel:
    """One model of one provider."""

    def __init__(self, setup: ModelSetup) -> None:
        self._setup = setup

    def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Ask, and yield the answer as it comes; raises `ModelFailed`."""
        setup = self._setup
        peer = failures.peer_of(setup.access, setup.info.id, request.settings.provider)
        reading = OpenAiAnswer(peer, quirks_of(setup.access))
        return stream_answer(setup, request, lambda: self._post(request), peer, reading)

    def _post(self, request: ModelRequest) -> ProviderRequest:
        access, info = self._setup.access, self._setup.info
        key = access.api_key.strip()  # People paste it with its line end.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = encode_body(request, access, info)
        return post_to(access, "/chat/completions", headers, body, takes_document=True)

"""Models behind OpenAI-style chat completions, which most providers and local servers speak.

Owns the course of one request. Its words are `openai_body.py`, those of the answer
`openai_answer.py`, the connection `http.py`.
"""

import asyncio
from collections.abc import AsyncGenerator

import aiohttp

from culm.errors import ModelFailed
from culm.model import failures
from culm.model.base import Access, ModelEvent, Request, joined
from culm.model.http import Answer, Post, open_answer, post_to
from culm.model.openai_answer import Reading
from culm.model.openai_body import encode_body
from culm.wire.messages import BinaryPart

LARGE_BYTES = 256 << 10  # Of attachments in one request.
SLICE = 256  # Lines taken at once: some 128 deltas, a millisecond of work.


class OpenAiModel:
    """One model of one provider. The session outlives it, and should not limit connections."""

    def __init__(
        self,
        http: aiohttp.ClientSession,
        access: Access,
        model_id: str,
        *,
        stall_s: float,  # The longest silence of a provider that is still at work.
        sees_images: bool,
    ) -> None:
        self._http = http
        self._access = access
        self._model_id = model_id
        self._stall_s = stall_s
        self._sees_images = sees_images

    async def stream(self, request: Request) -> AsyncGenerator[ModelEvent]:
        """Ask, and yield the answer as it comes; raises `ModelFailed`."""
        peer = failures.peer_of(self._access, self._model_id, request.settings.provider)
        # Pictures take their time to spell; meanwhile the others go on.
        post = await asyncio.to_thread(self._post, request) if _is_large(request) else None
        async with open_answer(
            self._http, post or self._post(request), peer, stall_s=self._stall_s
        ) as answer:
            reading = Reading(peer)
            while not reading.done and (lines := await _next_lines(answer, reading)) is not None:
                for start in range(0, len(lines), SLICE):
                    if start:
                        await asyncio.sleep(0)  # A model in a hurry must not hold up the others.
                    for event in joined(reading.on_lines(lines[start : start + SLICE])):
                        yield event
            if reading.done:
                await answer.settle()
            for event in reading.on_end(answer.rest()):
                yield event

    def _post(self, request: Request) -> Post:
        key = self._access.api_key.strip()  # People paste it with its line end.
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        body = encode_body(request, self._access, self._model_id, sees_images=self._sees_images)
        return post_to(self._access, "/chat/completions", headers, body)


def _is_large(request: Request) -> bool:
    parts = (part for message in request.messages for part in message.parts)
    return sum(len(p.data.data) for p in parts if isinstance(p, BinaryPart)) > LARGE_BYTES


async def _next_lines(answer: Answer, reading: Reading) -> list[bytes] | None:
    try:
        return await answer.lines()
    except ModelFailed:
        if reading.finish is None:
            raise
        return None  # The answer is complete; only the goodbye was lost.

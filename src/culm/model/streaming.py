"""The course of one request, the same in every dialect: post, read lines, tell events.

The words of the request and of the answer are the dialect's own.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

from culm.errors import ModelFailed
from culm.model.base import ModelEvent, ModelRequest, ModelSetup, joined
from culm.model.failures import ProviderPeer
from culm.model.http import ProviderRequest, ProviderResponse, open_answer
from culm.wire.messages import BinaryPart, Part, TextPart, ToolCallPart, ToolResultPart

LARGE = 1 << 20  # Bytes of one request; to spell them takes some ten milliseconds.
SLICE = 256  # Lines taken at once: some 128 deltas, a millisecond of work.


class AnswerParser(Protocol):
    """The state of one answer: lines in, events out."""

    @property
    def done(self) -> bool:
        """The stream said that nothing follows."""
        ...

    @property
    def complete(self) -> bool:
        """All of the answer has come; at most the goodbye is missing."""
        ...

    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]: ...

    def on_end(self, rest: bytes) -> Iterator[ModelEvent]:
        """The end of the body; `rest` is the line it ended in. Raises if something is missing."""
        ...


async def stream_answer(
    setup: ModelSetup,
    request: ModelRequest,
    make_post: Callable[[], ProviderRequest],
    peer: ProviderPeer,
    reading: AnswerParser,
) -> AsyncGenerator[ModelEvent]:
    """Ask, and yield the answer as it comes; raises `ModelFailed`."""
    # What is large takes its time to spell; meanwhile the others go on.
    post = await asyncio.to_thread(make_post) if _is_large(request) else make_post()
    async with open_answer(setup, post, peer) as answer:
        while not reading.done and (lines := await _next_lines(answer, reading)) is not None:
            for start in range(0, len(lines), SLICE):
                if start:
                    await asyncio.sleep(0)  # A model in a hurry must not hold up the others.
                for event in joined(reading.on_lines(lines[start : start + SLICE])):
                    answer.mark_progress()
                    yield event
        if reading.done:
            await answer.drain()
        for event in reading.on_end(answer.rest()):
            yield event


def _is_large(request: ModelRequest) -> bool:
    return sum(_weight(part) for message in request.messages for part in message.parts) > LARGE


def _weight(part: Part) -> int:
    """About how many bytes it takes to spell, told from lengths alone."""
    match part:
        case TextPart(data=text):
            return len(text.text)
        case ToolResultPart(data=result):
            return len(result.content)
        case ToolCallPart(data=call):
            return len(call.input)
        case BinaryPart(data=file):
            return 4 * len(file.data)  # As base64, and copied.
        case _:
            return 0


async def _next_lines(answer: ProviderResponse, reading: AnswerParser) -> list[bytes] | None:
    try:
        return await answer.lines()
    except ModelFailed:
        if not reading.complete:
            raise
        return None  # Only the goodbye was lost.

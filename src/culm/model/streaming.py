"""The course of one request in any dialect: post it, read lines, yield events.

The dialect encodes the request and parses the answer.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

from culm.errors import ModelFailed
from culm.model.base import ModelEvent, ModelRequest, ModelSetup, joined
from culm.model.failures import ProviderPeer
from culm.model.http import ProviderRequest, ProviderResponse, open_answer
from culm.wire.messages import BinaryPart, Part, TextPart, ToolCallPart, ToolResultPart

LARGE = 1 << 20  # Bytes of one request; encoding them takes some ten milliseconds.
SLICE = 256  # Lines parsed at once: some 128 deltas, a millisecond of work.


class AnswerParser(Protocol):
    """The state of one answer: lines in, events out."""

    @property
    def done(self) -> bool:
        """The stream has announced its end."""
        ...

    @property
    def complete(self) -> bool:
        """The whole answer has arrived; at most the end marker is missing."""
        ...

    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]: ...

    def on_end(self, rest: bytes) -> Iterator[ModelEvent]:
        """Handle the end of the body; `rest` is its unfinished line. Raises if it is too early."""
        ...


async def stream_answer(
    setup: ModelSetup,
    request: ModelRequest,
    make_post: Callable[[], ProviderRequest],
    peer: ProviderPeer,
    parser: AnswerParser,
) -> AsyncGenerator[ModelEvent]:
    """Send the request and yield the answer as it arrives; raises `ModelFailed`."""
    # Encoding a large request takes long, and other tasks must go on meanwhile.
    post = await asyncio.to_thread(make_post) if _is_large(request) else make_post()
    async with open_answer(setup, post, peer) as answer:
        while not parser.done and (lines := await _next_lines(answer, parser)) is not None:
            for start in range(0, len(lines), SLICE):
                if start:
                    await asyncio.sleep(0)  # A fast model must not block other tasks.
                for event in joined(parser.on_lines(lines[start : start + SLICE])):
                    answer.mark_progress()
                    yield event
        if parser.done:
            await answer.drain()
        for event in parser.on_end(answer.rest()):
            yield event


def _is_large(request: ModelRequest) -> bool:
    return sum(_weight(part) for message in request.messages for part in message.parts) > LARGE


def _weight(part: Part) -> int:
    """The approximate encoded size in bytes, estimated from lengths alone."""
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


async def _next_lines(answer: ProviderResponse, parser: AnswerParser) -> list[bytes] | None:
    try:
        return await answer.lines()
    except ModelFailed:
        if not parser.complete:
            raise
        return None  # Only the end marker was lost.

"""The course of one request in any dialect: post it, read lines, yield events.

A dialect is a `ProviderModel`, which encodes requests, and an `AnswerParser`; what they add to the
course is pure.
"""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import ClassVar, TypeVar

import msgspec

from culm.errors import ModelFailed
from culm.model import failures
from culm.model.base import (
    AnswerDone,
    ModelEvent,
    ModelRequest,
    ModelSetup,
    StopReason,
    TokenUsage,
    joined,
)
from culm.model.failures import ProviderPeer
from culm.model.http import (
    UNREADABLE,
    ProviderRequest,
    ProviderResponse,
    is_whole,
    open_answer,
    post_to,
)
from culm.wire.codec import encodable
from culm.wire.messages import BinaryPart, Part, TextPart, ToolCallPart, ToolResultPart

T = TypeVar("T")

LARGE = 1 << 20  # Bytes of one request; encoding them takes some ten milliseconds.
SLICE = 256  # Lines parsed at once: some 128 deltas, a millisecond of work.


class AnswerParser(ABC):
    """The state of one answer: lines in, events out. A subclass knows the dialect."""

    STOP_REASONS: ClassVar[Mapping[str, StopReason]]
    PLAIN_END: ClassVar[str]  # The reason of an answer that just ends; calls override it.

    def __init__(self, peer: ProviderPeer) -> None:
        self.done = False  # The stream has announced its end.
        self.finish: str | None = None  # The reason for the end, once the answer has ended.
        self._peer = peer
        self._has_calls = False

    @property
    def complete(self) -> bool:
        """The whole answer has arrived; at most the end marker is missing."""
        return self.finish is not None

    @abstractmethod
    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]: ...

    def on_end(self, rest: bytes) -> Iterator[ModelEvent]:
        """Handle the end of the body; `rest` is its unfinished line. Raises if it is too early."""
        yield from self._on_rest(rest)
        if self.finish is None and not self.done:
            raise failures.on_cut(self._peer)
        yield from self._last_events()
        reason = self.STOP_REASONS.get(self.finish or "", "unknown")
        if self._has_calls and self.finish in (None, self.PLAIN_END):
            reason = "tool_use"
        yield AnswerDone(reason, self._token_usage())

    def _on_rest(self, rest: bytes) -> Iterator[ModelEvent]:
        if not self.done and is_whole(rest):
            yield from self.on_lines([rest])

    @abstractmethod
    def _last_events(self) -> Iterator[ModelEvent]:
        """Events that were held back to the end of the answer."""
        ...

    @abstractmethod
    def _token_usage(self) -> TokenUsage | None: ...

    def _decode_slowly(self, payload: bytes, kind: type[T]) -> T:
        """Decode a payload that the fast decoder rejects because of invalid UTF-8."""
        try:
            value = json.loads(payload.decode(errors="replace"))
            return encodable(msgspec.convert(value, kind, strict=False))
        except UNREADABLE as exc:
            raise failures.on_unreadable(
                self._peer, "a line that is not part of an answer", payload
            ) from exc


class ProviderModel(ABC):
    """One model of one provider. A subclass knows the dialect."""

    PATH: ClassVar[str]  # Below the base URL.
    TAKES_DOCUMENT: ClassVar[bool] = False  # A JSON document is an answer as well.

    def __init__(self, setup: ModelSetup, headers: Mapping[str, str]) -> None:
        self._setup = setup
        self._headers = headers

    @abstractmethod
    def _encode(self, request: ModelRequest) -> bytes:
        """The JSON to post."""
        ...

    @abstractmethod
    def _make_parser(self, peer: ProviderPeer) -> AnswerParser: ...

    async def stream(self, request: ModelRequest) -> AsyncGenerator[ModelEvent]:
        """Send the request and yield the answer as it arrives; raises `ModelFailed`."""
        setup = self._setup
        peer = failures.peer_of(setup.access, setup.info.id, request.settings.provider)
        parser = self._make_parser(peer)
        # Encoding a large request takes long, and other tasks must go on meanwhile.
        is_large = _is_large(request)
        post = await asyncio.to_thread(self._post, request) if is_large else self._post(request)
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

    def _post(self, request: ModelRequest) -> ProviderRequest:
        body = self._encode(request)
        return post_to(
            self._setup.access,
            self.PATH,
            self._headers,
            body,
            takes_document=self.TAKES_DOCUMENT,
        )


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

"""Parser of a streamed answer of Anthropic's messages API: lines in, events out.

Pure. Every data line contains its type, so `event:` lines are ignored, as are unknown types.
`reasoning_roundtrip.py` records thinking.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
from msgspec import Struct

from culm.model import failures
from culm.model.base import (
    CallDelta,
    CallStarted,
    ModelEvent,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenUsage,
    usage_of,
)
from culm.model.failures import ProviderPeer
from culm.model.http import UNREADABLE
from culm.model.reasoning_roundtrip import ThinkingRecorder
from culm.model.streaming import AnswerParser
from culm.wire.codec import Json, encode

# --- the fields of the stream that are used; without GC tracking, as in `base.py`


class _Delta(Struct, gc=False):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    partial_json: str | None = None
    stop_reason: str | None = None


class _Block(Struct, gc=False):
    type: str | None = None
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    id: str | None = None
    name: str | None = None
    input: Json = None


class _Usage(Struct, gc=False):
    input_tokens: int | None = None
    output_tokens: int | None = None
    cache_read_input_tokens: int | None = None
    cache_creation_input_tokens: int | None = None


class _Message(Struct, gc=False):
    usage: _Usage | None = None


class _Event(Struct, gc=False):
    """All types of events in one; fields of other types are absent."""

    type: str | None = None
    index: int | None = None
    delta: _Delta | None = None
    content_block: _Block | None = None
    message: _Message | None = None
    usage: _Usage | None = None
    error: Json = None


# Lax, because some servers send counts as floats or strings.
_decode = msgspec.json.Decoder(_Event, strict=False).decode


_KNOWN = frozenset(
    {
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
        "error",
    }
)
_NO_EVENT = _Event()
_STOP = _Event("message_stop")


class _Call(Struct):
    key: int
    whole: str = ""  # Arguments from the start event; pieces that follow replace them.


class AnthropicAnswer(AnswerParser):
    STOP_REASONS: ClassVar[Mapping[str, StopReason]] = {
        "end_turn": "end_turn",
        "stop_sequence": "end_turn",
        "pause_turn": "end_turn",  # For tools that run at the provider; we use none.
        "max_tokens": "max_tokens",
        "model_context_window_exceeded": "max_tokens",
        "tool_use": "tool_use",
        "refusal": "content_filter",
    }
    PLAIN_END = "end_turn"

    def __init__(self, peer: ProviderPeer) -> None:
        super().__init__(peer)
        self._calls: dict[int, _Call] = {}  # By the index of the block.
        self._thinking = ThinkingRecorder()
        self._usage: _Usage | None = None

    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]:
        for line in lines if not self.done else ():
            if not line.startswith(b"data:"):
                continue  # A comment, the name of an event, or the empty line after it.
            try:
                event = _decode(line[5:])
            except UNREADABLE:
                event = self._event_of(line[5:].strip())
            delta = event.delta
            if delta is not None and delta.type == "text_delta":
                if text := delta.text:
                    self._thinking.said += len(text)
                    yield TextDelta(text)
            elif delta is not None:
                yield from self._on_delta(event, delta)
            else:
                yield from self._on_event(event)
                if self.done:
                    return

    def _last_events(self) -> Iterator[ModelEvent]:
        for call in self._calls.values():
            yield from _whole(call)

    def _on_delta(self, event: _Event, delta: _Delta) -> Iterator[ModelEvent]:
        match delta.type:
            case "input_json_delta":
                call = self._calls.get(event.index or 0)
                if call is not None and delta.partial_json:
                    call.whole = ""
                    yield CallDelta(call.key, delta.partial_json)
            case "thinking_delta" if delta.thinking:
                self._thinking.thought += len(delta.thinking)
                yield ReasoningDelta(delta.thinking)
            case "signature_delta" if delta.signature:
                yield ReasoningDelta("", delta.signature)
            case _:
                yield from self._on_event(event)  # The delta of a message has no type.

    def _on_event(self, event: _Event) -> Iterator[ModelEvent]:
        match event.type:
            case "content_block_start" if event.content_block is not None:
                yield from self._on_block(event.index or 0, event.content_block)
            case "content_block_stop":
                if (call := self._calls.get(event.index or 0)) is not None:
                    yield from _whole(call)
            case "message_start" if event.message is not None:
                self._count(event.message.usage)
            case "message_delta":
                self._count(event.usage)
                if event.delta is not None and event.delta.stop_reason:
                    self.finish = event.delta.stop_reason
            case "message_stop":
                self.done = True
            case _ if event.error or event.type == "error":
                raise failures.on_stream_error(self._peer, event.error or "no details")
            case _:
                pass

    def _on_block(self, index: int, block: _Block) -> Iterator[ModelEvent]:
        recorder = self._thinking
        if (before := self._calls.pop(index, None)) is not None:
            yield from _whole(before)
        match block.type:
            case "text" if block.text:
                recorder.said += len(block.text)
                yield TextDelta(block.text)
            case "thinking":
                between, opening = recorder.on_block("thinking")
                text = between + (block.thinking or "")
                signature = opening + (block.signature or "")
                recorder.thought += len(text) - len(between)
                if text or signature:
                    yield ReasoningDelta(text, signature)
            case "redacted_thinking" if block.data:
                _, opening = recorder.on_block("redacted")
                yield ReasoningDelta("", opening + block.data)
            case "tool_use":
                call = _Call(recorder.called, _arguments(block.input))
                recorder.called += 1
                self._has_calls = True
                self._calls[index] = call
                yield CallStarted(call.key, block.id or "", block.name or "")
            case _:
                pass

    def _count(self, usage: _Usage | None) -> None:
        """Update the counts, which are cumulative; some servers send each number only once."""
        if usage is None or self._usage is None:
            self._usage = usage or self._usage
            return
        for name in _Usage.__struct_fields__:
            count = max(getattr(self._usage, name) or 0, getattr(usage, name) or 0)
            setattr(self._usage, name, count)

    def _event_of(self, payload: bytes) -> _Event:
        """Decode payloads that the fast decoder rejects: end markers, invalid UTF-8, new events."""
        if not payload:
            return _NO_EVENT
        if payload == b"[DONE]":  # Some gateways end the stream as OpenAI does.
            return _STOP
        fields = self._decode_slowly(payload, dict[str, Json])
        kind = fields.get("type")
        if kind == "error":
            raise failures.on_stream_error(self._peer, fields.get("error") or fields)
        if isinstance(kind, str) and kind not in _KNOWN:
            return _NO_EVENT
        return self._decode_slowly(payload, _Event)

    def _token_usage(self) -> TokenUsage | None:
        if (usage := self._usage) is None:
            return None
        return usage_of(
            input=usage.input_tokens,
            output=usage.output_tokens,
            cache_read=usage.cache_read_input_tokens,
            cache_write=usage.cache_creation_input_tokens,
        )


def _whole(call: _Call) -> Iterator[ModelEvent]:
    """The arguments of a call that has sent no pieces."""
    if call.whole:
        yield CallDelta(call.key, call.whole)
        call.whole = ""


def _arguments(value: Json) -> str:
    """The arguments in the start event of a call, which are usually an empty object."""
    return encode(value).decode() if value else ""

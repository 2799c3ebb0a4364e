"""An answer in the stream of OpenAI's chat completions: lines in, events out.

Pure. Reads the stream as it is met in the wild, not only as it is documented: fields that are
null or missing, calls without an index or an id, endings without a reason.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from culm.model import failures
from culm.model.base import (
    CallBegan,
    CallDelta,
    Done,
    ModelEvent,
    ReasoningDelta,
    StopReason,
    TextDelta,
    Usage,
    usage_of,
)
from culm.model.failures import Peer
from culm.wire.codec import Json, encodable

# --- what comes over the wire, as far as we read it; without GC tracking, as in `base.py`


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | None = None


class _CallPiece(Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None


class _Delta(Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_CallPiece] | None = None


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    finish_reason: str | None = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    cost: float | None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    error: Json = None


# Lax, as some servers count in floats or strings.
_decode = msgspec.json.Decoder(_Chunk, strict=False).decode

# Bad JSON, JSON of another shape, bytes that are no text, brackets without end.
_UNREADABLE = (msgspec.DecodeError, ValueError, RecursionError)

_STOP_REASONS: dict[str, StopReason] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "content_filter",
}


class Reading:
    """The state of one answer: lines in, events out."""

    def __init__(self, peer: Peer) -> None:
        self.done = False  # The stream said that nothing follows.
        self.finish: str | None = None  # Why the answer ended, once it has.
        self._peer = peer
        self._calls = _Calls()
        self._usage: _Usage | None = None

    @property
    def complete(self) -> bool:
        return self.finish is not None

    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]:
        for line in lines if not self.done else ():
            if not line.startswith(b"data:"):
                continue  # A comment, an event's name, or the empty line behind each event.
            payload = line[5:]
            try:
                chunk = _decode(payload)
            except _UNREADABLE:
                payload = payload.strip()
                if payload == b"[DONE]":
                    self.done = True
                    return
                if not payload:
                    continue
                chunk = self._decode_slowly(payload)
            if chunk.error:
                raise failures.on_stream_error(self._peer, chunk.error)
            if chunk.usage is not None:
                self._usage = chunk.usage
            if not chunk.choices:
                continue
            choice = chunk.choices[0]
            delta = choice.delta
            if delta is not None:
                if thought := delta.reasoning_content or delta.reasoning:  # Some send it twice.
                    yield ReasoningDelta(thought)
                if delta.content:
                    yield TextDelta(delta.content)
                if delta.tool_calls:
                    yield from self._calls.on_pieces(delta.tool_calls)
            if choice.finish_reason:  # Some send "" with every delta.
                self.finish = choice.finish_reason

    def on_end(self, rest: bytes) -> Iterator[ModelEvent]:
        """The end of the body; `rest` is the line it ended in."""
        if not self.done and _is_whole(rest):
            yield from self.on_lines([rest])
        if self.finish is None and not self.done:
            raise failures.on_cut(self._peer)
        yield from self._calls.on_end()
        yield Done(self._reason(), None if self._usage is None else _counted(self._usage))

    def _decode_slowly(self, payload: bytes) -> _Chunk:
        """Read what the quick decoder refuses but a person could: a broken character."""
        try:
            value = json.loads(payload.decode(errors="replace"))
            return encodable(msgspec.convert(value, _Chunk, strict=False))
        except _UNREADABLE as exc:
            raise failures.on_unreadable(
                self._peer, "a line that is no part of an answer", payload
            ) from exc

    def _reason(self) -> StopReason:
        if self._calls and self.finish in (None, "stop"):
            return "tool_use"
        return _STOP_REASONS.get(self.finish or "", "unknown")


@dataclass(slots=True)
class _Call:
    key: int
    id: str = ""
    name: str = ""  # Empty until it has come; the call begins then.
    held: str = ""  # Arguments that came before the name.


class _Calls:
    """The calls of one answer, put together from their pieces."""

    def __init__(self) -> None:
        self._all: list[_Call] = []
        self._at: dict[int, _Call] = {}  # The latest at each index.

    def __bool__(self) -> bool:
        return bool(self._all)

    def on_pieces(self, pieces: list[_CallPiece]) -> Iterator[ModelEvent]:
        for piece in pieces:
            function = piece.function or _NO_FUNCTION
            call = self._call_of(piece, function.name or "")
            text = function.arguments or ""
            if call.name:
                if text:
                    yield CallDelta(call.key, text)
                continue
            call.id = call.id or piece.id or ""
            call.name = function.name or ""
            call.held += text
            if call.name:
                yield from _begin(call)

    def on_end(self) -> Iterator[ModelEvent]:
        """Calls whose name never came are told without one: the model must hear of them."""
        for call in self._all:
            if not call.name:
                yield from _begin(call)

    def _call_of(self, piece: _CallPiece, name: str) -> _Call:
        if piece.index is None:
            call = self._all[-1] if self._all else None
        else:
            call = self._at.get(piece.index)
        if call is None or _is_another(call, piece.id or "", name):
            call = _Call(len(self._all))
            self._all.append(call)
        if piece.index is not None:
            self._at[piece.index] = call
        return call


_NO_FUNCTION = _Function()


def _is_another(call: _Call, piece_id: str, name: str) -> bool:
    """Whether a piece where `call` was last begins a call of its own.

    Ids tell, if both have one. Else only a first piece has a name: some servers send every call
    whole, at index 0 and without an id.
    """
    if piece_id and call.id:
        return piece_id != call.id
    return bool(name and call.name) and (name != call.name or not call.id)


def _begin(call: _Call) -> Iterator[ModelEvent]:
    yield CallBegan(call.key, call.id, call.name)
    if call.held:
        yield CallDelta(call.key, call.held)


def _counted(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return usage_of(
        input=(usage.prompt_tokens or 0) - cached,
        output=usage.completion_tokens,
        cache_read=cached,
        cost=usage.cost,
    )


def _is_whole(line: bytes) -> bool:
    """Whether a line without its end lacks nothing else."""
    payload = line.removeprefix(b"data:").strip()
    try:
        msgspec.json.decode(payload, type=msgspec.Raw)
    except _UNREADABLE:
        return payload == b"[DONE]"
    return True

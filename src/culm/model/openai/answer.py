"""Parser of a streamed answer of OpenAI's chat completions: lines in, events out.

Pure. Accepts streams as real servers send them, not only as documented: null or missing fields,
calls without an index or an id, ends without a reason, and a single document in place of a
stream.
"""

from collections.abc import Iterator, Mapping
from typing import ClassVar

import msgspec
from msgspec import Struct, field

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
from culm.model.http import UNREADABLE, is_whole
from culm.model.openai.vendor_quirks import PLAIN, VendorQuirks
from culm.model.reasoning_roundtrip import ReasoningDetails, ReasoningLine, encode_line
from culm.model.streaming import AnswerParser
from culm.wire.codec import Json, encode

# --- the fields of the stream that are used; without GC tracking, as in `base.py`


class _Function(Struct, gc=False):
    name: str | None = None
    arguments: str | dict[str, Json] | None = None  # Some servers send an object.


class _Google(Struct, gc=False):
    thought_signature: str | None = None


class _Extra(Struct, gc=False):
    google: _Google | None = None


class _CallPiece(Struct, gc=False):
    index: int | None = None
    id: str | None = None
    function: _Function | None = None
    extra_content: _Extra | None = None


class _Block(Struct, gc=False):
    """A typed piece of content, as Mistral's reasoning models send it."""

    type: str = "text"
    text: str | None = None
    thinking: "str | list[_Block] | None" = None


class _Delta(Struct, gc=False):
    content: str | list[_Block] | None = None
    refusal: str | None = None  # In place of the content.
    reasoning_content: str | None = None
    reasoning: str | None = None
    reasoning_details: list[dict[str, Json]] | None = None
    tool_calls: list[_CallPiece] | None = None


class _Choice(Struct, gc=False):
    delta: _Delta | None = None
    message: _Delta | None = None  # The whole answer, in place of deltas.
    finish_reason: str | None = None
    error: Json = None


class _PromptDetails(Struct, gc=False):
    cached_tokens: int | None = None
    cache_write_tokens: int | None = None


class _CompletionDetails(Struct, gc=False):
    reasoning_tokens: int | None = None


class _Usage(Struct, gc=False):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _PromptDetails | None = None
    completion_tokens_details: _CompletionDetails | None = None
    prompt_cache_hit_tokens: int | None = None  # DeepSeek's name for cached tokens.
    cost: float | None = None


class _Groq(Struct, gc=False):
    usage: _Usage | None = None


class _Chunk(Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    x_groq: _Groq | None = None
    error: Json = None
    object: str | None = None  # "error" if the chunk itself is one.


# Lax, because some servers send counts as floats or strings.
_decode = msgspec.json.Decoder(_Chunk, strict=False).decode

DETAILS_CHARS_MAX = 4 << 20  # Of reasoning to return; a long one has a tenth of it.
HELD_CHARS_MAX = 64 << 10  # Of arguments before the name of their call; usually none.
NAMELESS_MAX = 64
DOCUMENT_BYTES_MAX = 16 << 20  # Of an answer that is not streamed; a stream needs only one line.
_BOM = b"\xef\xbb\xbf"

# Reasons that mean failure: the answer is incomplete, and a retry may succeed.
_BROKEN_OFF = frozenset({"error", "insufficient_system_resource"})


class OpenAiAnswer(AnswerParser):
    STOP_REASONS: ClassVar[Mapping[str, StopReason]] = {
        "stop": "end_turn",
        "eos_token": "end_turn",
        "length": "max_tokens",
        "model_length": "max_tokens",
        "tool_calls": "tool_use",
        "function_call": "tool_use",
        "content_filter": "content_filter",
    }
    PLAIN_END = "stop"

    def __init__(self, peer: ProviderPeer, quirks: VendorQuirks = PLAIN) -> None:
        super().__init__(peer)
        self._quirks = quirks
        self._calls = _Calls(peer)
        self._usage: _Usage | None = None
        self._details = ReasoningDetails()
        self._begun = False  # An event has arrived, so it is a stream.
        self._document: list[bytes] | None = None  # The lines of a document in place of a stream.
        self._document_bytes = 0

    def on_lines(self, lines: list[bytes]) -> Iterator[ModelEvent]:
        for line in lines if not self.done else ():
            if not line.startswith(b"data:"):
                # A comment, the name of an event, or the empty line after it.
                line = self._on_other(line) if line else b""
                if not line:
                    continue
            self._begun = True
            payload = line[5:]
            try:
                chunk = _decode(payload)
            except UNREADABLE:
                payload = payload.strip()
                if payload == b"[DONE]":
                    self.done = True
                    return
                if not payload:
                    continue
                chunk = self._decode_slowly(payload, _Chunk)
            if chunk.error or chunk.object == "error":
                error = chunk.error or self._decode_slowly(payload, dict[str, Json])
                raise failures.on_stream_error(self._peer, error)
            yield from self._on_chunk(chunk)

    def _on_rest(self, rest: bytes) -> Iterator[ModelEvent]:
        rest = rest.removeprefix(_BOM)
        in_document = self._document is not None or _opens_document(rest)
        if not self.done and (in_document or is_whole(rest)):
            yield from self.on_lines([rest])
        if self._document is not None and not self._begun:
            yield from self._on_document(b"\n".join(self._document))

    def _last_events(self) -> Iterator[ModelEvent]:
        if self.finish in _BROKEN_OFF:
            raise failures.on_broken_off(self._peer, self.finish)
        yield from self._calls.on_end()
        if self._details:
            yield ReasoningDelta("", encode_line(ReasoningLine(details=self._details.whole())))

    def _on_chunk(self, chunk: _Chunk) -> Iterator[ModelEvent]:
        if chunk.usage is not None:
            self._usage = chunk.usage
        elif chunk.x_groq is not None and chunk.x_groq.usage is not None:
            self._usage = chunk.x_groq.usage
        if not chunk.choices:
            return
        choice = chunk.choices[0]
        delta = choice.delta or choice.message
        if delta is not None:
            if thought := delta.reasoning_content or delta.reasoning:  # Some send it twice.
                yield ReasoningDelta(thought)
            if delta.reasoning_details and self._quirks.returns_details:
                self._keep(delta.reasoning_details)
            if content := delta.content or delta.refusal:
                if isinstance(content, str):
                    yield TextDelta(content)
                else:
                    yield from _on_blocks(content)
            if delta.tool_calls:
                self._has_calls = True
                yield from self._calls.on_pieces(delta.tool_calls)
        if choice.error:
            raise failures.on_stream_error(self._peer, choice.error)
        if choice.finish_reason:  # Some send "" with every delta.
            self.finish = choice.finish_reason

    def _keep(self, details: list[dict[str, Json]]) -> None:
        for piece in details:
            self._details.add(piece)
        if self._details.chars > DETAILS_CHARS_MAX:
            raise failures.on_unreadable(self._peer, "reasoning without an end")

    def _on_other(self, line: bytes) -> bytes:
        """Handle a line without `data:`; returns it as a data line if it is an event after all.

        A line that begins like a document starts one: an error, a page, or an unstreamed answer.
        """
        if self._document is not None:
            self._document.append(line)
            self._document_bytes += len(line)
            if self._document_bytes > DOCUMENT_BYTES_MAX:
                raise failures.on_unreadable(self._peer, "a document too long to be an answer")
            return b""
        if line.startswith(b"error:"):  # From llama.cpp, at the end of a stream.
            return b'data:{"error":%b}' % line[6:]
        if self._begun:
            return b""
        line = line.removeprefix(_BOM)
        if _opens_document(line):
            self._document = [line]
        return line if line.startswith(b"data:") else b""

    def _on_document(self, document: bytes) -> Iterator[ModelEvent]:
        try:
            chunk = _decode(document)
        except UNREADABLE:
            chunk = _Chunk()
        if not chunk.choices:
            raise failures.on_no_stream(self._peer, "a document", document)
        self.done = True
        yield from self._on_chunk(chunk)

    def _token_usage(self) -> TokenUsage | None:
        if (usage := self._usage) is None:
            return None
        prompt, output = usage.prompt_tokens or 0, usage.completion_tokens or 0
        read, written, thoughts = usage.prompt_cache_hit_tokens or 0, 0, 0
        if (details := usage.prompt_tokens_details) is not None:
            read, written = details.cached_tokens or read, details.cache_write_tokens or 0
        if usage.completion_tokens_details is not None:
            thoughts = usage.completion_tokens_details.reasoning_tokens or 0
        if self._quirks.counts_thoughts_apart:
            if usage.total_tokens is not None:
                thoughts = max(0, usage.total_tokens - prompt - output)
            output += thoughts
        return usage_of(
            input=prompt - read - written,
            output=output,
            cache_read=read,
            cache_write=written,
            reasoning=thoughts,
            cost=usage.cost,
        )


def _on_blocks(blocks: list[_Block]) -> Iterator[ModelEvent]:
    for block in blocks:
        if isinstance(block.thinking, list):
            thought = "".join(inner.text or "" for inner in block.thinking)
        else:
            thought = block.thinking or ""
        if thought:
            yield ReasoningDelta(thought)
        if block.text:
            yield TextDelta(block.text)


class _Call(Struct):
    key: int
    id: str = ""
    name: str = ""  # Empty until it arrives, which starts the call.
    held: list[str] = field(default_factory=list[str])  # Arguments that arrived before the name.
    signature: str = ""  # Of the reasoning before it; yielded before the call starts.


class _Calls:
    """Assembles the calls of one answer from their pieces."""

    def __init__(self, peer: ProviderPeer) -> None:
        self._peer = peer
        self._all: list[_Call] = []
        self._at: dict[int, _Call] = {}  # The last call at each index.
        self._begun = 0
        self._held_chars = 0  # Of all calls without a name.

    def on_pieces(self, pieces: list[_CallPiece]) -> Iterator[ModelEvent]:
        for piece in pieces:
            function = piece.function or _NO_FUNCTION
            call = self._call_of(piece, function.name or "")
            text = _arguments(function.arguments)
            if call.name:
                if text:
                    yield CallDelta(call.key, text)
                continue
            call.id = call.id or piece.id or ""
            call.name = function.name or ""
            call.signature = call.signature or _signature(piece)
            call.held.append(text)
            self._held_chars += len(text)
            if self._held_chars > HELD_CHARS_MAX or len(self._all) - self._begun > NAMELESS_MAX:
                raise failures.on_unreadable(self._peer, "calls without a name")
            if call.name:
                yield from self._begin(call)

    def on_end(self) -> Iterator[ModelEvent]:
        """Yield calls that never got a name, so that the model receives an error for them."""
        for call in self._all:
            if not call.name:
                yield from self._begin(call)

    def _begin(self, call: _Call) -> Iterator[ModelEvent]:
        if call.signature:
            # By index, because the call may be stored under another id.
            line = ReasoningLine(call=self._begun, signature=call.signature)
            yield ReasoningDelta("", encode_line(line))
        self._begun += 1
        yield CallStarted(call.key, call.id, call.name)
        if held := "".join(call.held):
            yield CallDelta(call.key, held)
            self._held_chars -= len(held)

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


def _arguments(arguments: str | dict[str, Json] | None) -> str:
    if isinstance(arguments, dict):
        return encode(arguments).decode()
    return arguments or ""


def _signature(piece: _CallPiece) -> str:
    extra = piece.extra_content
    if extra is None or extra.google is None:
        return ""
    return extra.google.thought_signature or ""


def _is_another(call: _Call, piece_id: str, name: str) -> bool:
    """True if a piece at the position of `call` starts another call.

    If both have ids, the ids decide. Otherwise only the first piece of a call has a name: some
    servers send every call whole, at index 0 and without an id.
    """
    if piece_id and call.id:
        return piece_id != call.id
    return bool(name and call.name) and (name != call.name or not call.id)


def _opens_document(line: bytes) -> bool:
    """True for JSON and HTML; no line of a stream begins like that."""
    return line.lstrip()[:1] in (b"{", b"[", b"<")

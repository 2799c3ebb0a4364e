"""The formats of both providers: blocks in pieces, and the end of an answer.

A dialect only converts them to bytes; it does not send anything.
"""

from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import Raw, Struct

from culm.testing.script import ScriptedUsage
from culm.wire.codec import Json, decode, encode

Kind = Literal["reasoning", "text", "call"]


class ScriptBlock(Struct, frozen=True, gc=False):
    """A section of an answer: its reasoning, its text, or one of its calls."""

    kind: Kind
    index: int  # Among all blocks of the answer.
    number: int = 0  # Of a call, among the calls.
    id: str = ""
    name: str = ""


class FilledBlock(NamedTuple):
    """A block with all of its text, for an answer that is not streamed."""

    block: ScriptBlock
    text: str


class StreamOptions(Struct, frozen=True):
    include_usage: bool = False


class RequestShape(Struct, frozen=True):
    """The fields of a request that affect its answer; they are the same in both dialects."""

    messages: Raw
    system: Raw = Raw(b"null")
    model: str = "scripted"
    stream: bool = False
    stream_options: StreamOptions | None = None

    @property
    def text(self) -> str:
        """System prompt and messages as normalized JSON."""
        parts: list[Json] = [decode(self.system, object), decode(self.messages, object)]
        return encode(parts).decode()


class AnswerHeader(Struct, frozen=True):
    """Metadata of an answer."""

    n: int  # The request's number.
    model: str
    created_s: int
    include_usage: bool


class Dialect(Protocol):
    """One answer in a provider's format. All but `whole` and `problem` return parts of a stream."""

    def __init__(self, answer: AnswerHeader) -> None: ...

    def head(self, usage: ScriptedUsage | None) -> bytes:
        """The beginning of the stream."""
        ...

    def began(self, block: ScriptBlock) -> bytes: ...

    def delta(self, block: ScriptBlock, text: str) -> bytes:
        """One piece of a block, as one event."""
        ...

    def ended(self, block: ScriptBlock) -> bytes: ...

    def tail(self, finish: str, usage: ScriptedUsage | None) -> bytes:
        """The end of the stream."""
        ...

    def malformed(self) -> bytes:
        """An event whose data is not JSON."""
        ...

    def unknown(self) -> bytes:
        """An event of an unknown type, which clients should ignore."""
        ...

    def failed(self) -> bytes:
        """An error after the beginning of the answer."""
        ...

    def whole(self, content: list[FilledBlock], finish: str, usage: ScriptedUsage | None) -> bytes:
        """The answer to a request without streaming."""
        ...

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        """The body of an error response."""
        ...


# --- OpenAI's chat completions

_OPENAI_FINISH = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


class OpenAiDialect:
    """One answer. The common part of its chunks is encoded once, as it may have thousands."""

    def __init__(self, answer: AnswerHeader) -> None:
        self._answer = answer
        self._id = f"chatcmpl-{answer.n}"
        shared = encode(self._named("chat.completion.chunk"))[:-1]
        self._before = b"data: " + shared + b',"choices":[{"index":0,"delta":'
        # If usage was requested, providers include the field in every chunk.
        usage = b',"usage":null' if answer.include_usage else b""
        self._after = b',"finish_reason":null}]' + usage + b"}\n\n"
        self._text = self._before + b'{"content":'
        self._reasoning = self._before + b'{"reasoning_content":'
        self._close = b"}" + self._after

    def _named(self, kind: str) -> dict[str, Json]:
        answer = self._answer
        return {"id": self._id, "object": kind, "created": answer.created_s, "model": answer.model}

    def head(self, usage: ScriptedUsage | None) -> bytes:
        return self._before + b'{"role":"assistant","content":""}' + self._after

    def began(self, block: ScriptBlock) -> bytes:
        if block.kind != "call":
            return b""
        call = _openai_call(block, "")
        call["index"] = block.number
        return self._before + encode({"tool_calls": [call]}) + self._after

    def delta(self, block: ScriptBlock, text: str) -> bytes:
        if block.kind == "text":
            return self._text + encode(text) + self._close
        if block.kind == "reasoning":
            return self._reasoning + encode(text) + self._close
        piece = {"index": block.number, "function": {"arguments": text}}
        return self._before + encode({"tool_calls": [piece]}) + self._after

    def ended(self, block: ScriptBlock) -> bytes:
        return b""

    def tail(self, finish: str, usage: ScriptedUsage | None) -> bytes:
        end = (
            self._before
            + b'{},"finish_reason":'
            + encode(_OPENAI_FINISH.get(finish, finish))
            + b"}]}\n\n"
        )
        if usage is not None and self._answer.include_usage:
            chunk = self._named("chat.completion.chunk")
            chunk |= {"choices": [], "usage": _openai_usage(usage)}
            end += b"data: " + encode(chunk) + b"\n\n"
        return end + b"data: [DONE]\n\n"

    def malformed(self) -> bytes:
        return b'data: {"choices":[{"index":0,"delta":{"content":\n\n'

    def unknown(self) -> bytes:
        # Also a comment, which some providers send to keep a connection open.
        data = encode({"object": "culm.unknown", "choices": None})
        return b": still here\n\nevent: culm.unknown\ndata: " + data + b"\n\n"

    def failed(self) -> bytes:
        return b"data: " + self.problem(500, "the script makes this answer fail here") + b"\n\n"

    def whole(self, content: list[FilledBlock], finish: str, usage: ScriptedUsage | None) -> bytes:
        message: dict[str, Json] = {"role": "assistant", "content": None}
        calls: list[Json] = []
        for block, text in content:
            match block.kind:
                case "text":
                    message["content"] = text
                case "reasoning":
                    message["reasoning_content"] = text
                case "call":
                    calls.append(_openai_call(block, text))
        if calls:
            message["tool_calls"] = calls
        reason = _OPENAI_FINISH.get(finish, finish)
        body = self._named("chat.completion")
        body["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        if usage is not None:
            body["usage"] = _openai_usage(usage)
        return encode(body)

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
        error = {"message": message, "type": kind, "param": None, "code": None}
        return encode({"error": error})


def _openai_call(block: ScriptBlock, arguments: str) -> dict[str, Json]:
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _openai_usage(usage: ScriptedUsage) -> Json:
    # The prompt tokens include cache reads and writes; only the reads are listed separately.
    prompt = usage.input + usage.cache_read + usage.cache_write
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output,
        "total_tokens": prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read},
    }


# --- Anthropic's messages

_ANTHROPIC_FINISH = {
    "content_filter": "refusal"
}  # The other reasons have the same names in this dialect.
SIGNATURE = "c2NyaXB0ZWQ="  # A client must return it with the thinking; here it is a constant.
_ANTHROPIC_ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    529: "overloaded_error",
}
_DELTAS = {
    "text": b'"delta":{"type":"text_delta","text":',
    "reasoning": b'"delta":{"type":"thinking_delta","thinking":',
    "call": b'"delta":{"type":"input_json_delta","partial_json":',
}


class AnthropicDialect:
    """One answer. The common part of a block's deltas is encoded once, as it may have thousands."""

    def __init__(self, answer: AnswerHeader) -> None:
        self._answer = answer
        self._before: dict[int, bytes] = {}  # By the block's index.

    def _message(self) -> dict[str, Json]:
        return {
            "id": f"msg_{self._answer.n}",
            "type": "message",
            "role": "assistant",
            "model": self._answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    def head(self, usage: ScriptedUsage | None) -> bytes:
        message = self._message()
        if usage is not None:
            message["usage"] = _anthropic_usage(usage) | {"output_tokens": 1}
        return _event("message_start", message=message) + _event("ping")

    def began(self, block: ScriptBlock) -> bytes:
        start = b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
        self._before[block.index] = start % block.index + _DELTAS[block.kind]
        content: dict[str, Json]
        match block.kind:
            case "text":
                content = {"type": "text", "text": ""}
            case "reasoning":
                content = {"type": "thinking", "thinking": "", "signature": ""}
            case "call":
                content = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        return _event("content_block_start", index=block.index, content_block=content)

    def delta(self, block: ScriptBlock, text: str) -> bytes:
        return self._before[block.index] + encode(text) + b"}}\n\n"

    def ended(self, block: ScriptBlock) -> bytes:
        signed = b""
        if block.kind == "reasoning":
            delta = {"type": "signature_delta", "signature": SIGNATURE}
            signed = _event("content_block_delta", index=block.index, delta=delta)
        return signed + _event("content_block_stop", index=block.index)

    def tail(self, finish: str, usage: ScriptedUsage | None) -> bytes:
        delta = {"stop_reason": _ANTHROPIC_FINISH.get(finish, finish), "stop_sequence": None}
        counted = {} if usage is None else {"usage": {"output_tokens": usage.output}}
        return _event("message_delta", delta=delta, **counted) + _event("message_stop")

    def malformed(self) -> bytes:
        return b'event: content_block_delta\ndata: {"type":"content_block_delta","index":\n\n'

    def unknown(self) -> bytes:
        return _event("culm_unknown", note="clients ignore unknown events")

    def failed(self) -> bytes:
        data = self.problem(529, "the script makes this answer fail here")
        return b"event: error\ndata: " + data + b"\n\n"

    def whole(self, content: list[FilledBlock], finish: str, usage: ScriptedUsage | None) -> bytes:
        body = self._message()
        body["content"] = [_anthropic_block(block, text) for block, text in content]
        body["stop_reason"] = _ANTHROPIC_FINISH.get(finish, finish)
        if usage is not None:
            body["usage"] = _anthropic_usage(usage)
        return encode(body)

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        kind = _ANTHROPIC_ERRORS.get(
            status, "invalid_request_error" if status < 500 else "api_error"
        )
        return encode({"type": "error", "error": {"type": kind, "message": message}})


def _event(kind: str, **fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _anthropic_block(block: ScriptBlock, text: str) -> Json:
    match block.kind:
        case "text":
            return {"type": "text", "text": text}
        case "reasoning":
            return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
        case "call":
            call = {"type": "tool_use", "id": block.id, "name": block.name}
            return call | {"input": _arguments(text)}


def _arguments(text: str) -> Json:
    """Arguments are a value in this dialect; invalid JSON can only be sent as a string."""
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _anthropic_usage(usage: ScriptedUsage) -> dict[str, Json]:
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
    }

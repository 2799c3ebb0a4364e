"""Answers in the format of Anthropic's messages API."""

import msgspec

from culm.testing.base import AnswerHeader, FilledBlock, ScriptBlock
from culm.testing.script import ScriptedUsage
from culm.wire.codec import Json, encode

FINISH = {"content_filter": "refusal"}  # The other reasons have the same names in this dialect.
SIGNATURE = "c2NyaXB0ZWQ="  # A client must return it with the thinking; here it is a constant.
ERRORS = {
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
            message["usage"] = _usage(usage) | {"output_tokens": 1}
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
        delta = {"stop_reason": FINISH.get(finish, finish), "stop_sequence": None}
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
        body["content"] = [_whole_block(block, text) for block, text in content]
        body["stop_reason"] = FINISH.get(finish, finish)
        if usage is not None:
            body["usage"] = _usage(usage)
        return encode(body)

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        kind = ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return encode({"type": "error", "error": {"type": kind, "message": message}})


def _event(kind: str, **fields: Json) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _whole_block(block: ScriptBlock, text: str) -> Json:
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


def _usage(usage: ScriptedUsage) -> dict[str, Json]:
    return {
        "input_tokens": usage.input,
        "cache_creation_input_tokens": usage.cache_write,
        "cache_read_input_tokens": usage.cache_read,
        "output_tokens": usage.output,
    }

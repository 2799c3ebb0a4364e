"""Answers in the format of OpenAI's chat completions."""

from culm.testing.base import AnswerHeader, FilledBlock, ScriptBlock
from culm.testing.script import ScriptedUsage
from culm.wire.codec import Json, encode

FINISH = {"end_turn": "stop", "max_tokens": "length", "tool_use": "tool_calls"}


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
        call = _call(block, "")
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
            self._before + b'{},"finish_reason":' + encode(FINISH.get(finish, finish)) + b"}]}\n\n"
        )
        if usage is not None and self._answer.include_usage:
            chunk = self._named("chat.completion.chunk")
            chunk |= {"choices": [], "usage": _usage(usage)}
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
                    calls.append(_call(block, text))
        if calls:
            message["tool_calls"] = calls
        reason = FINISH.get(finish, finish)
        body = self._named("chat.completion")
        body["choices"] = [{"index": 0, "message": message, "finish_reason": reason}]
        if usage is not None:
            body["usage"] = _usage(usage)
        return encode(body)

    @staticmethod
    def problem(status: int, message: str) -> bytes:
        kind = "invalid_request_error" if status < 500 else "server_error"
        kind = {401: "authentication_error", 429: "rate_limit_error"}.get(status, kind)
        error = {"message": message, "type": kind, "param": None, "code": None}
        return encode({"error": error})


def _call(block: ScriptBlock, arguments: str) -> dict[str, Json]:
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id, "type": "function", "function": function}


def _usage(usage: ScriptedUsage) -> Json:
    # The prompt tokens include cache reads and writes; only the reads are listed separately.
    prompt = usage.input + usage.cache_read + usage.cache_write
    return {
        "prompt_tokens": prompt,
        "completion_tokens": usage.output,
        "total_tokens": prompt + usage.output,
        "prompt_tokens_details": {"cached_tokens": usage.cache_read},
    }

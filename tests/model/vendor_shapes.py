"""One answer as streamed by each vendor, written from public documentation.

It is always the same answer: reasoning if the vendor sends it, text, two calls and usage.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ReasoningDelta,
    TextDelta,
    TokenUsage,
)
from culm.wire.codec import Json

THOUGHT = ("I list ", "both.")
TEXT = ("Grüße, ", "🦆!")
ARGUMENTS = ('{"path":"a"}', '{"path":"b"}')
DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Shape:
    """A complete stream and the vendor's differences in the answer."""

    stream: bytes
    vendor: str = ""
    thinks: bool = True
    ids: tuple[str, str] = ("call_a", "call_b")
    usage: TokenUsage | None = field(default=TokenUsage(10, 9))
    signature: str = ""  # Sent right before the first call.
    last_signature: str = ""  # Sent at the end.

    @property
    def events(self) -> list[ModelEvent]:
        """The expected events, with adjacent deltas joined."""
        return [
            *([ReasoningDelta("".join(THOUGHT))] if self.thinks else []),
            TextDelta("".join(TEXT)),
            *([ReasoningDelta("", self.signature)] if self.signature else []),
            CallStarted(0, self.ids[0], "ls"),
            CallDelta(0, ARGUMENTS[0]),
            CallStarted(1, self.ids[1], "ls"),
            CallDelta(1, ARGUMENTS[1]),
            *([ReasoningDelta("", self.last_signature)] if self.last_signature else []),
            AnswerDone("tool_use", self.usage),
        ]


def event(value: Json) -> bytes:
    return (
        b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
    )


def chunk(delta: Json, finish: str | None = None, /, choice: Json = None, **more: Json) -> bytes:
    """Encode one chunk; `choice` and `more` are the vendor's additional fields."""
    one: dict[str, Json] = {"index": 0, "delta": delta, "finish_reason": finish}
    one |= choice or {}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(head | {"choices": [one]} | more)


def whole_call(n: int, /, **fields: Json) -> dict[str, Json]:
    """Return a call in one piece."""
    function = {"name": "ls", "arguments": ARGUMENTS[n]}
    return {"index": n, "id": f"call_{'ab'[n]}", "type": "function", "function": function} | fields


def started_call(n: int) -> dict[str, Json]:
    function = {"name": "ls", "arguments": ""}
    return {"index": n, "id": f"call_{'ab'[n]}", "type": "function", "function": function}


def argument_pieces(n: int) -> list[dict[str, Json]]:
    text = ARGUMENTS[n]
    return [{"index": n, "function": {"arguments": piece}} for piece in (text[:5], text[5:])]


def usage_chunk(**usage: Json) -> bytes:
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return event(head | {"choices": [], "usage": usage})


def streamed_calls(**choice: Json) -> bytes:
    """Encode both calls, each with its name first and its arguments in pieces."""
    pieces = [piece for n in (0, 1) for piece in (started_call(n), *argument_pieces(n))]
    return b"".join(chunk({"tool_calls": [piece]}, choice=choice) for piece in pieces)


def whole_calls(*calls: Json) -> bytes:
    return b"".join(chunk({"tool_calls": [one]}) for one in calls)


def text_chunks(*names: str) -> bytes:
    """Encode the reasoning under the vendor's field names, and the text."""
    thoughts = [chunk({"content": None, **dict.fromkeys(names, t)}) for t in THOUGHT if names]
    return b"".join(thoughts) + b"".join(chunk({"content": text}) for text in TEXT)


OPENAI = Shape(
    chunk({"role": "assistant", "content": "", "refusal": None}, choice={"logprobs": None})
    + text_chunks()
    + streamed_calls(logprobs=None)
    + chunk({}, "tool_calls", service_tier="default", system_fingerprint="fp_1", usage=None)
    + usage_chunk(
        prompt_tokens=16,
        completion_tokens=9,
        total_tokens=25,
        prompt_tokens_details={"cached_tokens": 6, "audio_tokens": 0},
        completion_tokens_details={"reasoning_tokens": 4, "accepted_prediction_tokens": 0},
    )
    + DONE,
    "openai",
    thinks=False,
    usage=TokenUsage(10, 9, 6, reasoning=4),
)

_DETAIL = {"type": "reasoning.text", "format": "anthropic-claude-v1", "index": 0}
_SEALED = {"type": "reasoning.encrypted", "data": "c2VhbGVk", "id": "call_a", "index": 1}
OPENROUTER = Shape(
    b": OPENROUTER PROCESSING\n\n: OPENROUTER PROCESSING\n\n"
    + b"".join(
        chunk(
            {
                "role": "assistant",
                "content": "",
                "reasoning": text,
                "reasoning_details": [_DETAIL | {"text": text}],
            },
            choice={"native_finish_reason": None},
            provider="Anthropic",
        )
        for text in THOUGHT
    )
    + chunk({"content": "", "reasoning_details": [_DETAIL | {"signature": "c2ln"}]})
    + text_chunks()
    + chunk({"content": "", "reasoning": None, "reasoning_details": [_SEALED]})
    + streamed_calls(native_finish_reason=None)
    + chunk({"content": ""}, "tool_calls", choice={"native_finish_reason": "tool_use"})
    + b": OPENROUTER PROCESSING\n\n"
    + chunk(
        {"role": "assistant", "content": ""},
        usage={
            "prompt_tokens": 18,
            "completion_tokens": 9,
            "total_tokens": 27,
            "cost": 0.0125,
            "is_byok": False,
            "prompt_tokens_details": {"cached_tokens": 6, "cache_write_tokens": 2},
            "cost_details": {"upstream_inference_cost": None},
            "completion_tokens_details": {"reasoning_tokens": 4},
        },
    )
    + DONE,
    "openrouter",
    usage=TokenUsage(10, 9, 6, 2, 4, 0.0125),
    last_signature='{"details":[{"type":"reasoning.text","format":"anthropic-claude-v1","index":0,'
    '"text":"I list both.","signature":"c2ln"},{"type":"reasoning.encrypted","data":"c2VhbGVk",'
    '"id":"call_a","index":1}]}\n',
)

GROQ = Shape(
    chunk({"role": "assistant", "content": ""}, x_groq={"id": "req_1"})
    + text_chunks("reasoning")
    + chunk({"tool_calls": [whole_call(0), whole_call(1)]}, choice={"logprobs": None})
    + chunk(
        {},
        "tool_calls",
        x_groq={
            "id": "req_1",
            "usage": {
                "queue_time": 0.01,
                "prompt_tokens": 10,
                "completion_tokens": 9,
                "total_tokens": 19,
                "total_time": 0.1,
            },
        },
    )
    + DONE,
    "groq",
)

DEEPSEEK = Shape(
    b": keep-alive\n\n"
    + chunk({"role": "assistant", "content": None, "reasoning_content": ""})
    + text_chunks("reasoning_content")
    + b": keep-alive\n\n"
    + streamed_calls(logprobs=None)
    + chunk(
        {"content": "", "reasoning_content": None},
        "tool_calls",
        usage={
            "prompt_tokens": 16,
            "completion_tokens": 9,
            "total_tokens": 25,
            "prompt_cache_hit_tokens": 6,
            "prompt_cache_miss_tokens": 10,
            "completion_tokens_details": {"reasoning_tokens": 4},
        },
    )
    + DONE,
    "deepseek",
    usage=TokenUsage(10, 9, 6, reasoning=4),
)

MISTRAL = Shape(
    chunk({"role": "assistant", "content": ""})
    + b"".join(
        chunk({"content": [{"type": "thinking", "thinking": [{"type": "text", "text": text}]}]})
        for text in THOUGHT
    )
    + chunk({"content": [{"type": "text", "text": TEXT[0]}]})
    + chunk({"content": TEXT[1]})
    + chunk(
        {
            "content": "",
            "tool_calls": [whole_call(0, id="D681PevKs"), whole_call(1, id="xYz012345")],
        },
        "tool_calls",
        usage={"prompt_tokens": 10, "total_tokens": 19, "completion_tokens": 9},
    )
    + DONE,
    "mistral",
    ids=("D681PevKs", "xYz012345"),
)

XAI = Shape(
    b"".join(chunk({"role": "assistant", "reasoning_content": text}) for text in THOUGHT)
    + b"".join(chunk({"role": "assistant", "content": text}) for text in TEXT)
    + chunk({"role": "assistant", "content": "", "tool_calls": [whole_call(0), whole_call(1)]})
    + chunk({"role": "assistant", "content": ""}, "tool_calls")
    + usage_chunk(
        prompt_tokens=16,
        completion_tokens=5,
        total_tokens=25,
        prompt_tokens_details={"text_tokens": 16, "cached_tokens": 6},
        completion_tokens_details={"reasoning_tokens": 4},
        num_sources_used=0,
    )
    + DONE,
    "xai",
    usage=TokenUsage(10, 9, 6, reasoning=4),
)

_GEMINI_USAGE = {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 19}
GEMINI = Shape(
    b"".join(chunk({"role": "assistant", "content": text}) for text in TEXT)
    + chunk(
        {
            "role": "assistant",
            "tool_calls": [
                whole_call(0, extra_content={"google": {"thought_signature": "c2ln"}}),
            ],
        },
        usage=_GEMINI_USAGE,
    )
    + chunk({"role": "assistant", "tool_calls": [whole_call(1, index=0)]}, usage=_GEMINI_USAGE)
    + chunk({"role": "assistant"}, "stop", usage=_GEMINI_USAGE)
    + DONE,
    "gemini",
    thinks=False,
    usage=TokenUsage(10, 9, reasoning=4),
    signature='{"signature":"c2ln"}\n',
)

OLLAMA = Shape(
    b"".join(
        chunk(
            {"role": "assistant", "content": "", "reasoning": text}, system_fingerprint="fp_ollama"
        )
        for text in THOUGHT
    )
    + b"".join(chunk({"role": "assistant", "content": text}) for text in TEXT)
    + chunk({"role": "assistant", "content": "", "tool_calls": [whole_call(0)]})
    + chunk({"role": "assistant", "content": "", "tool_calls": [whole_call(1, index=0)]})
    + chunk({"role": "assistant", "content": ""}, "tool_calls")
    + usage_chunk(prompt_tokens=10, completion_tokens=9, total_tokens=19)
    + DONE,
    "ollama",
)

LLAMACPP = Shape(
    chunk({"role": "assistant", "content": None})
    + text_chunks("reasoning_content")
    + streamed_calls()
    + chunk({}, "tool_calls")
    + usage_chunk(prompt_tokens=10, completion_tokens=9, total_tokens=19).replace(
        b"}\n", b',"timings":{"prompt_n":10,"predicted_per_second":50.5}}\n'
    )
    + DONE,
    "llamacpp",
)

LMSTUDIO = Shape(
    chunk({"role": "assistant"})
    + text_chunks("reasoning_content")
    + streamed_calls(logprobs=None)
    + chunk({}, "tool_calls", stats={})
    + DONE,
    "lmstudio",
    usage=None,
)

VLLM = Shape(
    chunk({"role": "assistant", "content": ""}, choice={"logprobs": None}, prompt_token_ids=None)
    + text_chunks("reasoning", "reasoning_content")
    + streamed_calls(stop_reason=None, token_ids=None)
    + chunk({"content": ""}, "tool_calls", choice={"stop_reason": None})
    + usage_chunk(prompt_tokens=10, completion_tokens=9, total_tokens=19)
    + DONE,
    "vllm",
)

# All the observed deviations of different servers in one stream.
CARELESS = Shape(
    b"\xef\xbb\xbf"
    + (
        chunk({"role": "assistant"})
        + chunk({"reasoning_content": "".join(THOUGHT), "reasoning": "".join(THOUGHT)}, "")
        + text_chunks()
        + whole_calls(
            {"function": {"name": "ls", "arguments": {"path": "a"}}, "id": None},
            {"function": {"name": "ls", "arguments": {"path": "b"}}, "id": ""},
        )
        + chunk({"content": None, "tool_calls": None}, "stop")
    )
    .replace(b"data: ", b"data:")
    .replace(b"\n", b"\r\n")
    .rstrip(),
    ids=("", ""),
    usage=None,
)

# The same answer from a server that ignores the request for a stream.
UNSTREAMED = Shape(
    json.dumps(
        {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "choices": [
                {
                    "index": 0,
                    "message": {
                        "role": "assistant",
                        "reasoning_content": "".join(THOUGHT),
                        "content": "".join(TEXT),
                        "tool_calls": [whole_call(0), whole_call(1)],
                    },
                    "finish_reason": "tool_calls",
                }
            ],
            "usage": {"prompt_tokens": 10, "completion_tokens": 9, "total_tokens": 19},
        },
        indent=2,
    ).encode(),
)

SHAPES: Mapping[str, Shape] = {
    **{
        shape.vendor: shape
        for shape in (
            OPENAI,
            OPENROUTER,
            GROQ,
            DEEPSEEK,
            MISTRAL,
            XAI,
            GEMINI,
            OLLAMA,
            LLAMACPP,
            LMSTUDIO,
            VLLM,
        )
    },
    "careless": CARELESS,
    "unstreamed": UNSTREAMED,
}

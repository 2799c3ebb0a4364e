"""The request body for each vendor: the same conversation with the vendor's quirks."""

import json

import pytest
from msgspec.structs import replace

from culm.ids import MessageId, SessionId
from culm.model.base import ModelRequest, ProviderAccess, ToolSpec
from culm.model.openai.model import encode_body
from culm.model.openai.vendor_quirks import PLAIN, quirks_of
from culm.model.reasoning_roundtrip import ReasoningLine, encode_line, parse_lines
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from culm.wire.messages import (
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    Role,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.support import contract


def message(role: Role, *parts: Part, model: str = "") -> Message:
    provider = "acme" if model else ""
    return Message(MessageId("m"), role, SessionId("s"), list(parts), model, provider)


STORED_SIGNATURE = encode_line(ReasoningLine(call=0, signature="c2ln")) + encode_line(
    ReasoningLine(details=({"text": "hm"},))
)
HISTORY = [
    message("user", TextPart(Text("list a"))),
    message(
        "assistant",
        ReasoningPart(Reasoning("hm", signature=STORED_SIGNATURE)),
        ToolCallPart(ToolCall("call_of_some_length", "ls", '{"path":"a"}')),
        model="model-1",
    ),
    message("tool", ToolResultPart(ToolResult("call_of_some_length", "ls", "a.txt"))),
    message("user", TextPart(Text("and b?"))),
]
CHOSEN = SelectedModel(
    model="model-1",
    provider="acme",
    reasoning_effort="low",
    max_tokens=100,
    temperature=0.5,
    top_p=0.9,
    top_k=40,
    frequency_penalty=0.1,
    presence_penalty=0.2,
)
SPEC = ToolSpec("ls", "List files.", {"type": "object", "properties": {}})


def body(vendor: str, *, can_reason: bool = True, history: list[Message] = HISTORY) -> Json:
    info = ModelInfo(id="model-1", can_reason=can_reason)
    request = ModelRequest("Be brief.", history, (SPEC,), CHOSEN)
    return json.loads(encode_body(request, ProviderAccess(vendor=vendor), info))


CALL: dict[str, Json] = {
    "id": "call_of_some_length",
    "type": "function",
    "function": {"name": "ls", "arguments": '{"path":"a"}'},
}
CALLED: dict[str, Json] = {"role": "assistant", "content": None, "tool_calls": [CALL]}
SYSTEM, FIRST, RESULT, SECOND = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "list a"},
    {"role": "tool", "tool_call_id": "call_of_some_length", "content": "a.txt"},
    {"role": "user", "content": "and b?"},
)
PLAIN_BODY: dict[str, Json] = {
    "model": "model-1",
    "messages": [SYSTEM, FIRST, CALLED, RESULT, SECOND],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.5,
    "top_p": 0.9,
    "frequency_penalty": 0.1,
    "presence_penalty": 0.2,
    "max_tokens": 100,
    "reasoning_effort": "low",
    "tools": [
        {
            "type": "function",
            "function": {"name": "ls", "description": "List files.", "parameters": SPEC.parameters},
        }
    ],
}


def plain_body(*without: str, **changed: Json) -> dict[str, Json]:
    return {name: x for name, x in PLAIN_BODY.items() if name not in without} | changed


def between(called: Json, result: Json = RESULT, *after: Json) -> list[Json]:
    return [SYSTEM, FIRST, called, result, *after, SECOND]


SHORT_ID = "8cFtEq2Y2"
SIGNED = {**CALL, "extra_content": {"google": {"thought_signature": "c2ln"}}}


def test_default_reasoning_is_disabled_only_where_the_vendor_refuses_tools() -> None:
    info = ModelInfo(id="m", can_reason=True, reasoning_levels=["none", "low"])

    def effort(vendor: str, request: ModelRequest, levels: ModelInfo = info) -> Json:
        return json.loads(encode_body(request, ProviderAccess(vendor=vendor), levels)).get(
            "reasoning_effort"
        )

    asked = ModelRequest("", [], (ToolSpec("t", "", {}),))
    assert effort("openai", asked) == "none"
    assert effort("openai", replace(asked, settings=SelectedModel(reasoning_effort="low"))) == "low"
    assert effort("openai", replace(asked, tools=())) is None
    assert effort("openai", asked, ModelInfo(id="m", can_reason=True)) is None
    assert effort("groq", asked) is None


@contract("INV-82")
@pytest.mark.parametrize(
    ("vendor", "expected"),
    [
        ("", PLAIN_BODY),
        (
            "openai",
            plain_body(
                "temperature",
                "top_p",
                "frequency_penalty",
                "presence_penalty",
                "max_tokens",
                max_completion_tokens=100,
            ),
        ),
        (
            "openrouter",
            plain_body(
                "reasoning_effort",
                messages=between({**CALLED, "reasoning_details": [{"text": "hm"}]}),
                reasoning={"effort": "low"},
                top_k=40,
                usage={"include": True},
            ),
        ),
        ("groq", PLAIN_BODY),
        ("deepseek", plain_body(messages=between({**CALLED, "reasoning_content": "hm"}))),
        (
            "mistral",
            plain_body(
                "stream_options",
                messages=between(
                    {**CALLED, "tool_calls": [{**CALL, "id": SHORT_ID}]},
                    {**RESULT, "tool_call_id": SHORT_ID},
                    {"role": "assistant", "content": "Understood."},
                ),
            ),
        ),
        ("xai", plain_body("frequency_penalty", "presence_penalty")),
        ("gemini", plain_body(messages=between({**CALLED, "tool_calls": [SIGNED]}))),
        ("ollama", PLAIN_BODY),
        ("llamacpp", plain_body(top_k=40)),
        ("lmstudio", plain_body(top_k=40)),
        ("vllm", plain_body(top_k=40)),
        ("somebody else", PLAIN_BODY),
    ],
)
def test_each_vendor_gets_its_own_request_body(vendor: str, expected: Json) -> None:
    assert body(vendor) == expected


@pytest.mark.parametrize("vendor", ["openai", "xai"])
def test_a_model_that_does_not_reason_gets_every_setting(vendor: str) -> None:
    sent = body(vendor, can_reason=False)
    assert {"temperature", "top_p", "frequency_penalty", "presence_penalty"} <= sent.keys()


def calls_sent(vendor: str, *calls: str, model: str = "model-1", signature: str = "") -> Json:
    """Return the calls with these ids as sent back to `vendor`."""
    parts: list[Part] = [ReasoningPart(Reasoning("", signature))] if signature else []
    parts += [ToolCallPart(ToolCall(call_id, "ls", "{}")) for call_id in calls]
    sent = body(vendor, history=[message("assistant", *parts, model=model)])["messages"]
    assert [m["tool_call_id"] for m in sent[2:]] == [c["id"] for c in sent[1]["tool_calls"]]
    return sent[1]["tool_calls"]


def test_valid_call_ids_are_kept_and_others_stay_unique() -> None:
    assert [c["id"] for c in calls_sent("mistral", "D681PevKs")] == ["D681PevKs"]
    ids = [c["id"] for c in calls_sent("mistral", "call_1", "call_1~", "", "größe\ud83d")]
    assert len(set(ids)) == 4
    assert all(len(i) == 9 and i.isascii() and i.isalnum() for i in ids)
    kept, shortened = calls_sent("openai", "x" * 40, "x" * 41)
    assert (kept["id"], len(shortened["id"])) == ("x" * 40, 9)


def signatures(calls: Json) -> list[str | None]:
    none: dict[str, Json] = {"google": {"thought_signature": None}}
    return [c.get("extra_content", none)["google"]["thought_signature"] for c in calls]


@contract("INV-82")
def test_a_signature_is_sent_back_on_its_own_call() -> None:
    kept = encode_line(ReasoningLine(call=1, signature="two"))
    assert signatures(calls_sent("gemini", "a", "a~", signature=kept)) == [None, "two"]
    assert signatures(calls_sent("gemini", "a", "call_1")) == [None, None]


@contract("INV-82")
def test_a_signature_is_not_sent_to_another_model() -> None:
    placeholder = "skip_thought_signature_validator"
    assert signatures(
        calls_sent("gemini", "a", "b", model="model-0", signature=STORED_SIGNATURE)
    ) == [
        placeholder,
        None,
    ]
    assert signatures(calls_sent("openai", "a", "b", signature=STORED_SIGNATURE)) == [None, None]


@contract("INV-82")
def test_reasoning_is_sent_back_with_every_answer_where_the_vendor_wants_it() -> None:
    history = [
        message("assistant", ReasoningPart(Reasoning("hm")), TextPart(Text("one"))),
        message("user", TextPart(Text("go on"))),
        message("assistant", TextPart(Text("two"))),
        message("assistant", ReasoningPart(Reasoning("only thoughts"))),
    ]

    def thoughts(vendor: str, *, can_reason: bool) -> list[str | None]:
        sent = body(vendor, can_reason=can_reason, history=history)["messages"]
        return [m.get("reasoning_content") for m in sent if m["role"] == "assistant"]

    assert thoughts("deepseek", can_reason=True) == ["hm", ""]
    assert thoughts("deepseek", can_reason=False) == ["hm", None]
    assert thoughts("groq", can_reason=True) == [None, None]


def test_a_foreign_signature_is_ignored() -> None:
    assert parse_lines('EqQBCg==\n{"signature":"s"}\n{"call":"x"}\n[]\n' + "[" * 5000) == [
        ReasoningLine(signature="s")
    ]


def test_an_unknown_vendor_has_no_quirks() -> None:
    assert quirks_of(ProviderAccess()) == quirks_of(ProviderAccess(vendor="who")) == PLAIN

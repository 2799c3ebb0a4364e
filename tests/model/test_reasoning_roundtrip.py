"""Thinking blocks are sent back exactly as they were received."""

import json
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.anthropic.answer import AnthropicAnswer
from culm.model.base import CallDelta, CallStarted, ReasoningDelta, TextDelta
from culm.model.failures import ProviderPeer
from culm.model.reasoning_roundtrip import ThinkingBlock, thoughts_of
from culm.wire.codec import Json
from culm.wire.messages import (
    Message,
    Reasoning,
    ReasoningPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
)
from tests.model import anthropic_shapes as shapes
from tests.model.anthropic_messages import (
    call,
    make_message,
    result,
    sent_messages,
    text_block,
    tool_use_block,
)
from tests.model.anthropic_shapes import MODEL

PEER = ProviderPeer("acme", "api.acme.example", MODEL)
THINKING: Json = {"type": "thinking", "thinking": "hm", "signature": "sig"}


def signed(signature: str = "sig") -> ReasoningPart:
    return ReasoningPart(Reasoning("hm", signature))


@pytest.mark.parametrize(
    ("answer", "content"),
    [
        (make_message("assistant", signed(), call("c")), [THINKING, tool_use_block("c")]),
        (make_message("assistant", signed(""), call("c")), [tool_use_block("c")]),
        (make_message("assistant", signed(), call("c"), model="another"), [tool_use_block("c")]),
        (make_message("assistant", signed(), call("c"), provider="another"), [tool_use_block("c")]),
        (
            make_message("assistant", signed("sig\nof another adapter"), call("c")),
            [tool_use_block("c")],
        ),
    ],
)
def test_thinking_is_sent_back_only_to_the_model_that_signed_it(
    answer: Message, content: list[Json]
) -> None:
    found = sent_messages(make_message("user", "hello"), answer, make_message("tool", result("c")))
    assert found[1]["content"] == content


def test_thinking_is_sent_back_only_within_its_turn() -> None:
    step = make_message("assistant", signed(), call("c")), make_message("tool", result("c"))
    found = sent_messages(
        make_message("user", "hello"),
        *step,
        make_message("assistant", "done"),
        make_message("user", "again"),
        *step,
    )
    assert found[1]["content"] == [tool_use_block("c")]
    assert found[-2]["content"] == [THINKING, tool_use_block("c_2")]


def stored_message(sent: bytes) -> Message:
    """Return the stored message of an answer: one reasoning, one text, and its calls."""
    reasoning, text, calls = Reasoning(), Text(), list[ToolCall]()
    for event in AnthropicAnswer(PEER).on_lines(sent.split(b"\n")):
        match event:
            case ReasoningDelta():
                reasoning.thinking += event.text
                reasoning.signature += event.signature
            case TextDelta():
                text.text += event.text
            case CallStarted():
                calls.append(ToolCall(event.id, event.name))
            case CallDelta():
                calls[event.key].input += event.text
            case _:
                raise AssertionError("unexpected end of the answer")
    return make_message(
        "assistant", ReasoningPart(reasoning), TextPart(text), *map(ToolCallPart, calls)
    )


def sent_back(content: list[Json]) -> list[Json]:
    """Return an answer's content as it is sent back in the next request."""
    streamed = b"".join(as_bytes(n, block) for n, block in enumerate(content))
    calls = [block["id"] for block in content if block["type"] == "tool_use"]
    found = sent_messages(
        make_message("user", "hello"),
        stored_message(streamed),
        make_message("tool", *map(result, calls)),
    )
    return found[1]["content"] if len(found) > 1 else []


def as_bytes(index: int, block: Json) -> bytes:
    match block["type"]:
        case "text":
            return shapes.text(index, block["text"])
        case "thinking":
            return shapes.thinking(index, block["thinking"], signature=block["signature"])
        case "redacted_thinking":
            return shapes.redacted(index, block["data"])
        case _:
            return shapes.call(index, block["id"], block["name"], json.dumps(block["input"]))


def test_the_signature_of_a_single_block_is_stored_unchanged() -> None:
    (reasoning, _) = stored_message(shapes.thinking(0, "h", "m", signature="sig")).parts
    assert reasoning == ReasoningPart(Reasoning("hm", "sig"))


def test_several_thinking_blocks_are_stored_one_per_line() -> None:
    sent = (
        shapes.redacted(0, "ZW5j")
        + shapes.thinking(1, "one", signature="MQ==")
        + shapes.text(2, "words")
        + shapes.thinking(3, "two", signature="Mg==")
        + shapes.call(4, "c", "ls")
        + shapes.thinking(5, "", signature="Mw==")
    )
    (part, *_) = stored_message(sent).parts
    assert part == ReasoningPart(
        Reasoning(
            "one\n\ntwo\n\n",
            "\nredacted 0 0 0 ZW5j\nthinking 0 0 0 MQ==\nthinking 5 5 0 Mg==\nthinking 10 5 1 Mw==",
        )
    )


def test_thinking_cut_before_its_signature_is_dropped() -> None:
    cut = shapes.begin(1, "thinking") + shapes.delta(1, "thinking_delta", thinking="tw")
    part = cast(
        "ReasoningPart", stored_message(shapes.thinking(0, "one", signature="MQ==") + cut).parts[0]
    )
    assert thoughts_of(part.data) == [ThinkingBlock("thinking", "one", 0, 0, "MQ==")]


TOKENS = st.text("abcXYZ019+/=", min_size=1, max_size=8)
CHARACTERS = st.characters(codec="utf-8")


@st.composite
def any_thought(draw: st.DrawFn) -> Json:
    if draw(st.booleans()):
        return {"type": "redacted_thinking", "data": draw(TOKENS)}
    text = draw(st.text(CHARACTERS, max_size=8))
    return {"type": "thinking", "thinking": text, "signature": draw(TOKENS)}


@st.composite
def any_text_and_calls(draw: st.DrawFn) -> tuple[list[Json], int]:
    """Return a strategy for an optional text and a number of calls."""
    text = draw(st.text(CHARACTERS, max_size=8))
    return ([text_block(text)] if text.strip() else []), draw(st.integers(0, 2))


@given(
    first=any_text_and_calls(),
    rest=st.lists(st.tuples(st.lists(any_thought(), min_size=1, max_size=3), any_text_and_calls())),
)
def test_an_answer_is_sent_back_exactly_as_received(
    first: tuple[list[Json], int], rest: list[tuple[list[Json], tuple[list[Json], int]]]
) -> None:
    content: list[Json] = []
    calls = 0
    for thoughts, (text, more) in [([], first), *rest]:
        content += [
            *thoughts,
            *text,
            *(tool_use_block(f"c{n}", path="é") for n in range(calls, calls + more)),
        ]
        calls += more
    assert sent_back(content) == content

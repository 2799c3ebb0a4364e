"""Conversion of the history that a host sends with an assignment."""

import pytest
from msgspec import Raw

from culm.fleet.worker.executors.runtime_history import history_from
from culm.ids import SessionId
from culm.wire.codec import Json, encode
from culm.wire.messages import (
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)

SESSION = SessionId("session-1")


def read(*messages: Json, assignment: str = "Go on.") -> list[tuple[str, list[Part]]]:
    raws = [Raw(m if isinstance(m, bytes) else encode(m)) for m in messages]
    history = history_from(raws, assignment, SESSION)
    assert {message.session_id for message in history} == {SESSION}
    return [(message.role, message.parts) for message in history]


def text_parts(text: str) -> list[Part]:
    return [TextPart(Text(text))]


def test_each_message_kind_is_read_and_each_call_has_its_result() -> None:
    functions: list[Json] = [
        {"id": "a", "type": "function", "function": {"name": "ls", "arguments": '{"path":"."}'}},
        {"id": "b", "function": {"name": "view", "arguments": {"file_path": "x"}}},
    ]
    parts = [
        {"type": "text", "text": "Look:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA", "detail": "low"}},
        {"type": "hologram"},
    ]
    history = read(
        {"role": "system", "content": "You are brief.", "never_compress": True},
        {"role": "user", "content": "old", "compressed": True},
        {"role": "user", "content": "Look:", "content_parts": parts, "id": "m-1"},
        {
            "role": "assistant",
            "content": "I do.",
            "reasoning": "Hm.",
            "reasoning_signature": "sig",
            "tool_calls": functions,
            "phase": "commentary",
        },
        {"role": "tool", "content": "no such file", "tool_call_id": "b", "tool_success": False},
        {"role": "tool", "content": "a.txt", "tool_call_id": "a", "created_at": "2026-01-01"},
        {"role": "tool", "content": "nobody called", "tool_call_id": "c"},
        {"role": "user", "content": "Go on."},
    )
    assert history == [
        ("system", text_parts("You are brief.")),
        (
            "user",
            [
                TextPart(Text("Look:")),
                ImageUrlPart(ImageUrl("data:image/png;base64,AA", "low")),
            ],
        ),
        (
            "assistant",
            [
                ReasoningPart(Reasoning("Hm.", "sig")),
                TextPart(Text("I do.")),
                ToolCallPart(ToolCall("a", "ls", '{"path":"."}', finished=True)),
                ToolCallPart(ToolCall("b", "view", '{"file_path":"x"}', finished=True)),
            ],
        ),
        ("tool", [ToolResultPart(ToolResult("a", "ls", "a.txt"))]),
        ("tool", [ToolResultPart(ToolResult("b", "view", "no such file", is_error=True))]),
        ("user", text_parts("Go on.")),
    ]


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([], ["Go on."]),
        ([{"role": "user", "content": " Go on.\n"}], [" Go on.\n"]),
        ([{"role": "user", "content": "Begin."}], ["Begin.", "Go on."]),
        ([b'{"role": 7}', b"[]", b"nothing", b'"\xff"', b"[" * 3000], ["Go on."]),
        ([{"role": "user", "content": None}], ["Go on."]),
    ],
)
def test_assignment_is_added_once_and_unreadable_messages_are_skipped(
    messages: list[Json], texts: list[str]
) -> None:
    assert read(*messages) == [("user", text_parts(text)) for text in texts]


def test_model_and_provider_of_a_message_are_kept() -> None:
    answer = {"role": "assistant", "content": "Hi.", "model": "m", "provider": "p"}
    message, _ = history_from([Raw(encode(answer))], "Go on.", SESSION)
    expected = Message(message.id, "assistant", SESSION, text_parts("Hi."), model="m", provider="p")
    assert message == expected

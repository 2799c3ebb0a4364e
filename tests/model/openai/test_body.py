"""The conversation in a request to an OpenAI-compatible provider."""

import json
from base64 import b64encode

import pytest

from culm.ids import MessageId, SessionId
from culm.model.base import ModelRequest, ProviderAccess, ToolSpec
from culm.model.openai.model import encode_body
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.messages import (
    Binary,
    BinaryPart,
    Finish,
    FinishPart,
    ImageUrl,
    ImageUrlPart,
    Message,
    Part,
    Reasoning,
    ReasoningPart,
    Role,
    ShellCommand,
    ShellCommandPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.support import contract

PNG = b"\x89PNG"


def message(role: Role, *parts: Part) -> Message:
    return Message(MessageId("m"), role, SessionId("s"), list(parts))


def text(content: str) -> TextPart:
    return TextPart(Text(content))


def binary(path: str, mime_type: str, data: bytes) -> BinaryPart:
    return BinaryPart(Binary(path, mime_type, data))


def body(request: ModelRequest, *, sees_images: bool = True) -> dict[str, Json]:
    info = ModelInfo(id="m", supports_attachments=sees_images)
    return json.loads(encode_body(request, ProviderAccess(), info))


def sent_messages(*messages: Message, sees_images: bool = True) -> list[Json]:
    return body(ModelRequest("", list(messages)), sees_images=sees_images)["messages"]


def test_a_conversation_with_a_call_is_sent_in_order() -> None:
    assert sent_messages(
        message("system", text("be kind")),
        message("user", text("what is here?")),
        message(
            "assistant",
            ReasoningPart(Reasoning("let me look")),
            text("I look."),
            ToolCallPart(ToolCall("c1", "ls", '{"path": "."}', finished=True)),
            ToolCallPart(ToolCall("c2", "ls", "", finished=True)),
            FinishPart(Finish("tool_use", 1)),
        ),
        message(
            "tool",
            ToolResultPart(ToolResult("c1", "ls", "a.txt")),
            ToolResultPart(ToolResult("c2", "ls", "no path", is_error=True)),
        ),
        message("assistant", text("A file."), FinishPart(Finish("end_turn", 2))),
    ) == [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "what is here?"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [
                {
                    "id": "c1",
                    "type": "function",
                    "function": {"name": "ls", "arguments": '{"path": "."}'},
                },
                {"id": "c2", "type": "function", "function": {"name": "ls", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a.txt"},
        {"role": "tool", "tool_call_id": "c2", "content": "no path"},
        {"role": "assistant", "content": "A file."},
    ]


def test_a_call_without_text_has_null_content() -> None:
    encoded, _ = sent_messages(message("assistant", ToolCallPart(ToolCall("c", "ls", "{}"))))
    assert encoded["content"] is None


@pytest.mark.parametrize(
    ("made_up", "sent"),
    [("functions.ls", "functions_ls"), ("", "unknown"), ("größe", "gr__e"), ("x" * 99, "x" * 64)],
)
def test_an_invalid_tool_name_is_sanitized(made_up: str, sent: str) -> None:
    encoded, _ = sent_messages(message("assistant", ToolCallPart(ToolCall("c", made_up, "{}"))))
    assert encoded["tool_calls"][0]["function"]["name"] == sent


@contract("INV-82")
def test_calls_and_results_are_paired_even_if_the_history_is_not() -> None:
    encoded = sent_messages(
        message("tool", ToolResultPart(ToolResult("lost", "ls", "nobody called"))),
        message(
            "assistant",
            ToolCallPart(ToolCall("a", "ls", "{}")),
            ToolCallPart(ToolCall("b", "ls", "{}")),
        ),
        message(
            "tool",
            ToolResultPart(ToolResult("b", "ls", "here")),
            ToolResultPart(ToolResult("b", "ls", "twice")),
        ),
        message("user", text("go on")),
    )
    assert [(m["role"], m.get("tool_call_id"), m["content"]) for m in encoded] == [
        ("assistant", None, None),
        ("tool", "b", "here"),
        ("tool", "a", "[This call has no result.]"),
        ("user", None, "go on"),
    ]


@pytest.mark.parametrize("broken", ["", "{", '{"a": 1', "[]", "null", "word", "{}{}", "[" * 99_999])
def test_arguments_that_are_not_an_object_are_not_sent(broken: str) -> None:
    encoded, _ = sent_messages(message("assistant", ToolCallPart(ToolCall("c", "ls", broken))))
    assert encoded["tool_calls"][0]["function"]["arguments"] == "{}"


@pytest.mark.parametrize(
    "empty",
    [
        message("user"),
        message("user", text("")),
        message("assistant", text(""), FinishPart(Finish("canceled", 1))),
        message("assistant", ReasoningPart(Reasoning("only thoughts"))),
        message("system"),
        message("tool"),
    ],
)
def test_an_empty_message_is_left_out(empty: Message) -> None:
    assert sent_messages(empty) == []


def test_attachments_and_commands_are_sent_as_text_where_possible() -> None:
    (encoded,) = sent_messages(
        message(
            "user",
            text("look"),
            binary("notes.txt", "text/plain", b"gr\xc3\xbc\xc3\x9fe \xff"),
            ShellCommandPart(ShellCommand("make", "it broke", 2)),
            binary("a.pdf", "application/pdf", b"%PDF"),
        )
    )
    assert encoded["content"] == (
        "look\n\n"
        '<file path="notes.txt">\ngrüße \ufffd\n</file>\n\n'
        "I ran this command:\n<command>\nmake\n</command>\n"
        "<output>\nit broke\n</output>\n<exit_code>2</exit_code>\n\n"
        "[The file a.pdf (application/pdf) was left out: it is not text.]"
    )


def test_images_are_sent_to_a_model_that_sees_images() -> None:
    (encoded,) = sent_messages(
        message(
            "user",
            text("what is this?"),
            binary("a.png", "image/png", PNG),
            ImageUrlPart(ImageUrl("https://example.com/b.png", "low")),
            ImageUrlPart(ImageUrl("https://example.com/c.png")),
        )
    )
    assert encoded["content"] == [
        {"type": "text", "text": "what is this?"},
        {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{b64encode(PNG).decode()}"},
        },
        {"type": "image_url", "image_url": {"url": "https://example.com/b.png", "detail": "low"}},
        {"type": "image_url", "image_url": {"url": "https://example.com/c.png"}},
    ]


def test_images_are_replaced_by_a_note_for_a_model_that_sees_none() -> None:
    (encoded,) = sent_messages(
        message("user", binary("a.png", "image/png", PNG), ImageUrlPart(ImageUrl("https://x/b"))),
        sees_images=False,
    )
    assert encoded["content"] == (
        "[The image a.png was left out: this model sees no images.]\n\n"
        "[An image was left out: this model sees no images.]"
    )


PICTURE = ToolResult("c1", "view", "a picture", data="iVBO", mime_type="image/png")
CALLS = message(
    "assistant",
    ToolCallPart(ToolCall("c1", "view", "{}")),
    ToolCallPart(ToolCall("c2", "view", "{}")),
)
RESULTS = (
    message("tool", ToolResultPart(PICTURE)),
    message("tool", ToolResultPart(ToolResult("c2", "view", "", "UklGR", "audio/wav"))),
)


@contract("INV-82")
@pytest.mark.parametrize("then", ["nothing", "a user", "an answer"])
def test_an_image_in_a_result_is_sent_in_a_user_message_after_all_results(then: str) -> None:
    after = {
        "nothing": [],
        "a user": [message("user", text("so?"))],
        "an answer": [message("assistant", text("I see."))],
    }[then]
    encoded = sent_messages(CALLS, *RESULTS, *after)[1:]
    shown: list[Json] = [
        {"type": "text", "text": "The images of the results above:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}},
    ]
    assert encoded == [
        {
            "role": "tool",
            "tool_call_id": "c1",
            "content": "a picture\n[The image is in the next message.]",
        },
        {
            "role": "tool",
            "tool_call_id": "c2",
            "content": "[Data (audio/wav) was left out: it is not text.]",
        },
        {
            "role": "user",
            "content": [*shown, {"type": "text", "text": "so?"}] if then == "a user" else shown,
        },
        *([{"role": "assistant", "content": "I see."}] if then == "an answer" else []),
    ]


def test_an_image_in_a_result_is_replaced_by_a_note_if_the_model_sees_none() -> None:
    encoded = sent_messages(CALLS, *RESULTS, sees_images=False)
    assert [m["role"] for m in encoded] == ["assistant", "tool", "tool"]
    assert encoded[1]["content"] == "a picture\n[An image was left out: this model sees no images.]"


def test_tools_are_sent_with_their_schema() -> None:
    spec = ToolSpec("ls", "List files.", {"type": "object", "properties": {}})
    assert body(ModelRequest("", [], (spec,)))["tools"] == [
        {
            "type": "function",
            "function": {
                "name": "ls",
                "description": "List files.",
                "parameters": {"type": "object", "properties": {}},
            },
        }
    ]
    assert "tools" not in body(ModelRequest("", []))


def test_an_unpaired_surrogate_is_replaced() -> None:
    assert sent_messages(message("user", text("a\ud83d"))) == [
        {"role": "user", "content": "a\ufffd"}
    ]

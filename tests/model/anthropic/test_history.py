"""How a conversation is told to Anthropic, so that it is never refused."""

from base64 import b64encode
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
    ShellCommand,
    ShellCommandPart,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from tests.model.anthropic_messages import answered, body, call, result, said, told, used, words
from tests.model.anthropic_rules import faults
from tests.model.anthropic_shapes import INFO, MODEL
from tests.support import contract

PNG = b"\x89PNG"
PNG_TEXT = b64encode(PNG).decode()
BLIND = ModelInfo(id=MODEL, supports_attachments=False)
HELLO: Json = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
NO_RESULT = "[This call has no result.]"
GO_ON: Json = {"role": "user", "content": [{"type": "text", "text": "Go on."}]}


def test_a_conversation_with_calls_is_told_by_turns() -> None:
    assert told(
        said("user", "what is here?"),
        said(
            "assistant",
            ReasoningPart(Reasoning("let me look")),
            "I look.",
            call("c1", arguments='{"path": "."}'),
            call("c2"),
            FinishPart(Finish("tool_use", 1)),
        ),
        said("tool", result("c1", "a.txt")),
        said("tool", result("c2", "no path", is_error=True)),
        said("user", "and quickly"),
        said("assistant", "A file.", FinishPart(Finish("end_turn", 2))),
        said("user", "thanks"),
    ) == [
        {"role": "user", "content": [words("what is here?")]},
        {"role": "assistant", "content": [words("I look."), used("c1", path="."), used("c2")]},
        {
            "role": "user",
            "content": [
                answered("c1", "a.txt"),
                answered("c2", "no path", is_error=True),
                words("and quickly"),
            ],
        },
        {"role": "assistant", "content": [words("A file.")]},
        {"role": "user", "content": [words("thanks")]},
    ]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([], [GO_ON], id="nothing"),
        pytest.param([said("system", "be kind")], [GO_ON], id="only the system"),
        pytest.param(
            [said("assistant", "hi")],
            [
                {
                    "role": "user",
                    "content": [words("[The beginning of this conversation is missing.]")],
                },
                {"role": "assistant", "content": [words("hi")]},
                GO_ON,
            ],
            id="begins and ends with an answer",
        ),
        pytest.param(
            [said("user", "a"), said("user", "b")],
            [{"role": "user", "content": [words("a"), words("b")]}],
            id="two questions",
        ),
        pytest.param(
            [said("user", "hello"), said("assistant", "a"), said("assistant", "b")],
            [HELLO, {"role": "assistant", "content": [words("a"), words("b")]}, GO_ON],
            id="two answers",
        ),
        pytest.param(
            [said("user", "a"), said("assistant", " \n"), said("user", "", "  ", "b")],
            [{"role": "user", "content": [words("a"), words("b")]}],
            id="empty words",
        ),
        pytest.param(
            [said("user", "hello"), said("tool", result("never called")), said("tool")],
            [HELLO],
            id="a result without a call",
        ),
        pytest.param(
            [said("user", "hello"), *[said("assistant", call("c"))] * 2],
            [
                HELLO,
                {"role": "assistant", "content": [used("c")]},
                {"role": "user", "content": [answered("c", NO_RESULT, is_error=True)]},
                {"role": "assistant", "content": [used("c_2")]},
                {"role": "user", "content": [answered("c_2", NO_RESULT, is_error=True)]},
            ],
            id="calls without a result",
        ),
        pytest.param(
            [said("user", "hello"), said("assistant", call("c")), *[said("tool", result("c"))] * 2],
            [
                HELLO,
                {"role": "assistant", "content": [used("c")]},
                {"role": "user", "content": [answered("c")]},
            ],
            id="a result twice",
        ),
        pytest.param(
            [
                said("user", "hello"),
                said("assistant", call("c")),
                said("tool", result("c")),
                said("assistant", call("d")),
                said("user", "wait"),
                said("tool", result("d")),
            ],
            [
                HELLO,
                {"role": "assistant", "content": [used("c")]},
                {"role": "user", "content": [answered("c")]},
                {"role": "assistant", "content": [used("d")]},
                {"role": "user", "content": [answered("d"), words("wait")]},
            ],
            id="a result behind other words",
        ),
    ],
)
def test_a_history_of_any_shape_is_told_by_turns(
    messages: list[Message], expected: list[Json]
) -> None:
    assert told(*messages) == expected


def test_every_call_has_an_id_of_its_own_that_can_be_spelled() -> None:
    step = [said("assistant", call("a~"), call("a_"), call("ö:1"), call("")), said("tool")]
    for call_id in ("a~", "a_", "ö:1", ""):
        step[1].parts.append(result(call_id))
    ids = ["a_", "a__2", "__1", "call", "a__3", "a__4", "__1_2", "call_2"]
    assert told(said("user", "hello"), *step, *step) == [
        HELLO,
        {"role": "assistant", "content": [used(n) for n in ids[:4]]},
        {"role": "user", "content": [answered(n) for n in ids[:4]]},
        {"role": "assistant", "content": [used(n) for n in ids[4:]]},
        {"role": "user", "content": [answered(n) for n in ids[4:]]},
    ]


@pytest.mark.parametrize(
    ("name", "sent"), [("", "unknown"), ("a b.c", "a_b_c"), ("x" * 200, "x" * 128)]
)
def test_a_tool_that_nobody_has_is_named_as_far_as_it_can_be(name: str, sent: str) -> None:
    found = told(
        said("user", "hello"), said("assistant", call("c", name)), said("tool", result("c"))
    )
    assert found[1]["content"] == [used("c", sent)]


@pytest.mark.parametrize("broken", ["", "{", '{"a": 1', "[]", "null", "word", "{}{}", "[" * 99_999])
def test_arguments_that_are_no_object_are_an_empty_one(broken: str) -> None:
    step = said("assistant", call("c", arguments=broken)), said("tool", result("c"))
    assert told(said("user", "hello"), *step)[1]["content"] == [used("c")]


@pytest.mark.parametrize("is_error", [False, True])
def test_a_result_always_says_something(*, is_error: bool) -> None:
    step = said("assistant", call("c")), said("tool", result("c", " ", is_error=is_error))
    (block,) = told(said("user", "hello"), *step)[2]["content"]
    assert block["content"] == "[no output]"


# --- attachments


def test_attachments_and_commands_of_a_user_are_text_where_they_can_be() -> None:
    (message,) = told(
        said(
            "user",
            "look",
            BinaryPart(Binary("notes.txt", "text/plain", b"gr\xc3\xbc\xc3\x9fe \xff")),
            ShellCommandPart(ShellCommand("make", "it broke", 2)),
            BinaryPart(Binary("a.pdf", "application/pdf", b"%PDF")),
            BinaryPart(Binary("a.tiff", "image/tiff", b"II")),
            BinaryPart(Binary("none.png", "image/png", b"")),
        )
    )
    assert message["content"] == [
        words("look"),
        words('<file path="notes.txt">\ngrüße \ufffd\n</file>'),
        words(
            "I ran this command:\n<command>\nmake\n</command>\n"
            "<output>\nit broke\n</output>\n<exit_code>2</exit_code>"
        ),
        words("[The file a.pdf (application/pdf) was left out: it is no text.]"),
        words("[The image a.tiff (image/tiff) was left out: it is no JPEG, PNG, GIF or WebP.]"),
        words("[The image none.png (image/png) was left out: it is no JPEG, PNG, GIF or WebP.]"),
    ]


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG_TEXT},
}
IMAGES = said(
    "user",
    BinaryPart(Binary("a.png", "image/png", PNG)),
    ImageUrlPart(ImageUrl(f"data:image/png;base64,{PNG_TEXT}")),
    ImageUrlPart(ImageUrl("https://example.com/b.png", "low")),
    ImageUrlPart(ImageUrl("http://example.com/c.png")),
)


def test_images_are_shown_to_a_model_that_sees() -> None:
    assert told(IMAGES)[0]["content"] == [
        IMAGE,
        IMAGE,
        {"type": "image", "source": {"type": "url", "url": "https://example.com/b.png"}},
        words("[An image was left out: its address is not one of HTTPS.]"),
    ]


def test_images_are_named_to_a_model_that_does_not_see() -> None:
    unseen = words("[An image was left out: this model sees no images.]")
    assert told(IMAGES, info=BLIND)[0]["content"] == [
        words("[The image a.png was left out: this model sees no images.]"),
        *[unseen] * 3,
    ]


@pytest.mark.parametrize(
    ("info", "mime_type", "is_error", "content"),
    [
        (INFO, "image/png", False, [words("a plot"), IMAGE]),
        (INFO, "image/png", True, [words("a plot")]),
        (INFO, "application/pdf", False, [words("a plot")]),
        (
            BLIND,
            "image/png",
            False,
            [words("a plot"), words("[An image was left out: this model sees no images.]")],
        ),
    ],
)
def test_an_image_in_a_result_is_shown_where_it_may_be(
    info: ModelInfo, mime_type: str, content: list[Json], *, is_error: bool
) -> None:
    shown = ToolResult("c", "plot", "a plot", PNG_TEXT, mime_type, is_error=is_error)
    step = said("assistant", call("c")), said("tool", ToolResultPart(shown))
    (block,) = told(said("user", "hello"), *step, info=info)[2]["content"]
    assert block["content"] == content


# --- whatever the history, it is legal

ID = st.sampled_from(["a", "a~", "b", "ä", "call_1", ""])
MIME = st.sampled_from(["image/png", "image/svg+xml", "text/plain", "application/pdf", ""])
WORDS = st.text(st.sampled_from("ab \n"), max_size=3)
SIGNATURE = st.sampled_from(["", "sig", "\nredacted 0 0 0 x", "s\nthinking 1 1 1 t", "\nx"])
TEXTS = st.builds(TextPart, st.builds(Text, WORDS))
URLS = st.sampled_from(["https://x/a.png", "http://x", f"data:image/png;base64,{PNG_TEXT}", "x"])
SAID_BY_USER = st.one_of(
    TEXTS,
    st.builds(BinaryPart, st.builds(Binary, WORDS, MIME, st.sampled_from([b"", PNG]))),
    st.builds(ImageUrlPart, st.builds(ImageUrl, URLS)),
    st.builds(ShellCommandPart, st.builds(ShellCommand, WORDS, WORDS)),
)
CALLS = st.builds(
    ToolCallPart,
    st.builds(
        ToolCall,
        ID,
        st.sampled_from(["ls", "a b", ""]),
        st.sampled_from(["", "{}", '{"a":1}', "[1]", '{"a']),
    ),
)
SAID_BY_MODEL = TEXTS | CALLS | st.builds(ReasoningPart, st.builds(Reasoning, WORDS, SIGNATURE))
IMAGE_DATA = st.sampled_from(["", PNG_TEXT])
RESULTS = st.builds(
    ToolResultPart,
    st.builds(
        ToolResult, ID, content=WORDS, data=IMAGE_DATA, mime_type=MIME, is_error=st.booleans()
    ),
)


def once(parts: Sequence[Part]) -> list[Part]:
    """Calls of one answer have different ids, as the loop sees to it."""
    calls = {part.data.id: part for part in parts if isinstance(part, ToolCallPart)}
    return [p for p in parts if not isinstance(p, ToolCallPart)] + list(calls.values())


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    match draw(st.sampled_from(["user", "assistant", "tool", "system"])):
        case "user":
            return said("user", *draw(st.lists(SAID_BY_USER, max_size=3)))
        case "assistant":
            parts = once(draw(st.lists(SAID_BY_MODEL, max_size=5)))
            return said("assistant", *parts, model=draw(st.sampled_from([MODEL, "another"])))
        case "tool":
            return said("tool", *draw(st.lists(RESULTS, max_size=3)))
        case _:
            return said("system", draw(WORDS))


@contract("INV-82")
@given(messages=st.lists(any_message(), max_size=8), sees_images=st.booleans())
def test_no_history_is_refused(messages: list[Message], *, sees_images: bool) -> None:
    info = ModelInfo(id=MODEL, supports_attachments=sees_images)
    found = body(*messages, info=info, think=True, temperature=0.5)
    assert faults(found, sees_images=sees_images) == []


@contract("INV-82")
def test_thousands_of_calls_with_one_id_are_told_apart_and_each_has_its_own_result() -> None:
    times = 4000
    turns = [said("assistant", call("call_0")), said("tool", result("call_0"))] * times
    found = told(said("user", "go"), said("assistant", call("call_0_3")), *turns)
    blocks = [message["content"][0] for message in found[1:]]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    assert calls == results
    assert len(set(calls)) == times + 1

"""The messages sent to Anthropic, which must never violate its rules."""

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
from tests.model.anthropic_messages import (
    body,
    call,
    make_message,
    result,
    sent_messages,
    text_block,
    tool_result_block,
    tool_use_block,
)
from tests.model.anthropic_rules import faults
from tests.model.anthropic_shapes import INFO, MODEL
from tests.support import contract

PNG = b"\x89PNG"
PNG_TEXT = b64encode(PNG).decode()
BLIND = ModelInfo(id=MODEL, supports_attachments=False)
HELLO: Json = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
NO_RESULT = "[This call has no result.]"
GO_ON: Json = {"role": "user", "content": [{"type": "text", "text": "Go on."}]}


def test_a_conversation_with_calls_is_sent_as_alternating_turns() -> None:
    assert sent_messages(
        make_message("user", "what is here?"),
        make_message(
            "assistant",
            ReasoningPart(Reasoning("let me look")),
            "I look.",
            call("c1", arguments='{"path": "."}'),
            call("c2"),
            FinishPart(Finish("tool_use", 1)),
        ),
        make_message("tool", result("c1", "a.txt")),
        make_message("tool", result("c2", "no path", is_error=True)),
        make_message("user", "and quickly"),
        make_message("assistant", "A file.", FinishPart(Finish("end_turn", 2))),
        make_message("user", "thanks"),
    ) == [
        {"role": "user", "content": [text_block("what is here?")]},
        {
            "role": "assistant",
            "content": [
                text_block("I look."),
                tool_use_block("c1", path="."),
                tool_use_block("c2"),
            ],
        },
        {
            "role": "user",
            "content": [
                tool_result_block("c1", "a.txt"),
                tool_result_block("c2", "no path", is_error=True),
                text_block("and quickly"),
            ],
        },
        {"role": "assistant", "content": [text_block("A file.")]},
        {"role": "user", "content": [text_block("thanks")]},
    ]


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([], [GO_ON], id="nothing"),
        pytest.param([make_message("system", "be kind")], [GO_ON], id="only the system"),
        pytest.param(
            [make_message("assistant", "hi")],
            [
                {
                    "role": "user",
                    "content": [text_block("[The beginning of this conversation is missing.]")],
                },
                {"role": "assistant", "content": [text_block("hi")]},
                GO_ON,
            ],
            id="begins and ends with an answer",
        ),
        pytest.param(
            [make_message("user", "a"), make_message("user", "b")],
            [{"role": "user", "content": [text_block("a"), text_block("b")]}],
            id="two questions",
        ),
        pytest.param(
            [
                make_message("user", "hello"),
                make_message("assistant", "a"),
                make_message("assistant", "b"),
            ],
            [HELLO, {"role": "assistant", "content": [text_block("a"), text_block("b")]}, GO_ON],
            id="two answers",
        ),
        pytest.param(
            [
                make_message("user", "a"),
                make_message("assistant", " \n"),
                make_message("user", "", "  ", "b"),
            ],
            [{"role": "user", "content": [text_block("a"), text_block("b")]}],
            id="empty words",
        ),
        pytest.param(
            [
                make_message("user", "hello"),
                make_message("tool", result("never called")),
                make_message("tool"),
            ],
            [HELLO],
            id="a result without a call",
        ),
        pytest.param(
            [make_message("user", "hello"), *[make_message("assistant", call("c"))] * 2],
            [
                HELLO,
                {"role": "assistant", "content": [tool_use_block("c")]},
                {"role": "user", "content": [tool_result_block("c", NO_RESULT, is_error=True)]},
                {"role": "assistant", "content": [tool_use_block("c_2")]},
                {"role": "user", "content": [tool_result_block("c_2", NO_RESULT, is_error=True)]},
            ],
            id="calls without a result",
        ),
        pytest.param(
            [
                make_message("user", "hello"),
                make_message("assistant", call("c")),
                *[make_message("tool", result("c"))] * 2,
            ],
            [
                HELLO,
                {"role": "assistant", "content": [tool_use_block("c")]},
                {"role": "user", "content": [tool_result_block("c")]},
            ],
            id="a result twice",
        ),
        pytest.param(
            [
                make_message("user", "hello"),
                make_message("assistant", call("c")),
                make_message("tool", result("c")),
                make_message("assistant", call("d")),
                make_message("user", "wait"),
                make_message("tool", result("d")),
            ],
            [
                HELLO,
                {"role": "assistant", "content": [tool_use_block("c")]},
                {"role": "user", "content": [tool_result_block("c")]},
                {"role": "assistant", "content": [tool_use_block("d")]},
                {"role": "user", "content": [tool_result_block("d"), text_block("wait")]},
            ],
            id="a result behind other words",
        ),
    ],
)
def test_any_history_is_sent_as_alternating_turns(
    messages: list[Message], expected: list[Json]
) -> None:
    assert sent_messages(*messages) == expected


def test_every_call_has_a_unique_valid_id() -> None:
    step = [
        make_message("assistant", call("a~"), call("a_"), call("ö:1"), call("")),
        make_message("tool"),
    ]
    for call_id in ("a~", "a_", "ö:1", ""):
        step[1].parts.append(result(call_id))
    ids = ["a_", "a__2", "__1", "call", "a__3", "a__4", "__1_2", "call_2"]
    assert sent_messages(make_message("user", "hello"), *step, *step) == [
        HELLO,
        {"role": "assistant", "content": [tool_use_block(n) for n in ids[:4]]},
        {"role": "user", "content": [tool_result_block(n) for n in ids[:4]]},
        {"role": "assistant", "content": [tool_use_block(n) for n in ids[4:]]},
        {"role": "user", "content": [tool_result_block(n) for n in ids[4:]]},
    ]


@pytest.mark.parametrize(
    ("name", "sent"), [("", "unknown"), ("a b.c", "a_b_c"), ("x" * 200, "x" * 128)]
)
def test_an_invalid_tool_name_is_sanitized(name: str, sent: str) -> None:
    found = sent_messages(
        make_message("user", "hello"),
        make_message("assistant", call("c", name)),
        make_message("tool", result("c")),
    )
    assert found[1]["content"] == [tool_use_block("c", sent)]


@pytest.mark.parametrize("broken", ["", "{", '{"a": 1', "[]", "null", "word", "{}{}", "[" * 99_999])
def test_arguments_that_are_not_an_object_become_an_empty_object(broken: str) -> None:
    step = make_message("assistant", call("c", arguments=broken)), make_message("tool", result("c"))
    assert sent_messages(make_message("user", "hello"), *step)[1]["content"] == [
        tool_use_block("c")
    ]


@pytest.mark.parametrize("is_error", [False, True])
def test_an_empty_result_gets_a_placeholder(*, is_error: bool) -> None:
    step = (
        make_message("assistant", call("c")),
        make_message("tool", result("c", " ", is_error=is_error)),
    )
    (block,) = sent_messages(make_message("user", "hello"), *step)[2]["content"]
    assert block["content"] == "[no output]"


# --- attachments


def test_attachments_and_commands_are_sent_as_text_where_possible() -> None:
    (message,) = sent_messages(
        make_message(
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
        text_block("look"),
        text_block('<file path="notes.txt">\ngrüße \ufffd\n</file>'),
        text_block(
            "I ran this command:\n<command>\nmake\n</command>\n"
            "<output>\nit broke\n</output>\n<exit_code>2</exit_code>"
        ),
        text_block("[The file a.pdf (application/pdf) was left out: it is not text.]"),
        text_block(
            "[The image a.tiff (image/tiff) was left out: it is not JPEG, PNG, GIF or WebP.]"
        ),
        text_block(
            "[The image none.png (image/png) was left out: it is not JPEG, PNG, GIF or WebP.]"
        ),
    ]


IMAGE = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": PNG_TEXT},
}
IMAGES = make_message(
    "user",
    BinaryPart(Binary("a.png", "image/png", PNG)),
    ImageUrlPart(ImageUrl(f"data:image/png;base64,{PNG_TEXT}")),
    ImageUrlPart(ImageUrl("https://example.com/b.png", "low")),
    ImageUrlPart(ImageUrl("http://example.com/c.png")),
)


def test_images_are_sent_to_a_model_that_sees_images() -> None:
    assert sent_messages(IMAGES)[0]["content"] == [
        IMAGE,
        IMAGE,
        {"type": "image", "source": {"type": "url", "url": "https://example.com/b.png"}},
        text_block("[An image was left out: its address is not HTTPS.]"),
    ]


def test_images_are_replaced_by_a_note_for_a_model_that_sees_none() -> None:
    unseen = text_block("[An image was left out: this model sees no images.]")
    assert sent_messages(IMAGES, info=BLIND)[0]["content"] == [
        text_block("[The image a.png was left out: this model sees no images.]"),
        *[unseen] * 3,
    ]


@pytest.mark.parametrize(
    ("info", "mime_type", "is_error", "content"),
    [
        (INFO, "image/png", False, [text_block("a plot"), IMAGE]),
        (INFO, "image/png", True, [text_block("a plot")]),
        (INFO, "application/pdf", False, [text_block("a plot")]),
        (
            BLIND,
            "image/png",
            False,
            [
                text_block("a plot"),
                text_block("[An image was left out: this model sees no images.]"),
            ],
        ),
    ],
)
def test_an_image_in_a_result_is_sent_only_where_it_is_allowed(
    info: ModelInfo, mime_type: str, content: list[Json], *, is_error: bool
) -> None:
    shown = ToolResult("c", "plot", "a plot", PNG_TEXT, mime_type, is_error=is_error)
    step = make_message("assistant", call("c")), make_message("tool", ToolResultPart(shown))
    (block,) = sent_messages(make_message("user", "hello"), *step, info=info)[2]["content"]
    assert block["content"] == content


# --- any history gives a valid request

ID = st.sampled_from(["a", "a~", "b", "ä", "call_1", ""])
MIME = st.sampled_from(["image/png", "image/svg+xml", "text/plain", "application/pdf", ""])
SHORT_TEXTS = st.text(st.sampled_from("ab \n"), max_size=3)
SIGNATURE = st.sampled_from(["", "sig", "\nredacted 0 0 0 x", "s\nthinking 1 1 1 t", "\nx"])
TEXTS = st.builds(TextPart, st.builds(Text, SHORT_TEXTS))
URLS = st.sampled_from(["https://x/a.png", "http://x", f"data:image/png;base64,{PNG_TEXT}", "x"])
USER_PARTS = st.one_of(
    TEXTS,
    st.builds(BinaryPart, st.builds(Binary, SHORT_TEXTS, MIME, st.sampled_from([b"", PNG]))),
    st.builds(ImageUrlPart, st.builds(ImageUrl, URLS)),
    st.builds(ShellCommandPart, st.builds(ShellCommand, SHORT_TEXTS, SHORT_TEXTS)),
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
MODEL_PARTS = TEXTS | CALLS | st.builds(ReasoningPart, st.builds(Reasoning, SHORT_TEXTS, SIGNATURE))
IMAGE_DATA = st.sampled_from(["", PNG_TEXT])
RESULTS = st.builds(
    ToolResultPart,
    st.builds(
        ToolResult, ID, content=SHORT_TEXTS, data=IMAGE_DATA, mime_type=MIME, is_error=st.booleans()
    ),
)


def without_duplicate_calls(parts: Sequence[Part]) -> list[Part]:
    """Keep one call per id: the run loop gives the calls of one answer different ids."""
    calls = {part.data.id: part for part in parts if isinstance(part, ToolCallPart)}
    return [p for p in parts if not isinstance(p, ToolCallPart)] + list(calls.values())


@st.composite
def any_message(draw: st.DrawFn) -> Message:
    match draw(st.sampled_from(["user", "assistant", "tool", "system"])):
        case "user":
            return make_message("user", *draw(st.lists(USER_PARTS, max_size=3)))
        case "assistant":
            parts = without_duplicate_calls(draw(st.lists(MODEL_PARTS, max_size=5)))
            return make_message(
                "assistant", *parts, model=draw(st.sampled_from([MODEL, "another"]))
            )
        case "tool":
            return make_message("tool", *draw(st.lists(RESULTS, max_size=3)))
        case _:
            return make_message("system", draw(SHORT_TEXTS))


@contract("INV-82")
@given(messages=st.lists(any_message(), max_size=8), sees_images=st.booleans())
def test_no_history_violates_the_rules_of_the_provider(
    messages: list[Message], *, sees_images: bool
) -> None:
    info = ModelInfo(id=MODEL, supports_attachments=sees_images)
    found = body(*messages, info=info, think=True, temperature=0.5)
    assert faults(found, sees_images=sees_images) == []


@contract("INV-82")
def test_thousands_of_calls_with_one_id_get_unique_ids_and_their_results() -> None:
    times = 4000
    turns = [
        make_message("assistant", call("call_0")),
        make_message("tool", result("call_0")),
    ] * times
    found = sent_messages(
        make_message("user", "go"), make_message("assistant", call("call_0_3")), *turns
    )
    blocks = [message["content"][0] for message in found[1:]]
    calls = [block["id"] for block in blocks if block["type"] == "tool_use"]
    results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
    assert calls == results
    assert len(set(calls)) == times + 1

"""Anthropic streams parsed into model events."""

import json
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.model.anthropic.answer import AnthropicAnswer
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenUsage,
)
from culm.model.failures import ProviderPeer
from culm.wire.codec import Json
from tests.model import provider
from tests.model.anthropic_shapes import (
    END,
    STOP,
    answer_to,
    begin,
    call,
    delta,
    end,
    event,
    failure_of,
    finish,
    redacted,
    start,
    text,
    thinking,
)
from tests.model.provider import stream
from tests.support import contract

PEER = ProviderPeer("acme", "api.acme.example", "model-1")
NOTHING = TokenUsage()
END_TURN = AnswerDone("end_turn", NOTHING)


def read(chunks: Iterable[bytes]) -> list[ModelEvent | str]:
    return provider.read(AnthropicAnswer(PEER), chunks)


def read_merged(sent: bytes) -> list[ModelEvent | str]:
    return merged(read(iter([sent])))


def merged(events: list[ModelEvent | str]) -> list[ModelEvent | str]:
    """Return the same events with adjacent deltas of one kind joined."""
    found: list[ModelEvent | str] = []
    for now in events:
        match (found[-1] if found else None), now:
            case TextDelta(text=a), TextDelta(text=b):
                found[-1] = TextDelta(a + b)
            case ReasoningDelta(text=a, signature=s), ReasoningDelta(text=b, signature=t):
                found[-1] = ReasoningDelta(a + b, s + t)
            case CallDelta(key=k, text=a), CallDelta(key=j, text=b) if k == j:
                found[-1] = CallDelta(k, a + b)
            case _:
                found.append(now)
    return found


RICH = (
    start(input_tokens=9, cache_read_input_tokens=70, cache_creation_input_tokens=5)
    + event("ping")
    + thinking(0, "Grüße", " 🦆", signature="c2ln")
    + text(1, "I ", "lök.")
    + call(2, "toolu_1", "view", '{"path', '": "a"}')
    + call(3, "toolu_2", "grep", '{"pattern": "é"}')
    + finish("tool_use", output_tokens=42)
    + STOP
)
RICH_EVENTS = [
    ReasoningDelta("Grüße 🦆", "c2ln"),
    TextDelta("I lök."),
    CallStarted(0, "toolu_1", "view"),
    CallDelta(0, '{"path": "a"}'),
    CallStarted(1, "toolu_2", "grep"),
    CallDelta(1, '{"pattern": "é"}'),
    AnswerDone("tool_use", TokenUsage(9, 42, 70, 5)),
]


async def test_an_answer_with_all_kinds_of_content_is_read_in_order() -> None:
    assert merged([*await answer_to(stream(RICH))]) == RICH_EVENTS


@pytest.mark.parametrize(
    "sent",
    [
        text(0, "a").replace(b"\n", b"\r\n") + END,
        text(0, "a").replace(b"data: ", b"data:") + END,
        text(0, "a").replace(b"\n\n", b"\n") + END,
        b": hello\n\nid: 7\nretry: 10\ndata:\n\ndata: \n\nunknown\n\n" + text(0, "a") + END,
        begin(0, "text", text="a") + end(0) + END,
        delta(0, "text_delta", text="a") + END,
        text(0, "", "a") + delta(0, "text_delta") + delta(0, "text_delta", text=None) + END,
        event("ping") + text(0, "a") + event("culm_unknown", index=7, message="hello") + END,
        text(0, "a") + event("culm_unknown", delta={"type": "x", "text": "y"}) + END,
        text(0, "a") + delta(0, "citations_delta", citation={"title": "t"}) + END,
        text(0, "a") + delta(0, "mystery_delta", text="not ours") + END,
        begin(1, "server_tool_use", id="s", name="web_search", input={"q": 1})
        + delta(1, "input_json_delta", partial_json='{"q": 2}')
        + end(1)
        + begin(2, "web_search_tool_result", content=[{"type": "x"}])
        + end(2)
        + text(0, "a")
        + END,
        text(0, "a") + delta(9, "input_json_delta", partial_json="{}") + END,
        text(0, "a") + END + text(1, "after the end"),
        text(0, "a") + finish() + b"data: [DONE]\n\n",
        text(0, "a") + finish(),
        text(0, "a") + finish().rstrip(b"\n"),
        text(0, "a") + finish() + STOP.rstrip(b"\n"),
        text(0, "a") + finish() + b"event: message_stop\ndata: {",
        text(0, "a") + finish(None) + finish("stop_sequence") + STOP,
    ],
)
def test_unknown_and_unusual_events_are_ignored(sent: bytes) -> None:
    assert read_merged(sent) == [TextDelta("a"), END_TURN]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [(rb"a\ud83d", "a\ufffd"), (rb"\ud83d\ude00", "😀"), (b"a\xffb", "a\ufffdb")],
)
def test_invalid_characters_are_replaced(raw: bytes, expected: str) -> None:
    line = delta(0, "text_delta", text="HERE").replace(b"HERE", raw)
    assert read_merged(line + END) == [TextDelta(expected), END_TURN]


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "end_turn"),
        ("stop_sequence", "end_turn"),
        ("pause_turn", "end_turn"),
        ("max_tokens", "max_tokens"),
        ("model_context_window_exceeded", "max_tokens"),
        ("tool_use", "tool_use"),
        ("refusal", "content_filter"),
        ("something new", "unknown"),
    ],
)
def test_every_stop_reason_is_translated(reason: str, expected: StopReason) -> None:
    assert read_merged(finish(reason) + STOP) == [AnswerDone(expected, NOTHING)]


def test_an_answer_that_ends_with_calls_has_the_reason_tool_use() -> None:
    assert read_merged(call(0, "a", "ls") + END)[-1] == AnswerDone("tool_use", NOTHING)
    assert read_merged(call(0, "a", "ls") + finish("max_tokens"))[-1] == AnswerDone(
        "max_tokens", NOTHING
    )
    assert read_merged(call(0, "a", "ls") + STOP)[-1] == AnswerDone("tool_use")


# --- usage


@pytest.mark.parametrize(
    ("sent", "usage"),
    [
        (start(input_tokens=3, output_tokens=1) + finish(output_tokens=8), TokenUsage(3, 8)),
        (start(input_tokens=0) + finish(input_tokens=3, output_tokens=8), TokenUsage(3, 8)),
        (start(input_tokens=3) + finish(input_tokens=0, output_tokens=8), TokenUsage(3, 8)),
        (start(cache_read_input_tokens=4, cache_creation_input_tokens=5), TokenUsage(0, 0, 4, 5)),
        (finish("end_turn", output_tokens=2) + finish(output_tokens=6), TokenUsage(0, 6)),
        (start(input_tokens=-3), TokenUsage()),
        (event("message_start", message={"usage": None}), None),
        (event("message_start", message=None), None),
    ],
)
def test_usage_is_counted_over_the_whole_answer(sent: bytes, usage: TokenUsage | None) -> None:
    stopped = event("message_delta", delta={"stop_reason": "end_turn"})
    assert read_merged(sent + stopped + STOP) == [AnswerDone("end_turn", usage)]


# --- calls


def test_arguments_in_the_start_event_are_used_only_without_deltas() -> None:
    whole = begin(0, "tool_use", id="a", name="ls", input={"path": "."})
    pieces = delta(0, "input_json_delta", partial_json='{"path":"x"}')
    began = CallStarted(0, "a", "ls")
    done = AnswerDone("tool_use", NOTHING)
    assert read_merged(whole + end(0) + END) == [began, CallDelta(0, '{"path":"."}'), done]
    assert read_merged(whole + END) == [began, CallDelta(0, '{"path":"."}'), done]
    assert read_merged(whole + pieces + end(0) + END) == [began, CallDelta(0, '{"path":"x"}'), done]


def test_a_call_without_arguments_is_read() -> None:
    assert read_merged(call(0, "a", "ls", "") + END) == [
        CallStarted(0, "a", "ls"),
        AnswerDone("tool_use", NOTHING),
    ]
    assert read_merged(begin(0, "tool_use") + END) == [
        CallStarted(0, "", ""),
        AnswerDone("tool_use", NOTHING),
    ]


def test_interleaved_calls_are_separated_by_their_index() -> None:
    sent = (
        begin(1, "tool_use", id="a", name="f", input={})
        + begin(2, "tool_use", id="b", name="g", input={})
        + delta(2, "input_json_delta", partial_json="{")
        + delta(1, "input_json_delta", partial_json="{}")
        + delta(2, "input_json_delta", partial_json="}")
    )
    assert read_merged(sent + END) == [
        CallStarted(0, "a", "f"),
        CallStarted(1, "b", "g"),
        CallDelta(1, "{"),
        CallDelta(0, "{}"),
        CallDelta(1, "}"),
        AnswerDone("tool_use", NOTHING),
    ]


def test_a_second_call_at_the_same_index_is_a_new_call() -> None:
    whole = begin(0, "tool_use", id="a", name="f", input={"x": 1})
    assert read_merged(whole + whole + END) == [
        CallStarted(0, "a", "f"),
        CallDelta(0, '{"x":1}'),
        CallStarted(1, "a", "f"),
        CallDelta(1, '{"x":1}'),
        AnswerDone("tool_use", NOTHING),
    ]


# --- failures


@pytest.mark.parametrize(
    "line",
    [
        b"data: {\n",
        b"data: [1]\n",
        b"data: hello\n",
        b'data: {"type":"content_block_delta","delta":{"type":"text_delta","text":5}}\n',
        b'data: {"type":"message_stop"} {}\n',
        b'data: {"x":' + b"[" * 100_000 + b"\n",
    ],
)
async def test_an_invalid_line_is_a_permanent_failure(line: bytes) -> None:
    failure = await failure_of(stream(text(0, "a") + line + END))
    assert failure.title == "Unreadable answer"
    assert "acme sent a line that is not part of an answer" in failure.message
    assert len(failure.message) < 2200
    assert not failure.transient


REPORTED = "The provider reported an error"


@pytest.mark.parametrize(
    ("fields", "title", "message", "transient"),
    [
        ({"error": {"type": "overloaded_error", "message": "busy"}}, REPORTED, "busy", True),
        ({"error": {"type": "api_error", "message": "oops"}}, REPORTED, "oops", True),
        ({"error": {"type": "timeout_error", "message": "late"}}, REPORTED, "late", True),
        (
            {"error": {"type": "rate_limit_error", "message": "slow down"}},
            "Too many requests",
            "slow down",
            True,
        ),
        ({"error": {"type": "invalid_request_error", "message": "bad"}}, REPORTED, "bad", False),
        (
            {"error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}},
            "The conversation is too long",
            "prompt is too long",
            False,
        ),
        ({"error": "just words"}, REPORTED, "just words", False),
        ({"message": "no object"}, REPORTED, "no object", False),
        ({}, REPORTED, "no details", False),
    ],
)
async def test_an_error_inside_the_stream_is_a_failure(
    fields: dict[str, Json], title: str, message: str, *, transient: bool
) -> None:
    failure = await failure_of(stream(text(0, "a") + event("error", **fields)))
    assert (failure.title, failure.transient) == (title, transient)
    assert message in failure.message


@pytest.mark.parametrize("sent", [b"\n", start(), text(0, "a"), text(0, "a") + finish()[:-9]])
async def test_a_stream_that_ends_without_a_stop_reason_was_cut(sent: bytes) -> None:
    failure = await failure_of(stream(sent))
    assert failure.title == "The stream was cut"
    assert failure.transient


# --- chunk boundaries


MESSY = (
    b": hi\r\n\r\n"
    + redacted(0, "ZW5j")
    + RICH.removesuffix(finish("tool_use", output_tokens=42) + STOP)
    + thinking(4, "more", signature="dHdv")
    + delta(5, "text_delta", text="HERE").replace(b"HERE", b"\\ud83d")
    + finish("tool_use", output_tokens=42)
)
SAMPLES = [RICH, RICH.replace(b"\n", b"\r\n"), MESSY, MESSY.replace(b"\n", b"\r\n")]


def pieces(sent: bytes, places: list[int]) -> Iterator[bytes]:
    begun = 0
    for place in [*sorted(places), len(sent)]:
        yield sent[begun:place]
        begun = place


@contract("MODEL-1")
@pytest.mark.parametrize("sent", SAMPLES, ids=["rich", "rich crlf", "messy", "messy crlf"])
def test_a_split_at_any_byte_gives_the_same_events(sent: bytes) -> None:
    whole = read_merged(sent)
    assert isinstance(whole[-1], AnswerDone)
    for place in range(len(sent) + 1):
        assert merged(read(pieces(sent, [place]))) == whole, place
    assert merged(read(sent[n : n + 1] for n in range(len(sent)))) == whole


@contract("MODEL-1")
@pytest.mark.parametrize("ending", [b"", STOP, b"data: {\n" + STOP, b"data: {"])
@given(places=st.lists(st.integers(0, len(MESSY)), max_size=60))
def test_any_splits_of_the_bytes_give_the_same_events(ending: bytes, places: list[int]) -> None:
    sent = MESSY + ending
    assert merged(read(pieces(sent, places))) == read_merged(sent)


@pytest.mark.parametrize("sent", SAMPLES, ids=["rich", "rich crlf", "messy", "messy crlf"])
def test_a_stream_cut_anywhere_gives_a_prefix_of_its_events(sent: bytes) -> None:
    whole = read(iter([sent]))
    for length in range(len(sent)):
        *events, last = read(iter([sent[:length]]))
        assert events == whole[: len(events)]
        assert last == "The stream was cut" or isinstance(last, AnswerDone)


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_without_a_crash(sent: bytes) -> None:
    assert read(iter([b"data:" + sent]))


NAMES = [
    "type",
    "index",
    "delta",
    "content_block",
    "message",
    "usage",
    "error",
    "text",
    "thinking",
    "signature",
    "partial_json",
    "stop_reason",
    "data",
    "id",
    "name",
    "input",
    "input_tokens",
    "output_tokens",
]
KINDS = [
    "message_start",
    "content_block_start",
    "content_block_delta",
    "content_block_stop",
    "message_delta",
    "message_stop",
    "error",
    "ping",
    "text",
    "thinking",
    "tool_use",
    "redacted_thinking",
    "text_delta",
    "thinking_delta",
    "signature_delta",
    "input_json_delta",
]


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.text() | st.sampled_from(KINDS),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner)
            ),
        ),
        max_size=4,
    )
)
def test_any_json_is_parsed_without_a_crash(values: list[Json]) -> None:
    assert read(b"data: " + json.dumps(value).encode() + b"\n" for value in values)

"""OpenAI-compatible streams parsed into model events."""

import json
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import ModelFailed
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ReasoningDelta,
    StopReason,
    TextDelta,
    TokenUsage,
    joined,
)
from culm.model.failures import ProviderPeer
from culm.model.http import LineSplitter
from culm.model.openai.answer import (
    DETAILS_CHARS_MAX,
    HELD_CHARS_MAX,
    NAMELESS_MAX,
    OpenAiAnswer,
)
from culm.model.openai.vendor_quirks import VendorQuirks
from culm.model.reasoning_roundtrip import ReasoningLine, encode_line
from culm.wire.codec import Json
from tests.model import provider
from tests.model.provider import STOP, answer_to, data, delta, failure_of, stream

END_TURN = AnswerDone("end_turn")


def call(**fields: Json) -> bytes:
    """Encode a delta with one piece of a call."""
    function = {k: fields.pop(k) for k in ("name", "arguments") if k in fields}
    return delta(tool_calls=[{**fields, "function": function}])


async def test_text_and_reasoning_become_deltas_in_order() -> None:
    sent = (
        delta(role="assistant", content="")
        + delta(reasoning_content="hm")
        + delta(reasoning=" so", content=None)
        + delta(content="Grüße ")
        + delta(content="🦆")
        + STOP
    )
    assert list(joined(await answer_to(stream(sent)))) == [
        ReasoningDelta("hm"),
        ReasoningDelta(" so"),
        TextDelta("Grüße 🦆"),
        END_TURN,
    ]


async def test_reasoning_under_both_names_is_read_once() -> None:
    sent = delta(reasoning_content="hm", reasoning="hm") + STOP
    assert await answer_to(stream(sent)) == [ReasoningDelta("hm"), END_TURN]


@pytest.mark.parametrize(
    "sent",
    [
        delta(content="a").replace(b"\n", b"\r\n") + STOP,
        delta(content="a").replace(b"data: ", b"data:") + STOP,
        delta(content="a").replace(b"\n\n", b"\n") + STOP,
        b": hello\n\nevent: message\nid: 7\nretry: 10\n" + delta(content="a") + STOP,
        b"data:\n\ndata: \n\nunknown\n\n" + delta(content="a") + STOP,
        delta(content="a", surprise={"x": [1]}) + data({"object": "ping"}) + STOP,
        delta(content="a") + data({"choices": None, "usage": None, "error": None}) + STOP,
        delta(content="a") + data({"choices": [], "usage": None}) + STOP,
        delta(content="a") + data({"choices": [{"delta": None}]}) + STOP,
        delta(content="a") + data({"choices": [{}]}) + STOP,
        delta("", content="a") + STOP,
        delta(content="a", tool_calls=None) + delta(tool_calls=[]) + STOP,
        delta(content="a") + STOP + delta(content="after the end"),
        delta("stop", content="a"),
        delta("stop", content="a").rstrip(b"\n"),
        delta(content="a") + delta("stop") + b"data: [DONE]",
        delta(content="a") + delta("stop") + b'data: {"choi',
    ],
)
async def test_unusual_streams_are_read(sent: bytes) -> None:
    assert await answer_to(stream(sent)) == [TextDelta("a"), END_TURN]


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (rb"a\ud83d", "a\ufffd"),
        (rb"\ude00b", "\ufffdb"),
        (rb"\ud83dA", "\ufffdA"),
        (rb"\ud83d\ude00", "😀"),
        (b"a\xffb", "a\ufffdb"),
        (b"null", "null"),
        (rb"\u0000", "\0"),
    ],
)
async def test_invalid_characters_are_replaced(raw: bytes, text: str) -> None:
    sent = b'data: {"choices":[{"delta":{"content":"' + raw + b'"}}]}\n\n' + STOP
    assert await answer_to(stream(sent)) == [TextDelta(text), END_TURN]


async def test_parallel_calls_are_separated_by_their_index() -> None:
    sent = (
        call(index=0, id="a", name="view", arguments="")
        + call(index=1, id="b", name="grep", arguments='{"p')
        + call(index=0, arguments='{"x":')
        + call(index=1, id="", name="", arguments='":1}')
        + call(index=0, id=None, name=None, arguments="2}")
        + delta("tool_calls")
    )
    assert await answer_to(stream(sent)) == [
        CallStarted(0, "a", "view"),
        CallStarted(1, "b", "grep"),
        CallDelta(1, '{"p'),
        CallDelta(0, '{"x":'),
        CallDelta(1, '":1}'),
        CallDelta(0, "2}"),
        AnswerDone("tool_use"),
    ]


TWO_CALLS = [
    CallStarted(0, "a", "view"),
    CallDelta(0, "{}"),
    CallStarted(1, "b", "view"),
    CallDelta(1, "[]"),
    AnswerDone("tool_use"),
]
TWO_CALLS_WITHOUT_ID = [
    CallStarted(0, "", "view"),
    CallDelta(0, "{}"),
    CallStarted(1, "", "view"),
    CallDelta(1, "[]"),
    AnswerDone("tool_use"),
]


@pytest.mark.parametrize(
    ("pieces", "events"),
    [
        pytest.param(
            [
                call(id="a", name="view"),
                call(arguments="{}"),
                call(id="b", name="view"),
                call(arguments="[]"),
            ],
            TWO_CALLS,
            id="no index",
        ),
        pytest.param(
            [
                call(index=0, id="a", name="view", arguments="{}"),
                call(index=0, id="b", name="view", arguments="[]"),
            ],
            TWO_CALLS,
            id="a new id at the same index",
        ),
        pytest.param(
            [
                call(index=0, id="a", name="view"),
                call(index=0, id="a", name="view", arguments="{}"),
                call(index=1, id="b", name="view"),
                call(index=1, id="b", name="view", arguments="[]"),
            ],
            TWO_CALLS,
            id="id and name in every piece",
        ),
        pytest.param(
            [
                call(index=0, id="a"),
                call(index=0, arguments="{"),
                call(index=0, name="view", arguments="}"),
                call(index=1, name="view", id="b", arguments="[]"),
            ],
            TWO_CALLS,
            id="the name comes late",
        ),
        pytest.param(
            [
                call(index=0, id="", name="view", arguments="{}"),
                call(index=0, id="", name="view", arguments="[]"),
            ],
            TWO_CALLS_WITHOUT_ID,
            id="whole calls, all at index 0, without ids",
        ),
        pytest.param(
            [call(name="view", arguments="{}"), call(name="view"), call(arguments="[]")],
            TWO_CALLS_WITHOUT_ID,
            id="neither index nor id",
        ),
        pytest.param(
            [call(index=0, id="a", arguments="{}"), delta(tool_calls=[{"index": 0}])],
            [CallStarted(0, "a", ""), CallDelta(0, "{}"), AnswerDone("tool_use")],
            id="the name never comes",
        ),
    ],
)
async def test_calls_are_assembled_from_all_known_variants(
    pieces: list[bytes], events: list[ModelEvent]
) -> None:
    assert await answer_to(stream(b"".join(pieces) + STOP)) == events


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        ("stop", "end_turn"),
        ("length", "max_tokens"),
        ("tool_calls", "tool_use"),
        ("function_call", "tool_use"),
        ("content_filter", "content_filter"),
        ("who_knows", "unknown"),
    ],
)
async def test_every_finish_reason_is_translated(finish: str, reason: StopReason) -> None:
    assert await answer_to(stream(delta(finish))) == [AnswerDone(reason)]


@pytest.mark.parametrize(
    ("finish", "reason"), [("stop", "tool_use"), ("length", "max_tokens"), (None, "tool_use")]
)
async def test_an_answer_with_calls_has_the_reason_tool_use_despite_stop(
    finish: str | None, reason: StopReason
) -> None:
    sent = call(index=0, id="a", name="f") + delta(finish) + b"data: [DONE]\n\n"
    assert (await answer_to(stream(sent)))[-1] == AnswerDone(reason)


async def test_a_stream_that_ends_with_done_needs_no_finish_reason() -> None:
    sent = delta(content="a") + b"data: [DONE]\n\n"
    assert await answer_to(stream(sent)) == [TextDelta("a"), AnswerDone("unknown")]


@pytest.mark.parametrize(
    ("reported", "usage"),
    [
        ({"prompt_tokens": 10, "completion_tokens": 3}, TokenUsage(10, 3)),
        (
            {"prompt_tokens": 10, "prompt_tokens_details": {"cached_tokens": 4}, "cost": 0.25},
            TokenUsage(6, 0, 4, cost=0.25),
        ),
        (
            {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}},
            TokenUsage(0, 0, 4),
        ),
        (
            {"prompt_tokens": None, "completion_tokens": 3.0, "prompt_tokens_details": None},
            TokenUsage(0, 3),
        ),
    ],
)
async def test_usage_is_reported_with_the_end(reported: Json, usage: TokenUsage) -> None:
    after = delta("stop") + data({"choices": [], "usage": reported}) + b"data: [DONE]\n\n"
    assert await answer_to(stream(after)) == [AnswerDone("end_turn", usage)]
    within = data({"choices": [{"finish_reason": "stop"}], "usage": reported})
    assert await answer_to(stream(within)) == [AnswerDone("end_turn", usage)]


@pytest.mark.parametrize(
    "line",
    [
        b"data: {\n",
        b"data: [1]\n",
        b"data: hello\n",
        b'data: {"choices":[{"delta":{"content":5}}]}\n',
        b'data: {"choices":[]} {"choices":[]}\n',
        b'data: {"x":' + b"[" * 100_000 + b"\n",
    ],
)
async def test_an_invalid_line_is_a_permanent_failure(line: bytes) -> None:
    failure = await failure_of(stream(delta(content="a") + line + STOP))
    assert failure.title == "Unreadable answer"
    assert "acme sent a line that is not part of an answer" in failure.message
    assert len(failure.message) < 2200
    assert not failure.transient


@pytest.mark.parametrize(
    ("error", "title", "message", "transient"),
    [
        (
            {"message": "Overloaded", "type": "server_error", "code": None},
            "The provider reported an error",
            "acme broke off its answer: Overloaded",
            True,
        ),
        (
            {"message": "bad tool", "type": "invalid_request_error"},
            "The provider reported an error",
            "acme broke off its answer: bad tool",
            False,
        ),
        ("just words", "The provider reported an error", "just words", False),
        ({"code": 429, "message": "slow down"}, "Too many requests", "slow down", True),
        ({"code": "503", "message": "later"}, "The provider has a problem", "later", True),
        ({"code": 401, "message": "no"}, "Authentication problem", "no", False),
        ({"what": "ever"}, "The provider reported an error", '{"what":"ever"}', False),
    ],
)
async def test_an_error_inside_the_stream_is_a_failure(
    error: Json, title: str, message: str, *, transient: bool
) -> None:
    failure = await failure_of(stream(delta(content="a") + data({"error": error})))
    assert failure.title == title
    assert message in failure.message
    assert failure.transient == transient


@pytest.mark.parametrize("sent", [b"\n", delta(content="a"), delta(content="a")[:-9]])
async def test_a_stream_that_ends_without_a_finish_reason_was_cut(sent: bytes) -> None:
    failure = await failure_of(stream(sent))
    assert failure.title == "The stream was cut"
    assert failure.transient


# --- chunk boundaries

PEER = ProviderPeer("acme", "api.acme.example", "model-1")
SAMPLE = (
    b": hi\r\n\r\n"
    + delta(reasoning="é")
    + delta(content="Grüße 🦆").replace(b"\n", b"\r\n")
    + 'data:{"choices":[{"delta":{"content":"ünïcödé 🦆"}}]}\n\n'.encode()
    + b'data: {"choices":[{"delta":{"content":"\\ud83d"}}]}\n\n'
    + call(index=0, id="a", name="f", arguments='{"k": "')
    + call(index=0, arguments='v"}')
    + delta("tool_calls")
    + data({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
)


def read(chunks: Iterable[bytes]) -> list[ModelEvent | str]:
    return provider.read(OpenAiAnswer(PEER), chunks)


def pieces(sent: bytes, places: list[int]) -> Iterator[bytes]:
    start = 0
    for place in [*sorted(places), len(sent)]:
        yield sent[start:place]
        start = place


@pytest.mark.parametrize("ending", [b"", b"data: [DONE]\n\n", b"data: {\n" + STOP, b"data: {"])
@given(places=st.lists(st.integers(0, len(SAMPLE)), max_size=60))
def test_any_split_of_the_bytes_gives_the_same_events(ending: bytes, places: list[int]) -> None:
    sent = SAMPLE + ending
    assert read(pieces(sent, places)) == read(iter([sent]))


@given(end=st.integers(0, len(SAMPLE)))
def test_a_stream_cut_anywhere_gives_a_prefix_of_its_events(end: int) -> None:
    *events, last = read(iter([SAMPLE[:end]]))
    whole = read(iter([SAMPLE]))
    assert events == whole[: len(events)]
    assert last == "The stream was cut" or isinstance(last, AnswerDone)


def test_an_endless_document_is_refused_without_buffering_it() -> None:
    page = [b"<html>\n", *[b"x" * 500_000 + b"\n"] * 40]
    assert read(iter(page)) == ["Unreadable answer"]


@pytest.mark.parametrize(
    "sent",
    [
        b'data: {"object":"error","message":"\\ud83d","n":1' + b"0" * 400 + b"}\n",
        b'data: {"error":{"x":"\\ud83d","n":1' + b"0" * 400 + b"}}\n",
        b"error: not even JSON\n",
    ],
)
def test_a_malformed_error_is_a_failure(sent: bytes) -> None:
    assert len(read(iter([sent]))) == 1


@given(st.binary(max_size=300))
def test_any_bytes_are_parsed_without_a_crash(sent: bytes) -> None:
    assert read(iter([b"data:" + sent]))
    assert read(iter([sent]))


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "choices",
                        "delta",
                        "content",
                        "tool_calls",
                        "function",
                        "index",
                        "id",
                        "usage",
                        "error",
                        "finish_reason",
                        "name",
                        "arguments",
                        "code",
                        "message",
                        "type",
                        "object",
                        "message",
                        "reasoning_details",
                        "extra_content",
                    ]
                ),
                inner,
            )
        ),
    )
)
def test_any_json_is_parsed_without_a_crash(value: Json) -> None:
    assert read(iter([b"data: " + json.dumps(value).encode() + b"\n"]))


# --- buffered parts


def detail(**fields: Json) -> bytes:
    return delta(reasoning_details=[fields])


def read_with_details(sent: bytes) -> list[ModelEvent | str]:
    """Like `read`, for a provider that wants its reasoning details back."""
    lines, parser = LineSplitter(), OpenAiAnswer(PEER, VendorQuirks(returns_details=True))
    try:
        return [*parser.on_lines(lines.feed(sent)), *parser.on_end(lines.rest())]
    except ModelFailed as exc:
        return [exc.title]


def test_reasoning_details_in_many_pieces_are_joined() -> None:
    pieces = 50_000
    sent = detail(type="reasoning.text", index=0, text="hm, ") * pieces + STOP
    whole = {"type": "reasoning.text", "index": 0, "text": "hm, " * pieces}
    signature = encode_line(ReasoningLine(details=(whole,)))
    assert read_with_details(sent) == [ReasoningDelta("", signature), END_TURN]


@pytest.mark.parametrize(
    "piece",
    [
        detail(type="reasoning.text", index=0, text="x" * 100_000),
        detail(type="reasoning.encrypted", index=0, data="x" * 100_000),
    ],
    ids=["text", "encrypted"],
)
def test_endless_reasoning_details_are_refused(piece: bytes) -> None:
    times = DETAILS_CHARS_MAX // 100_000
    assert read_with_details(piece * times + STOP)[-1] == END_TURN
    assert read_with_details(piece * (times + 1) + STOP) == ["Unreadable answer"]


def test_buffered_arguments_of_a_call_without_a_name_are_bounded() -> None:
    piece = call(index=0, id="c", arguments="x" * 1024)
    times = HELD_CHARS_MAX // 1024
    assert read(iter([piece * times, STOP]))[-1] == AnswerDone("tool_use")
    assert read(iter([piece * (times + 1), STOP])) == ["Unreadable answer"]


def test_the_number_of_calls_without_a_name_is_limited() -> None:
    nameless = [call(index=n, id=f"c{n}") for n in range(NAMELESS_MAX + 1)]
    assert read(iter([*nameless[:-1], STOP]))[-1] == AnswerDone("tool_use")
    assert read(iter([*nameless, STOP])) == ["Unreadable answer"]
    named = [call(index=n, id=f"c{n}", name="ls") for n in range(NAMELESS_MAX + 1)]
    assert read(iter([*named, STOP]))[-1] == AnswerDone("tool_use")

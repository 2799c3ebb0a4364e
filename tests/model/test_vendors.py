"""The same answer is read from the stream of every vendor."""

import zlib
from collections.abc import Iterable, Iterator
from gzip import compress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from culm.errors import ModelFailed
from culm.model.base import (
    AnswerDone,
    CallDelta,
    ModelEvent,
    ProviderAccess,
    ReasoningDelta,
    TextDelta,
)
from culm.model.failures import ProviderPeer
from culm.model.http import LineSplitter
from culm.model.openai.answer import OpenAiAnswer
from culm.model.openai.vendor_quirks import quirks_of
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply as Scripted
from culm.testing.script import Script
from tests.model.provider import (
    END,
    STREAM_HEAD,
    Reply,
    ask,
    chunk,
    data,
    delta,
    failure_of,
    head,
    open_model,
    open_provider,
    refusal,
    stream,
)
from tests.model.vendor_shapes import SHAPES, Shape
from tests.support import WAIT_S, contract

PEER = ProviderPeer("acme", "api.acme.example", "model-1")
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def merged(events: Iterable[ModelEvent]) -> list[ModelEvent]:
    """Return the same events with adjacent deltas of one kind joined."""
    joined: list[ModelEvent] = []
    for event in events:
        match joined[-1] if joined else None, event:
            case TextDelta(text=before), TextDelta(text=text):
                joined[-1] = TextDelta(before + text)
            case ReasoningDelta(text=before, signature=signed), ReasoningDelta() if not signed:
                joined[-1] = ReasoningDelta(before + event.text, event.signature)
            case CallDelta(key=key, text=before), CallDelta() if key == event.key:
                joined[-1] = CallDelta(key, before + event.text)
            case _:
                joined.append(event)
    return joined


def read(shape: Shape, chunks: Iterable[bytes]) -> list[ModelEvent]:
    lines = LineSplitter()
    parser = OpenAiAnswer(PEER, quirks_of(ProviderAccess(vendor=shape.vendor)))
    events: list[ModelEvent] = []
    for one in chunks:
        events.extend(parser.on_lines(lines.feed(one)))
    events.extend(parser.on_end(lines.rest()))
    return merged(events)


# --- answers


@contract("MODEL-1")
@EVERY_SHAPE
def test_a_split_at_any_byte_gives_the_same_answer(shape: Shape) -> None:
    sent = shape.stream
    for place in range(len(sent) + 1):
        assert read(shape, (sent[:place], sent[place:])) == shape.events, place


@EVERY_SHAPE
def test_a_stream_read_byte_by_byte_gives_the_same_answer(shape: Shape) -> None:
    assert read(shape, (shape.stream[n : n + 1] for n in range(len(shape.stream)))) == shape.events


@contract("MODEL-1")
@EVERY_SHAPE
@settings(max_examples=25)
@given(sizes=st.lists(st.integers(1, 400), min_size=1, max_size=40))
def test_any_chunks_give_the_same_answer(shape: Shape, sizes: list[int]) -> None:
    def chunks() -> Iterator[bytes]:
        start = 0
        while start < len(shape.stream):
            for size in sizes:
                yield shape.stream[start : start + size]
                start += size

    assert read(shape, chunks()) == shape.events


def ending(shape: Shape, sent: bytes) -> str:
    """Return the outcome of an answer of which only `sent` arrives."""
    try:
        *_, last = read(shape, [sent])
    except ModelFailed as exc:
        return exc.title
    return "complete" if isinstance(last, AnswerDone) else "without an end"


@pytest.mark.parametrize("name", [name for name in SHAPES if name != "unstreamed"])
def test_a_stream_without_its_end_is_cut_or_complete(name: str) -> None:
    shape = SHAPES[name]
    for place in range(0, len(shape.stream), 7):
        assert ending(shape, shape.stream[:place]) in ("complete", "The stream was cut")


async def answer_of(shape: Shape, reply: Reply) -> list[ModelEvent]:
    async with open_provider(reply) as provider:
        access = ProviderAccess(vendor=shape.vendor, base_url=provider.url)
        async with open_model("", access=access) as model:
            return merged(await ask(model))


@EVERY_SHAPE
async def test_the_answer_is_read_over_a_socket(shape: Shape) -> None:
    assert await answer_of(shape, stream(shape.stream)) == shape.events


@pytest.mark.parametrize("name", ["openai", "careless"])
async def test_the_answer_is_read_in_packets_of_one_byte(name: str) -> None:
    shape = SHAPES[name]
    pieces = [chunk(shape.stream[n : n + 1]) for n in range(len(shape.stream))]
    assert await answer_of(shape, Reply([STREAM_HEAD, *pieces, END])) == shape.events


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
async def test_a_compressed_answer_is_read_though_not_requested(encoding: str) -> None:
    shape = SHAPES["openai"]
    pack = compress if encoding == "gzip" else zlib.compress
    packed = pack(shape.stream)
    fields = {"Content_Type": "text/event-stream", "Content_Encoding": encoding}
    start = head("200 OK", Transfer_Encoding="chunked", **fields)
    reply = Reply([start, chunk(packed[:50]), chunk(packed[50:]) + END])
    assert await answer_of(shape, reply) == shape.events


async def test_an_answer_with_broken_compression_is_a_failure() -> None:
    fields = {"Content_Type": "text/event-stream", "Content_Encoding": "gzip"}
    body = compress(SHAPES["openai"].stream)[:40] + b"nonsense" * 9
    failure = await failure_of(refusal("200 OK", body, **fields))
    assert failure.title in ("The stream was cut", "Unreadable answer")


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream", "text/plain"])
async def test_an_answer_that_is_not_streamed_is_read(kind: str) -> None:
    shape = SHAPES["unstreamed"]
    reply = refusal("200 OK", shape.stream, Content_Type=kind)
    assert await answer_of(shape, reply) == shape.events


async def test_a_stream_declared_as_json_is_read() -> None:
    shape = SHAPES["openai"]
    reply = refusal("200 OK", shape.stream, Content_Type="application/json; charset=utf-8")
    assert await answer_of(shape, reply) == shape.events


async def test_a_refusal_is_read_as_text() -> None:
    sent = delta(role="assistant", content=None, refusal="I can") + delta(refusal="not.")
    shape = SHAPES["openai"]
    joined = await answer_of(shape, stream(sent + delta("stop")))
    assert joined == [TextDelta("I cannot."), AnswerDone("end_turn")]


async def test_reasoning_in_think_tags_stays_text() -> None:
    sent = delta(content="<think>hm</think>") + delta("stop", content="Yes.")
    joined = await answer_of(SHAPES["vllm"], stream(sent))
    assert joined == [TextDelta("<think>hm</think>Yes."), AnswerDone("end_turn")]


@pytest.mark.parametrize(
    ("sent", "title", "message", "transient"),
    [
        pytest.param(
            data(
                {
                    "id": "gen-1",
                    "error": {"code": 502, "message": "Provider disconnected"},
                    "choices": [{"delta": {"content": ""}, "finish_reason": "error"}],
                }
            ),
            "The provider has a problem",
            "acme failed (502): Provider disconnected",
            True,
            id="openrouter: an error beside the choices",
        ),
        pytest.param(
            data({"choices": [{"error": {"code": 429, "message": "slow"}, "delta": {}}]}),
            "Too many requests",
            "acme limits the rate of requests (429): slow",
            True,
            id="openrouter: an error within the choice",
        ),
        pytest.param(
            delta("error"),
            "The provider reported an error",
            "acme broke off its answer: error",
            True,
            id="an ending that is an error",
        ),
        pytest.param(
            delta("insufficient_system_resource"),
            "The provider reported an error",
            "acme broke off its answer: insufficient_system_resource",
            True,
            id="deepseek: interrupted",
        ),
        pytest.param(
            data(
                {"object": "error", "message": "too long", "type": "BadRequestError", "code": 400}
            ),
            "The provider refused",
            "acme refused (400): too long",
            False,
            id="vllm: a chunk that is an error",
        ),
        pytest.param(
            b'error: {"code":500,"message":"slot lost","type":"server_error"}\n\n',
            "The provider has a problem",
            "acme failed (500): slot lost",
            True,
            id="llama.cpp: an event that is an error",
        ),
        pytest.param(
            data({"error": {"message": "bad call", "code": "tool_use_failed"}}),
            "The model made a broken call",
            "acme could not read a call that model-1 made: bad call",
            True,
            id="groq: a broken call",
        ),
    ],
)
async def test_an_error_in_the_middle_of_a_stream_ends_it(
    sent: bytes, title: str, message: str, *, transient: bool
) -> None:
    failure = await failure_of(stream(delta(content="a") + sent + b"data: [DONE]\n\n"))
    assert (failure.title, failure.message, failure.transient) == (title, message, transient)


@pytest.mark.parametrize("vendor", ["openai", "openrouter", "mistral", "gemini", "ollama"])
@pytest.mark.parametrize(
    ("reply", "title"),
    [
        (Scripted(tokens=5, stall_after=2), "The provider stopped answering"),
        (Scripted(tokens=5, error_after=2), "The provider reported an error"),
        (Scripted(tokens=5, malformed_after=2), "Unreadable answer"),
        (Scripted(tokens=5, long_line_bytes=10_000_000), "Unreadable answer"),
        (Scripted(tokens=5, cut_after=2), "The stream was cut"),
        (Scripted(tokens=5, cut_after=0), "The stream was cut"),
        (Scripted(status=401), "Authentication problem"),
        (Scripted(status=402), "Out of credit"),
        (Scripted(status=404), "Model or address not found"),
        (Scripted(status=429), "Too many requests"),
        (Scripted(status=503), "The provider has a problem"),
        (Scripted(body="<html></html>"), "Unreadable answer"),
    ],
)
async def test_a_fault_has_the_same_title_for_every_vendor(
    vendor: str, reply: Scripted, title: str
) -> None:
    async with open_model_server(Script([reply])) as server:
        access = ProviderAccess(vendor=vendor, base_url=server.url)
        # Short only where the provider stops answering: a busy machine must not fail.
        stall_s = WAIT_S if reply.stall_after is None else 0.3
        async with open_model("", access=access, stall_s=stall_s) as model:
            with pytest.raises(ModelFailed) as caught:
                await ask(model)
    assert caught.value.title == title

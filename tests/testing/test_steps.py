"""Answers as steps: the pieces, their order, and the place of a fault."""

from collections.abc import Iterator
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.testing.dialects import (
    AnswerHeader,
    AnthropicDialect,
    Dialect,
    OpenAiDialect,
    ScriptBlock,
)
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.testing.steps import (
    BlockBegan,
    BlockEnded,
    BlockPiece,
    FaultStep,
    RawStep,
    Step,
    content_of,
    events,
    steps,
    usage_of,
)

ANSWER = AnswerHeader(n=1, model="m", created_s=0, include_usage=False)
CALLS = [
    ScriptedCall(id="a", name="one", input="0123456789abcdef"),
    ScriptedCall(name="two", input="xyz"),
]


def never() -> int:
    raise AssertionError("nothing here is stamped")


def play(reply: Reply, dialect: Dialect | None = None) -> Iterator[Step]:
    return steps(reply, 1, 10, dialect or OpenAiDialect(ANSWER), never)


def outline(reply: Reply) -> list[str]:
    """Describe a stream: deltas as "d", other events by their name."""
    dialect = OpenAiDialect(ANSWER)
    asides = {
        dialect.malformed(): "malformed",
        dialect.unknown(): "unknown",
        dialect.failed(): "error",
    }
    found: list[str] = []
    for step in play(reply):
        if isinstance(step, bytes):
            found.append("d")
        elif isinstance(step, FaultStep):
            found.append(step.name.lower())
        elif step.data in asides:
            found.append(asides[step.data])
    return found


@given(st.text())
def test_the_pieces_of_a_text_add_up_to_it(text: str) -> None:
    pieces = [e.text for e in events(Reply(text=text), 1, never) if isinstance(e, BlockPiece)]
    assert "".join(pieces) == text
    assert all(pieces)


def test_an_answer_is_reasoning_then_text_then_calls() -> None:
    reply = Reply(reasoning="so then", text="Hi you", calls=CALLS)
    thought, text = ScriptBlock("reasoning", 0), ScriptBlock("text", 1)
    one, two = ScriptBlock("call", 2, 0, "a", "one"), ScriptBlock("call", 3, 1, "call_7_1", "two")
    assert list(events(reply, 7, never)) == [
        *(
            BlockBegan(thought),
            BlockPiece(thought, "so "),
            BlockPiece(thought, "then"),
            BlockEnded(thought),
        ),
        *(BlockBegan(text), BlockPiece(text, "Hi "), BlockPiece(text, "you"), BlockEnded(text)),
        *(
            BlockBegan(one),
            BlockPiece(one, "01234567"),
            BlockPiece(one, "89abcdef"),
            BlockEnded(one),
        ),
        *(BlockBegan(two), BlockPiece(two, "xyz"), BlockEnded(two)),
    ]


def test_the_arguments_of_interleaved_calls_alternate() -> None:
    one, two = ScriptBlock("call", 0, 0, "a", "one"), ScriptBlock("call", 1, 1, "call_7_1", "two")
    assert list(events(Reply(calls=CALLS, interleave=True), 7, never)) == [
        *(BlockBegan(one), BlockBegan(two)),
        *(BlockPiece(one, "01234567"), BlockPiece(two, "xyz"), BlockPiece(one, "89abcdef")),
        *(BlockEnded(one), BlockEnded(two)),
    ]


@pytest.mark.parametrize("interleave", [False, True])
def test_a_complete_answer_has_the_text_of_all_pieces(interleave: bool) -> None:  # noqa: FBT001
    content, deltas = content_of(Reply(text="a b", calls=CALLS, interleave=interleave), 1, never)
    assert [text for _, text in content] == ["a b", "0123456789abcdef", "xyz"]
    assert deltas == 5


def test_exact_deltas_and_counted_tokens_are_sent_as_scripted() -> None:
    for reply, wanted in (
        (Reply(deltas=["a", "", "b c"]), ["a", "", "b c"]),
        (Reply(tokens=3), ["tok0 ", "tok1 ", "tok2 "]),
    ):
        assert [e.text for e in events(reply, 1, never) if isinstance(e, BlockPiece)] == wanted


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        (Reply(tokens=2, stamp=True), ["@1 ", "@2 "]),
        (Reply(text="a b", stamp=True), ["@1 a ", "@2 b"]),
    ],
)
def test_a_stamp_is_the_time_when_its_piece_is_made(reply: Reply, wanted: list[str]) -> None:
    clock = count(1)
    pieces = events(reply, 1, lambda: next(clock))
    assert [e.text for e in pieces if isinstance(e, BlockPiece)] == wanted


@pytest.mark.parametrize(
    ("reply", "wanted"),
    [
        (Reply(tokens=2), "d d"),
        (Reply(), ""),
        (Reply(tokens=3, hold_after=0), "hold d d d"),
        (Reply(tokens=3, hold_after=2), "d d hold d"),
        (Reply(tokens=2, stall_after=1), "d stall d"),
        (Reply(tokens=2, cut_after=99), "d d cut"),
        (Reply(tokens=2, error_after=1), "d error end d"),
        (Reply(tokens=2, unknown_event=True), "d unknown d"),
        (Reply(unknown_event=True), "unknown"),
        (Reply(tokens=2, malformed_after=1, unknown_event=True), "d unknown malformed d"),
        (Reply(tokens=2, cut_after=1, hold_after=1), "d hold cut d"),
        (Reply(text="a", reasoning="b", cut_after=1), "d cut d"),
    ],
)
def test_a_fault_comes_after_the_scripted_delta(reply: Reply, wanted: str) -> None:
    assert outline(reply) == wanted.split()


@pytest.mark.parametrize("dialect", [OpenAiDialect, AnthropicDialect])
@pytest.mark.parametrize("line_bytes", [1_000, 70_000])
def test_a_long_line_has_exactly_the_requested_bytes(
    dialect: type[OpenAiDialect | AnthropicDialect], line_bytes: int
) -> None:
    sent = list(play(Reply(text="a", long_line_bytes=line_bytes), dialect(ANSWER)))
    longest = max(
        len(line)
        for step in sent
        if not isinstance(step, FaultStep)
        for line in (step.data if isinstance(step, RawStep) else step).split(b"\n")
    )
    assert longest == line_bytes
    assert sum(isinstance(step, bytes) for step in sent) == 2


def test_usage_is_scripted_absent_or_estimated() -> None:
    scripted = ScriptedUsage(input=5, output=6, cache_read=7, cache_write=8)
    assert usage_of(Reply(usage=scripted), 1, 2) == scripted
    assert usage_of(Reply(usage=None), 1, 2) is None
    assert usage_of(Reply(), 1, 2) == ScriptedUsage(input=1, output=2)

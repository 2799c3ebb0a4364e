"""The OpenAI adapter against the scripted provider."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest

from culm.errors import ModelFailed
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ReasoningDelta,
    TextDelta,
    TokenUsage,
    joined,
)
from culm.model.openai.model import OpenAiModel
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script, ScriptedCall, ScriptedUsage
from tests.model.provider import REQUEST, ask, open_model

STALL_S = 0.5


@asynccontextmanager
async def open_scripted(reply: Reply) -> AsyncGenerator[tuple[ModelServer, OpenAiModel]]:
    async with (
        open_model_server(Script([reply])) as server,
        open_model(server.url, stall_s=STALL_S) as model,
    ):
        yield server, model


def text_of(events: list[ModelEvent], key: int) -> str:
    return "".join(e.text for e in events if isinstance(e, CallDelta) and e.key == key)


async def test_an_answer_with_all_kinds_of_content_is_complete() -> None:
    reply = Reply(
        reasoning="hm",
        deltas=["Hel", "lo"],
        calls=[
            ScriptedCall(id="c1", name="ls", input={"path": "/a/long/path/with/names"}),
            ScriptedCall(id="c2", name="ls", input={"path": "/b"}),
        ],
        interleave=True,
        usage=ScriptedUsage(input=10, output=4, cache_read=6),
        unknown_event=True,
    )
    async with open_scripted(reply) as (_, model):
        events = await ask(model)
    assert [e for e in joined(events) if not isinstance(e, CallDelta)] == [
        ReasoningDelta("hm"),
        TextDelta("Hello"),
        CallStarted(0, "c1", "ls"),
        CallStarted(1, "c2", "ls"),
        AnswerDone("tool_use", TokenUsage(10, 4, 6)),
    ]
    assert text_of(events, 0) == '{"path":"/a/long/path/with/names"}'
    assert text_of(events, 1) == '{"path":"/b"}'


@pytest.mark.parametrize(
    ("reply", "title", "transient"),
    [
        (Reply(tokens=5, stall_after=2), "The provider stopped answering", True),
        (Reply(tokens=5, delay_s=10), "The provider stopped answering", True),
        (Reply(tokens=5, error_after=2), "The provider reported an error", True),
        (Reply(tokens=5, malformed_after=2), "Unreadable answer", False),
        (Reply(tokens=5, long_line_bytes=10_000_000), "Unreadable answer", False),
        (Reply(tokens=5, cut_after=2), "The stream was cut", True),
        (Reply(status=401), "Authentication problem", False),
        (Reply(status=529), "The provider has a problem", True),
        (Reply(body="<html></html>"), "Unreadable answer", False),
    ],
)
async def test_a_scripted_fault_has_its_failure_title(
    reply: Reply, title: str, *, transient: bool
) -> None:
    async with open_scripted(reply) as (_, model):
        with pytest.raises(ModelFailed) as caught:
            await ask(model)
    assert (caught.value.title, caught.value.transient) == (title, transient)


async def test_closing_the_stream_disconnects_from_the_server() -> None:
    async with open_scripted(Reply(tokens=5, stall_after=2)) as (server, model):
        async with aclosing(model.stream(REQUEST)) as events:
            assert isinstance(await anext(events), TextDelta)
        await server.until_left(1)

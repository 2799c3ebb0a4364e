"""A request to Anthropic: the HTTP request, its answer and its failures."""

import traceback
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import pytest

from culm.errors import ModelFailed
from culm.model.anthropic.model import AnthropicModel, full_url
from culm.model.base import (
    AnswerDone,
    CallDelta,
    CallStarted,
    ModelEvent,
    ModelRequest,
    ProviderAccess,
    ReasoningDelta,
    TextDelta,
    TokenUsage,
    joined,
)
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply as Scripted
from culm.testing.script import Script, ScriptedCall, ScriptedUsage
from culm.wire.config import SelectedModel
from tests.model.anthropic_messages import make_message
from tests.model.anthropic_shapes import (
    END,
    MODEL,
    STOP,
    answer_to,
    event,
    failure_of,
    finish,
    open_model,
    text,
)
from tests.model.provider import (
    KEY,
    REQUEST,
    STREAM_HEAD,
    Reply,
    Then,
    ask,
    chunk,
    head,
    open_provider,
    refusal,
    stream,
)
from tests.support import WAIT_S

STALL_S = 0.5  # Only where the provider stops answering: a busy machine is slow, too.
END_TURN = AnswerDone("end_turn", TokenUsage())


# --- the request


async def test_a_request_carries_the_key_and_the_version() -> None:
    async with open_provider(stream(END)) as provider, open_model(provider.url) as model:
        await ask(model, ModelRequest("be brief", [make_message("user", "hello")]))
    request = provider.requests[0]
    assert request.path == "/v1/messages"
    names = ("x-api-key", "anthropic-version", "content-type", "accept", "accept-encoding")
    assert {name: request.headers[name] for name in names} == {
        "x-api-key": KEY,
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
        "accept": "text/event-stream",
        "accept-encoding": "identity",
    }
    assert "authorization" not in request.headers
    mark = {"cache_control": {"type": "ephemeral"}}
    assert request.body == {
        "model": MODEL,
        "stream": True,
        "max_tokens": 8192,
        "system": [{"type": "text", "text": "be brief", **mark}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", **mark}]}],
    }


@pytest.mark.parametrize(
    ("access", "headers"),
    [
        (ProviderAccess(), {}),
        (ProviderAccess(api_key="  k-1\n"), {"x-api-key": "k-1"}),
        (ProviderAccess(api_key="Bearer  t-1 \n"), {"authorization": "Bearer t-1"}),
        (ProviderAccess(api_key="Bearer"), {"x-api-key": "Bearer"}),
        (ProviderAccess(api_key="k-1", headers={"X-API-KEY": "mine"}), {"x-api-key": "mine"}),
        (
            ProviderAccess(api_key="k-1", headers={"anthropic-beta": "b-1"}),
            {"x-api-key": "k-1", "anthropic-beta": "b-1"},
        ),
    ],
)
async def test_headers_of_the_access_override_ours(
    access: ProviderAccess, headers: dict[str, str]
) -> None:
    async with open_provider(stream(END)) as provider:
        url = provider.url.removesuffix("/v1")
        target = ProviderAccess(base_url=url, api_key=access.api_key, headers=access.headers)
        async with open_model("", access=target) as model:
            await ask(model)
    assert provider.requests[0].path == "/v1/messages"
    sent = provider.requests[0].headers
    names = ("authorization", "x-api-key", "anthropic-beta")
    assert {name: sent[name] for name in names if name in sent} == headers


@pytest.mark.parametrize(
    ("given", "full"),
    [
        ("https://api.anthropic.com", "https://api.anthropic.com/v1"),
        ("https://api.anthropic.com/", "https://api.anthropic.com/v1"),
        ("https://api.anthropic.com/v1", "https://api.anthropic.com/v1"),
        ("https://api.anthropic.com/v1/", "https://api.anthropic.com/v1/"),
        ("https://api.z.example/api/anthropic", "https://api.z.example/api/anthropic"),
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080/v1"),
        ("http://[::1", "http://[::1"),
        ("http://", "http://"),
        ("nonsense", "nonsense"),
        ("", ""),
    ],
)
def test_an_address_without_a_path_gets_the_default_path(given: str, full: str) -> None:
    assert full_url(given) == full


# --- the end of an answer


@pytest.mark.parametrize("then", ["keep", "hold", "close", "reset"])
@pytest.mark.parametrize("ending", [finish(), finish() + STOP])
async def test_a_complete_answer_does_not_wait_for_the_end_of_the_connection(
    ending: bytes, then: Then
) -> None:
    reply = Reply([STREAM_HEAD + chunk(text(0, "a") + ending)], then)
    stall_s = STALL_S if then in ("keep", "hold") else WAIT_S
    async with open_provider(reply) as provider, open_model(provider.url, stall_s=stall_s) as model:
        assert await ask(model) == [TextDelta("a"), END_TURN]


async def test_a_connection_is_reused_after_a_complete_answer() -> None:
    replies = stream(text(0, "a") + END), stream(END)
    async with open_provider(*replies) as provider, open_model(provider.url) as model:
        assert await ask(model) == [TextDelta("a"), END_TURN]
        assert await ask(model) == [END_TURN]
        assert provider.connections == 1


async def test_an_answer_is_read_byte_by_byte() -> None:
    sent = text(0, "ä🦆") + END
    assert await answer_to(
        Reply([STREAM_HEAD, *[chunk(sent[n : n + 1]) for n in range(len(sent))], b"0\r\n\r\n"])
    ) == [TextDelta("ä🦆"), END_TURN]


async def test_a_provider_that_only_sends_a_ping_times_out() -> None:
    reply = Reply([STREAM_HEAD + chunk(event("ping"))], "hold")
    failure = await failure_of(reply, stall_s=0.05)
    assert failure.title == "The provider stopped answering"
    assert failure.transient


@pytest.mark.parametrize(
    ("reply", "title", "transient"),
    [
        (refusal("401 Unauthorized", b"{}"), "Authentication problem", False),
        (refusal("429 Too Many Requests", b"{}"), "Too many requests", True),
        (refusal("529 Overloaded", b"{}"), "The provider has a problem", True),
        (refusal("200 OK", b"<html>", Content_Type="text/html"), "Unreadable answer", False),
        (
            refusal(
                "200 OK",
                b'{"type":"error","error":{"type":"overloaded_error","message":"later"}}',
                Content_Type="application/json",
            ),
            "The provider reported an error",
            True,
        ),
        (
            Reply([head("200 OK", Content_Type="text/event-stream")], "close"),
            "The stream was cut",
            True,
        ),
    ],
)
async def test_a_response_that_is_not_an_answer_has_its_failure_title(
    reply: Reply, title: str, *, transient: bool
) -> None:
    failure = await failure_of(reply)
    assert (failure.title, failure.transient) == (title, transient)


@pytest.mark.parametrize("key", [KEY, f"Bearer {KEY}"])
@pytest.mark.parametrize("place", ["error", "stream", "junk"])
async def test_a_key_echoed_by_the_provider_is_not_shown(place: str, key: str) -> None:
    echo = f"bad key {KEY}"
    reply = {
        "error": refusal("401 Unauthorized", echo.encode()),
        "stream": stream(event("error", error={"type": "x", "message": echo})),
        "junk": stream(b"data: " + echo.encode() + b"\n\n"),
    }[place]
    async with open_provider(reply) as provider:
        access = ProviderAccess(base_url=provider.url, api_key=key)
        async with open_model("", access=access) as model:
            with pytest.raises(ModelFailed) as caught:
                await ask(model)
    logged = "".join(traceback.format_exception(caught.value))
    assert "bad key" in caught.value.message
    assert KEY not in f"{caught.value.title} {caught.value.message} {caught.value.hint} {logged}"


# --- against the scripted provider


@asynccontextmanager
async def open_scripted(reply: Scripted) -> AsyncGenerator[tuple[ModelServer, AnthropicModel]]:
    is_slow = reply.delay_s or reply.stall_after is not None
    async with (
        open_model_server(Script([reply])) as server,
        open_model(server.url, stall_s=STALL_S if is_slow else WAIT_S) as model,
    ):
        yield server, model


def arguments(events: list[ModelEvent], key: int) -> str:
    return "".join(e.text for e in events if isinstance(e, CallDelta) and e.key == key)


@pytest.mark.parametrize("interleave", [False, True])
async def test_an_answer_with_all_kinds_of_content_is_complete(*, interleave: bool) -> None:
    reply = Scripted(
        reasoning="hm",
        deltas=["Hel", "lo"],
        calls=[
            ScriptedCall(id="c1", name="ls", input={"path": "/a/long/path/with/names"}),
            ScriptedCall(id="c2", name="ls", input={"path": "/b"}),
        ],
        interleave=interleave,
        usage=ScriptedUsage(input=10, output=4, cache_read=6, cache_write=3),
        unknown_event=True,
    )
    async with open_scripted(reply) as (server, model):
        events = await ask(model, ModelRequest("", [], settings=SelectedModel(think=True)))
    assert [e for e in joined(events) if not isinstance(e, CallDelta)] == [
        ReasoningDelta("hm"),
        ReasoningDelta("", "c2NyaXB0ZWQ="),
        TextDelta("Hello"),
        CallStarted(0, "c1", "ls"),
        CallStarted(1, "c2", "ls"),
        AnswerDone("tool_use", TokenUsage(10, 4, 6, 3)),
    ]
    assert arguments(events, 0) == '{"path":"/a/long/path/with/names"}'
    assert arguments(events, 1) == '{"path":"/b"}'
    assert server.requests[0].path == "/v1/messages"


@pytest.mark.parametrize(
    ("reply", "title", "transient"),
    [
        (Scripted(tokens=5, stall_after=2), "The provider stopped answering", True),
        (Scripted(tokens=5, delay_s=10), "The provider stopped answering", True),
        (Scripted(tokens=5, error_after=2), "The provider reported an error", True),
        (Scripted(tokens=5, malformed_after=2), "Unreadable answer", False),
        (Scripted(tokens=5, long_line_bytes=10_000_000), "Unreadable answer", False),
        (Scripted(tokens=5, cut_after=2), "The stream was cut", True),
        (Scripted(tokens=5, cut_after=9), "The stream was cut", True),
        (Scripted(status=401), "Authentication problem", False),
        (Scripted(status=529), "The provider has a problem", True),
        (Scripted(body="<html></html>"), "Unreadable answer", False),
    ],
)
async def test_a_scripted_fault_has_its_failure_title(
    reply: Scripted, title: str, *, transient: bool
) -> None:
    async with open_scripted(reply) as (_, model):
        with pytest.raises(ModelFailed) as caught:
            await ask(model)
    assert (caught.value.title, caught.value.transient) == (title, transient)


@pytest.mark.parametrize(
    ("finish", "usage", "done"),
    [
        (
            "content_filter",
            ScriptedUsage(input=1, output=2),
            AnswerDone("content_filter", TokenUsage(1, 2)),
        ),
        (
            "max_tokens",
            ScriptedUsage(input=1, output=2),
            AnswerDone("max_tokens", TokenUsage(1, 2)),
        ),
        ("odd", None, AnswerDone("unknown", None)),
    ],
)
async def test_scripted_stop_reasons_and_usage_are_read(
    finish: str, usage: ScriptedUsage | None, done: AnswerDone
) -> None:
    async with open_scripted(Scripted(text="no", finish=finish, usage=usage)) as (_, model):
        assert await ask(model) == [TextDelta("no"), done]


async def test_closing_the_stream_disconnects_from_the_server() -> None:
    async with open_scripted(Scripted(tokens=5, stall_after=2)) as (server, model):
        async with aclosing(model.stream(REQUEST)) as events:
            assert isinstance(await anext(events), TextDelta)
        await server.until_left(1)

"""A request to an OpenAI-compatible provider: the HTTP request and how it ends or is canceled."""

import asyncio
import gc
import socket
from contextlib import aclosing

import aiohttp
import pytest

from culm.errors import ModelFailed
from culm.model.base import AnswerDone, ModelRequest, ModelSetup, ProviderAccess, TextDelta
from culm.model.openai.model import OpenAiModel
from culm.wire.codec import Json
from culm.wire.config import Model as ModelInfo
from culm.wire.config import SelectedModel
from tests.model.provider import (
    END,
    KEY,
    REQUEST,
    STOP,
    STREAM_HEAD,
    Provider,
    Reply,
    ask,
    chunk,
    delta,
    head,
    open_model,
    open_provider,
    refusal,
    stream,
)
from tests.support import WAIT_S

ENDLESS = Reply([STREAM_HEAD + chunk(delta(content="a"))], "hold")


async def test_a_request_carries_the_key_and_asks_for_a_stream() -> None:
    async with open_provider(stream(STOP)) as provider, open_model(provider.url) as model:
        await ask(model, ModelRequest("be brief", []))
    assert provider.requests[0].path == "/v1/chat/completions"
    headers = provider.requests[0].headers
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["content-type"] == "application/json"
    assert headers["accept"] == "text/event-stream"
    assert headers["accept-encoding"] == "identity"
    assert provider.requests[0].body == {
        "model": "model-1",
        "messages": [{"role": "system", "content": "be brief"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("access", "headers"),
    [
        (ProviderAccess(), {}),
        (ProviderAccess(api_key="  k-1\n"), {"authorization": "Bearer k-1"}),
        (
            ProviderAccess(api_key="k-1", headers={"X-Org": "o"}),
            {"authorization": "Bearer k-1", "x-org": "o"},
        ),
        (
            ProviderAccess(api_key="k-1", headers={"AUTHORIZATION": "Mine"}),
            {"authorization": "Mine"},
        ),
    ],
)
async def test_headers_of_the_access_override_ours(
    access: ProviderAccess, headers: dict[str, str]
) -> None:
    async with open_provider(stream(STOP)) as provider:
        target = ProviderAccess(
            base_url=provider.url + "/", api_key=access.api_key, headers=access.headers
        )
        async with open_model("", access=target) as model:
            await ask(model)
    assert provider.requests[0].path == "/v1/chat/completions"
    sent = provider.requests[0].headers
    assert {name: sent.get(name) for name in ("authorization", "x-org") if name in sent} == headers


async def test_settings_then_the_access_override_the_body() -> None:
    chosen = SelectedModel(
        temperature=0.5,
        top_p=0.9,
        frequency_penalty=0.1,
        presence_penalty=0.2,
        max_tokens=100,
        reasoning_effort="high",
        provider_options={"seed": 1, "top_p": 0.8, "user": "u"},
    )
    async with open_provider(stream(STOP), stream(STOP)) as provider:
        access = ProviderAccess(base_url=provider.url, body={"user": "w", "model": "other"})
        async with open_model("", access=access) as model:
            await ask(model, ModelRequest("", [], settings=chosen))
            await ask(model, ModelRequest("", [], settings=chosen, max_tokens=7))
    expected: dict[str, Json] = {
        "model": "other",
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.5,
        "top_p": 0.8,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "max_tokens": 100,
        "reasoning_effort": "high",
        "seed": 1,
        "user": "w",
    }
    assert [request.body for request in provider.requests] == [
        expected,
        {**expected, "max_tokens": 7},
    ]


@pytest.mark.parametrize("last", ["with the end", "after the end"])
async def test_a_connection_is_reused_after_a_complete_answer(last: str) -> None:
    whole = STREAM_HEAD + chunk(delta(content="a") + STOP)
    reply = Reply([whole + END] if last == "with the end" else [whole, END])
    async with open_provider(reply, stream(STOP)) as provider, open_model(provider.url) as model:
        assert await ask(model) == [TextDelta("a"), AnswerDone("end_turn")]
        assert await ask(model) == [AnswerDone("end_turn")]
        assert provider.connections == 1


async def test_a_server_that_stays_connected_after_done_does_not_delay_the_answer() -> None:
    reply = Reply([STREAM_HEAD + chunk(STOP)], "hold")
    async with open_provider(reply) as provider, open_model(provider.url) as model:
        assert await ask(model) == [AnswerDone("end_turn")]
        await provider.left.wait()


async def test_closing_the_stream_drops_the_connection() -> None:
    async with open_provider(ENDLESS) as provider, open_model(provider.url) as model:
        async with aclosing(model.stream(REQUEST)) as events:
            assert await anext(events) == TextDelta("a")
            assert not provider.left.is_set()
        await provider.left.wait()


async def test_an_unread_body_is_not_drained_on_close() -> None:
    lots = chunk(delta(content="a") + b": " + b"x" * 500_000 + b"\n")
    reply = Reply([STREAM_HEAD, *[lots] * 40], "hold")
    async with open_provider(reply) as provider, open_model(provider.url) as model:
        async with aclosing(model.stream(REQUEST)) as events:
            assert await anext(events) == TextDelta("a")
        await provider.left.wait()


async def cancel_once(provider: Provider, model: OpenAiModel, started: asyncio.Event) -> None:
    """Start a request, cancel it once `started` is set, and wait for the disconnect."""

    async def consume() -> None:
        async with aclosing(model.stream(REQUEST)) as events:
            async for _ in events:
                started.set()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(consume())
        await started.wait()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled()
    await provider.left.wait()


async def test_canceling_a_reader_drops_the_connection() -> None:
    async with open_provider(ENDLESS) as provider, open_model(provider.url) as model:
        await cancel_once(provider, model, asyncio.Event())


async def test_canceling_before_the_response_head_drops_the_connection() -> None:
    async with open_provider(Reply([], "hold")) as provider, open_model(provider.url) as model:
        await cancel_once(provider, model, provider.arrived)


async def test_canceling_while_reading_an_error_drops_the_connection() -> None:
    reply = Reply([head("500 Oops", Content_Length=100) + b"half"], "hold")
    async with open_provider(reply) as provider, open_model(provider.url) as model:
        await cancel_once(provider, model, provider.arrived)


async def test_a_connection_is_reused_after_a_complete_error() -> None:
    replies = refusal("503 Busy", b"later"), stream(STOP)
    async with open_provider(*replies) as provider, open_model(provider.url) as model:
        with pytest.raises(ModelFailed, match="later"):
            await ask(model)
        assert await ask(model) == [AnswerDone("end_turn")]
        assert provider.connections == 1


async def test_a_slow_reader_does_not_count_as_a_stall() -> None:
    sent = [STREAM_HEAD, chunk(delta(content="a")), chunk(delta(content="b") + STOP) + END]
    async with (
        open_provider(Reply(sent)) as provider,
        open_model(provider.url, stall_s=1.0) as model,
    ):
        events = model.stream(REQUEST)
        assert await anext(events) == TextDelta("a")
        await asyncio.sleep(1.2)  # Longer than the stall limit.
        assert [event async for event in events] == [TextDelta("b"), AnswerDone("end_turn")]


async def test_the_stall_limit_counts_from_the_last_bytes() -> None:
    reply = Reply([STREAM_HEAD, *[chunk(b": wait\n")] * 8, chunk(STOP) + END])
    async with open_provider(reply) as provider, open_model(provider.url, stall_s=1.5) as model:
        provider.trickle_s = 0.2  # Longer in total than the stall limit.
        assert await ask(model) == [AnswerDone("end_turn")]


async def test_a_server_that_never_reads_the_request_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # It never accepts a connection.
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        async with asyncio.timeout(WAIT_S), open_model(url, stall_s=0.1) as model:
            with pytest.raises(ModelFailed, match=r".* sent nothing for 0\.1 s"):
                await ask(model, ModelRequest("x" * 30_000_000, []))


async def test_a_dropped_stream_closes_its_connection() -> None:
    async with open_provider(ENDLESS) as provider, aiohttp.ClientSession() as http:
        access = ProviderAccess(base_url=provider.url)
        info = ModelInfo(id="m", supports_attachments=True)
        model = OpenAiModel(ModelSetup(http, access, info, WAIT_S, WAIT_S))
        events = model.stream(REQUEST)
        assert await anext(events) == TextDelta("a")
        del events
        gc.collect()  # Warnings are errors.
        await provider.left.wait()


@pytest.mark.parametrize("sign", [b": ping\n\n", delta(content="")], ids=["comment", "delta"])
async def test_keep_alive_messages_without_content_do_not_prevent_a_timeout(sign: bytes) -> None:
    reply = Reply([STREAM_HEAD, *[chunk(sign)] * 2000])
    async with open_provider(reply) as provider, open_model(provider.url, stall_s=0.05) as model:
        provider.trickle_s = 0.005  # Longer in total than a test may wait.
        with pytest.raises(ModelFailed, match="sent nothing for") as caught:
            await ask(model)
        assert caught.value.transient
        await provider.left.wait()

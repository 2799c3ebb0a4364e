"""The scripted provider over real sockets: faults, the request log and shutdown."""

import asyncio
import socket

import aiohttp
import pytest

from culm.errors import Conflict, ListenFailed, NotFound
from culm.testing import model_server
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from culm.wire.codec import encode
from tests.support import WAIT_S
from tests.testing.provider_client import (
    ANTHROPIC,
    OPENAI,
    both,
    events_in,
    is_end,
    open_provider_client,
    text_of,
    text_pieces,
)


async def read_until(response: aiohttp.ClientResponse, wanted: bytes) -> bytes:
    """Read until the data contains `wanted`; return all of it."""
    data = b""
    async with asyncio.timeout(WAIT_S):
        while wanted not in data:
            piece = await response.content.readany()
            assert piece, f"the stream ended: {data!r}"
            data += piece
    return data


# --- answers


@both
async def test_replies_are_sent_in_order_and_an_exhausted_script_is_an_error(path: str) -> None:
    async with open_provider_client(Reply(text="One."), Reply(text="Two.")) as client:
        assert text_of(await client.stream(path)) == "One."
        assert text_of(await client.stream(path)) == "Two."
        status, answer = await client.refused(path)
        assert status == 500
        assert "the script is exhausted: request 3" in answer["error"]["message"]
        client.server.add(Reply(text="Three."))
        assert text_of(await client.stream(path)) == "Three."


@both
async def test_a_rule_answers_requests_that_contain_its_text(path: str) -> None:
    script = Script([Reply(text="plain")], [ReplyRule("be a pirate", Reply(text="Arr"))])
    async with open_provider_client(script=script) as client:
        assert text_of(await client.stream(path, system="You must be a pirate.")) == "Arr"
        assert text_of(await client.stream(path)) == "plain"


async def test_a_new_script_replaces_the_old_one() -> None:
    async with open_provider_client(Reply(text="old")) as client:
        client.server.play(Script(otherwise=Reply(text="new")))
        assert text_of(await client.stream(OPENAI)) == "new"
        body = encode({"otherwise": {"text": "newer"}})
        assert await client.control("POST", "/culm/script", body) == (200, {"ok": True})
        assert text_of(await client.stream(OPENAI)) == "newer"
        status, answer = await client.control("POST", "/culm/script", b'{"otherwise": {"x": 1}}')
        assert status == 400
        assert "unknown field `x` - at `$.otherwise`" in answer["error"]["message"]


@both
async def test_an_invalid_request_is_refused_and_uses_no_reply(path: str) -> None:
    async with open_provider_client(Reply(text="kept")) as client:
        deep = b'{"messages": %b}' % (b"[" * 100_000 + b"]" * 100_000)
        for body in (b"", b"{", b"[]", b"{}", b'{"messages": [], "stream": "yes"}', deep):
            async with client.session.post(client.server.url + path, data=body) as response:
                assert response.status == 400, body[:50]
                assert "invalid request" in (await response.json())["error"]["message"]
        assert client.server.requests[1].body is None
        assert text_of(await client.stream(path)) == "kept"


@both
async def test_a_body_that_is_too_large_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "BODY_BYTES_MAX", 1_000)
    async with open_provider_client() as client:
        status, answer = await client.refused(path, padding="x" * 1_000)
        assert status == 413
        assert answer["error"]["message"] == "the request is larger than 1000 bytes"


async def test_too_many_concurrent_answers_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "STREAMS_MAX", 1)
    async with open_provider_client(Reply(text="Hi", hold_after=0)) as client, client.post(OPENAI):
        status, answer = await client.refused(ANTHROPIC)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")


async def test_models_are_listed_for_both_dialects() -> None:
    async with (
        open_provider_client() as client,
        client.session.get(client.server.url + "/models") as response,
    ):
        (model,) = (await response.json())["data"]
        assert (model["id"], model["object"], model["type"]) == ("scripted", "model", "model")


async def test_an_unknown_path_is_answered_with_the_known_paths() -> None:
    async with open_provider_client() as client:
        status, answer = await client.control("POST", "/chat/completions")
        assert status == 404
        assert "POST /v1/chat/completions" in answer["error"]["message"]


# --- faults


@both
async def test_a_plain_answer_has_the_scripted_status_headers_and_body(path: str) -> None:
    headers = {"Retry-After": "2", "Content-Type": "text/html"}
    reply = Reply(status=503, headers=headers, body="<h1>busy</h1>")
    async with open_provider_client(reply) as client, client.post(path) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "2"
        assert response.content_type == "text/html"
        assert await response.text() == "<h1>busy</h1>"


@both
async def test_a_scripted_body_with_status_200_is_sent_unchanged(path: str) -> None:
    async with (
        open_provider_client(Reply(body="not what you think")) as client,
        client.post(path) as response,
    ):
        assert (response.status, await response.text()) == (200, "not what you think")


@both
async def test_a_held_answer_waits_until_it_is_released(path: str) -> None:
    async with open_provider_client(Reply(text="one two three", hold_after=2)) as client:
        async with client.post(path) as response:
            before = events_in(await read_until(response, b'"two "'))
            assert text_pieces(before) == ["one ", "two "]
            assert not client.server.requests[0].ended
            client.server.release()
            after = events_in(await response.read())
        assert text_pieces(after) == ["three"]
        assert is_end(after[-1])
        assert client.server.requests[0].ended


@both
async def test_one_of_two_held_answers_is_released_by_its_number(path: str) -> None:
    replies = [Reply(text="Hi", hold_after=0)] * 2
    async with (
        open_provider_client(*replies) as client,
        client.post(path) as first,
        client.post(path) as second,
    ):
        with pytest.raises(NotFound):
            client.server.release(3)
        assert (await client.control("POST", "/culm/release?n=3"))[0] == 404
        assert (await client.control("POST", "/culm/release?n=x"))[0] == 400
        client.server.release(2)
        assert text_of(events_in(await second.read())) == "Hi"
        assert not client.server.requests[0].ended
        assert await client.control("POST", "/culm/release") == (200, {"ok": True})
        assert text_of(events_in(await first.read())) == "Hi"


@both
async def test_a_release_before_the_hold_counts(path: str) -> None:
    async with open_provider_client(Reply(text="Hi", delay_s=0.05, hold_after=0)) as client:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(client.stream(path))
            await client.server.until_requests(1)
            client.server.release()
        assert text_of(asking.result()) == "Hi"


@both
@pytest.mark.parametrize("after", [0, 1])
async def test_a_stalled_answer_sends_nothing_more_until_the_client_leaves(
    path: str, after: int
) -> None:
    async with open_provider_client(Reply(text="one two", stall_after=after)) as client:
        async with client.post(path) as response:
            if after:
                assert b"two" not in await read_until(response, b'"one "')
            client.server.release()  # This has no effect on a stall.
            response.close()
        async with asyncio.timeout(WAIT_S):
            await client.server.until_left(1)
        (seen,) = client.server.requests
        assert (seen.left, seen.ended) == (True, False)


@both
@pytest.mark.parametrize("after", [0, 1, 99])
async def test_a_cut_answer_arrives_partially_and_has_no_end(path: str, after: int) -> None:
    async with open_provider_client(Reply(text="one two", cut_after=after)) as client:
        received = b""
        async with client.post(path) as response:
            with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012 - any of the reads
                while piece := await response.content.readany():
                    received += piece
        events = events_in(received)
        assert text_pieces(events) == ["one ", "two"][:after]
        assert not is_end(events[-1])
        (seen,) = client.server.requests
        assert (seen.left, seen.ended) == (False, True)
        with pytest.raises(Conflict):
            await client.server.until_left(1)


@both
async def test_a_malformed_event_is_sent_between_valid_ones(path: str) -> None:
    async with open_provider_client(Reply(text="one two", malformed_after=1)) as client:
        events = await client.stream(path)
    assert text_of(events) == "one two"
    broken = [event for event in events if isinstance(event, str) and event != "[DONE]"]
    assert len(broken) == 1
    assert broken[0].startswith("{")


@both
async def test_an_unknown_event_is_sent_between_known_ones(path: str) -> None:
    async with open_provider_client(
        *[Reply(text="one two", unknown_event=True), Reply(text="one two")]
    ) as client:
        with_unknown, without = await client.stream(path), await client.stream(path)
    assert text_of(with_unknown) == text_of(without) == "one two"
    assert len(with_unknown) == len(without) + 1


@both
async def test_a_long_line_is_one_long_delta(path: str) -> None:
    async with open_provider_client(Reply(text="Hi", long_line_bytes=2_000_000)) as client:
        filler, text = text_pieces(await client.stream(path))
    assert set(filler) == {"x"}
    assert 1_999_500 < len(filler) < 2_000_000
    assert text == "Hi"


@both
async def test_the_response_head_waits_for_the_scripted_delay(path: str) -> None:
    loop = asyncio.get_running_loop()
    async with open_provider_client(Reply(text="Hi", delay_s=0.1)) as client:
        begun_s = loop.time()
        async with client.post(path):
            assert loop.time() - begun_s >= 0.099


@both
async def test_a_paced_answer_keeps_to_its_schedule(path: str) -> None:
    async with open_provider_client(Reply(tokens=50, rate=250, stamp=True)) as client:
        pieces = text_pieces(await client.stream(path))
    sent_ns = [int(piece.removeprefix("@")) for piece in pieces]
    assert len(sent_ns) == 50
    # 49 pauses of 4 ms. A busy machine may send late, and the first later than the last.
    assert sent_ns[-1] - sent_ns[0] > 150e6
    assert sent_ns == sorted(sent_ns)


@both
async def test_faults_also_apply_to_an_answer_without_a_stream(path: str) -> None:
    async with open_provider_client(
        Reply(text="Hi", hold_after=3, rate=1_000),
        Reply(text="Hi", malformed_after=0),
        Reply(text="Hi", error_after=0),
        Reply(text="Hi", cut_after=0),
        Reply(text="Hi", stall_after=0),
    ) as client:
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(client.ask(path))
            await client.server.until_requests(1)
            client.server.release(1)
        assert held.result()["model"] == "m"
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            await client.ask(path)
        assert (await client.refused(path, stream=False))[0] == 500
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.ask(path)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            stalled = tasks.create_task(client.ask(path))
            await client.server.until_requests(5)
            stalled.cancel()
        async with asyncio.timeout(WAIT_S):
            await client.server.until_left(5)
        assert [seen.left for seen in client.server.requests] == [False] * 4 + [True]


# --- the request log


@both
async def test_a_request_is_recorded_unchanged(path: str) -> None:
    async with open_provider_client(Reply(text="Hi")) as client:
        client.session.headers["X-Api-Key"] = "sk-test"
        await client.stream(path, temperature=0.5)
        (seen,) = client.server.requests
        assert (seen.n, seen.path) == (1, f"/v1{path}")
        assert seen.headers["x-api-key"] == "sk-test"
        assert seen.body["temperature"] == 0.5
        assert (seen.left, seen.ended) == (False, True)
        _, (listed,) = await client.control("GET", "/culm/requests")
        assert listed == {
            "n": 1,
            "path": f"/v1{path}",
            "body": seen.body,
            "left": False,
            "ended": True,
        }


@both
async def test_a_client_that_leaves_during_an_answer_is_recorded(path: str) -> None:
    async with open_provider_client(Reply(tokens=1_000_000)) as client:
        async with client.post(path) as response:
            await read_until(response, b"tok1 ")
            response.close()
        async with asyncio.timeout(WAIT_S):
            await client.server.until_left(1)
        assert not client.server.requests[0].ended


@both
async def test_a_client_that_leaves_after_the_end_is_not_recorded_as_left(path: str) -> None:
    end = b"[DONE]" if path == OPENAI else b"message_stop"
    async with open_provider_client(*[Reply(tokens=200)] * 20) as client:
        for _ in range(20):
            async with client.post(path) as response:
                await read_until(response, end)
                response.close()
        assert [(s.left, s.ended) for s in client.server.requests] == [(False, True)] * 20


async def test_twenty_concurrent_answers_are_all_complete() -> None:
    async with open_provider_client(script=Script(otherwise=Reply(tokens=2_000))) as client:
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(client.stream(OPENAI)) for _ in range(20)]
        wanted = [f"tok{n} " for n in range(2_000)]
        assert all(text_pieces(task.result()) == wanted for task in asking)


# --- shutdown


@both
async def test_no_task_is_left_when_the_block_ends(path: str) -> None:
    tasks_before = asyncio.all_tasks()
    async with aiohttp.ClientSession() as session:
        script = Script(otherwise=Reply(text="one two", stall_after=1))
        async with open_model_server(script) as server:
            body = encode({"messages": [], "stream": True})
            response = await session.post(server.url + path, data=body)
            await read_until(response, b'"one "')
            await (await session.get(server.url + "/models")).read()
        assert asyncio.all_tasks() == tasks_before
        (seen,) = server.requests
        assert (seen.left, seen.ended) == (False, False)
        with pytest.raises(aiohttp.ClientError):
            await session.get(server.url + "/models")
        response.close()


async def test_a_client_that_does_not_read_does_not_block_shutdown() -> None:
    script = Script(otherwise=Reply(tokens=1_000_000))
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.settimeout(0)
        async with asyncio.timeout(WAIT_S), open_model_server(script) as server:
            host, port = server.url.removeprefix("http://").removesuffix("/v1").split(":")
            await loop.sock_connect(client, (host, int(port)))
            body = encode({"messages": [], "stream": True})
            head = f"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            await loop.sock_sendall(client, head.encode() + body)
            await server.until_requests(1)


async def test_a_port_in_use_is_named_in_the_error() -> None:
    async with open_model_server() as server:
        port = int(server.url.removesuffix("/v1").rpartition(":")[2])
        with pytest.raises(ListenFailed, match=f"http://127.0.0.1:{port}"):
            async with open_model_server(port=port):
                pass

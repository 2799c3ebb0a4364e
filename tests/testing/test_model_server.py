"""The scripted provider over real sockets: every trouble, what it has seen, and its own end."""

import asyncio
import socket

import aiohttp
import pytest

from culm.errors import Conflict, ListenFailed, NotFound
from culm.testing import model_server
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Rule, Script
from culm.wire.codec import encode
from tests.support import WAIT_S
from tests.testing.talk import (
    ANTHROPIC,
    OPENAI,
    both,
    events_in,
    is_end,
    open_talk,
    text_of,
    text_pieces,
)


async def read_until(response: aiohttp.ClientResponse, wanted: bytes) -> bytes:
    """What has come when `wanted` is in it."""
    data = b""
    async with asyncio.timeout(WAIT_S):
        while wanted not in data:
            piece = await response.content.readany()
            assert piece, f"the stream ended: {data!r}"
            data += piece
    return data


# --- what is answered


@both
async def test_requests_get_the_replies_in_order_and_an_error_when_none_is_left(path: str) -> None:
    async with open_talk(Reply(text="One."), Reply(text="Two.")) as talk:
        assert text_of(await talk.stream(path)) == "One."
        assert text_of(await talk.stream(path)) == "Two."
        status, answer = await talk.refused(path)
        assert status == 500
        assert "the script is exhausted: for request 3" in answer["error"]["message"]
        talk.server.add(Reply(text="Three."))
        assert text_of(await talk.stream(path)) == "Three."


@both
async def test_a_rule_takes_the_request_whose_words_it_knows(path: str) -> None:
    script = Script([Reply(text="plain")], [Rule("be a pirate", Reply(text="Arr"))])
    async with open_talk(script=script) as talk:
        assert text_of(await talk.stream(path, system="You must be a pirate.")) == "Arr"
        assert text_of(await talk.stream(path)) == "plain"


async def test_a_new_script_takes_the_place_of_the_old_one() -> None:
    async with open_talk(Reply(text="old")) as talk:
        talk.server.play(Script(otherwise=Reply(text="new")))
        assert text_of(await talk.stream(OPENAI)) == "new"
        wish = encode({"otherwise": {"text": "newer"}})
        assert await talk.control("POST", "/culm/script", wish) == (200, {"ok": True})
        assert text_of(await talk.stream(OPENAI)) == "newer"
        status, answer = await talk.control("POST", "/culm/script", b'{"otherwise": {"x": 1}}')
        assert status == 400
        assert "unknown field `x` - at `$.otherwise`" in answer["error"]["message"]


@both
async def test_a_request_that_is_not_usable_is_refused_and_uses_no_reply(path: str) -> None:
    async with open_talk(Reply(text="kept")) as talk:
        deep = b'{"messages": %b}' % (b"[" * 100_000 + b"]" * 100_000)
        for body in (b"", b"{", b"[]", b"{}", b'{"messages": [], "stream": "yes"}', deep):
            async with talk.session.post(talk.server.url + path, data=body) as response:
                assert response.status == 400, body[:50]
                assert "not usable" in (await response.json())["error"]["message"]
        assert talk.server.requests[1].body is None
        assert text_of(await talk.stream(path)) == "kept"


@both
async def test_a_body_that_is_too_large_is_refused(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_server, "BODY_BYTES_MAX", 1_000)
    async with open_talk() as talk:
        status, answer = await talk.refused(path, padding="x" * 1_000)
        assert status == 413
        assert answer["error"]["message"] == "a request may have at most 1000 bytes"


async def test_one_answer_too_many_at_a_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_server, "STREAMS_MAX", 1)
    async with open_talk(Reply(text="Hi", hold_after=0)) as talk, talk.post(OPENAI):
        status, answer = await talk.refused(ANTHROPIC)
        assert (status, answer["error"]["type"]) == (503, "overloaded_error")


async def test_models_are_listed_for_both_dialects() -> None:
    async with open_talk() as talk, talk.session.get(talk.server.url + "/models") as response:
        (model,) = (await response.json())["data"]
        assert (model["id"], model["object"], model["type"]) == ("scripted", "model", "model")


async def test_a_path_that_is_not_there_is_answered_with_those_that_are() -> None:
    async with open_talk() as talk:
        status, answer = await talk.control("POST", "/chat/completions")
        assert status == 404
        assert "POST /v1/chat/completions" in answer["error"]["message"]


# --- trouble


@both
async def test_a_plain_answer_has_the_status_headers_and_body_of_the_script(path: str) -> None:
    headers = {"Retry-After": "2", "Content-Type": "text/html"}
    reply = Reply(status=503, headers=headers, body="<h1>busy</h1>")
    async with open_talk(reply) as talk, talk.post(path) as response:
        assert response.status == 503
        assert response.headers["Retry-After"] == "2"
        assert response.content_type == "text/html"
        assert await response.text() == "<h1>busy</h1>"


@both
async def test_a_body_with_status_200_is_an_answer_that_no_client_expects(path: str) -> None:
    async with open_talk(Reply(body="not what you think")) as talk, talk.post(path) as response:
        assert (response.status, await response.text()) == (200, "not what you think")


@both
async def test_a_held_answer_waits_until_it_is_released(path: str) -> None:
    async with open_talk(Reply(text="one two three", hold_after=2)) as talk:
        async with talk.post(path) as response:
            before = events_in(await read_until(response, b'"two "'))
            assert text_pieces(before) == ["one ", "two "]
            assert not talk.server.requests[0].ended
            talk.server.release()
            after = events_in(await response.read())
        assert text_pieces(after) == ["three"]
        assert is_end(after[-1])
        assert talk.server.requests[0].ended


@both
async def test_one_of_two_held_answers_is_released_by_its_number(path: str) -> None:
    replies = [Reply(text="Hi", hold_after=0)] * 2
    async with open_talk(*replies) as talk, talk.post(path) as first, talk.post(path) as second:
        with pytest.raises(NotFound):
            talk.server.release(3)
        assert (await talk.control("POST", "/culm/release?n=3"))[0] == 404
        assert (await talk.control("POST", "/culm/release?n=x"))[0] == 400
        talk.server.release(2)
        assert text_of(events_in(await second.read())) == "Hi"
        assert not talk.server.requests[0].ended
        assert await talk.control("POST", "/culm/release") == (200, {"ok": True})
        assert text_of(events_in(await first.read())) == "Hi"


@both
async def test_a_release_before_the_answer_has_come_so_far_counts(path: str) -> None:
    async with open_talk(Reply(text="Hi", delay_s=0.05, hold_after=0)) as talk:
        async with asyncio.TaskGroup() as tasks:
            asking = tasks.create_task(talk.stream(path))
            await talk.server.until_requests(1)
            talk.server.release()
        assert text_of(asking.result()) == "Hi"


@both
@pytest.mark.parametrize("after", [0, 1])
async def test_a_stalled_answer_sends_no_more_until_the_client_leaves(
    path: str, after: int
) -> None:
    async with open_talk(Reply(text="one two", stall_after=after)) as talk:
        async with talk.post(path) as response:
            if after:
                assert b"two" not in await read_until(response, b'"one "')
            talk.server.release()  # It does not help here.
            response.close()
        async with asyncio.timeout(WAIT_S):
            await talk.server.until_left(1)
        (seen,) = talk.server.requests
        assert (seen.left, seen.ended) == (True, False)


@both
@pytest.mark.parametrize("after", [0, 1, 99])
async def test_a_cut_answer_arrives_as_far_as_it_was_sent_and_has_no_end(
    path: str, after: int
) -> None:
    async with open_talk(Reply(text="one two", cut_after=after)) as talk:
        received = b""
        async with talk.post(path) as response:
            with pytest.raises(aiohttp.ClientPayloadError):  # noqa: PT012 - any of the reads
                while piece := await response.content.readany():
                    received += piece
        events = events_in(received)
        assert text_pieces(events) == ["one ", "two"][:after]
        assert not is_end(events[-1])
        (seen,) = talk.server.requests
        assert (seen.left, seen.ended) == (False, True)
        with pytest.raises(Conflict):
            await talk.server.until_left(1)


@both
async def test_a_line_that_is_not_json_comes_between_good_ones(path: str) -> None:
    async with open_talk(Reply(text="one two", malformed_after=1)) as talk:
        events = await talk.stream(path)
    assert text_of(events) == "one two"
    broken = [event for event in events if isinstance(event, str) and event != "[DONE]"]
    assert len(broken) == 1
    assert broken[0].startswith("{")


@both
async def test_an_unknown_event_comes_between_known_ones(path: str) -> None:
    async with open_talk(
        *[Reply(text="one two", unknown_event=True), Reply(text="one two")]
    ) as talk:
        with_unknown, without = await talk.stream(path), await talk.stream(path)
    assert text_of(with_unknown) == text_of(without) == "one two"
    assert len(with_unknown) == len(without) + 1


@both
async def test_a_long_line_is_a_long_delta(path: str) -> None:
    async with open_talk(Reply(text="Hi", long_line_bytes=2_000_000)) as talk:
        filler, text = text_pieces(await talk.stream(path))
    assert set(filler) == {"x"}
    assert 1_999_500 < len(filler) < 2_000_000
    assert text == "Hi"


@both
async def test_the_head_waits_as_long_as_the_script_says(path: str) -> None:
    loop = asyncio.get_running_loop()
    async with open_talk(Reply(text="Hi", delay_s=0.1)) as talk:
        begun_s = loop.time()
        async with talk.post(path):
            assert loop.time() - begun_s >= 0.099


@both
async def test_a_paced_answer_keeps_to_its_schedule(path: str) -> None:
    async with open_talk(Reply(tokens=50, rate=250, stamp=True)) as talk:
        pieces = text_pieces(await talk.stream(path))
    sent_ns = [int(piece.removeprefix("@")) for piece in pieces]
    assert len(sent_ns) == 50
    # 49 pauses of 4 ms. A busy machine may send late, and the first later than the last.
    assert sent_ns[-1] - sent_ns[0] > 150e6
    assert sent_ns == sorted(sent_ns)


@both
async def test_trouble_of_an_answer_without_a_stream(path: str) -> None:
    async with open_talk(
        Reply(text="Hi", hold_after=3, rate=1_000),
        Reply(text="Hi", malformed_after=0),
        Reply(text="Hi", error_after=0),
        Reply(text="Hi", cut_after=0),
        Reply(text="Hi", stall_after=0),
    ) as talk:
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(talk.ask(path))
            await talk.server.until_requests(1)
            talk.server.release(1)
        assert held.result()["model"] == "m"
        with pytest.raises(ValueError, match=r"Unterminated|Expecting"):
            await talk.ask(path)
        assert (await talk.refused(path, stream=False))[0] == 500
        with pytest.raises(aiohttp.ClientPayloadError):
            await talk.ask(path)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
            stalled = tasks.create_task(talk.ask(path))
            await talk.server.until_requests(5)
            stalled.cancel()
        async with asyncio.timeout(WAIT_S):
            await talk.server.until_left(5)
        assert [seen.left for seen in talk.server.requests] == [False] * 4 + [True]


# --- what was seen


@both
async def test_a_request_is_remembered_as_it_came(path: str) -> None:
    async with open_talk(Reply(text="Hi")) as talk:
        talk.session.headers["X-Api-Key"] = "sk-test"
        await talk.stream(path, temperature=0.5)
        (seen,) = talk.server.requests
        assert (seen.n, seen.path) == (1, f"/v1{path}")
        assert seen.headers["x-api-key"] == "sk-test"
        assert seen.body["temperature"] == 0.5
        assert (seen.left, seen.ended) == (False, True)
        _, (told,) = await talk.control("GET", "/culm/requests")
        assert told == {
            "n": 1,
            "path": f"/v1{path}",
            "body": seen.body,
            "left": False,
            "ended": True,
        }


@both
async def test_a_client_that_leaves_in_the_middle_is_noticed(path: str) -> None:
    async with open_talk(Reply(tokens=1_000_000)) as talk:
        async with talk.post(path) as response:
            await read_until(response, b"tok1 ")
            response.close()
        async with asyncio.timeout(WAIT_S):
            await talk.server.until_left(1)
        assert not talk.server.requests[0].ended


@both
async def test_a_client_that_leaves_right_after_the_end_has_not_left_early(path: str) -> None:
    end = b"[DONE]" if path == OPENAI else b"message_stop"
    async with open_talk(*[Reply(tokens=200)] * 20) as talk:
        for _ in range(20):
            async with talk.post(path) as response:
                await read_until(response, end)
                response.close()
        assert [(s.left, s.ended) for s in talk.server.requests] == [(False, True)] * 20


async def test_twenty_answers_at_once_are_each_complete() -> None:
    async with open_talk(script=Script(otherwise=Reply(tokens=2_000))) as talk:
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(talk.stream(OPENAI)) for _ in range(20)]
        wanted = [f"tok{n} " for n in range(2_000)]
        assert all(text_pieces(task.result()) == wanted for task in asking)


# --- its own end


@both
async def test_nothing_is_left_running_when_the_block_ends(path: str) -> None:
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


async def test_a_client_that_does_not_read_does_not_keep_the_server() -> None:
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


async def test_a_port_that_is_taken_is_named() -> None:
    async with open_model_server() as server:
        port = int(server.url.removesuffix("/v1").rpartition(":")[2])
        with pytest.raises(ListenFailed, match=f"http://127.0.0.1:{port}"):
            async with open_model_server(port=port):
                pass

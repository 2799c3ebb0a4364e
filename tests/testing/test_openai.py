"""The OpenAI dialect as seen by a client."""

from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json
from tests.testing.provider_client import OPENAI, PROMPT, open_provider_client

USAGE = ScriptedUsage(input=10, output=4, cache_read=30, cache_write=2)
COUNTED = {
    "prompt_tokens": 42,
    "completion_tokens": 4,
    "total_tokens": 46,
    "prompt_tokens_details": {"cached_tokens": 30},
}
CALL = ScriptedCall(id="c", name="bash", input={"command": "ls"})


def choice(event: Json) -> Json:
    assert event["object"] == "chat.completion.chunk"
    assert (event["id"], event["model"]) == ("chatcmpl-1", "m")
    (found,) = event["choices"]
    return found


async def test_a_stream_has_reasoning_text_calls_a_finish_reason_and_an_end() -> None:
    async with open_provider_client(Reply(reasoning="Hm", text="Hi you", calls=[CALL])) as client:
        *events, done = await client.stream(OPENAI)
    assert done == "[DONE]"
    *choices, last = map(choice, events)
    assert {c["finish_reason"] for c in choices} == {None}
    assert last == {"index": 0, "delta": {}, "finish_reason": "tool_calls"}
    function = {"name": "bash", "arguments": ""}
    assert [c["delta"] for c in choices] == [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "Hm"},
        {"content": "Hi "},
        {"content": "you"},
        {"tool_calls": [{"id": "c", "type": "function", "function": function, "index": 0}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": '{"comman'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": 'd":"ls"}'}}]},
    ]


async def test_parallel_calls_have_their_own_index() -> None:
    calls = [ScriptedCall(name="a", input="0123456789"), ScriptedCall(name="b", input="{oops")]
    async with open_provider_client(Reply(calls=calls, interleave=True)) as client:
        *events, _ = await client.stream(OPENAI)
    pieces = [call for e in events for call in choice(e)["delta"].get("tool_calls", [])]
    assert [(p["index"], p.get("id"), p["function"]) for p in pieces] == [
        (0, "call_1_0", {"name": "a", "arguments": ""}),
        (1, "call_1_1", {"name": "b", "arguments": ""}),
        (0, None, {"arguments": "01234567"}),
        (1, None, {"arguments": "{oops"}),
        (0, None, {"arguments": "89"}),
    ]


async def test_usage_is_the_last_chunk_and_sent_only_on_request() -> None:
    async with open_provider_client(*[Reply(text="Hi", usage=USAGE)] * 2) as client:
        asked = await client.stream(OPENAI, stream_options={"include_usage": True})
        not_asked = await client.stream(OPENAI)
    assert asked[-2]["choices"] == []
    assert asked[-2]["usage"] == COUNTED
    assert all(event["usage"] is None for event in asked[:-3])
    assert not any("usage" in event for event in not_asked[:-1])


async def test_usage_omitted_by_the_script_is_not_sent() -> None:
    async with open_provider_client(*[Reply(text="Hi", usage=None)] * 2) as client:
        *events, _ = await client.stream(OPENAI, stream_options={"include_usage": True})
        assert not any(event.get("usage") for event in events)
        assert "usage" not in await client.ask(OPENAI)


async def test_every_finish_reason_is_translated() -> None:
    reasons = {
        "end_turn": "stop",
        "max_tokens": "length",
        "tool_use": "tool_calls",
        "content_filter": "content_filter",
        "a new one": "a new one",
    }
    async with open_provider_client(
        *(Reply(text="Hi", finish=finish) for finish in reasons)
    ) as client:
        sent = [(await client.ask(OPENAI))["choices"][0]["finish_reason"] for _ in reasons]
    assert sent == list(reasons.values())


async def test_an_answer_without_a_stream_is_one_object() -> None:
    reply = Reply(reasoning="Hm", text="Hi you", calls=[CALL], usage=USAGE)
    async with open_provider_client(reply) as client:
        answer = await client.ask(OPENAI)
        (seen,) = client.server.requests
    function = {"name": "bash", "arguments": '{"command":"ls"}'}
    message = {
        "role": "assistant",
        "content": "Hi you",
        "reasoning_content": "Hm",
        "tool_calls": [{"id": "c", "type": "function", "function": function}],
    }
    assert answer == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": int(seen.at),
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": COUNTED,
    }
    assert seen.body == {"model": "m", "stream": False, "messages": PROMPT}


async def test_errors_have_the_shape_of_the_dialect() -> None:
    async with open_provider_client(
        Reply(status=401), Reply(status=429), Reply(status=502)
    ) as client:
        for status, kind in (
            (401, "authentication_error"),
            (429, "rate_limit_error"),
            (502, "server_error"),
        ):
            message = f"the script answers this request with status {status}"
            error = {"message": message, "type": kind, "param": None, "code": None}
            assert await client.refused(OPENAI) == (status, {"error": error})


async def test_an_error_inside_a_stream_is_the_last_event() -> None:
    async with open_provider_client(Reply(text="a b c", error_after=2)) as client:
        *events, error = await client.stream(OPENAI)
    assert error["error"]["type"] == "server_error"
    assert [choice(event)["delta"]["content"] for event in events] == ["", "a ", "b "]

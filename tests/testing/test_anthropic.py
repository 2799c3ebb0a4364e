"""The Anthropic dialect as seen by a client."""

from culm.testing.dialects import SIGNATURE
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json
from tests.testing.provider_client import ANTHROPIC, open_provider_client

USAGE = ScriptedUsage(input=10, output=4, cache_read=30, cache_write=2)
COUNTED = {
    "input_tokens": 10,
    "cache_creation_input_tokens": 2,
    "cache_read_input_tokens": 30,
    "output_tokens": 4,
}
CALL = ScriptedCall(id="c", name="bash", input={"command": "ls"})
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m"}
OPEN: dict[str, Json] = MESSAGE | {"content": [], "stop_reason": None, "stop_sequence": None}


def block_start(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **fields: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def block_stop(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


async def test_a_stream_has_blocks_between_message_start_and_message_stop() -> None:
    reply = Reply(reasoning="Hm", text="Hi you", calls=[CALL], usage=USAGE)
    async with open_provider_client(reply) as client:
        events = await client.stream(ANTHROPIC)
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    assert events == [
        {"type": "message_start", "message": OPEN | {"usage": COUNTED | {"output_tokens": 1}}},
        {"type": "ping"},
        block_start(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="Hm"),
        delta(0, "signature_delta", signature=SIGNATURE),
        block_stop(0),
        block_start(1, {"type": "text", "text": ""}),
        delta(1, "text_delta", text="Hi "),
        delta(1, "text_delta", text="you"),
        block_stop(1),
        block_start(2, {"type": "tool_use", "id": "c", "name": "bash", "input": {}}),
        delta(2, "input_json_delta", partial_json='{"comman'),
        delta(2, "input_json_delta", partial_json='d":"ls"}'),
        block_stop(2),
        {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]


async def test_every_event_is_named_after_its_type() -> None:
    reply = Reply(text="Hi", unknown_event=True)
    async with open_provider_client(reply) as client, client.post(ANTHROPIC) as response:
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    for block in blocks:
        event, data = block.split("\n")
        assert data.startswith(f'data: {{"type":"{event.removeprefix("event: ")}"')


async def test_parallel_calls_have_their_own_block_index() -> None:
    calls = [ScriptedCall(name="a", input="0123456789"), ScriptedCall(name="b", input="{oops")]
    async with open_provider_client(Reply(calls=calls, interleave=True)) as client:
        events = await client.stream(ANTHROPIC)
    assert events[2:-2] == [
        block_start(0, {"type": "tool_use", "id": "call_1_0", "name": "a", "input": {}}),
        block_start(1, {"type": "tool_use", "id": "call_1_1", "name": "b", "input": {}}),
        delta(0, "input_json_delta", partial_json="01234567"),
        delta(1, "input_json_delta", partial_json="{oops"),
        delta(0, "input_json_delta", partial_json="89"),
        block_stop(0),
        block_stop(1),
    ]


async def test_usage_omitted_by_the_script_is_not_sent() -> None:
    async with open_provider_client(*[Reply(text="Hi", usage=None)] * 2) as client:
        events = await client.stream(ANTHROPIC)
        assert events[0]["message"] == OPEN
        assert "usage" not in events[-2]
        assert "usage" not in await client.ask(ANTHROPIC)


async def test_every_finish_reason_is_translated() -> None:
    reasons = {
        "end_turn": "end_turn",
        "max_tokens": "max_tokens",
        "tool_use": "tool_use",
        "content_filter": "refusal",
        "a new one": "a new one",
    }
    async with open_provider_client(
        *(Reply(text="Hi", finish=finish) for finish in reasons)
    ) as client:
        sent = [(await client.ask(ANTHROPIC))["stop_reason"] for _ in reasons]
    assert sent == list(reasons.values())


async def test_an_answer_without_a_stream_is_one_object() -> None:
    broken = ScriptedCall(id="d", name="view", input="{oops")
    reply = Reply(reasoning="Hm", text="Hi you", calls=[CALL, broken], usage=USAGE)
    async with open_provider_client(reply) as client:
        answer = await client.ask(ANTHROPIC)
    content = [
        {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE},
        {"type": "text", "text": "Hi you"},
        {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "d", "name": "view", "input": "{oops"},
    ]
    rest = {"stop_reason": "tool_use", "stop_sequence": None, "usage": COUNTED}
    assert answer == MESSAGE | {"content": content} | rest


async def test_errors_have_the_shape_of_the_dialect() -> None:
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }
    async with open_provider_client(*(Reply(status=status) for status in kinds)) as client:
        for status, kind in kinds.items():
            message = f"the script answers this request with status {status}"
            error = {"type": "error", "error": {"type": kind, "message": message}}
            assert await client.refused(ANTHROPIC) == (status, error)


async def test_an_error_inside_a_stream_is_the_last_event() -> None:
    async with open_provider_client(Reply(text="a b c", error_after=2)) as client:
        events = await client.stream(ANTHROPIC)
    assert events[-2] == delta(0, "text_delta", text="b ")
    assert events[-1]["error"]["type"] == "overloaded_error"

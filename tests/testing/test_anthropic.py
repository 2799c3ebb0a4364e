"""The Anthropic dialect, as a client reads it."""

from culm.testing.anthropic import SIGNATURE
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.codec import Json
from tests.testing.talk import ANTHROPIC, open_talk

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


def began(index: int, block: Json) -> Json:
    return {"type": "content_block_start", "index": index, "content_block": block}


def delta(index: int, kind: str, **fields: str) -> Json:
    return {"type": "content_block_delta", "index": index, "delta": {"type": kind, **fields}}


def ended(index: int) -> Json:
    return {"type": "content_block_stop", "index": index}


async def test_a_stream_is_blocks_between_the_start_and_the_end_of_a_message() -> None:
    reply = Reply(reasoning="Hm", text="Hi you", calls=[CALL], usage=USAGE)
    async with open_talk(reply) as talk:
        events = await talk.stream(ANTHROPIC)
    stop = {"stop_reason": "tool_use", "stop_sequence": None}
    assert events == [
        {"type": "message_start", "message": OPEN | {"usage": COUNTED | {"output_tokens": 1}}},
        {"type": "ping"},
        began(0, {"type": "thinking", "thinking": "", "signature": ""}),
        delta(0, "thinking_delta", thinking="Hm"),
        delta(0, "signature_delta", signature=SIGNATURE),
        ended(0),
        began(1, {"type": "text", "text": ""}),
        delta(1, "text_delta", text="Hi "),
        delta(1, "text_delta", text="you"),
        ended(1),
        began(2, {"type": "tool_use", "id": "c", "name": "bash", "input": {}}),
        delta(2, "input_json_delta", partial_json='{"comman'),
        delta(2, "input_json_delta", partial_json='d":"ls"}'),
        ended(2),
        {"type": "message_delta", "delta": stop, "usage": {"output_tokens": 4}},
        {"type": "message_stop"},
    ]


async def test_the_name_of_every_event_is_its_type() -> None:
    reply = Reply(text="Hi", unknown_event=True)
    async with open_talk(reply) as talk, talk.post(ANTHROPIC) as response:
        blocks = (await response.text()).removesuffix("\n\n").split("\n\n")
    for block in blocks:
        event, data = block.split("\n")
        assert data.startswith(f'data: {{"type":"{event.removeprefix("event: ")}"')


async def test_parallel_calls_are_told_apart_by_their_block() -> None:
    calls = [ScriptedCall(name="a", input="0123456789"), ScriptedCall(name="b", input="{oops")]
    async with open_talk(Reply(calls=calls, interleave=True)) as talk:
        events = await talk.stream(ANTHROPIC)
    assert events[2:-2] == [
        began(0, {"type": "tool_use", "id": "call_1_0", "name": "a", "input": {}}),
        began(1, {"type": "tool_use", "id": "call_1_1", "name": "b", "input": {}}),
        delta(0, "input_json_delta", partial_json="01234567"),
        delta(1, "input_json_delta", partial_json="{oops"),
        delta(0, "input_json_delta", partial_json="89"),
        ended(0),
        ended(1),
    ]


async def test_usage_that_the_script_leaves_out_is_not_sent() -> None:
    async with open_talk(*[Reply(text="Hi", usage=None)] * 2) as talk:
        events = await talk.stream(ANTHROPIC)
        assert events[0]["message"] == OPEN
        assert "usage" not in events[-2]
        assert "usage" not in await talk.ask(ANTHROPIC)


async def test_every_reason_to_finish_is_said_in_this_dialect() -> None:
    reasons = {
        "end_turn": "end_turn",
        "max_tokens": "max_tokens",
        "tool_use": "tool_use",
        "content_filter": "refusal",
        "a new one": "a new one",
    }
    async with open_talk(*(Reply(text="Hi", finish=finish) for finish in reasons)) as talk:
        said = [(await talk.ask(ANTHROPIC))["stop_reason"] for _ in reasons]
    assert said == list(reasons.values())


async def test_an_answer_without_a_stream_is_one_object() -> None:
    broken = ScriptedCall(id="d", name="view", input="{oops")
    reply = Reply(reasoning="Hm", text="Hi you", calls=[CALL, broken], usage=USAGE)
    async with open_talk(reply) as talk:
        answer = await talk.ask(ANTHROPIC)
    content = [
        {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE},
        {"type": "text", "text": "Hi you"},
        {"type": "tool_use", "id": "c", "name": "bash", "input": {"command": "ls"}},
        {"type": "tool_use", "id": "d", "name": "view", "input": "{oops"},
    ]
    rest = {"stop_reason": "tool_use", "stop_sequence": None, "usage": COUNTED}
    assert answer == MESSAGE | {"content": content} | rest


async def test_errors_have_the_shape_of_this_dialect() -> None:
    kinds = {
        400: "invalid_request_error",
        401: "authentication_error",
        429: "rate_limit_error",
        500: "api_error",
        529: "overloaded_error",
    }
    async with open_talk(*(Reply(status=status) for status in kinds)) as talk:
        for status, kind in kinds.items():
            message = f"the script answers this request with status {status}"
            error = {"type": "error", "error": {"type": kind, "message": message}}
            assert await talk.refused(ANTHROPIC) == (status, error)


async def test_an_error_within_a_stream_is_an_event_and_then_there_is_no_more() -> None:
    async with open_talk(Reply(text="a b c", error_after=2)) as talk:
        events = await talk.stream(ANTHROPIC)
    assert events[-2] == delta(0, "text_delta", text="b ")
    assert events[-1]["error"]["type"] == "overloaded_error"

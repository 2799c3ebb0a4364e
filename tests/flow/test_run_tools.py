"""Calls of a turn: sequential or parallel, each run once and answered once."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall
from culm.tools.base import CallRequest, CallResult
from culm.wire.messages import Finish, ToolCall
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired, calls_of, finish_of, results_of
from tests.flow.runs import open_received, open_runs
from tests.support import contract


def by_input(*texts: str, name: str = "tool") -> Reply:
    """Calls with exactly these arguments."""
    return Reply(calls=[ScriptedCall(name=name, input=text) for text in texts])


# --- order of a turn


@contract("INV-37", "INV-82")
async def test_turn_repeats_request_and_calls_until_no_call_remains(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("look")
    play = script(calling("look", text="First.", path="a"), calling("look", text="Then.", path="b"))
    async with open_runs(tmp_path, kind, play, tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        complete = await harness.received.complete(run_id)
        assert await harness.rows() == [
            ("user", "Hi.", "stop"),
            ("assistant", "First.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "Then.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "Fine.", "end_turn"),
        ]
        assert (complete.text, complete.message_id) == ("Fine.", (await harness.messages())[-1].id)
        assert [call.arguments for call in tool.calls] == [{"path": "a"}, {"path": "b"}]
        assert_answered(await harness.messages())
        for n in (1, 2, 3):
            assert_paired(harness.sent(n))
        assert [(m.role, m.content) for m in harness.sent(3)] == [
            ("user", "Hi."),
            ("assistant", "First."),
            ("tool", "look 1"),
            ("assistant", "Then."),
            ("tool", "look 2"),
        ]
        run = await harness.run(run_id)
        assert (run.steps, run.outcome) == (3, "end_turn")


async def test_call_is_stored_completely_before_it_runs(tmp_path: Path) -> None:
    gate = Gate()
    play = script(calling("held", "held", path="a/b.txt"))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        calls = calls_of(await harness.messages())
        assert [(call.input, call.finished) for call in calls] == [('{"path":"a/b.txt"}', True)] * 2
        gate.release()
        await harness.received.complete(run_id)


async def test_parallel_calls_run_at_most_five_at_a_time(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tool = Probe("side", gate.pass_through, parallel=True)
    async with open_runs(tmp_path, play=script(calling(*["side"] * 8)), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 5)
        await harness.flow.run_ready()
        assert len(tool.calls) == 5
        gate.release()
        await harness.received.complete(run_id)
        assert (len(tool.calls), gate.inside_max) == (8, 5)
        assert_answered(await harness.messages())
        assert_paired(harness.sent(2))


async def test_other_calls_run_one_by_one_in_order(tmp_path: Path) -> None:
    side_gate, gate, order = Gate(), Gate(), list[str]()

    async def note(call: CallRequest) -> CallResult:
        order.append(call.name)
        return CallResult("noted")

    tools = [
        Probe("side", side_gate.pass_through, parallel=True),
        Probe("alone", gate.pass_through),
        Probe("first", note),
        Probe("last", note),
    ]
    play = script(calling("first", "side", "side", "alone", "alone", "last"))
    async with open_runs(tmp_path, play=play, tools=tools) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: side_gate.inside == 2)
        await harness.flow.run_ready()
        assert (gate.inside, order) == (0, ["first"])
        side_gate.release()
        await until(lambda: gate.inside == 1)
        await harness.flow.run_ready()
        assert (gate.inside, order) == (1, ["first"])
        gate.release()
        await harness.received.complete(run_id)
        assert (gate.inside_max, order) == (1, ["first", "last"])
        names = [result.name for result in results_of(await harness.messages())]
        assert sorted(names) == ["alone", "alone", "first", "last", "side", "side"]


@pytest.mark.parametrize(("outcome", "reason"), [("end_turn", ""), ("denied", "denied")])
async def test_result_that_ends_the_turn_leaves_other_calls_answered_and_not_run(
    tmp_path: Path, outcome: str, reason: str
) -> None:
    async def end(call: CallRequest) -> CallResult:
        return CallResult("No.", is_error=True, ends_turn="denied" if reason else "end_turn")

    last = Probe("last")
    async with (
        open_runs(
            tmp_path, play=script(calling("end", "last")), tools=[Probe("end", end), last]
        ) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("Hi.")
        complete = await crush.complete(run_id)
        assert (complete.error, complete.culm_reason) == ("", reason)
        assert (await harness.run(run_id)).outcome == outcome
        messages = await harness.messages()
        assert_answered(messages)
        finish = finish_of(messages[1])
        assert (finish.reason, finish.culm_reason) == ("end_turn", reason)
        assert (last.calls, len(harness.seen())) == ([], 1)


# --- invalid calls


@pytest.mark.parametrize("text", ["{not json", '["a list"]', '"text"', "{", '{"a": 1'])
async def test_arguments_that_are_not_an_object_are_an_error_result(
    tmp_path: Path, text: str
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(by_input(text)), tools=[tool]) as harness:
        complete = await harness.received.complete(await harness.prompt("Hi."))
        assert complete.text == "Fine."
        messages = await harness.messages()
        (call,) = calls_of(messages)
        assert (call.input, call.finished) == ("{}", True)
        (result,) = results_of(messages)
        assert (result.is_error, "JSON" in result.content) == (True, True)
        assert harness.sent(2)[-1].content == result.content
        assert tool.calls == []


async def test_missing_arguments_are_an_empty_object(tmp_path: Path) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(by_input("")), tools=[tool]) as harness:
        await harness.received.complete(await harness.prompt("Hi."))
        assert [call.arguments for call in tool.calls] == [{}]
        (call,) = calls_of(await harness.messages())
        assert call == ToolCall(call.id, "tool", "{}", finished=True)


@pytest.mark.parametrize(
    "ids", [["same", "same", "same", "same~1"], ["same~2", "same", "same"], ["", "", "call_0"]]
)
async def test_calls_with_equal_ids_each_run_once_and_are_answered(
    tmp_path: Path, ids: list[str]
) -> None:
    tool = Probe("tool")
    calls = [ScriptedCall(name="tool", input={"n": n}, id=id_) for n, id_ in enumerate(ids)]
    async with open_runs(tmp_path, play=script(Reply(calls=calls)), tools=[tool]) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        assert [call.arguments for call in tool.calls] == [{"n": n} for n in range(len(ids))]
        messages = await harness.messages()
        assert len({call.id for call in calls_of(messages)}) == len(ids)
        assert_answered(messages)
        assert_paired(harness.sent(2))


async def test_answer_with_too_many_calls_is_an_error_and_its_calls_are_answered(
    tmp_path: Path,
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(calling(*["tool"] * 129)), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        assert (run.outcome, run.title) == ("error", "Too many calls")
        messages = await harness.messages()
        assert_answered(messages)
        assert (len(calls_of(messages)), tool.calls) == (64, [])


async def test_same_call_id_in_two_steps_is_two_calls(tmp_path: Path) -> None:
    tool = Probe("tool")
    again = Reply(calls=[ScriptedCall(name="tool", id="same")])
    async with open_runs(tmp_path, play=script(again, again), tools=[tool]) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        assert len(tool.calls) == len(results_of(await harness.messages())) == 2
        assert_paired(harness.sent(3))


async def test_unknown_tool_is_an_error_result_that_names_the_known_tools(
    tmp_path: Path,
) -> None:
    tools = [Probe("one"), Probe("two")]
    async with open_runs(tmp_path, play=script(calling("three")), tools=tools) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        (result,) = results_of(await harness.messages())
        assert result.is_error
        assert all(text in result.content for text in ("'three'", "one", "two"))


@contract("EXC-9")
@pytest.mark.parametrize("error", [ValueError("bad"), ConnectionResetError("net"), TimeoutError()])
async def test_tool_exception_is_an_error_result_and_the_call_is_not_repeated(
    tmp_path: Path, error: Exception
) -> None:
    async def fail(call: CallRequest) -> CallResult:
        raise error

    tool, other = Probe("fails", fail), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("other", "fails")), tools=[tool, other]
    ) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        results = results_of(await harness.messages())
        assert [(r.name, r.is_error) for r in results] == [("other", False), ("fails", True)]
        assert type(error).__name__ in results[1].content
        assert (len(tool.calls), len(other.calls), len(harness.seen())) == (1, 1, 2)


@pytest.mark.parametrize("parallel", [False, True])
async def test_externally_cancelled_tool_is_an_error_and_the_run_continues(
    tmp_path: Path, *, parallel: bool
) -> None:
    async def be_cancelled(call: CallRequest) -> CallResult:
        never: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        never.cancel()
        return await never

    tools = [Probe("vain", be_cancelled, parallel=parallel), Probe("other", parallel=parallel)]
    play = script(calling("vain", "other"))
    async with open_runs(tmp_path, play=play, tools=tools) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        errors = {result.name: result.is_error for result in results_of(await harness.messages())}
        assert errors == {"vain": True, "other": False}


# --- retries never repeat a call


@contract("EXC-9", "INV-38")
async def test_call_is_not_repeated_when_the_next_request_is_retried(
    tmp_path: Path,
) -> None:
    tool = Probe("tool")
    play = script(calling("tool"), Reply(status=503), Reply(text="Half", cut_after=1))
    async with open_runs(tmp_path, play=play, tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.clock.pass_retry(5.0)
        await harness.clock.pass_retry(10.0)
        assert (await harness.received.complete(run_id)).text == "Fine."
        assert (len(tool.calls), len(harness.seen())) == (1, 4)
        assert [m.role for m in harness.sent(4)] == [m.role for m in harness.sent(2)]
        assert_answered(await harness.messages())


@contract("EXC-9")
async def test_calls_of_an_interrupted_answer_are_not_run(tmp_path: Path) -> None:
    tool = Probe("tool")
    cut = Reply(text="I shall ", calls=[ScriptedCall(name="tool", input={"n": 1})], cut_after=99)
    whole = calling("tool", n=2)
    async with open_runs(tmp_path, play=script(cut, whole), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.clock.pass_retry(5.0)
        await harness.received.complete(run_id)
        assert [call.arguments for call in tool.calls] == [{"n": 2}]
        assert len(calls_of(await harness.messages())) == 1


async def test_answer_cut_at_max_tokens_runs_none_of_its_calls(tmp_path: Path) -> None:
    tool = Probe("tool")
    cut = Reply(text="So ", calls=[ScriptedCall(name="tool")], finish="max_tokens")
    async with open_runs(tmp_path, play=script(cut), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        complete = await harness.received.complete(run_id)
        assert (complete.error, complete.text) == ("", "So ")
        assert (await harness.run(run_id)).outcome == "max_tokens"
        messages = await harness.messages()
        assert_answered(messages)
        assert finish_of(messages[1]).reason == "max_tokens"
        assert tool.calls == []


@contract("INV-82")
async def test_request_after_an_interrupted_turn_has_no_call_without_a_result(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through), Probe("other")]
    half = Reply(calls=[ScriptedCall(name="other", input={"path": "abcdefgh"})], hold_after=1)
    cut = Reply(calls=[ScriptedCall(name="other")], finish="max_tokens")
    play = script(calling("other", "held", "other"), half, cut)
    async with open_runs(tmp_path, play=play, tools=tools) as harness:
        await harness.prompt("One.", run_id="one")
        await until(lambda: gate.inside == 1)
        await harness.cancel()
        await harness.received.complete("one")
        await harness.prompt("Two.", run_id="two")
        await harness.received.event_with("message_delta", '"kind":"input"', "pat")
        await harness.cancel()
        await harness.received.complete("two")
        await harness.received.complete(await harness.prompt("Three."))
        await harness.received.complete(await harness.prompt("Four."))
        for n in range(1, len(harness.seen()) + 1):
            assert_paired(harness.sent(n))
        assert len(results_of(await harness.messages())) == 5
        assert [m.content for m in harness.sent(4) if m.role == "user"] == [
            "One.", "Two.", "Three.", "Four.",
        ]  # fmt: skip


async def test_unusual_finish_reason_is_a_normal_end_that_names_it(tmp_path: Path) -> None:
    play = script(
        Reply(text="I cannot say.", finish="content_filter"), Reply(text="x", finish="odd")
    )
    async with open_runs(tmp_path, play=play) as harness:
        for reason in ("content_filter", "unknown"):
            complete = await harness.received.complete(await harness.prompt("Hi."))
            assert complete.error == ""
            finish = finish_of((await harness.messages())[-1])
            assert finish == Finish(reason, finish.time)

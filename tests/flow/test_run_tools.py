"""Calls of a turn: in order or side by side, each run once and answered once, whatever happens."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall
from culm.tools.base import CallRequest, CallResult
from culm.wire.messages import Finish, ToolCall
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired, calls_of, finish_of, results_of
from tests.flow.runs import open_heard, open_runs
from tests.support import contract


def by_input(*texts: str, name: str = "tool") -> Reply:
    """Calls with exactly these arguments."""
    return Reply(calls=[ScriptedCall(name=name, input=text) for text in texts])


# --- the course of a turn


@contract("INV-37", "INV-82")
async def test_a_turn_asks_calls_and_asks_again_until_there_is_nothing_to_call(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("look")
    play = script(calling("look", text="First.", path="a"), calling("look", text="Then.", path="b"))
    async with open_runs(tmp_path, kind, play, tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        complete = await stage.heard.complete(run_id)
        assert await stage.rows() == [
            ("user", "Hi.", "stop"),
            ("assistant", "First.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "Then.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "Fine.", "end_turn"),
        ]
        assert (complete.text, complete.message_id) == ("Fine.", (await stage.messages())[-1].id)
        assert [call.arguments for call in tool.calls] == [{"path": "a"}, {"path": "b"}]
        assert_answered(await stage.messages())
        for n in (1, 2, 3):
            assert_paired(stage.sent(n))
        assert [(m.role, m.content) for m in stage.sent(3)] == [
            ("user", "Hi."),
            ("assistant", "First."),
            ("tool", "look 1"),
            ("assistant", "Then."),
            ("tool", "look 2"),
        ]
        run = await stage.run(run_id)
        assert (run.steps, run.outcome) == (3, "end_turn")


async def test_a_call_is_stored_whole_before_it_has_any_effect(tmp_path: Path) -> None:
    gate = Gate()
    play = script(calling("held", "held", path="a/b.txt"))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        calls = calls_of(await stage.messages())
        assert [(call.input, call.finished) for call in calls] == [('{"path":"a/b.txt"}', True)] * 2
        gate.release()
        await stage.heard.complete(run_id)


async def test_calls_of_parallel_tools_run_side_by_side_at_most_five_at_a_time(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tool = Probe("side", gate.pass_through, parallel=True)
    async with open_runs(tmp_path, play=script(calling(*["side"] * 8)), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 5)
        await stage.flow.settle()
        assert len(tool.calls) == 5
        gate.release()
        await stage.heard.complete(run_id)
        assert (len(tool.calls), gate.most) == (8, 5)
        assert_answered(await stage.messages())
        assert_paired(stage.sent(2))


async def test_other_calls_run_alone_in_the_order_in_which_they_were_made(tmp_path: Path) -> None:
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
    async with open_runs(tmp_path, play=play, tools=tools) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: side_gate.inside == 2)
        await stage.flow.settle()
        assert (gate.inside, order) == (0, ["first"])
        side_gate.release()
        await until(lambda: gate.inside == 1)
        await stage.flow.settle()
        assert (gate.inside, order) == (1, ["first"])
        gate.release()
        await stage.heard.complete(run_id)
        assert (gate.most, order) == (1, ["first", "last"])
        names = [result.name for result in results_of(await stage.messages())]
        assert sorted(names) == ["alone", "alone", "first", "last", "side", "side"]


@pytest.mark.parametrize(("outcome", "reason"), [("end_turn", ""), ("denied", "denied")])
async def test_a_result_that_ends_the_turn_leaves_the_other_calls_unrun_and_answered(
    tmp_path: Path, outcome: str, reason: str
) -> None:
    async def end(call: CallRequest) -> CallResult:
        return CallResult("No.", is_error=True, ends_turn="denied" if reason else "end_turn")

    last = Probe("last")
    async with (
        open_runs(
            tmp_path, play=script(calling("end", "last")), tools=[Probe("end", end), last]
        ) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("Hi.")
        complete = await crush.complete(run_id)
        assert (complete.error, complete.culm_reason) == ("", reason)
        assert (await stage.run(run_id)).outcome == outcome
        messages = await stage.messages()
        assert_answered(messages)
        finish = finish_of(messages[1])
        assert (finish.reason, finish.culm_reason) == ("end_turn", reason)
        assert (last.calls, len(stage.seen())) == ([], 1)


# --- calls that are not as they should be


@pytest.mark.parametrize("text", ["{not json", '["a list"]', '"text"', "{", '{"a": 1'])
async def test_arguments_that_are_no_object_run_nothing_and_the_model_is_told(
    tmp_path: Path, text: str
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(by_input(text)), tools=[tool]) as stage:
        complete = await stage.heard.complete(await stage.prompt("Hi."))
        assert complete.text == "Fine."
        messages = await stage.messages()
        (call,) = calls_of(messages)
        assert (call.input, call.finished) == ("{}", True)
        (result,) = results_of(messages)
        assert (result.is_error, "JSON" in result.content) == (True, True)
        assert stage.sent(2)[-1].content == result.content
        assert tool.calls == []


async def test_arguments_that_are_left_out_are_an_empty_object(tmp_path: Path) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(by_input("")), tools=[tool]) as stage:
        await stage.heard.complete(await stage.prompt("Hi."))
        assert [call.arguments for call in tool.calls] == [{}]
        (call,) = calls_of(await stage.messages())
        assert call == ToolCall(call.id, "tool", "{}", finished=True)


@pytest.mark.parametrize(
    "ids", [["same", "same", "same", "same~1"], ["same~2", "same", "same"], ["", "", "call_0"]]
)
async def test_calls_with_one_id_are_each_run_once_and_each_answered(
    tmp_path: Path, ids: list[str]
) -> None:
    tool = Probe("tool")
    calls = [ScriptedCall(name="tool", input={"n": n}, id=id_) for n, id_ in enumerate(ids)]
    async with open_runs(tmp_path, play=script(Reply(calls=calls)), tools=[tool]) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        assert [call.arguments for call in tool.calls] == [{"n": n} for n in range(len(ids))]
        messages = await stage.messages()
        assert len({call.id for call in calls_of(messages)}) == len(ids)
        assert_answered(messages)
        assert_paired(stage.sent(2))


async def test_an_answer_with_too_many_calls_is_an_error_and_those_that_came_are_answered(
    tmp_path: Path,
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(calling(*["tool"] * 129)), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, run.title) == ("error", "Too many calls")
        messages = await stage.messages()
        assert_answered(messages)
        assert (len(calls_of(messages)), tool.calls) == (64, [])


async def test_an_answer_without_end_is_cut_where_a_message_may_not_grow(tmp_path: Path) -> None:
    endless = Reply(deltas=["x" * 500_000] * 40)
    async with open_runs(tmp_path, play=script(endless)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, "characters" in run.details) == ("error", True)
        assert len((await stage.rows())[1][1]) == 8 * 500_000
        await stage.heard.complete(await stage.prompt("Again."))


async def test_the_same_id_in_two_steps_is_two_calls(tmp_path: Path) -> None:
    tool = Probe("tool")
    again = Reply(calls=[ScriptedCall(name="tool", id="same")])
    async with open_runs(tmp_path, play=script(again, again), tools=[tool]) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        assert len(tool.calls) == len(results_of(await stage.messages())) == 2
        assert_paired(stage.sent(3))


async def test_a_tool_that_is_not_there_is_an_error_that_names_those_that_are(
    tmp_path: Path,
) -> None:
    tools = [Probe("one"), Probe("two")]
    async with open_runs(tmp_path, play=script(calling("three")), tools=tools) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        (result,) = results_of(await stage.messages())
        assert result.is_error
        assert all(word in result.content for word in ("'three'", "one", "two"))


@contract("EXC-9")
@pytest.mark.parametrize("error", [ValueError("bad"), ConnectionResetError("net"), TimeoutError()])
async def test_a_tool_that_raises_is_a_result_for_the_model_and_is_not_run_again(
    tmp_path: Path, error: Exception
) -> None:
    async def fail(call: CallRequest) -> CallResult:
        raise error

    tool, other = Probe("fails", fail), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("other", "fails")), tools=[tool, other]
    ) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        results = results_of(await stage.messages())
        assert [(r.name, r.is_error) for r in results] == [("other", False), ("fails", True)]
        assert type(error).__name__ in results[1].content
        assert (len(tool.calls), len(other.calls), len(stage.seen())) == (1, 1, 2)


@pytest.mark.parametrize("parallel", [False, True])
async def test_a_tool_that_was_cancelled_by_nobody_of_ours_is_an_error_and_the_run_goes_on(
    tmp_path: Path, *, parallel: bool
) -> None:
    async def wait_in_vain(call: CallRequest) -> CallResult:
        never: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        never.cancel()
        return await never

    tools = [Probe("vain", wait_in_vain, parallel=parallel), Probe("other", parallel=parallel)]
    play = script(calling("vain", "other"))
    async with open_runs(tmp_path, play=play, tools=tools) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        errors = {result.name: result.is_error for result in results_of(await stage.messages())}
        assert errors == {"vain": True, "other": False}


# --- asked again, never run again


@contract("EXC-9", "INV-38")
async def test_a_call_is_not_run_again_when_the_question_after_it_is_repeated(
    tmp_path: Path,
) -> None:
    tool = Probe("tool")
    play = script(calling("tool"), Reply(status=503), Reply(text="Half", cut_after=1))
    async with open_runs(tmp_path, play=play, tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.clock.pass_retry(5.0)
        await stage.clock.pass_retry(10.0)
        assert (await stage.heard.complete(run_id)).text == "Fine."
        assert (len(tool.calls), len(stage.seen())) == (1, 4)
        assert [m.role for m in stage.sent(4)] == [m.role for m in stage.sent(2)]
        assert_answered(await stage.messages())


@contract("EXC-9")
async def test_calls_of_an_answer_that_was_cut_off_are_not_run(tmp_path: Path) -> None:
    tool = Probe("tool")
    cut = Reply(text="I shall ", calls=[ScriptedCall(name="tool", input={"n": 1})], cut_after=99)
    whole = calling("tool", n=2)
    async with open_runs(tmp_path, play=script(cut, whole), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.clock.pass_retry(5.0)
        await stage.heard.complete(run_id)
        assert [call.arguments for call in tool.calls] == [{"n": 2}]
        assert len(calls_of(await stage.messages())) == 1


async def test_an_answer_cut_at_its_limit_of_tokens_runs_none_of_its_calls(tmp_path: Path) -> None:
    tool = Probe("tool")
    cut = Reply(text="So ", calls=[ScriptedCall(name="tool")], finish="max_tokens")
    async with open_runs(tmp_path, play=script(cut), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        complete = await stage.heard.complete(run_id)
        assert (complete.error, complete.text) == ("", "So ")
        assert (await stage.run(run_id)).outcome == "max_tokens"
        messages = await stage.messages()
        assert_answered(messages)
        assert finish_of(messages[1]).reason == "max_tokens"
        assert tool.calls == []


@contract("INV-82")
async def test_after_a_turn_that_broke_off_the_model_reads_no_call_without_result(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through), Probe("other")]
    half = Reply(calls=[ScriptedCall(name="other", input={"path": "abcdefgh"})], hold_after=1)
    cut = Reply(calls=[ScriptedCall(name="other")], finish="max_tokens")
    play = script(calling("other", "held", "other"), half, cut)
    async with open_runs(tmp_path, play=play, tools=tools) as stage:
        await stage.prompt("One.", run_id="one")
        await until(lambda: gate.inside == 1)
        await stage.cancel()
        await stage.heard.complete("one")
        await stage.prompt("Two.", run_id="two")
        await stage.heard.saying("message_delta", '"kind":"input"', "pat")
        await stage.cancel()
        await stage.heard.complete("two")
        await stage.heard.complete(await stage.prompt("Three."))
        await stage.heard.complete(await stage.prompt("Four."))
        for n in range(1, len(stage.seen()) + 1):
            assert_paired(stage.sent(n))
        assert len(results_of(await stage.messages())) == 5
        assert [m.content for m in stage.sent(4) if m.role == "user"] == [
            "One.", "Two.", "Three.", "Four.",
        ]  # fmt: skip


async def test_an_unusual_reason_to_stop_is_a_good_end_that_names_it(tmp_path: Path) -> None:
    play = script(
        Reply(text="I cannot say.", finish="content_filter"), Reply(text="x", finish="odd")
    )
    async with open_runs(tmp_path, play=play) as stage:
        for reason in ("content_filter", "unknown"):
            complete = await stage.heard.complete(await stage.prompt("Hi."))
            assert complete.error == ""
            finish = finish_of((await stage.messages())[-1])
            assert finish == Finish(reason, finish.time)

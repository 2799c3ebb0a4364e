"""What a run may use up and what it has used: limits, loops, tokens and money."""

import asyncio
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.settings import Settings
from culm.testing.script import Reply, Rule, Script, ScriptedCall, ScriptedUsage
from culm.tools.base import CallRequest, CallResult
from culm.wire.messages import Message
from culm.wire.sessions import Session
from tests.flow.drive import until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, finish_of, results_of
from tests.flow.runs import open_heard, open_runs
from tests.support import contract

PRICES: dict[str, object] = {
    "cost_per_1m_in": 3.0,
    "cost_per_1m_out": 15.0,
    "cost_per_1m_in_cached": 3.75,
    "cost_per_1m_out_cached": 0.3,
}
HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


async def always(call: CallRequest) -> CallResult:
    return CallResult("the same")


def using(reply: Reply, **usage: int) -> Reply:
    """The same answer with this count of tokens."""
    return Reply(text=reply.text, calls=reply.calls, usage=ScriptedUsage(**usage))


# --- loops


@contract("INV-80", "EXC-23")
async def test_a_run_that_repeats_itself_is_stopped_at_the_tenth_step_and_says_why(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("again", always)
    play = Script([], [TITLE], calling("again"))
    async with (
        open_runs(tmp_path, kind, play, tools=[tool]) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("Hi.")
        complete = await crush.complete(run_id)
        assert (complete.culm_reason, "repeated" in complete.error) == ("loop", True)
        assert (len(stage.seen()), len(tool.calls)) == (10, 10)
        run = await stage.run(run_id)
        assert (run.outcome, run.steps) == ("loop", 10)
        last = [told.read(Message) for told in crush.told if told.type == "message"][-1]
        finish = finish_of(last)
        assert (finish.reason, finish.culm_reason, bool(finish.message)) == ("error", "loop", True)
        assert_answered(await stage.messages())
        assert [error.run_id for error in crush.errors()] == [run_id]


@contract("INV-80")
@pytest.mark.parametrize("steps", [["a"] * 9, ["a", "b"] * 7, ["a"] * 5 + ["b"] * 5])
async def test_nine_same_steps_or_five_of_ten_are_no_loop(tmp_path: Path, steps: list[str]) -> None:
    tools = [Probe("a", always), Probe("b", always)]
    play = script(*(calling(name) for name in steps))
    async with open_runs(tmp_path, play=play, tools=tools) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."
        assert len(stage.seen()) == len(steps) + 1


@contract("INV-80")
async def test_the_same_calls_with_other_results_are_no_loop(tmp_path: Path) -> None:
    tool = Probe("count")  # It answers with how often it was called.
    async with open_runs(tmp_path, play=script(*[calling("count")] * 12), tools=[tool]) as stage:
        assert (await stage.heard.complete(await stage.prompt("Hi."))).text == "Fine."


@contract("INV-80")
async def test_six_same_steps_among_the_last_ten_are_a_loop_whatever_was_before(
    tmp_path: Path,
) -> None:
    tools = [Probe("a", always), Probe("count")]
    steps = ["count"] * 6 + ["a", "a", "count", "a", "a", "count", "a", "a"]
    play = script(*(calling(name) for name in [*steps, "count", "count"]))
    async with open_runs(tmp_path, play=play, tools=tools) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, run.steps) == ("loop", len(steps))


# --- limits


@pytest.mark.parametrize(
    ("limits", "steps", "word"),
    [
        ({"steps": 2}, 2, "2 steps"),
        ({"tokens": 250}, 3, "250 tokens"),
        ({"cost": 0.001}, 2, "USD"),
        ({"steps": 3, "tokens": 10_000, "cost": 5.0}, 3, "3 steps"),
    ],
)
async def test_a_run_that_has_used_what_it_may_ends_budget_after_its_calls(
    tmp_path: Path, limits: dict[str, object], steps: int, word: str
) -> None:
    tool = Probe("count")
    play = Script([], [TITLE], using(calling("count"), input=80, output=20))
    async with (
        open_runs(tmp_path, play=play, tools=[tool], info=PRICES) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("Hi.", limits=limits)
        complete = await crush.complete(run_id)
        assert (complete.culm_reason, word in complete.error) == ("budget", True), complete
        run = await stage.run(run_id)
        assert (run.outcome, run.steps, len(tool.calls)) == ("budget", steps, steps)
        messages = await stage.messages()
        assert_answered(messages)
        assert [e.run_id for e in crush.errors()] == [run_id]
        last = [m for m in messages if m.role == "assistant"][-1]
        assert (finish_of(last).reason, finish_of(last).culm_reason) == ("error", "budget")


async def test_an_answer_that_ends_the_turn_ends_it_well_although_it_used_up_the_limit(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as stage:
        run_id = await stage.prompt("Hi.", limits={"steps": 1, "tokens": 1})
        await stage.heard.complete(run_id)
        assert (await stage.run(run_id)).outcome == "end_turn"


@pytest.mark.parametrize(("asked", "steps"), [({}, 2), ({"steps": 9}, 2), ({"steps": 1}, 1)])
async def test_nobody_can_ask_for_more_than_the_servers_settings_allow(
    tmp_path: Path, asked: dict[str, object], steps: int
) -> None:
    play = Script([], [TITLE], calling("count"))
    settings = Settings(run_steps_max=2)
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], settings=settings) as stage:
        run_id = await stage.prompt("Hi.", limits=asked)
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, run.steps) == ("budget", steps)


@pytest.mark.parametrize("moment", ["streaming", "calling", "waiting"])
async def test_a_run_whose_time_is_up_ends_budget_wherever_it_is(
    tmp_path: Path, moment: str
) -> None:
    gate = Gate()
    replies = {
        "streaming": HELD,
        "calling": calling("held", "other"),
        "waiting": Reply(status=429, headers={"Retry-After": "50"}),
    }
    tools = [Probe("held", gate.pass_through), Probe("other")]
    async with open_runs(tmp_path, play=script(replies[moment]), tools=tools) as stage:
        run_id = await stage.prompt("Hi.", limits={"wall_s": 30})
        if moment == "streaming":
            await stage.heard.text("Hello")
        else:
            await until(lambda: gate.inside == 1 or stage.clock.is_armed(50.0))
        stage.clock.advance(29)
        await stage.flow.settle()
        assert stage.heard.completes() == []
        stage.clock.advance(1)
        complete = await stage.heard.complete(run_id)
        assert (complete.culm_reason, complete.cancelled) == ("budget", False)
        run = await stage.run(run_id)
        assert (run.outcome, "wall time" in run.details) == ("budget", True)
        assert_answered(await stage.messages())
        assert (tools[1].calls, len(stage.seen())) == ([], 1)


async def test_a_call_that_was_begun_when_time_was_up_is_not_said_to_be_unrun(
    tmp_path: Path,
) -> None:
    gate = Gate()
    play = script(calling("held", "held"))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as stage:
        run_id = await stage.prompt("Hi.", limits={"wall_s": 30})
        await until(lambda: gate.inside == 1)
        stage.clock.advance(30)
        await stage.heard.complete(run_id)
        begun, unrun = results_of(await stage.messages())
        assert (begun.is_error, unrun.is_error) == (True, True)
        assert "Not run" not in begun.content
        assert "Not run" in unrun.content


# --- tokens and money


@contract("INV-81", "EXC-18")
async def test_tokens_are_those_of_the_last_step_and_money_adds_up_over_steps_and_runs(
    tmp_path: Path, kind: str
) -> None:
    first = using(calling("count"), input=1000, output=100, cache_read=400)
    second = using(Reply(text="Done."), input=2000, output=50)
    play = script(first, second, second)
    async with open_runs(tmp_path, kind, play, tools=[Probe("count")], info=PRICES) as stage:
        step_1 = (1000 * 3.0 + 100 * 15.0 + 400 * 0.3) / 1e6
        step_2 = (2000 * 3.0 + 50 * 15.0) / 1e6
        one = await stage.prompt("Hi.")
        await stage.heard.complete(one)
        await stage.heard.saying("session", "A title")  # It is counted, too; here it is free.
        title = (await stage.session()).cost - step_1 - step_2
        run = await stage.run(one)
        assert (run.prompt_tokens, run.completion_tokens) == (3400, 150)
        assert run.cost == pytest.approx(step_1 + step_2)
        assert (run.estimated, run.steps) == (False, 2)
        session = await stage.session()
        assert (session.prompt_tokens, session.completion_tokens) == (2000, 50)
        two = await stage.prompt("Again.")
        await stage.heard.complete(two)
        session = await stage.session()
        assert session.cost == pytest.approx(step_1 + 2 * step_2 + title)
        assert (await stage.run(two)).cost == pytest.approx(step_2)


@contract("INV-81")
@pytest.mark.parametrize("usage", [None, ScriptedUsage()])
async def test_tokens_that_nobody_counted_are_estimated_and_cost_nothing(
    tmp_path: Path, usage: ScriptedUsage | None
) -> None:
    counted = using(Reply(text="One."), input=1000, output=100)
    rules = [Rule(when="Write a title", reply=Reply(text="A title", usage=None))]
    play = Script([counted, Reply(text="Some words.", usage=usage)], rules)
    async with open_runs(tmp_path, play=play, info=PRICES) as stage:
        await stage.heard.complete(await stage.prompt("One."))
        await stage.heard.saying("session", "A title")
        before = await stage.session()
        run_id = await stage.prompt("Two.")
        await stage.heard.complete(run_id)
        run, after = await stage.run(run_id), await stage.session()
        assert (run.estimated, run.cost) == (True, 0.0)
        assert after.cost == before.cost == pytest.approx(0.0045)
        assert after.prompt_tokens > 0
        assert after.completion_tokens == 3  # A quarter of its bytes, rounded up.
        assert (run.prompt_tokens, run.completion_tokens) == (after.prompt_tokens, 3)


@contract("INV-36")
@pytest.mark.parametrize(
    "usage",
    [
        ScriptedUsage(input=-7, output=-3),
        ScriptedUsage(input=2**63 - 1, output=2**63 - 1),
        ScriptedUsage(input=10, output=1, cache_read=10**6),
    ],
    ids=["negative", "enormous", "contradictory"],
)
async def test_an_answer_whose_count_of_tokens_cannot_be_is_an_answer_all_the_same(
    tmp_path: Path, usage: ScriptedUsage
) -> None:
    odd = [Reply(text="One.", usage=usage), Reply(text="Two.", usage=usage)]
    async with open_runs(
        tmp_path, play=script(*odd), info={**PRICES, "context_window": 0}
    ) as stage:
        for text in ("One.", "Two."):
            run_id = await stage.prompt("Hi.")
            assert (await stage.heard.complete(run_id)).text == text
            run, session = await stage.run(run_id), await stage.session()
            for count in (run.prompt_tokens, run.completion_tokens, run.cost):
                assert count >= 0
            assert min(session.prompt_tokens, session.completion_tokens, session.cost) >= 0
        assert [reason for _, _, reason in await stage.rows()] == ["stop", "end_turn"] * 2


@contract("EXC-18")
async def test_a_title_a_rename_and_steps_at_once_lose_neither_money_nor_words(
    tmp_path: Path,
) -> None:
    priced = using(Reply(text="A title"), input=100, output=10)
    rules = [Rule(when="Write a title", reply=priced)]
    step = using(calling("count"), input=1000, output=100)
    play = Script([step] * 5, rules, using(Reply(text="Fine."), input=1000, output=100))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=PRICES) as stage:
        run_id = await stage.prompt("Hi.")
        async with asyncio.TaskGroup() as tasks:
            for n in range(10):
                tasks.create_task(stage.remote.rename_session(stage.session_id, f"mine {n}"))
        await stage.heard.complete(run_id)
        cost = 6 * 0.0045 + 0.00045  # Of six steps and the title.

        def is_all_of_it(told: ServerEvent) -> bool:
            return told.type == "session" and told.read(Session).cost > cost - 1e-9

        await stage.heard.until(is_all_of_it)
        session = await stage.session()
        assert session.cost == pytest.approx(cost)
        assert session.message_count == len(await stage.messages()) == 12
        assert session.title in {f"mine {n}" for n in range(10)}  # A person's own is kept.


async def test_what_was_used_before_a_failure_is_counted(tmp_path: Path) -> None:
    step = Reply(calls=[ScriptedCall(name="count")], usage=ScriptedUsage(input=1000, output=100))
    play = script(step, Reply(status=401))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=PRICES) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        run = await stage.run(run_id)
        assert (run.outcome, run.prompt_tokens) == ("error", 1000)
        assert run.cost == pytest.approx(0.0045)

"""Limits, loops, tokens and cost of runs."""

import asyncio
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.run.draft import MESSAGE_CHARS_MAX
from culm.settings import Settings
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall, ScriptedUsage
from culm.tools.base import CallRequest, CallResult
from culm.wire.messages import Message, Session
from tests.flow.drive import until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, finish_of, results_of
from tests.flow.runs import open_received, open_runs
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


def with_usage(reply: Reply, **usage: int) -> Reply:
    """The same reply with this usage."""
    return Reply(text=reply.text, calls=reply.calls, usage=ScriptedUsage(**usage))


# --- loops


@contract("INV-80", "EXC-23")
async def test_repeating_run_is_stopped_at_the_tenth_step_with_a_reason(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("again", always)
    play = Script([], [TITLE], calling("again"))
    async with (
        open_runs(tmp_path, kind, play, tools=[tool]) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("Hi.")
        complete = await crush.complete(run_id)
        assert (complete.culm_reason, "repeated" in complete.error) == ("loop", True)
        assert (len(harness.seen()), len(tool.calls)) == (10, 10)
        run = await harness.run(run_id)
        assert (run.outcome, run.steps) == ("loop", 10)
        last = [event.read(Message) for event in crush.events if event.type == "message"][-1]
        finish = finish_of(last)
        assert (finish.reason, finish.culm_reason, bool(finish.message)) == ("error", "loop", True)
        assert_answered(await harness.messages())
        assert [error.run_id for error in crush.errors()] == [run_id]


@contract("INV-80")
@pytest.mark.parametrize("steps", [["a"] * 9, ["a", "b"] * 7, ["a"] * 5 + ["b"] * 5])
async def test_nine_equal_steps_or_five_of_ten_are_not_a_loop(
    tmp_path: Path, steps: list[str]
) -> None:
    tools = [Probe("a", always), Probe("b", always)]
    play = script(*(calling(name) for name in steps))
    async with open_runs(tmp_path, play=play, tools=tools) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."
        assert len(harness.seen()) == len(steps) + 1


@contract("INV-80")
async def test_equal_calls_with_different_results_are_not_a_loop(tmp_path: Path) -> None:
    tool = Probe("count")  # Its result is the number of its calls.
    async with open_runs(tmp_path, play=script(*[calling("count")] * 12), tools=[tool]) as harness:
        assert (await harness.received.complete(await harness.prompt("Hi."))).text == "Fine."


@contract("INV-80")
async def test_six_equal_steps_of_the_last_ten_are_a_loop(
    tmp_path: Path,
) -> None:
    tools = [Probe("a", always), Probe("count")]
    steps = ["count"] * 6 + ["a", "a", "count", "a", "a", "count", "a", "a"]
    play = script(*(calling(name) for name in [*steps, "count", "count"]))
    async with open_runs(tmp_path, play=play, tools=tools) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        assert (run.outcome, run.steps) == ("loop", len(steps))


# --- limits


@pytest.mark.parametrize(
    ("limits", "steps", "text"),
    [
        ({"steps": 2}, 2, "2 steps"),
        ({"tokens": 250}, 3, "250 tokens"),
        ({"cost": 0.001}, 2, "USD"),
        ({"steps": 3, "tokens": 10_000, "cost": 5.0}, 3, "3 steps"),
    ],
)
async def test_run_at_its_limit_ends_with_budget_after_its_calls(
    tmp_path: Path, limits: dict[str, object], steps: int, text: str
) -> None:
    tool = Probe("count")
    play = Script([], [TITLE], with_usage(calling("count"), input=80, output=20))
    async with (
        open_runs(tmp_path, play=play, tools=[tool], info=PRICES) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("Hi.", limits=limits)
        complete = await crush.complete(run_id)
        assert (complete.culm_reason, text in complete.error) == ("budget", True), complete
        run = await harness.run(run_id)
        assert (run.outcome, run.steps, len(tool.calls)) == ("budget", steps, steps)
        messages = await harness.messages()
        assert_answered(messages)
        assert [e.run_id for e in crush.errors()] == [run_id]
        last = [m for m in messages if m.role == "assistant"][-1]
        assert (finish_of(last).reason, finish_of(last).culm_reason) == ("error", "budget")


async def test_final_answer_that_reaches_the_limit_ends_the_turn_normally(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as harness:
        run_id = await harness.prompt("Hi.", limits={"steps": 1, "tokens": 1})
        await harness.received.complete(run_id)
        assert (await harness.run(run_id)).outcome == "end_turn"


@pytest.mark.parametrize(("asked", "steps"), [({}, 2), ({"steps": 9}, 2), ({"steps": 1}, 1)])
async def test_requested_limits_cannot_exceed_the_server_settings(
    tmp_path: Path, asked: dict[str, object], steps: int
) -> None:
    play = Script([], [TITLE], calling("count"))
    settings = Settings(run_steps_max=2)
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], settings=settings) as harness:
        run_id = await harness.prompt("Hi.", limits=asked)
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        assert (run.outcome, run.steps) == ("budget", steps)


@pytest.mark.parametrize("moment", ["streaming", "calling", "waiting"])
async def test_run_at_its_wall_limit_ends_with_budget_at_any_point(
    tmp_path: Path, moment: str
) -> None:
    gate = Gate()
    replies = {
        "streaming": HELD,
        "calling": calling("held", "other"),
        "waiting": Reply(status=429, headers={"Retry-After": "50"}),
    }
    tools = [Probe("held", gate.pass_through), Probe("other")]
    async with open_runs(tmp_path, play=script(replies[moment]), tools=tools) as harness:
        run_id = await harness.prompt("Hi.", limits={"wall_s": 30})
        if moment == "streaming":
            await harness.received.text("Hello")
        else:
            await until(lambda: gate.inside == 1 or harness.clock.is_armed(50.0))
        harness.clock.advance(29)
        await harness.flow.run_ready()
        assert harness.received.completes() == []
        harness.clock.advance(1)
        complete = await harness.received.complete(run_id)
        assert (complete.culm_reason, complete.cancelled) == ("budget", False)
        run = await harness.run(run_id)
        assert (run.outcome, "wall time" in run.details) == ("budget", True)
        assert_answered(await harness.messages())
        assert (tools[1].calls, len(harness.seen())) == ([], 1)


async def test_call_started_before_the_wall_limit_is_not_reported_as_not_run(
    tmp_path: Path,
) -> None:
    gate = Gate()
    play = script(calling("held", "held"))
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as harness:
        run_id = await harness.prompt("Hi.", limits={"wall_s": 30})
        await until(lambda: gate.inside == 1)
        harness.clock.advance(30)
        await harness.received.complete(run_id)
        started, not_run = results_of(await harness.messages())
        assert (started.is_error, not_run.is_error) == (True, True)
        assert "Not run" not in started.content
        assert "Not run" in not_run.content


# --- tokens and cost


@contract("INV-81", "EXC-18")
async def test_session_tokens_are_of_the_last_step_and_cost_adds_up(
    tmp_path: Path, kind: str
) -> None:
    first = with_usage(calling("count"), input=1000, output=100, cache_read=400)
    second = with_usage(Reply(text="Done."), input=2000, output=50)
    play = script(first, second, second)
    async with open_runs(tmp_path, kind, play, tools=[Probe("count")], info=PRICES) as harness:
        step_1 = (1000 * 3.0 + 100 * 15.0 + 400 * 0.3) / 1e6
        step_2 = (2000 * 3.0 + 50 * 15.0) / 1e6
        one = await harness.prompt("Hi.")
        await harness.received.complete(one)
        await harness.received.event_with("session", "A title")  # Its cost is counted, too.
        title = (await harness.session()).cost - step_1 - step_2
        run = await harness.run(one)
        assert (run.prompt_tokens, run.completion_tokens) == (3400, 150)
        assert run.cost == pytest.approx(step_1 + step_2)
        assert (run.estimated, run.steps) == (False, 2)
        session = await harness.session()
        assert (session.prompt_tokens, session.completion_tokens) == (2000, 50)
        two = await harness.prompt("Again.")
        await harness.received.complete(two)
        session = await harness.session()
        assert session.cost == pytest.approx(step_1 + 2 * step_2 + title)
        assert (await harness.run(two)).cost == pytest.approx(step_2)


@contract("INV-81")
@pytest.mark.parametrize("usage", [None, ScriptedUsage()])
async def test_uncounted_tokens_are_estimated_and_cost_nothing(
    tmp_path: Path, usage: ScriptedUsage | None
) -> None:
    counted = with_usage(Reply(text="One."), input=1000, output=100)
    rules = [ReplyRule(when="Write a title", reply=Reply(text="A title", usage=None))]
    play = Script([counted, Reply(text="Some words.", usage=usage)], rules)
    async with open_runs(tmp_path, play=play, info=PRICES) as harness:
        await harness.received.complete(await harness.prompt("One."))
        await harness.received.event_with("session", "A title")
        before = await harness.session()
        run_id = await harness.prompt("Two.")
        await harness.received.complete(run_id)
        run, after = await harness.run(run_id), await harness.session()
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
async def test_answer_with_implausible_usage_is_accepted(
    tmp_path: Path, usage: ScriptedUsage
) -> None:
    odd = [Reply(text="One.", usage=usage), Reply(text="Two.", usage=usage)]
    async with open_runs(
        tmp_path, play=script(*odd), info={**PRICES, "context_window": 0}
    ) as harness:
        for text in ("One.", "Two."):
            run_id = await harness.prompt("Hi.")
            assert (await harness.received.complete(run_id)).text == text
            run, session = await harness.run(run_id), await harness.session()
            for count in (run.prompt_tokens, run.completion_tokens, run.cost):
                assert count >= 0
            assert min(session.prompt_tokens, session.completion_tokens, session.cost) >= 0
        assert [reason for _, _, reason in await harness.rows()] == ["stop", "end_turn"] * 2


@contract("EXC-18")
async def test_simultaneous_title_rename_and_steps_lose_no_cost_or_title(
    tmp_path: Path,
) -> None:
    priced = with_usage(Reply(text="A title"), input=100, output=10)
    rules = [ReplyRule(when="Write a title", reply=priced)]
    step = with_usage(calling("count"), input=1000, output=100)
    play = Script([step] * 5, rules, with_usage(Reply(text="Fine."), input=1000, output=100))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=PRICES) as harness:
        run_id = await harness.prompt("Hi.")
        async with asyncio.TaskGroup() as tasks:
            for n in range(10):
                tasks.create_task(harness.remote.rename_session(harness.session_id, f"mine {n}"))
        await harness.received.complete(run_id)
        cost = 6 * 0.0045 + 0.00045  # Of six steps and the title.

        def has_full_cost(event: ServerEvent) -> bool:
            return event.type == "session" and event.read(Session).cost > cost - 1e-9

        await harness.received.until(has_full_cost)
        session = await harness.session()
        assert session.cost == pytest.approx(cost)
        assert session.message_count == len(await harness.messages()) == 12
        assert session.title in {f"mine {n}" for n in range(10)}  # A title set by a person is kept.


async def test_usage_before_a_failure_is_counted(tmp_path: Path) -> None:
    step = Reply(calls=[ScriptedCall(name="count")], usage=ScriptedUsage(input=1000, output=100))
    play = script(step, Reply(status=401))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=PRICES) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        run = await harness.run(run_id)
        assert (run.outcome, run.prompt_tokens) == ("error", 1000)
        assert run.cost == pytest.approx(0.0045)


# --- long answers


async def test_answer_of_ten_megabytes_is_stored_as_a_whole(tmp_path: Path) -> None:
    pieces = [f"{n:03} " + "x" * 99_996 for n in range(105)]
    async with open_runs(tmp_path, play=script(Reply(deltas=pieces))) as harness:
        run_id = await harness.prompt("Hi.")
        complete = await harness.received.complete(run_id)
        assert complete.error == ""
        (row,) = [row for row in await harness.rows() if row[0] == "assistant"]
        assert row == ("assistant", "".join(pieces), "end_turn")


async def test_answer_beyond_the_limit_ends_the_run_with_an_error(tmp_path: Path) -> None:
    piece = "x" * 100_000
    count = MESSAGE_CHARS_MAX // len(piece)
    play = script(Reply(deltas=[piece] * (count + 1)))
    async with open_runs(tmp_path, play=play) as harness:
        complete = await harness.received.complete(await harness.prompt("Hi."))
        assert f"too many characters in one message: at most {MESSAGE_CHARS_MAX}" in complete.error
        (row,) = [row for row in await harness.rows() if row[0] == "assistant"]
        assert row == ("assistant", piece * count, "error")
        await harness.received.complete(await harness.prompt("Again."))

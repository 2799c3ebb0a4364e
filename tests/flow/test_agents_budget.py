"""What a tree may use up: set aside before each question, kept by all side by side, changeable."""

import re
from pathlib import Path

import pytest

from culm.run.limits import RETRY_DELAYS_S
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.runs import Limits
from tests.flow.agents_stage import (
    COST,
    TOKENS,
    LoopWorker,
    OnFrame,
    calls,
    held,
    open_agents,
    start,
    talk,
)
from tests.flow.drive import until
from tests.flow.reading import assert_answered
from tests.support import contract

EACH = ScriptedUsage(input=1190, output=10)  # Somewhat more than is set aside for a question.
USED, LIMIT = 1200, 2500
FIVE = ("@a1", "@a2", "@a3", "@a4", "@a5")
LISTS = [ScriptedCall(name="agent_list")]


@contract("EXC-22")
async def test_agents_side_by_side_overshoot_a_limit_by_no_more_than_one_question_each(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start(*(f"{who}: go" for who in FIVE))),
        *(talk(who, held(usage=EACH)) for who in FIVE),
    ) as stage:
        run_id = await stage.prompt("@lead: go", limits={"tokens": LIMIT})
        await until(lambda: len([w for who in FIVE for w in stage.heard_by(who)]) == 3)
        await stage.flow.settle()  # The others wait: what is set aside leaves no room.
        asked = [seen for who in FIVE for seen in stage.heard_by(who)]
        assert len(asked) == 3
        for seen in asked:
            stage.release(seen)
        complete = await stage.heard.complete(run_id)
        assert complete.culm_reason == "budget"
        assert sorted((await stage.outcomes()).values()) == ["budget"] * 2 + ["completed"] * 3
        run = await stage.run(run_id)
        assert run.tree_tokens == TOKENS + 3 * USED <= LIMIT + 3 * USED
        for who in FIVE:
            assert_answered(await stage.messages_of(who))


async def test_one_that_waits_for_room_goes_on_when_others_have_used_less(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go")),
        talk("@ann", held("Little.")),
        talk("@bob", held("Little, too.")),
    ) as stage:
        run_id = await stage.prompt("@lead: go", limits={"tokens": 1000})
        await until(lambda: bool(stage.heard_by("@ann") or stage.heard_by("@bob")))
        await stage.flow.settle()
        (first,) = [*stage.heard_by("@ann"), *stage.heard_by("@bob")]
        stage.release(first)
        await until(lambda: len([*stage.heard_by("@ann"), *stage.heard_by("@bob")]) == 2)
        stage.model.release()
        assert (await stage.heard.complete(run_id)).text == "Done."
        assert await stage.outcomes() == {"@ann:": "completed", "@bob:": "completed"}


async def test_a_budget_raised_while_agents_wait_for_room_lets_them_go_on(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 500}), then="Over."),
        talk("@ann", start("@bob: go", "@cat: go")),
        talk("@bob", held()),
        talk("@cat", held()),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await until(lambda: bool(stage.heard_by("@bob") or stage.heard_by("@cat")))
        await stage.flow.settle()
        assert len([*stage.heard_by("@bob"), *stage.heard_by("@cat")]) == 1
        ann = await stage.agent("@ann")
        changed = await stage.done(ann.agent_id, "budget", tokens=50_000)
        assert changed.budget == Limits(tokens=50_000)
        await stage.asked_by("@bob")
        await stage.asked_by("@cat")
        stage.model.release()
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert set((await stage.outcomes()).values()) == {"completed"}


async def test_a_budget_lowered_while_agents_work_ends_them_with_its_own_reason(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go")),
        talk("@bob", held("", calls=LISTS)),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        seen, ann = await stage.asked_by("@bob"), await stage.agent("@ann")
        await stage.done(ann.agent_id, "budget", tokens=2)
        stage.release(seen)
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert await stage.outcomes() == {"@ann:": "budget", "@bob:": "budget"}
        (result,) = await stage.results()
        assert result.is_error
        assert "budget: Limit reached: The run has used its 2 tokens." in result.content
        assert "The run it works for has used its 2 tokens." in (await stage.agent("@bob")).reason
        for who in ("@ann", "@bob"):
            assert_answered(await stage.messages_of(who))


@contract("EXC-22")
@pytest.mark.parametrize(
    ("limits", "words"),
    [({"tokens": 100}, "100 tokens"), ({"steps": 1}, "1 step"), ({"cost": 0.0001}, "0.0001 USD")],
)
async def test_an_agent_that_reaches_a_limit_of_its_own_ends_and_its_parent_goes_on(
    tmp_path: Path, limits: dict[str, float], words: str
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits=limits), then="Over."),
        # What it would start has nothing left, and is not spawned.
        talk("@ann", start("@bob: go")),
    ) as stage:
        await stage.talk("@lead: go")
        ann, (result,) = await stage.agent("@ann"), await stage.results()
        assert (ann.outcome, ann.tokens) == ("budget", TOKENS)
        assert words in ann.reason
        assert (result.is_error, words in result.content) == (True, True)
        (refused,) = await stage.results("@ann")
        assert refused.is_error
        assert words in refused.content
        assert (await stage.rows())[-1] == ("assistant", "Over.", "end_turn")
        assert len(await stage.agents()) == 1


async def test_an_agent_whose_time_is_up_ends_with_all_below_it(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"wall_s": 60}), then="Over."),
        talk("@ann", start("@bob: go")),
        talk("@bob", held()),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await stage.asked_by("@bob")
        stage.clock.advance(60)
        assert (await stage.heard.complete(run_id)).text == "Over."
        await stage.until_idle()
        ann, bob = await stage.agent("@ann"), await stage.agent("@bob")
        assert (ann.outcome, "Time is up" in ann.reason) == ("budget", True)
        assert (bob.outcome, bob.reason.split(":")[0]) == ("canceled", "parent_ended")
        assert stage.launcher.alive == []


async def test_only_the_limits_that_are_named_change_and_0_removes_one(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@lead", held()), talk("@ann", held())) as stage:
        ann = await stage.start_agent("@ann: go", limits={"tokens": 9_000, "cost": 2.0})
        changed = await stage.done(ann.agent_id, "budget", steps=5)
        assert changed.budget == Limits(steps=5, tokens=9_000, cost=2.0)
        changed = await stage.done(ann.agent_id, "budget", tokens=0)
        assert changed.budget == Limits(steps=5, cost=2.0)
        assert (await stage.agent("@ann")).budget == changed.budget
        run_id = await stage.prompt("@lead: go")
        for named, now in (
            ({"tokens": 7_000}, (7_000, 0)),
            ({"cost": 1.5}, (7_000, 1.5)),
            ({"tokens": 0}, (0, 1.5)),
        ):
            budget = (await stage.done(stage.session_id, "budget", **named)).budget
            assert (budget.tokens, budget.cost) == now
        await stage.asked_by("@ann")
        await stage.asked_by("@lead")
        stage.model.release()
        await stage.heard.complete(run_id)
        await stage.when("@ann", lambda one: one.state == "ended")


async def test_a_budget_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann", held())) as stage:
        ann = await stage.start_agent("@ann: go")
        for body in ({"tokens": -1}, {"wall_s": "soon"}):
            assert (await stage.do(ann.agent_id, "budget", **body)).status == 400
        assert (await stage.do("nobody", "budget", tokens=2)).status == 404
        assert (await stage.agent("@ann")).budget == Limits()
        await stage.done(ann.agent_id, "cancel")


async def test_an_answer_that_is_cut_off_is_asked_for_again_and_what_was_reported_is_counted(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go")),
        talk("@ann", calls("agent_list"), Reply(text="Half a", cut_after=1), then="Whole."),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await stage.clock.pass_retry(5.0)
        await stage.heard.complete(run_id)
        ann = await stage.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", 2 * TOKENS)
        assert (await stage.rows_of("@ann"))[-1] == ("assistant", "Whole.", "end_turn")


@contract("EXC-22", "INV-81")
async def test_an_answer_cut_off_with_its_worker_is_estimated_costs_nothing_and_stays_charged(
    tmp_path: Path,
) -> None:
    """What was set aside for it is not given back, so little is left for whoever is above."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", Reply(deltas=["Half ", "of it"], hold_after=1)),
    ) as stage:
        run_id = await stage.prompt("@lead: go", limits={"tokens": 1100})
        await stage.heard.text("Half ")
        ann = await stage.agent("@ann")
        stage.worker_of(ann.agent_id).strike()
        complete = await stage.heard.complete(run_id)
        assert complete.culm_reason == "budget"
        run = await stage.run(ann.run_id)
        assert (run.estimated, run.cost, 0 < run.prompt_tokens + run.completion_tokens < 20) == (
            True, 0, True,
        )  # fmt: skip
        assert (await stage.rows_of("@ann"))[-1] == ("assistant", "Half ", "error")


@contract("EXC-22")
async def test_an_answer_that_was_cut_off_and_asked_for_again_is_charged(tmp_path: Path) -> None:
    cut = Reply(text="word " * 2000, cut_after=1999)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 3000}), then="Over."),
        talk("@ann", cut, cut, cut),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        for delay_s in RETRY_DELAYS_S:
            await stage.clock.pass_retry(delay_s)
        assert (await stage.heard.complete(run_id)).text == "Over."
        ann = await stage.agent("@ann")
        assert (ann.outcome, ann.reason) == (
            "budget",
            "Limit reached: The run has used its 3000 tokens.",
        )


async def test_a_question_that_was_only_refused_is_asked_again_for_nothing(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 1500}), then="Over."),
        talk("@ann", *[Reply(status=503)] * 3),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        for delay_s in RETRY_DELAYS_S:
            await stage.clock.pass_retry(delay_s)
        await stage.heard.complete(run_id)
        ann = await stage.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", TOKENS)


async def test_a_budget_of_a_session_is_that_of_the_prompt_that_runs_and_of_no_other(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path, talk("@one", held("One."), *[calls("agent_list")] * 5)
    ) as stage:
        first = await stage.prompt("@one: go", run_id="r1", interactive=True)
        second = await stage.prompt(
            "@one: more", run_id="r2", interactive=True, limits={"steps": 2}
        )
        await stage.asked(1)
        await stage.done(stage.session_id, "budget", steps=50)
        stage.model.release()
        await stage.heard.complete(first)
        assert (await stage.heard.complete(second)).culm_reason == "budget"
        assert (await stage.run(second)).steps == 2


def lying(about: bytes, said: bytes, lie: bytes) -> OnFrame:
    """A worker says something else in the frames about this."""

    def changed(frame: bytes) -> bytes:
        return re.sub(said, lie, frame) if about in frame else frame

    async def arrives(worker: LoopWorker, frame: bytes) -> bool:
        worker.lie = changed
        return True

    return arrives


@pytest.mark.parametrize(
    ("said", "lie"),
    [
        (rb'"cost":[^,]+', b'"cost":1.7e308'),
        (rb'"cost":[^,]+', b'"cost":-1'),
        (rb'"prompt_tokens":100', b'"prompt_tokens":-100'),
        (rb'"completion_tokens":10', b'"completion_tokens":4611686018427387904'),
    ],
)
async def test_what_a_worker_says_it_has_used_is_not_believed_beyond_reason(
    tmp_path: Path, said: bytes, lie: bytes
) -> None:
    """Sums that are no numbers would be everybody's."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", *[calls("agent_list")] * 2, then="Ann."),
    ) as stage:
        stage.launcher.on_frame = lying(b'"usage_reported"', said, lie)
        run_id = await stage.prompt("@lead: go")
        assert (await stage.heard.complete(run_id)).text == "Over."
        ann, run = await stage.agent("@ann"), await stage.run(run_id)
        assert (ann.outcome, ann.cost) == ("completed", 0.0)
        # As where nobody counts: an estimate of its last answer.
        assert 0 < ann.tokens < TOKENS
        assert run.tree_tokens == 2 * TOKENS + ann.tokens
        assert run.tree_cost == pytest.approx(2 * COST)


@pytest.mark.parametrize(
    ("said", "lie"),
    [
        (rb'"tokens":\d+', b'"tokens":-1000000'),
        (rb'"tokens":\d+', b'"tokens":1e300'),
        (rb'"cost":[\d.e-]+', b'"cost":-0.1'),
    ],
)
async def test_nobody_sets_less_than_nothing_aside(tmp_path: Path, said: bytes, lie: bytes) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann")
    ) as stage:
        stage.launcher.on_frame = lying(b'"reserve"', said, lie)
        run_id = await stage.prompt("@lead: go", limits={"tokens": 5000})
        assert (await stage.heard.complete(run_id)).text == "Over."
        ann = await stage.agent("@ann")
        assert (ann.outcome, stage.heard_by("@ann")) == ("error", [])
        assert "nothing could be set aside" in ann.reason

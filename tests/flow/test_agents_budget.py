"""Budgets of agent trees: reserved before each model request, shared, changeable."""

import re
from pathlib import Path

import pytest

from culm.run.limits import RETRY_DELAYS_S
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.runs import Limits
from tests.flow.agents_harness import (
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

EACH = ScriptedUsage(input=1190, output=10)  # Slightly more than is reserved for a request.
USED, LIMIT = 1200, 2500
FIVE = ("@a1", "@a2", "@a3", "@a4", "@a5")
LISTS = [ScriptedCall(name="agent_list")]


@contract("EXC-22")
async def test_parallel_agents_exceed_a_limit_by_at_most_one_request_each(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start(*(f"{who}: go" for who in FIVE))),
        *(talk(who, held(usage=EACH)) for who in FIVE),
    ) as harness:
        run_id = await harness.prompt("@lead: go", limits={"tokens": LIMIT})
        await until(lambda: len([w for who in FIVE for w in harness.requests_by(who)]) == 3)
        await harness.flow.run_ready()  # The others wait: the reservations leave no budget.
        asked = [seen for who in FIVE for seen in harness.requests_by(who)]
        assert len(asked) == 3
        for seen in asked:
            harness.release(seen)
        complete = await harness.received.complete(run_id)
        assert complete.culm_reason == "budget"
        assert sorted((await harness.outcomes()).values()) == ["budget"] * 2 + ["completed"] * 3
        run = await harness.run(run_id)
        assert run.tree_tokens == TOKENS + 3 * USED <= LIMIT + 3 * USED
        for who in FIVE:
            assert_answered(await harness.messages_of(who))


async def test_agent_waiting_for_budget_continues_when_others_used_less(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go")),
        talk("@ann", held("Little.")),
        talk("@bob", held("Little, too.")),
    ) as harness:
        run_id = await harness.prompt("@lead: go", limits={"tokens": 1000})
        await until(lambda: bool(harness.requests_by("@ann") or harness.requests_by("@bob")))
        await harness.flow.run_ready()
        (first,) = [*harness.requests_by("@ann"), *harness.requests_by("@bob")]
        harness.release(first)
        await until(lambda: len([*harness.requests_by("@ann"), *harness.requests_by("@bob")]) == 2)
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "Done."
        assert await harness.outcomes() == {"@ann:": "completed", "@bob:": "completed"}


async def test_raised_budget_lets_waiting_agents_continue(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 500}), then="Over."),
        talk("@ann", start("@bob: go", "@cat: go")),
        talk("@bob", held()),
        talk("@cat", held()),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await until(lambda: bool(harness.requests_by("@bob") or harness.requests_by("@cat")))
        await harness.flow.run_ready()
        assert len([*harness.requests_by("@bob"), *harness.requests_by("@cat")]) == 1
        ann = await harness.agent("@ann")
        changed = await harness.done(ann.agent_id, "budget", tokens=50_000)
        assert changed.budget == Limits(tokens=50_000)
        await harness.until_asked_by("@bob")
        await harness.until_asked_by("@cat")
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "Over."
        assert set((await harness.outcomes()).values()) == {"completed"}


async def test_lowered_budget_ends_running_agents_with_reason_budget(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go")),
        talk("@bob", held("", calls=LISTS)),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        seen, ann = await harness.until_asked_by("@bob"), await harness.agent("@ann")
        await harness.done(ann.agent_id, "budget", tokens=2)
        harness.release(seen)
        assert (await harness.received.complete(run_id)).text == "Over."
        assert await harness.outcomes() == {"@ann:": "budget", "@bob:": "budget"}
        (result,) = await harness.results()
        assert result.is_error
        assert "budget: Limit reached: The run has used its 2 tokens." in result.content
        assert "The run it works for has used its 2 tokens." in (await harness.agent("@bob")).reason
        for who in ("@ann", "@bob"):
            assert_answered(await harness.messages_of(who))


@contract("EXC-22")
@pytest.mark.parametrize(
    ("limits", "text"),
    [({"tokens": 100}, "100 tokens"), ({"steps": 1}, "1 step"), ({"cost": 0.0001}, "0.0001 USD")],
)
async def test_agent_at_its_own_limit_ends_and_its_parent_continues(
    tmp_path: Path, limits: dict[str, float], text: str
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits=limits), then="Over."),
        # Its child has no budget left and is not started.
        talk("@ann", start("@bob: go")),
    ) as harness:
        await harness.talk("@lead: go")
        ann, (result,) = await harness.agent("@ann"), await harness.results()
        assert (ann.outcome, ann.tokens) == ("budget", TOKENS)
        assert text in ann.reason
        assert (result.is_error, text in result.content) == (True, True)
        (refused,) = await harness.results("@ann")
        assert refused.is_error
        assert text in refused.content
        assert (await harness.rows())[-1] == ("assistant", "Over.", "end_turn")
        assert len(await harness.agents()) == 1


async def test_agent_at_its_wall_limit_ends_with_all_its_children(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"wall_s": 60}), then="Over."),
        talk("@ann", start("@bob: go")),
        talk("@bob", held()),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await harness.until_asked_by("@bob")
        harness.clock.advance(60)
        assert (await harness.received.complete(run_id)).text == "Over."
        await harness.until_idle()
        ann, bob = await harness.agent("@ann"), await harness.agent("@bob")
        assert (ann.outcome, "Time is up" in ann.reason) == ("budget", True)
        assert (bob.outcome, bob.reason.split(":")[0]) == ("canceled", "parent_ended")
        assert harness.launcher.alive == []


@contract("EXC-29")
@pytest.mark.parametrize("by_s", [3600.0, -3600.0])
async def test_wall_limit_set_after_a_change_of_the_time_of_day_counts_from_the_start(
    tmp_path: Path, by_s: float
) -> None:
    async with open_agents(tmp_path, talk("@ann", held())) as harness:
        ann = await harness.start_agent("@ann: go")
        await harness.until_asked_by("@ann")
        harness.clock.advance(10)
        harness.clock.set_time(by_s)
        await harness.done(ann.agent_id, "budget", wall_s=60)
        harness.clock.advance(49)
        assert (await harness.agent("@ann")).state == "running"
        harness.clock.advance(1)
        await harness.until_agent("@ann", lambda one: one.outcome == "budget")


async def test_budget_change_affects_only_named_limits_and_0_removes_one(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@lead", held()), talk("@ann", held())) as harness:
        ann = await harness.start_agent("@ann: go", limits={"tokens": 9_000, "cost": 2.0})
        changed = await harness.done(ann.agent_id, "budget", steps=5)
        assert changed.budget == Limits(steps=5, tokens=9_000, cost=2.0)
        changed = await harness.done(ann.agent_id, "budget", tokens=0)
        assert changed.budget == Limits(steps=5, cost=2.0)
        assert (await harness.agent("@ann")).budget == changed.budget
        run_id = await harness.prompt("@lead: go")
        for named, now in (
            ({"tokens": 7_000}, (7_000, 0)),
            ({"cost": 1.5}, (7_000, 1.5)),
            ({"tokens": 0}, (0, 1.5)),
        ):
            budget = (await harness.done(harness.session_id, "budget", **named)).budget
            assert (budget.tokens, budget.cost) == now
        await harness.until_asked_by("@ann")
        await harness.until_asked_by("@lead")
        harness.model.release()
        await harness.received.complete(run_id)
        await harness.until_agent("@ann", lambda one: one.state == "ended")


async def test_invalid_budget_is_refused(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann", held())) as harness:
        ann = await harness.start_agent("@ann: go")
        for body in ({"tokens": -1}, {"wall_s": "soon"}):
            assert (await harness.do(ann.agent_id, "budget", **body)).status == 400
        assert (await harness.do("nobody", "budget", tokens=2)).status == 404
        assert (await harness.agent("@ann")).budget == Limits()
        await harness.done(ann.agent_id, "cancel")


async def test_interrupted_answer_is_retried_and_reported_usage_is_counted(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go")),
        talk("@ann", calls("agent_list"), Reply(text="Half a", cut_after=1), then="Whole."),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await harness.clock.pass_retry(5.0)
        await harness.received.complete(run_id)
        ann = await harness.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", 2 * TOKENS)
        assert (await harness.rows_of("@ann"))[-1] == ("assistant", "Whole.", "end_turn")


@contract("EXC-22", "EXC-28")
@pytest.mark.parametrize("received", ["Half ", ""])
async def test_answer_lost_with_its_worker_is_estimated_and_stays_charged(
    tmp_path: Path, received: str
) -> None:
    """Its reservation is not returned, so little is left for its parent."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", Reply(deltas=["Half ", "of it"], hold_after=len(received) // 5)),
    ) as harness:
        run_id = await harness.prompt("@lead: go", limits={"tokens": 1100})
        await harness.until_asked_by("@ann", 1)
        if received:
            await harness.received.text(received)
        ann = await harness.agent("@ann")
        harness.worker_of(ann.agent_id).crash()
        complete = await harness.received.complete(run_id)
        assert complete.culm_reason == "budget"
        run = await harness.run(ann.run_id)
        tokens = 2, 2 if received else 0  # "@ann: go" has eight bytes.
        assert (run.estimated, run.prompt_tokens, run.completion_tokens) == (True, *tokens)
        cost = (tokens[0] + 10 * tokens[1]) / 1_000_000
        ann, lead = await harness.agent("@ann"), await harness.run(run_id)
        assert (run.cost, ann.cost, lead.tree_cost - lead.cost) == pytest.approx((cost,) * 3)
        assert (await harness.remote.session(ann.session_id)).cost == pytest.approx(cost)
        assert (await harness.rows_of("@ann"))[-1] == ("assistant", received, "error")


@contract("EXC-22")
async def test_interrupted_and_retried_answer_is_charged(tmp_path: Path) -> None:
    cut = Reply(text="word " * 2000, cut_after=1999)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 3000}), then="Over."),
        talk("@ann", cut, cut, cut),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        for delay_s in RETRY_DELAYS_S:
            await harness.clock.pass_retry(delay_s)
        assert (await harness.received.complete(run_id)).text == "Over."
        ann = await harness.agent("@ann")
        assert (ann.outcome, ann.reason) == (
            "budget",
            "Limit reached: The run has used its 3000 tokens.",
        )


async def test_refused_model_request_is_retried_without_a_charge(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", limits={"tokens": 1500}), then="Over."),
        talk("@ann", *[Reply(status=503)] * 3),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        for delay_s in RETRY_DELAYS_S:
            await harness.clock.pass_retry(delay_s)
        await harness.received.complete(run_id)
        ann = await harness.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", TOKENS)


async def test_session_budget_applies_only_to_the_running_prompt(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path, talk("@one", held("One."), *[calls("agent_list")] * 5)
    ) as harness:
        first = await harness.prompt("@one: go", run_id="r1", interactive=True)
        second = await harness.prompt(
            "@one: more", run_id="r2", interactive=True, limits={"steps": 2}
        )
        await harness.until_asked(1)
        await harness.done(harness.session_id, "budget", steps=50)
        harness.model.release()
        await harness.received.complete(first)
        assert (await harness.received.complete(second)).culm_reason == "budget"
        assert (await harness.run(second)).steps == 2


def rewrite_frames(marker: bytes, pattern: bytes, replacement: bytes) -> OnFrame:
    """Rewrite the frames of a worker that contain `marker`."""

    def changed(frame: bytes) -> bytes:
        return re.sub(pattern, replacement, frame) if marker in frame else frame

    async def arrives(worker: LoopWorker, frame: bytes) -> bool:
        worker.rewrite = changed
        return True

    return arrives


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (rb'"cost":[^,]+', b'"cost":1.7e308'),
        (rb'"cost":[^,]+', b'"cost":-1'),
        (rb'"prompt_tokens":100', b'"prompt_tokens":-100'),
        (rb'"completion_tokens":10', b'"completion_tokens":4611686018427387904'),
    ],
)
async def test_implausible_usage_reported_by_a_worker_is_ignored(
    tmp_path: Path, pattern: bytes, replacement: bytes
) -> None:
    """Otherwise an invalid total would spread to the whole tree."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", *[calls("agent_list")] * 2, then="Ann."),
    ) as harness:
        harness.launcher.on_frame = rewrite_frames(b'"usage_reported"', pattern, replacement)
        run_id = await harness.prompt("@lead: go")
        assert (await harness.received.complete(run_id)).text == "Over."
        ann, run = await harness.agent("@ann"), await harness.run(run_id)
        assert (ann.outcome, ann.cost) == ("completed", 0.0)
        # As without usage: an estimate of its last answer.
        assert 0 < ann.tokens < TOKENS
        assert run.tree_tokens == 2 * TOKENS + ann.tokens
        assert run.tree_cost == pytest.approx(2 * COST)


@pytest.mark.parametrize(
    ("pattern", "replacement"),
    [
        (rb'"tokens":\d+', b'"tokens":-1000000'),
        (rb'"tokens":\d+', b'"tokens":1e300'),
        (rb'"cost":[\d.e-]+', b'"cost":-0.1'),
    ],
)
async def test_negative_or_implausible_reservation_is_refused(
    tmp_path: Path, pattern: bytes, replacement: bytes
) -> None:
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann")
    ) as harness:
        harness.launcher.on_frame = rewrite_frames(b'"reserve"', pattern, replacement)
        run_id = await harness.prompt("@lead: go", limits={"tokens": 5000})
        assert (await harness.received.complete(run_id)).text == "Over."
        ann = await harness.agent("@ann")
        assert (ann.outcome, harness.requests_by("@ann")) == ("error", [])
        assert "no budget could be reserved" in ann.reason

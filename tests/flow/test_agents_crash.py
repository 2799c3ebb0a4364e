"""What becomes of a tree when its server dies: every row is truthful, nothing is done twice."""

import asyncio
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.wire.asks import Ask, PermissionRequest
from tests.flow.agents_lives import open_lives
from tests.flow.agents_stage import (
    COST,
    TOKENS,
    AgentStage,
    LoopWorker,
    calls,
    held,
    one_after_the_other,
    start,
    talk,
)
from tests.flow.asking import answer, request_in
from tests.flow.drive import until
from tests.flow.reading import assert_answered
from tests.support import contract

TREE = (
    talk("@lead", start("@ann: go"), then="Over."),
    talk("@ann", start("@bob: go"), then="Ann is done."),
    talk("@bob", calls("agent_list"), held("Bob is done.")),
)


@contract("EXC-22", "INV-79")
async def test_a_tree_that_a_crash_cut_off_is_interrupted_and_the_next_prompt_goes_on(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, *TREE) as lives:
        async with lives.next() as first:
            await first.prompt("@lead: go")
            await first.asked_by("@bob", 2)
            await first.heard.saying("session", "A title")
            lives.kill()
        async with lives.next() as stage:
            await stage.until_idle()
            assert await stage.outcomes() == {"@ann:": "interrupted", "@bob:": "interrupted"}
            for agent in await stage.agents():
                assert (agent.state, agent.pid, agent.waiting_for) == ("ended", 0, "")
            assert {run.outcome for run in await stage.runs()} == {"interrupted"}
            for messages in (
                await stage.messages(),
                await stage.messages_of("@ann"),
                await stage.messages_of("@bob"),
            ):
                assert_answered(messages)
            (result,) = await stage.results()
            assert "Check before you repeat it." in result.content
            ann = await stage.agent("@ann")
            assert (ann.tokens, round(ann.cost, 6)) == (2 * TOKENS, 2 * COST)
            assert round((await stage.session()).cost, 6) == round(3 * COST, 6)
            assert stage.launcher.workers == [], "nothing is begun again unasked"
            asked = len(stage.seen())
            await stage.talk("@lead: and now?")
            assert len(stage.seen()) == asked + 1
            read = [message.role for message in stage.read_by("@lead")]
            assert read == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_the_asks_of_agents_that_a_server_lost_are_closed(tmp_path: Path, how: str) -> None:
    """Who works in a process of its own cannot go on waiting without it."""
    writes = calls("write", file_path="a.txt", content="A")
    async with open_lives(tmp_path, *TREE[:2], talk("@bob", writes)) as lives:
        async with lives.next() as first:
            await first.prompt("@lead: go")
            request = await request_in(first.heard)
            if how == "kill":
                lives.kill()
        async with lives.next() as stage:
            await stage.until_idle()
            assert await stage.outcomes() == {"@ann:": "interrupted", "@bob:": "interrupted"}
            (ask,) = await stage.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
            assert (ask.request.id, ask.state) == (request.id, "withdrawn")
            assert not await answer(stage, request.id, "allow")
            assert not (stage.flow.directory() / "a.txt").exists()


@pytest.mark.parametrize("wait", [False, True], ids=["detached", "waited-for"])
async def test_of_agents_that_no_worker_had_begun_those_go_on_that_nobody_waits_for(
    tmp_path: Path, *, wait: bool
) -> None:
    """Ann works, and bob waits for her slot."""
    async with open_lives(
        tmp_path,
        talk("@lead", *one_after_the_other("@ann: go", "@bob: go", wait=wait), then="Over."),
        talk("@ann", held()),
        talk("@bob", then="Bob is done."),
    ) as lives:
        async with lives.next(Settings(agents_at_once=1)) as first:
            await first.prompt("@lead: go")
            await first.asked_by("@ann")
            first.release(await first.asked_by("@lead", 2))
            await first.when("@bob", lambda one: one.waiting_for == "slot")
            if not wait:
                await until(lambda: len(first.flow.workspace(first.remote.id).runs.live()) == 2)
            lives.kill()
        async with lives.next() as stage:
            await stage.until_idle()
            outcome = "interrupted" if wait else "completed"
            assert await stage.outcomes() == {"@ann:": "interrupted", "@bob:": outcome}
            assert len(stage.heard_by("@ann")) == 1, "nothing is begun again unasked"
            assert len(stage.heard_by("@bob")) == (0 if wait else 1)
            assert len(await stage.runs()) == 3


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_an_agent_that_a_client_started_is_interrupted_with_its_server_and_takes_more_work(
    tmp_path: Path, how: str
) -> None:
    async with open_lives(tmp_path, talk("@ann", held(), then="More.")) as lives:
        async with lives.next() as first:
            ann = await first.start_agent("@ann: go")
            await first.asked_by("@ann")
            if how == "kill":
                lives.kill()
        async with lives.next() as stage:
            await stage.until_idle()
            assert (await stage.agent("@ann")).outcome == "interrupted"
            assert (await stage.do(ann.agent_id, "message", text="go on")).status == 202
            again = await stage.when("@ann", lambda one: one.outcome == "completed")
            assert again.agent_id == ann.agent_id
            rows = [row for row in await stage.rows_of("@ann") if row[0] == "user"]
            assert [row[1] for row in rows] == ["@ann: go", "go on"]


ONE = Settings(agents_at_once=1)
LATER = (
    talk("@lead", *one_after_the_other("@ann: go", "@bob: go"), then="Over."),
    talk("@ann", held()),
    talk("@bob", *[calls("agent_list")] * 8),
)


async def bob_waits(stage: AgentStage, **limits: int) -> str:
    """Have ann take the only slot; the run that started both has ended."""
    run_id = await stage.prompt("@lead: go", run_id="top", interactive=True, limits=limits)
    await stage.asked_by("@ann")
    stage.release(await stage.asked_by("@lead", 2))
    await stage.heard.complete(run_id)
    return (await stage.when("@bob", lambda bob: bob.waiting_for == "slot")).agent_id


@contract("EXC-22")
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
async def test_the_budget_of_a_tree_holds_for_who_begins_under_the_next_server(
    tmp_path: Path, *, is_killed: bool
) -> None:
    async with open_lives(tmp_path, *LATER) as lives:
        async with lives.next(ONE) as first:
            await bob_waits(first, steps=6)
            if is_killed:
                lives.kill()
        async with lives.next(ONE) as stage:
            await stage.until_idle()
            bob = await stage.agent("@bob")
            assert bob.reason == "Limit reached: The run it works for has used its 6 steps."
            assert (await stage.run("top")).tree_steps == 6


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
async def test_a_budget_that_was_changed_holds_under_the_next_server(
    tmp_path: Path, *, is_killed: bool
) -> None:
    async with open_lives(tmp_path, *LATER) as lives:
        async with lives.next(ONE) as first:
            await first.done(await bob_waits(first), "budget", steps=2)
            if is_killed:
                lives.kill()
        async with lives.next(ONE) as stage:
            await stage.until_idle()
            bob = await stage.agent("@bob")
            assert (bob.outcome, bob.tokens) == ("budget", 2 * TOKENS)


@contract("EXC-22")
async def test_what_a_last_answer_used_survives_a_crash_before_its_worker_has_let_go(
    tmp_path: Path,
) -> None:
    is_over, never = asyncio.Event(), asyncio.Event()

    async def keep_the_end(_: LoopWorker, frame: bytes) -> bool:
        if b'"terminal"' in frame:
            is_over.set()
            await never.wait()
        return True

    async with open_lives(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", then="Ann.")
    ) as lives:
        async with lives.next() as first:
            first.launcher.on_frame = keep_the_end
            await first.prompt("@lead: go")
            await is_over.wait()
            await first.when("@ann", lambda ann: ann.tokens > 0)
            lives.kill()
            never.set()
        async with lives.next() as stage:
            ann = await stage.agent("@ann")
            assert (ann.outcome, ann.tokens, ann.cost) == ("interrupted", TOKENS, COST)


async def test_detached_ones_that_had_not_begun_are_begun_after_an_ordered_end(
    tmp_path: Path,
) -> None:
    async with open_lives(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go", wait=False), then="Over."),
        talk("@ann", held()),
        talk("@bob", held()),
    ) as lives:
        one = Settings(agents_at_once=1)
        async with lives.next(one) as first:
            await first.talk("@lead: go")
            await until(lambda: bool(first.heard_by("@ann") or first.heard_by("@bob")))
            who, later = ("@ann", "@bob") if first.heard_by("@ann") else ("@bob", "@ann")
            await first.when(later, lambda one: one.waiting_for == "slot")
        async with lives.next(one) as stage:
            await stage.asked_by(later)
            stage.model.release()
            await stage.until_idle()
            outcomes = await stage.outcomes()
            assert outcomes == {f"{who}:": "interrupted", f"{later}:": "completed"}

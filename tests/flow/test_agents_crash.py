"""Agent trees after a server crash: correct rows, and nothing runs twice."""

import asyncio
from pathlib import Path

import pytest

from culm.settings import Settings
from culm.wire.asks import Ask, PermissionRequest
from tests.flow.agents_harness import (
    COST,
    TOKENS,
    AgentHarness,
    LoopWorker,
    calls,
    held,
    start,
    start_one_by_one,
    talk,
)
from tests.flow.agents_restarts import open_restarts
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
async def test_crashed_agent_tree_is_interrupted_and_the_next_prompt_runs(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, *TREE) as restarts:
        async with restarts.next() as first:
            await first.prompt("@lead: go")
            await first.until_asked_by("@bob", 2)
            await first.received.event_with("session", "A title")
            restarts.kill()
        async with restarts.next() as harness:
            await harness.until_idle()
            assert await harness.outcomes() == {"@ann:": "interrupted", "@bob:": "interrupted"}
            for agent in await harness.agents():
                assert (agent.state, agent.pid, agent.waiting_for) == ("ended", 0, "")
            assert {run.outcome for run in await harness.runs()} == {"interrupted"}
            for messages in (
                await harness.messages(),
                await harness.messages_of("@ann"),
                await harness.messages_of("@bob"),
            ):
                assert_answered(messages)
            (result,) = await harness.results()
            assert "Check before you repeat it." in result.content
            ann = await harness.agent("@ann")
            bob = await harness.run((await harness.agent("@bob")).run_id)
            lost = bob.cost - COST  # The estimate of bob's open request.
            assert (bob.estimated, bob.steps, 0 < lost < COST) == (True, 2, True)
            assert (ann.tokens, ann.cost) == (
                TOKENS + bob.tree_tokens,
                pytest.approx(2 * COST + lost),
            )
            assert (await harness.session()).cost == pytest.approx(3 * COST + lost)
            assert harness.launcher.workers == [], "nothing is restarted automatically"
            asked = len(harness.seen())
            await harness.talk("@lead: and now?")
            assert len(harness.seen()) == asked + 1
            read = [message.role for message in harness.sent_by("@lead")]
            assert read == ["user", "assistant", "tool", "user"]


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_asks_of_agents_lost_with_the_server_are_withdrawn(tmp_path: Path, how: str) -> None:
    """An agent cannot continue to wait after its worker process is gone."""
    writes = calls("write", file_path="a.txt", content="A")
    async with open_restarts(tmp_path, *TREE[:2], talk("@bob", writes)) as restarts:
        async with restarts.next() as first:
            await first.prompt("@lead: go")
            request = await request_in(first.received)
            if how == "kill":
                restarts.kill()
        async with restarts.next() as harness:
            await harness.until_idle()
            assert await harness.outcomes() == {"@ann:": "interrupted", "@bob:": "interrupted"}
            (ask,) = await harness.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
            assert (ask.request.id, ask.state) == (request.id, "withdrawn")
            assert not await answer(harness, request.id, "allow")
            assert not (harness.flow.directory() / "a.txt").exists()


@pytest.mark.parametrize("wait", [False, True], ids=["detached", "waited-for"])
async def test_unstarted_agents_resume_after_a_crash_only_if_detached(
    tmp_path: Path, *, wait: bool
) -> None:
    """Ann runs, and bob waits for her slot."""
    async with open_restarts(
        tmp_path,
        talk("@lead", *start_one_by_one("@ann: go", "@bob: go", wait=wait), then="Over."),
        talk("@ann", held()),
        talk("@bob", then="Bob is done."),
    ) as restarts:
        async with restarts.next(Settings(agents_at_once=1)) as first:
            await first.prompt("@lead: go")
            await first.until_asked_by("@ann")
            first.release(await first.until_asked_by("@lead", 2))
            await first.until_agent("@bob", lambda one: one.waiting_for == "slot")
            if not wait:
                await until(lambda: len(first.flow.workspace(first.remote.id).runs.live()) == 2)
            restarts.kill()
        async with restarts.next() as harness:
            await harness.until_idle()
            outcome = "interrupted" if wait else "completed"
            assert await harness.outcomes() == {"@ann:": "interrupted", "@bob:": outcome}
            assert len(harness.requests_by("@ann")) == 1, "nothing is restarted automatically"
            assert len(harness.requests_by("@bob")) == (0 if wait else 1)
            assert len(await harness.runs()) == 3


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_agent_of_a_client_is_interrupted_with_its_server_and_can_continue(
    tmp_path: Path, how: str
) -> None:
    async with open_restarts(tmp_path, talk("@ann", held(), then="More.")) as restarts:
        async with restarts.next() as first:
            ann = await first.start_agent("@ann: go")
            await first.until_asked_by("@ann")
            if how == "kill":
                restarts.kill()
        async with restarts.next() as harness:
            await harness.until_idle()
            assert (await harness.agent("@ann")).outcome == "interrupted"
            assert (await harness.do(ann.agent_id, "message", text="go on")).status == 202
            again = await harness.until_agent("@ann", lambda one: one.outcome == "completed")
            assert again.agent_id == ann.agent_id
            rows = [row for row in await harness.rows_of("@ann") if row[0] == "user"]
            assert [row[1] for row in rows] == ["@ann: go", "go on"]


ONE = Settings(agents_at_once=1)
LATER = (
    talk("@lead", *start_one_by_one("@ann: go", "@bob: go"), then="Over."),
    talk("@ann", held()),
    talk("@bob", *[calls("agent_list")] * 8),
)


async def bob_waits(harness: AgentHarness, **limits: int) -> str:
    """Let ann take the only slot; the run that started both has ended."""
    run_id = await harness.prompt("@lead: go", run_id="top", interactive=True, limits=limits)
    await harness.until_asked_by("@ann")
    harness.release(await harness.until_asked_by("@lead", 2))
    await harness.received.complete(run_id)
    return (await harness.until_agent("@bob", lambda bob: bob.waiting_for == "slot")).agent_id


@contract("EXC-22")
@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
async def test_tree_budget_applies_to_agents_started_by_the_next_server(
    tmp_path: Path, *, is_killed: bool
) -> None:
    async with open_restarts(tmp_path, *LATER) as restarts:
        async with restarts.next(ONE) as first:
            await bob_waits(first, steps=6)
            if is_killed:
                restarts.kill()
        async with restarts.next(ONE) as harness:
            await harness.until_idle()
            bob = await harness.agent("@bob")
            assert bob.reason == "Limit reached: The run it works for has used its 6 steps."
            assert (await harness.run("top")).tree_steps == 6


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "ended"])
async def test_changed_budget_applies_under_the_next_server(
    tmp_path: Path, *, is_killed: bool
) -> None:
    async with open_restarts(tmp_path, *LATER) as restarts:
        async with restarts.next(ONE) as first:
            await first.done(await bob_waits(first), "budget", steps=2)
            if is_killed:
                restarts.kill()
        async with restarts.next(ONE) as harness:
            await harness.until_idle()
            bob = await harness.agent("@bob")
            assert (bob.outcome, bob.tokens) == ("budget", 2 * TOKENS)


@contract("EXC-22")
async def test_usage_of_a_last_answer_survives_a_crash_before_its_turn_ends(
    tmp_path: Path,
) -> None:
    is_over, never = asyncio.Event(), asyncio.Event()

    async def hold_terminal_frame(_: LoopWorker, frame: bytes) -> bool:
        if b'"terminal"' in frame:
            is_over.set()
            await never.wait()
        return True

    async with open_restarts(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", then="Ann.")
    ) as restarts:
        async with restarts.next() as first:
            first.launcher.on_frame = hold_terminal_frame
            await first.prompt("@lead: go")
            await is_over.wait()
            await first.until_agent("@ann", lambda ann: ann.tokens > 0)
            restarts.kill()
            never.set()
        async with restarts.next() as harness:
            ann = await harness.agent("@ann")
            assert (ann.outcome, ann.tokens, ann.cost) == ("interrupted", TOKENS, COST)


async def test_unstarted_detached_agents_start_after_an_orderly_restart(
    tmp_path: Path,
) -> None:
    async with open_restarts(
        tmp_path,
        talk("@lead", start("@ann: go", "@bob: go", wait=False), then="Over."),
        talk("@ann", held()),
        talk("@bob", held()),
    ) as restarts:
        one = Settings(agents_at_once=1)
        async with restarts.next(one) as first:
            await first.talk("@lead: go")
            await until(lambda: bool(first.requests_by("@ann") or first.requests_by("@bob")))
            who, later = ("@ann", "@bob") if first.requests_by("@ann") else ("@bob", "@ann")
            await first.until_agent(later, lambda one: one.waiting_for == "slot")
        async with restarts.next(one) as harness:
            await harness.until_asked_by(later)
            harness.model.release()
            await harness.until_idle()
            outcomes = await harness.outcomes()
            assert outcomes == {f"{who}:": "interrupted", f"{later}:": "completed"}

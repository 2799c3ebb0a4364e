"""Whoever was away ends with the runs, the queues and the agents of whoever never left."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.ids import RunId
from culm.store.log import trim
from culm.wire.agents import StartAgent
from culm.wire.runs import QueuedPrompt
from tests.flow.agents_stage import AgentStage, held, open_agents, start, talk
from tests.flow.drive import Visitor
from tests.flow.test_resume import assert_same, come_back, ended
from tests.support import WAIT_S, contract

TALKS = (
    talk("@lead", start("@ann: go", name="ann"), then="Over."),
    talk("@ann", held("Ann "), then="Ann is done."),
    talk("@bob", held("Bob "), then="Bob is done."),
)

Between = Callable[[AgentStage], Awaitable[object]]


async def queue_more(stage: AgentStage) -> None:
    await stage.prompt("Another.", run_id="c")


async def reorder(stage: AgentStage) -> None:
    await stage.remote.order_queue(stage.session_id, [RunId("b"), RunId("a")])


async def edit(stage: AgentStage) -> None:
    await stage.remote.edit_run("b", "Changed. " * 100)


async def drop_one(stage: AgentStage) -> None:
    await stage.remote.drop_run("a")


async def clear(stage: AgentStage) -> None:
    await stage.remote.clear_queue(stage.session_id)


async def start_another_agent(stage: AgentStage) -> None:
    await stage.remote.start_agent(StartAgent("@bob: go", "bob"))
    await stage.asked_by("@bob")
    await stage.when("bob", lambda one: one.pid > 0)


async def stop_the_agent(stage: AgentStage) -> None:
    await stage.remote.cancel_agent((await stage.agent("ann")).agent_id)
    await stage.until_idle()


async def let_all_end(stage: AgentStage) -> None:
    stage.model.release()
    await stage.until_idle()


async def delete_all_of_it(stage: AgentStage) -> None:
    await stage.remote.cancel(stage.session_id)
    await stage.until_idle()
    await stage.remote.delete_session(stage.session_id)


HAPPENINGS: list[Between] = [
    queue_more,
    reorder,
    edit,
    drop_one,
    clear,
    start_another_agent,
    stop_the_agent,
    let_all_end,
    delete_all_of_it,
]


async def begun(stage: AgentStage) -> None:
    """The top waits for an agent, whose answer is held back; two prompts wait behind that."""
    await stage.prompt("@lead: go", run_id="lead")
    await stage.asked_by("@ann")
    await stage.when("ann", lambda one: one.pid > 0)
    for name in ("a", "b"):
        await stage.prompt(f"Prompt {name}.", run_id=name)


@contract("EXC-13")
@pytest.mark.parametrize("is_trimmed", [False, True], ids=["resumed", "anew"])
@pytest.mark.parametrize("between", HAPPENINGS, ids=lambda between: between.__name__)
async def test_a_client_that_was_away_knows_every_run_queue_and_agent(
    tmp_path: Path, between: Between, *, is_trimmed: bool
) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        there = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        visitor = Visitor(there)
        async with open_mirror(stage.remote) as follower, asyncio.timeout(WAIT_S):
            await follower.connected()
            await begun(stage)
            await visitor.load()
            both = [QueuedPrompt(RunId(name), f"Prompt {name}.") for name in ("a", "b")]
            assert visitor.mirror.queue == {stage.session_id: both}
            assert [one.name for one in visitor.mirror.agents.values()] == ["ann"]
            await between(stage)
            if is_trimmed:
                await stage.flow.workspace(stage.remote.id).store.write(trim(0, 0))
            await come_back(stage.remote, visitor)
            await follower.until(ended)
            await assert_same(stage.remote, visitor.mirror, follower.mirror)
        stage.model.release()
        await stage.remote.cancel(stage.session_id)
        for one in await stage.agents():
            await stage.remote.cancel_agent(one.agent_id)
        await stage.until_idle()


@contract("EXC-13")
async def test_a_client_that_names_sessions_holds_the_runs_and_agents_of_those_alone(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        await begun(stage)
        ann = await stage.agent("ann")
        other = await stage.remote.create_session("other")
        async with (
            open_mirror(stage.remote, stage.session_id) as top,
            open_mirror(stage.remote, ann.session_id, other.id) as below,
            asyncio.timeout(WAIT_S),
        ):
            await top.until(lambda mirror: bool(mirror.runs))
            await below.until(lambda mirror: bool(mirror.runs))
            assert (set(top.mirror.runs), top.mirror.agents) == ({"lead", "a", "b"}, {})
            assert set(below.mirror.runs) == {ann.run_id}
            assert (set(below.mirror.agents), below.mirror.queue) == ({ann.agent_id}, {})
            stage.model.release()
            await top.until(lambda mirror: not mirror.runs and not mirror.queue)
            await below.until(lambda mirror: not mirror.runs and not mirror.agents)

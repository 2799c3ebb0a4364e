"""Resumed streams: a reconnected client knows the same runs, queues and agents."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from culm.ids import RunId
from culm.store.store import trim
from culm.wire.agents import StartAgent
from culm.wire.runs import QueuedPrompt
from tests.flow.agents_harness import AgentHarness, held, open_agents, start, talk
from tests.flow.drive import ReconnectingMirror
from tests.flow.test_resume import assert_same, ended, reconnect
from tests.support import WAIT_S, contract

TALKS = (
    talk("@lead", start("@ann: go", name="ann"), then="Over."),
    talk("@ann", held("Ann "), then="Ann is done."),
    talk("@bob", held("Bob "), then="Bob is done."),
)

Change = Callable[[AgentHarness], Awaitable[object]]


async def queue_more(harness: AgentHarness) -> None:
    await harness.prompt("Another.", run_id="c")


async def reorder(harness: AgentHarness) -> None:
    await harness.remote.order_queue(harness.session_id, [RunId("b"), RunId("a")])


async def edit(harness: AgentHarness) -> None:
    await harness.remote.edit_run("b", "Changed. " * 100)


async def drop_one(harness: AgentHarness) -> None:
    await harness.remote.drop_run("a")


async def clear(harness: AgentHarness) -> None:
    await harness.remote.clear_queue(harness.session_id)


async def start_another_agent(harness: AgentHarness) -> None:
    await harness.remote.start_agent(StartAgent("@bob: go", "bob"))
    await harness.until_asked_by("@bob")
    await harness.until_agent("bob", lambda one: one.pid > 0)


async def stop_the_agent(harness: AgentHarness) -> None:
    await harness.remote.cancel_agent((await harness.agent("ann")).agent_id)
    await harness.until_idle()


async def let_all_end(harness: AgentHarness) -> None:
    harness.model.release()
    await harness.until_idle()


async def delete_all_of_it(harness: AgentHarness) -> None:
    await harness.remote.cancel(harness.session_id)
    await harness.until_idle()
    await harness.remote.delete_session(harness.session_id)


CHANGES: list[Change] = [
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


async def start_runs(harness: AgentHarness) -> None:
    """Start a run that waits for an agent with a held answer, and queue two prompts."""
    await harness.prompt("@lead: go", run_id="lead")
    await harness.until_asked_by("@ann")
    await harness.until_agent("ann", lambda one: one.pid > 0)
    for name in ("a", "b"):
        await harness.prompt(f"Prompt {name}.", run_id=name)


@contract("EXC-13")
@pytest.mark.parametrize("is_trimmed", [False, True], ids=["resumed", "anew"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
async def test_reconnected_client_knows_every_run_queue_and_agent(
    tmp_path: Path, change: Change, *, is_trimmed: bool
) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        there = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        reconnecting = ReconnectingMirror(there)
        async with open_mirror(harness.remote) as follower, asyncio.timeout(WAIT_S):
            await follower.connected()
            await start_runs(harness)
            await reconnecting.load()
            both = [QueuedPrompt(RunId(name), f"Prompt {name}.") for name in ("a", "b")]
            assert reconnecting.mirror.queue == {harness.session_id: both}
            assert [one.name for one in reconnecting.mirror.agents.values()] == ["ann"]
            await change(harness)
            if is_trimmed:
                await harness.flow.workspace(harness.remote.id).store.write(trim(0, 0))
            await reconnect(harness.remote, reconnecting)
            await follower.until(ended)
            await assert_same(harness.remote, reconnecting.mirror, follower.mirror)
        harness.model.release()
        await harness.remote.cancel(harness.session_id)
        for one in await harness.agents():
            await harness.remote.cancel_agent(one.agent_id)
        await harness.until_idle()


@contract("EXC-13")
async def test_client_with_a_session_filter_has_only_their_runs_and_agents(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        await start_runs(harness)
        ann = await harness.agent("ann")
        other = await harness.remote.create_session("other")
        async with (
            open_mirror(harness.remote, harness.session_id) as top,
            open_mirror(harness.remote, ann.session_id, other.id) as below,
            asyncio.timeout(WAIT_S),
        ):
            await top.until(lambda mirror: bool(mirror.runs))
            await below.until(lambda mirror: bool(mirror.runs))
            assert (set(top.mirror.runs), top.mirror.agents) == ({"lead", "a", "b"}, {})
            assert set(below.mirror.runs) == {ann.run_id}
            assert (set(below.mirror.agents), below.mirror.queue) == ({ann.agent_id}, {})
            harness.model.release()
            await top.until(lambda mirror: not mirror.runs and not mirror.queue)
            await below.until(lambda mirror: not mirror.runs and not mirror.agents)

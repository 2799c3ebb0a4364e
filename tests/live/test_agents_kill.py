"""Trees of agents in real processes, and `kill -9` of any part of them."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.messages import full_text
from tests.flow.agents_harness import calls, script_of, start, talk
from tests.live.agents_harness import FOLDER, at_work, open_agents_harness, pids, sleeping
from tests.live.harness import RESUME_S, make_directory
from tests.live.run_harness import open_client_of, write_config
from tests.processes.process_harness import wait_until_gone
from tests.support import contract, model_config

STOP_S = 5.0  # The limit for a cancel of any tree.


@contract("FLEET-99", "INV-79", "EXC-22")
async def test_killed_agent_in_a_three_level_tree_becomes_an_error_result(
    folder: Path,
) -> None:
    play = script_of(
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go"), then="Ann is done."),
        talk("@bob", start("@cat: go"), then="Bob is done."),
        talk("@cat", calls("bash", command="touch made"), sleeping("cat")),
    )
    async with open_model_server(play) as model, open_agents_harness(folder, model) as harness:
        await harness.prompt("@lead: go", "run")
        async with open_client_of(harness.server) as client:
            other = await client.open_workspace(make_directory(folder, FOLDER))
            for count in (1, 2):  # For `touch`, and for the command that never ends.
                async with asyncio.timeout(RESUME_S):
                    while not (open_asks := await other.asks()):
                        await asyncio.sleep(0.02)
                (ask,) = open_asks
                agents = await harness.agents()
                path = [agents[who].agent_id for who in ("@ann", "@bob", "@cat")]
                assert ask.agent_path == [harness.session_id, *path], count
                assert await other.answer(ask, "allow")
        agents = await harness.until(at_work("@ann", "@bob", "@cat"))
        commands = await harness.pids_of("cat")
        assert (folder / FOLDER / "made").exists()
        assert sorted(await harness.workers()) == sorted(pids(agents.values()))
        os.kill(agents["@bob"].pid, signal.SIGKILL)
        await harness.watch.until_complete("run", wait_s=RESUME_S)
        await wait_until_gone(*commands, agents["@bob"].pid, agents["@cat"].pid)
        assert await harness.outcomes() == {
            "@ann": "completed",
            "@bob": "error",
            "@cat": "canceled",
        }
        await harness.assert_consistent()
        (top,), (result,) = (
            await harness.results(),
            await harness.results(agents["@ann"].session_id),
        )
        assert (top.is_error, "Ann is done." in top.content) == (False, True)
        assert (result.is_error, "error: " in result.content) == (True, True)


@contract("FLEET-57", "EXC-22")
async def test_killed_server_leaves_no_agent_process_and_interrupted_outcomes(
    folder: Path,
) -> None:
    leaves = ("a1", "a2", "b1", "b2")
    play = script_of(
        talk("@lead", start("@ann: go", "@bob: go"), then="I see."),
        talk("@ann", start("@a1: go", "@a2: go")),
        talk("@bob", start("@b1: go", "@b2: go")),
        *(talk(f"@{name}", sleeping(name)) for name in leaves),
    )
    all_agents = ("@ann", "@bob", *(f"@{name}" for name in leaves))
    async with open_model_server(play) as model:
        async with open_agents_harness(folder, model) as harness:
            await harness.prompt("@lead: go", "killed", approve="allow")
            commands = await harness.pids_of(*leaves)
            agents = await harness.until(at_work(*all_agents))
            await harness.server.kill()
            await wait_until_gone(*commands, *pids(agents.values()))
        async with open_agents_harness(folder, model, harness.session_id) as again:
            assert await again.outcomes() == dict.fromkeys(all_agents, "interrupted")
            await again.assert_consistent()
            (result,) = await again.results()
            assert "Check before you repeat it." in result.content
            await again.prompt("@lead: and now?", "next")
            await again.watch.until_complete("next", wait_s=RESUME_S)
            assert len(await again.agents()) == 6, "nothing is restarted without a request"


@contract("EXC-26")
@pytest.mark.parametrize("killed", ["server", "agent"])
async def test_shown_output_of_an_agents_call_survives_a_kill(folder: Path, killed: str) -> None:
    count = "n=0; while :; do n=$((n+1)); echo line $n; sleep 0.03; done"
    counting = Reply(calls=[ScriptedCall(name="bash", id="count", input={"command": count})])
    play = script_of(talk("@lead", start("@ann: go"), then="Over."), talk("@ann", counting))
    async with open_model_server(play) as model:
        async with open_agents_harness(folder, model) as harness:
            watch = harness.watch
            await harness.prompt("@lead: go", "run", approve="allow")
            await watch.until(lambda: "line 20\n" in watch.output_of("count"), RESUME_S)
            agent = (await harness.agents())["@ann"]
            if killed == "server":
                await harness.server.kill()
            else:
                os.kill(agent.pid, signal.SIGKILL)
                await watch.until_complete("run", wait_s=RESUME_S)
        async with open_agents_harness(folder, model, harness.session_id) as again:
            (result,) = await again.results(agent.session_id)
    assert result.is_error
    assert result.content.startswith(watch.output_of("count"))


@contract("EXC-22")
async def test_cancel_ends_a_whole_agent_tree_with_its_commands(folder: Path) -> None:
    play = script_of(
        talk("@lead", start("@ann: go")),
        talk("@ann", start("@bob: go")),
        talk("@bob", sleeping("bob")),
    )
    async with open_model_server(play) as model, open_agents_harness(folder, model) as harness:
        await harness.prompt("@lead: go", "run", approve="allow")
        commands = await harness.pids_of("bob")
        agents = await harness.until(at_work("@ann", "@bob"))
        async with asyncio.timeout(STOP_S):
            assert (await harness.remote.cancel_run("run")).result == "canceled"
            await wait_until_gone(*commands, *pids(agents.values()))
        assert await harness.outcomes() == {"@ann": "canceled", "@bob": "canceled"}
        await harness.assert_consistent()


IN, OUT = 1.0, 10.0  # USD per million tokens.
# The whole answer, with its usage, follows when it is released.
COUNTED = Reply(deltas=["Half ", "of it"], hold_after=1, usage=ScriptedUsage(input=100, output=10))


async def answer_unread(model: ModelServer, *pids: int) -> None:
    """Let the model answer the last request completely, and kill its readers before they read."""
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    request = model.requests[-1]
    model.release(request.n)
    async with asyncio.timeout(RESUME_S):
        while not request.ended:
            await asyncio.sleep(0.02)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


@contract("EXC-28", "EXC-22")
@pytest.mark.parametrize("who", ["worker", "server"])
async def test_answer_that_was_lost_in_a_kill_is_charged_by_an_estimate(
    folder: Path, who: str
) -> None:
    play = script_of(talk("@lead", start("@ann: go"), then="Over."), talk("@ann", COUNTED))
    async with open_model_server(play) as model:
        prices = {"cost_per_1m_in": IN, "cost_per_1m_out": OUT}
        write_config(folder, model, **model_config(model.url, **prices))
        async with open_agents_harness(folder, model) as harness:
            await harness.prompt("@lead: go", "run")
            agents = await harness.until(at_work("@ann"))
            ann = agents["@ann"].session_id
            async with asyncio.timeout(RESUME_S):
                while not full_text((await harness.remote.messages(ann))[-1].parts):
                    await asyncio.sleep(0.02)
            if who == "worker":
                await answer_unread(model, agents["@ann"].pid)
                await harness.watch.until_complete("run", wait_s=RESUME_S)
            else:
                await answer_unread(model, harness.server.process.pid, agents["@ann"].pid)
                await harness.server.process.wait()
        async with open_agents_harness(folder, model, harness.session_id) as again:
            remote, agent = again.remote, (await again.agents())["@ann"]
            run, lead = await remote.run(agent.run_id), await remote.run("run")
            assert (run.outcome, run.estimated, run.steps) == (
                "error" if who == "worker" else "interrupted", True, 1,
            )  # fmt: skip
            # A quarter of the bytes of "@ann: go" and of "Half ", rounded up.
            assert (run.prompt_tokens, run.completion_tokens) == (2, 2)
            cost = pytest.approx((2 * IN + 2 * OUT) / 1_000_000)
            assert [run.cost, agent.cost, (await remote.session(ann)).cost] == [cost] * 3
            assert lead.tree_cost - lead.cost == cost
            assert (lead.estimated, lead.steps) == (False, 2 if who == "worker" else 1)
            await again.assert_consistent()

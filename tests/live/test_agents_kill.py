"""Trees of agents in real processes, and `kill -9` of any part: the rest is true, none is left."""

import asyncio
import os
import signal
from pathlib import Path

from culm.testing.model_server import open_model_server
from tests.flow.agents_stage import calls, script_of, start, talk
from tests.live.agents_desk import FOLDER, at_work, open_desk, pids, sleeping
from tests.live.harness import RESUME_S, make_directory
from tests.live.run_drive import open_client_of
from tests.processes.yard import gone
from tests.support import contract

STOP_S = 5.0  # What a cancel of any tree may take.


@contract("FLEET-99", "INV-79", "EXC-22")
async def test_of_three_levels_the_deepest_asks_another_client_and_a_kill_in_the_middle_is_a_result(
    folder: Path,
) -> None:
    play = script_of(
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go"), then="Ann is done."),
        talk("@bob", start("@cat: go"), then="Bob is done."),
        talk("@cat", calls("bash", command="touch made"), sleeping("cat")),
    )
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        await desk.prompt("@lead: go", "run")
        async with open_client_of(desk.server) as client:
            other = await client.open_workspace(make_directory(folder, FOLDER))
            for count in (1, 2):  # For what it makes, and for what never ends.
                async with asyncio.timeout(RESUME_S):
                    while not (open_asks := await other.asks()):
                        await asyncio.sleep(0.02)
                (ask,) = open_asks
                agents = await desk.agents()
                path = [agents[who].agent_id for who in ("@ann", "@bob", "@cat")]
                assert ask.agent_path == [desk.session_id, *path], count
                assert await other.answer(ask, "allow")
        agents = await desk.when(at_work("@ann", "@bob", "@cat"))
        commands = await desk.pids_of("cat")
        assert (folder / FOLDER / "made").exists()
        assert sorted(await desk.workers()) == sorted(pids(agents.values()))
        os.kill(agents["@bob"].pid, signal.SIGKILL)
        await desk.watch.until_complete("run", wait_s=RESUME_S)
        await gone(*commands, agents["@bob"].pid, agents["@cat"].pid)
        assert await desk.outcomes() == {"@ann": "completed", "@bob": "error", "@cat": "canceled"}
        await desk.assert_truthful()
        (top,), (result,) = await desk.results(), await desk.results(agents["@ann"].session_id)
        assert (top.is_error, "Ann is done." in top.content) == (False, True)
        assert (result.is_error, "error: " in result.content) == (True, True)


@contract("FLEET-57", "EXC-22")
async def test_of_a_tree_whose_server_was_killed_nothing_runs_and_the_next_one_tells_the_truth(
    folder: Path,
) -> None:
    leaves = ("a1", "a2", "b1", "b2")
    play = script_of(
        talk("@lead", start("@ann: go", "@bob: go"), then="I see."),
        talk("@ann", start("@a1: go", "@a2: go")),
        talk("@bob", start("@b1: go", "@b2: go")),
        *(talk(f"@{name}", sleeping(name)) for name in leaves),
    )
    everybody = ("@ann", "@bob", *(f"@{name}" for name in leaves))
    async with open_model_server(play) as model:
        async with open_desk(folder, model) as desk:
            await desk.prompt("@lead: go", "killed", approve="allow")
            commands = await desk.pids_of(*leaves)
            agents = await desk.when(at_work(*everybody))
            await desk.server.kill()
            await gone(*commands, *pids(agents.values()))
        async with open_desk(folder, model, desk.session_id) as again:
            assert await again.outcomes() == dict.fromkeys(everybody, "interrupted")
            await again.assert_truthful()
            (result,) = await again.results()
            assert "Check before you repeat it." in result.content
            await again.prompt("@lead: and now?", "next")
            await again.watch.until_complete("next", wait_s=RESUME_S)
            assert len(await again.agents()) == 6, "nothing is begun again unasked"


@contract("EXC-22")
async def test_a_cancel_leaves_nothing_of_a_tree_whose_deepest_runs_a_command(folder: Path) -> None:
    play = script_of(
        talk("@lead", start("@ann: go")),
        talk("@ann", start("@bob: go")),
        talk("@bob", sleeping("bob")),
    )
    async with open_model_server(play) as model, open_desk(folder, model) as desk:
        await desk.prompt("@lead: go", "run", approve="allow")
        commands = await desk.pids_of("bob")
        agents = await desk.when(at_work("@ann", "@bob"))
        async with asyncio.timeout(STOP_S):
            assert (await desk.remote.cancel_run("run")).result == "canceled"
            await gone(*commands, *pids(agents.values()))
        assert await desk.outcomes() == {"@ann": "canceled", "@bob": "canceled"}
        await desk.assert_truthful()

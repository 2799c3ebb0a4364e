"""`culm steer`: an active run reads the message; without one the command fails."""

import asyncio
from pathlib import Path

from culm.testing.script import ScriptedCall
from tests.cli.commands.test_asks import run_culm
from tests.cli.commands.test_ps import options_for
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.agents_harness import held, open_agents, talk
from tests.support import WAIT_S


async def test_active_run_reads_a_steer_message_and_an_ended_one_is_refused(
    tmp_path: Path, cli: CliHarness
) -> None:
    look = ScriptedCall(name="ls", input={})
    top = talk("@top", held("", calls=[look]), held("Two."))
    async with open_agents(tmp_path, top, talk("@ann", held())) as harness:
        options = options_for(harness)
        ann = await harness.start_agent("@ann: go")
        run_id = await harness.prompt("@top: begin")
        first, other = await harness.until_asked_by("@top"), await harness.until_asked_by("@ann")
        expected = f"run {run_id[:8]} (@top: begin) reads it before its next step\n"
        for name in (run_id[:8], harness.session_id):
            assert await run_culm(cli, "steer", *options, name, "be", "brief") == CommandResult(
                0, "", expected
            )
        result = await run_culm(cli, "steer", *options, ann.agent_id, "stay calm")
        assert result.err == f"agent {ann.agent_id[:8]} (@ann: go) reads it before its next step\n"
        harness.release(first)
        harness.release(other)
        second = await harness.until_asked_by("@top", 2)
        assert str(harness.sent_by("@top", 1)).count("be brief") == 2
        steered, _ = (run for run in await harness.remote.runs() if run.prompt == "be brief")
        apart = await run_culm(cli, "stop", *options, steered.id)
        assert (apart.status, "cannot be stopped by itself" in apart.err) == (1, True)
        harness.release(second)
        await harness.until_asked_by("@ann", 2)
        assert "stay calm" in str(harness.sent_by("@ann", 1))
        async with asyncio.timeout(WAIT_S):
            while any(run.state != "ended" for run in await harness.remote.runs()):
                await asyncio.sleep(0.01)
        short = ann.agent_id[:8]
        for name, label, instead in (
            (run_id, f"run {run_id[:8]} (@top: begin)", f"run --session {harness.session_id}"),
            (ann.agent_id, f"agent {short} (@ann: go)", f"mail send --to {short}"),
        ):
            assert await run_culm(cli, "steer", *options, name, "more") == CommandResult(
                1,
                "",
                f"culm: no active run in {label}\n"
                f"hint: give it more to do with culm {instead} TEXT\n",
            )

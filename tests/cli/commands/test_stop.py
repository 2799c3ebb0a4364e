"""`culm stop`: targets are named by people, and the outcome of each is printed."""

from pathlib import Path

import pytest

from culm.cli.commands.stop import StopOutcome
from tests.cli.commands.test_asks import run_culm
from tests.cli.commands.test_ps import options_for
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.agents_harness import held, open_agents, talk


async def test_agent_is_stopped_by_name_without_a_reason(tmp_path: Path, cli: CliHarness) -> None:
    async with open_agents(tmp_path, talk("@ann", held())) as harness:
        ann = await harness.start_agent("@ann: go")
        await harness.until_asked_by("@ann")
        short = ann.agent_id[:8]
        unknown = await run_culm(cli, "stop", *options_for(harness), "@ann: go", "@anne")
        assert (unknown.status, unknown.err.splitlines()) == (
            2,
            [
                "culm: no run or agent or session is named @anne",
                f"hint: did you mean agent {short} (@ann: go)",
            ],
        )
        result = await run_culm(cli, "stop", *options_for(harness), "@ann: go")
        assert result == CommandResult(0, "", f"agent {short} (@ann: go): canceled\n")
        assert (await harness.agent("@ann")).reason == ""
    no_server = await run_culm(cli, "stop", "--host", f"unix://{tmp_path}/s", "a")
    assert (no_server.status, no_server.err.splitlines()[0]) == (
        2,
        f"culm: no active runs in {cli.project}",
    )


async def test_title_shared_with_a_prompt_means_the_session(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with open_agents(tmp_path, talk("@top", held())) as harness:
        run_id = await harness.prompt("@top: begin")
        await harness.until_asked_by("@top")
        await harness.remote.rename_session(harness.session_id, "@Top: begin")
        result = await run_culm(cli, "stop", *options_for(harness), "@top: begin")
        assert result == CommandResult(0, "", f"run {run_id[:8]} (@top: begin): canceled\n")


@pytest.mark.parametrize(
    ("outcome", "line"),
    [
        (StopOutcome("run r", "canceled"), "run r: canceled"),
        (StopOutcome("run r", "finished_first"), "run r: finished first"),
        (StopOutcome("run r", "not_stopped", [7, 8]), "run r: did not stop; left: pid 7, 8"),
        (StopOutcome("run r", "already_ended", why="error"), "run r: had already ended (error)"),
    ],
)
def test_outcome_of_stop_is_one_line(outcome: StopOutcome, line: str) -> None:
    assert outcome.line() == line

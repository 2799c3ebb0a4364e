"""`culm agents`: states of sessions and agents, also without a server."""

import json
from pathlib import Path

import pytest

from culm.cli.render.renderers import ended_line
from culm.clock import LoopClock
from culm.ids import AgentId, RunId, SessionId
from culm.store.runs import end_run, start_run
from culm.store.sessions import add_session
from culm.wire.agents import Agent
from culm.wire.runs import Ending
from culm.workspace.roots import DataRoots, project_folder
from tests.cli.conftest import CliHarness
from tests.store.trees import TOP, open_tree

RUN = RunId(f"r {TOP}")
STALE_NOTE = "(no server is running: states are those that the last one stored)\n"


@pytest.fixture
def database(cli: CliHarness) -> Path:
    """The database of a project with one session and one accepted run."""
    folder = project_folder(cli.data_dir, cli.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db"):
        return folder / "culm.db"


def test_session_is_listed_with_the_state_of_its_runs(cli: CliHarness, database: Path) -> None:
    def states() -> list[tuple[str, str, str | None]]:
        listed = json.loads(cli.culm("agents", "--json").out)
        return sorted((one["run_id"], one["state"], one["outcome"]) for one in listed)

    assert states() == [(RUN, "pending", None)]
    with open_tree(database) as tree:
        tree.do(start_run(RUN, was_queued=False))
    assert states() == [(RUN, "running", None)]
    with open_tree(database) as tree:
        tree.do(end_run(RUN, Ending("end_turn")))
        tree.do(add_session(SessionId("idle"), "Nothing yet", sessions_max=9))
    assert states() == [("", "ended", None), (RUN, "ended", "completed")]
    rows = [line.split()[:3] for line in cli.culm("agents").out.splitlines()[1:]]
    assert sorted(rows) == [["idle", "session", "-"], [TOP, "session", "completed"]]


async def test_stale_note_is_printed_without_a_server_if_a_run_has_not_ended(
    cli: CliHarness, database: Path
) -> None:
    assert cli.culm("agents").err == STALE_NOTE
    async with DataRoots(LoopClock()).hold(cli.data_dir):
        assert cli.culm("agents").err == ""
    (cli.data_dir / "culm.lock").write_text("nonsense")
    assert cli.culm("agents").err == STALE_NOTE
    with open_tree(database) as tree:
        tree.do(end_run(RUN, Ending("end_turn")))
    assert cli.culm("agents").err == ""


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("", "canceled: 2,200 tokens, $0.5000"),
        ("It has ended.", "canceled: It has ended; 2,200 tokens, $0.5000"),
    ],
)
def test_ended_line_has_the_outcome_reason_and_usage(reason: str, line: str) -> None:
    agent = Agent(AgentId("a"), "", SessionId("s"), outcome="canceled", reason=reason)
    agent.tokens, agent.cost = 2_200, 0.5
    assert ended_line(agent) == line

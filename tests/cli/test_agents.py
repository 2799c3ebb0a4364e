"""`culm agents`: how far everybody is, and what is known of that without a server."""

import json
from pathlib import Path

import pytest

from culm.cli.render.agent_lines import ended_line
from culm.clock import LoopClock
from culm.ids import AgentId, RunId, SessionId
from culm.store.runs import end_run, start_run
from culm.store.sessions import add_session
from culm.wire.agents import Agent
from culm.wire.endings import Ending
from culm.workspace.roots import DataRoots, project_folder
from tests.cli.conftest import Desk
from tests.store.trees import TOP, open_tree

RUN = RunId(f"r {TOP}")
OLD = "(no server runs: states are as the last one left them)\n"


@pytest.fixture
def database(desk: Desk) -> Path:
    """Of a project with one session, whose run was accepted."""
    folder = project_folder(desk.data_dir, desk.project)
    folder.mkdir(parents=True)
    with open_tree(folder / "culm.db"):
        return folder / "culm.db"


def test_a_session_is_listed_with_how_far_its_runs_are(desk: Desk, database: Path) -> None:
    def states() -> list[tuple[str, str, str | None]]:
        listed = json.loads(desk.culm("agents", "--json").out)
        return sorted((one["run_id"], one["state"], one["outcome"]) for one in listed)

    assert states() == [(RUN, "pending", None)]
    with open_tree(database) as tree:
        tree.do(start_run(RUN, was_queued=False))
    assert states() == [(RUN, "running", None)]
    with open_tree(database) as tree:
        tree.do(end_run(RUN, Ending("end_turn")))
        tree.do(add_session(SessionId("idle"), "Nothing yet", sessions_max=9))
    assert states() == [("", "ended", None), (RUN, "ended", "completed")]
    rows = [line.split()[:3] for line in desk.culm("agents").out.splitlines()[1:]]
    assert sorted(rows) == [["idle", "session", "-"], [TOP, "session", "completed"]]


async def test_that_states_are_old_is_told_where_no_server_is_and_somebody_has_not_ended(
    desk: Desk, database: Path
) -> None:
    assert desk.culm("agents").err == OLD
    async with DataRoots(LoopClock()).hold(desk.data_dir):
        assert desk.culm("agents").err == ""
    (desk.data_dir / "culm.lock").write_text("nonsense")
    assert desk.culm("agents").err == OLD
    with open_tree(database) as tree:
        tree.do(end_run(RUN, Ending("end_turn")))
    assert desk.culm("agents").err == ""


@pytest.mark.parametrize(
    ("reason", "line"),
    [
        ("", "canceled: 2,200 tokens, $0.5000"),
        ("It has ended.", "canceled: It has ended; 2,200 tokens, $0.5000"),
    ],
)
def test_the_last_line_of_an_agent_reads_as_one(reason: str, line: str) -> None:
    agent = Agent(AgentId("a"), "", SessionId("s"), outcome="canceled", reason=reason)
    agent.tokens, agent.cost = 2_200, 0.5
    assert ended_line(agent) == line

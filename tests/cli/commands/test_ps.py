"""`culm ps`: active runs, the agents below them, and processes."""

import asyncio
import json
import re
from pathlib import Path

from culm.cli.commands.ps import ActivityNames, WorkspaceActivity, lines_of, parents_of
from culm.cli.render.text import in_tree_order
from culm.ids import AgentId, RunId, SessionId
from culm.testing.model_server import open_model_server
from culm.wire.agents import Agent
from culm.wire.runs import Run
from culm.wire.workspaces import Process
from tests.cli.commands.test_asks import run_culm
from tests.cli.conftest import CliHarness, CommandResult
from tests.flow.agents_harness import AgentHarness, held, open_agents, start, talk
from tests.flow.config_files import open_configured
from tests.support import WAIT_S, contract


def options_for(harness: AgentHarness) -> tuple[str, ...]:
    return ("--host", harness.flow.url, "--dir", str(harness.flow.directory()))


@contract("CLI-8")
async def test_ps_shows_agents_below_runs_and_stop_ends_the_session(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with open_agents(
        tmp_path, talk("@top", start("@ann: go", wait=True)), talk("@ann", held())
    ) as harness:
        options = options_for(harness)
        run_id = await harness.prompt("@top: begin")
        await harness.until_asked_by("@ann")
        ann = await harness.agent("@ann")
        head, run, agent, _, processes, worker = (
            await run_culm(cli, "ps", *options)
        ).out.splitlines()
        assert head.split() == ["id", "kind", "state", "age", "tokens", "cost", "what"]
        assert run.split()[:3] == [run_id[:8], "run", "active"]
        assert run.endswith("@top: begin")
        assert agent.startswith(f"  {ann.agent_id[:8]}  agent  running")
        assert processes.split() == ["pid", "kind", "age", "memory", "command"]
        assert worker.endswith(f"@ann: go ({ann.agent_id[:8]})")
        listed = json.loads((await run_culm(cli, "ps", "--json", *options)).out)
        assert sorted(one["id"] for one in listed["runs"]) == sorted([run_id, ann.run_id])
        assert [one["agent_id"] for one in listed["agents"]] == [ann.agent_id]
        assert [one["kind"] for one in listed["processes"]] == ["worker"]
        stopped = await run_culm(cli, "stop", *options, harness.session_id[:12])
        assert stopped == CommandResult(
            0,
            "",
            f"run {run_id[:8]} (@top: begin): canceled\n"
            f"agent {ann.agent_id[:8]} (@ann: go): canceled\n",
        )
        assert await run_culm(cli, "ps", *options) == CommandResult(0, "", "no active runs\n")
        again = await run_culm(cli, "stop", *options, run_id, "@ann: go")
        assert again == CommandResult(
            0,
            "",
            f"run {run_id[:8]} (@top: begin): had already ended (canceled)\n"
            f"agent {ann.agent_id[:8]} (@ann: go): had already ended (canceled)\n",
        )


async def test_ps_lists_running_processes_and_all_directories(
    tmp_path: Path, cli: CliHarness
) -> None:
    async with (
        open_model_server() as model_server,
        open_configured(tmp_path, model_server, None, tools=None) as harness,
    ):
        options = ("--host", harness.flow.url)
        run_id = await harness.prompt("run echo up; sleep 60", approve="allow")
        async with asyncio.timeout(WAIT_S):
            while not (found := await harness.remote.processes()):
                await asyncio.sleep(0.01)
        (process,) = found
        shown = (await run_culm(cli, "ps", *options)).out.splitlines()
        pid, kind, age, *memory, command = shown[-1].split(None, 5)
        assert (pid, kind, memory[1]) == (str(process.pid), "call", "MiB")
        assert re.fullmatch(r"0:\d\d", age)
        assert command == "echo up; sleep 60"
        assert [line.split()[0] for line in shown[:2]] == ["id", run_id[:8]]
        place = harness.remote.info.path
        everywhere = await run_culm(cli, "ps", "--all", "--dir", "/", *options)
        assert everywhere.out.splitlines()[:2] == [place, shown[0]]
        listed = json.loads((await run_culm(cli, "ps", "--all", "--json", *options)).out)
        assert [(one["path"], len(one["runs"])) for one in listed] == [(place, 1)]
        stopped = await run_culm(cli, "stop", *options, run_id[:8])
        assert stopped == CommandResult(
            0, "", f"run {run_id[:8]} (run echo up; sleep 60): canceled\n"
        )
        assert await run_culm(cli, "ps", *options) == CommandResult(0, "", "no active runs\n")


async def test_ps_without_a_server_lists_no_runs(tmp_path: Path, cli: CliHarness) -> None:
    no_server = ("--host", f"unix://{tmp_path}/s")
    assert await run_culm(cli, "ps", *no_server) == CommandResult(0, "", "no active runs\n")
    assert await run_culm(cli, "ps", "--all", *no_server) == CommandResult(
        0, "", "no active runs\n"
    )
    none: dict[str, list[str]] = {"runs": [], "agents": [], "processes": []}
    assert json.loads((await run_culm(cli, "ps", "--json", *no_server)).out) == none
    assert (await run_culm(cli, "steer", *no_server, "a", "hi")).status == 2


# --- formatting


def run_of(run_id: str, session_id: str = "s", **more: object) -> Run:
    run = Run(RunId(run_id), SessionId(session_id), state="active", prompt=f"do {run_id}")
    for name, value in more.items():
        setattr(run, name, value)
    return run


def agent_of(agent_id: str, parent_id: str, run_id: str = "", **more: object) -> Agent:
    agent = Agent(AgentId(agent_id), parent_id, SessionId(f"s {agent_id}"), state="running")
    agent.run_id, agent.name = run_id, f"the {agent_id}"
    for name, value in more.items():
        setattr(agent, name, value)
    return agent


def test_agents_are_listed_below_their_run_or_idle_session() -> None:
    activity = WorkspaceActivity(
        [
            run_of("r1"),
            run_of("r2", state="queued"),
            run_of("ra", "s a", agent_id="a", parent_run_id="r2"),
        ],
        [
            agent_of("a", "s", "ra"),
            agent_of("b", "gone"),  # Its parent has ended ...
            agent_of("c", "old"),  # ... and the session of this one is idle.
            agent_of("d", ""),
            agent_of("e", "a"),
        ],
        [],
    )
    known = ActivityNames(parents={"gone": "a", "old": "rest"})
    assert list(in_tree_order(parents_of(activity, known))) == [
        (0, "r1"),
        (0, "r2"),
        (1, "a"),
        (2, "b"),
        (2, "e"),
        (0, "rest"),
        (1, "c"),
        (0, "d"),
    ]


def test_rows_show_what_a_run_waits_for_and_usage_of_its_tree() -> None:
    activity = WorkspaceActivity(
        [
            run_of("r1", state="waiting", tree_tokens=1200, tree_cost=0.5, created_at=40),
            run_of("r2", state="folded", host_run_id="r1", created_at=100),
            run_of("r3", "t", state="held", title="No model", created_at=100),
        ],
        [agent_of("a", "s", waiting_for="slot", started_at=99, tokens=7)],
        [Process(7, "culm worker a", "worker", "s a", "", "", 1.0, 1 << 20, stopping=True)],
    )
    known = ActivityNames(asks={"r1": "ask 68263f22"}, short={"a": "a"})
    assert lines_of(activity, known, 100.0, 0) == [
        "id   kind   state                   age   tokens  cost     what",
        "r1   run    waits for ask 68263f22  1:00  1,200   $0.5000  do r1",
        "  a  agent  waits for a slot        0:01  7       -        the a",
        "r2   run    read by r1              0:00  -       -        do r2",
        "r3   run    held: No model          0:00  -       -        do r3",
        "",
        "pid  kind    age   memory   command",
        "7    worker  0:01  1.0 MiB  the a (a) (stopping)",
    ]
    assert max(map(len, lines_of(activity, known, 100.0, 40))) <= 40


def test_tree_order_lists_each_item_once_even_in_a_cycle() -> None:
    parents = {"a": "b", "b": "a", "c": "", "d": "c", "e": "nobody"}
    order = [(0, "c"), (1, "d"), (0, "e"), (0, "a"), (1, "b")]
    assert list(in_tree_order(parents)) == order

"""`culm ps`, `culm stop`, `culm steer`: what is going on, and what people do about it."""

import asyncio
import json
from pathlib import Path

import pytest

from culm.cli.names import NamedItem
from culm.cli.ps import ActivityNames, WorkspaceActivity, lines_of, parents_of
from culm.cli.render.trees import in_tree_order
from culm.cli.stop import StopOutcome
from culm.cli.targets import NamedTargets
from culm.errors import InvalidRequest, NotFound
from culm.ids import AgentId, RunId, SessionId
from culm.testing.model_server import open_model_server
from culm.testing.script import ScriptedCall
from culm.wire.agents import Agent
from culm.wire.processes import Process
from culm.wire.runs import Run
from tests.cli.conftest import Desk, Said
from tests.cli.test_asks import say
from tests.flow.agents_stage import AgentStage, held, open_agents, start, talk
from tests.flow.written import open_written
from tests.support import WAIT_S, contract


def at(stage: AgentStage) -> tuple[str, ...]:
    return ("--host", stage.flow.url, "--dir", str(stage.flow.directory()))


@contract("CLI-8")
async def test_runs_are_shown_with_the_agents_below_them_and_stopped_with_their_session(
    tmp_path: Path, desk: Desk
) -> None:
    async with open_agents(
        tmp_path, talk("@top", start("@ann: go", wait=True)), talk("@ann", held())
    ) as stage:
        where = at(stage)
        run_id = await stage.prompt("@top: begin")
        await stage.asked_by("@ann")
        ann = await stage.agent("@ann")
        head, run, agent, _, processes, worker = (await say(desk, "ps", *where)).out.splitlines()
        assert head.split() == ["id", "kind", "state", "age", "tokens", "cost", "what"]
        assert run.split()[:3] == [run_id[:8], "run", "active"]
        assert run.endswith("@top: begin")
        assert agent.startswith(f"  {ann.agent_id[:8]}  agent  running")
        assert processes.split() == ["pid", "kind", "age", "memory", "command"]
        assert worker.endswith(f"@ann: go ({ann.agent_id[:8]})")
        told = json.loads((await say(desk, "ps", "--json", *where)).out)
        assert sorted(one["id"] for one in told["runs"]) == sorted([run_id, ann.run_id])
        assert [one["agent_id"] for one in told["agents"]] == [ann.agent_id]
        assert [one["kind"] for one in told["processes"]] == ["worker"]
        stopped = await say(desk, "stop", *where, stage.session_id[:12])
        assert stopped == Said(
            0,
            "",
            f"run {run_id[:8]} (@top: begin): canceled\n"
            f"agent {ann.agent_id[:8]} (@ann: go): canceled\n",
        )
        assert await say(desk, "ps", *where) == Said(0, "", "nothing runs here\n")
        again = await say(desk, "stop", *where, run_id, "@ann: go")
        assert again == Said(
            0,
            "",
            f"run {run_id[:8]} (@top: begin): had ended (canceled)\n"
            f"agent {ann.agent_id[:8]} (@ann: go): had ended (canceled)\n",
        )


async def test_an_agent_is_stopped_by_its_name_and_nobody_is_said_to_have_cancelled_it(
    tmp_path: Path, desk: Desk
) -> None:
    async with open_agents(tmp_path, talk("@ann", held())) as stage:
        ann = await stage.start_agent("@ann: go")
        await stage.asked_by("@ann")
        short = ann.agent_id[:8]
        unknown = await say(desk, "stop", *at(stage), "@ann: go", "@anne")
        assert (unknown.status, unknown.err.splitlines()) == (
            2,
            [
                "culm: no run or agent or session is called @anne",
                f"hint: did you mean agent {short} (@ann: go)",
            ],
        )
        said = await say(desk, "stop", *at(stage), "@ann: go")
        assert said == Said(0, "", f"agent {short} (@ann: go): canceled\n")
        assert (await stage.agent("@ann")).reason == ""
    nobody = await say(desk, "stop", "--host", f"unix://{tmp_path}/s", "a")
    assert (nobody.status, nobody.err.splitlines()[0]) == (
        2,
        f"culm: nobody is at work in {desk.project}",
    )


async def test_what_works_is_told_something_and_where_nothing_works_that_is_said(
    tmp_path: Path, desk: Desk
) -> None:
    look = ScriptedCall(name="ls", input={})
    top = talk("@top", held("", calls=[look]), held("Two."))
    async with open_agents(tmp_path, top, talk("@ann", held())) as stage:
        where = at(stage)
        ann = await stage.start_agent("@ann: go")
        run_id = await stage.prompt("@top: begin")
        first, other = await stage.asked_by("@top"), await stage.asked_by("@ann")
        words = f"run {run_id[:8]} (@top: begin) reads it before its next step\n"
        for name in (run_id[:8], stage.session_id):
            assert await say(desk, "steer", *where, name, "be", "brief") == Said(0, "", words)
        said = await say(desk, "steer", *where, ann.agent_id, "stay calm")
        assert said.err == f"agent {ann.agent_id[:8]} (@ann: go) reads it before its next step\n"
        stage.release(first)
        stage.release(other)
        second = await stage.asked_by("@top", 2)
        assert str(stage.read_by("@top", 1)).count("be brief") == 2
        told, _ = (run for run in await stage.remote.runs() if run.prompt == "be brief")
        apart = await say(desk, "stop", *where, told.id)
        assert (apart.status, "cannot be stopped by itself" in apart.err) == (1, True)
        stage.release(second)
        await stage.asked_by("@ann", 2)
        assert "stay calm" in str(stage.read_by("@ann", 1))
        async with asyncio.timeout(WAIT_S):
            while any(run.state != "ended" for run in await stage.remote.runs()):
                await asyncio.sleep(0.01)
        short = ann.agent_id[:8]
        for name, label, instead in (
            (run_id, f"run {run_id[:8]} (@top: begin)", f"run --session {stage.session_id}"),
            (ann.agent_id, f"agent {short} (@ann: go)", f"mail send --to {short}"),
        ):
            assert await say(desk, "steer", *where, name, "more") == Said(
                1,
                "",
                f"culm: nothing is at work in {label}\n"
                f"hint: culm {instead} TEXT gives it more to do\n",
            )


async def test_a_title_that_a_session_has_from_its_prompt_means_the_session(
    tmp_path: Path, desk: Desk
) -> None:
    async with open_agents(tmp_path, talk("@top", held())) as stage:
        run_id = await stage.prompt("@top: begin")
        await stage.asked_by("@top")
        await stage.remote.rename_session(stage.session_id, "@Top: begin")
        said = await say(desk, "stop", *at(stage), "@top: begin")
        assert said == Said(0, "", f"run {run_id[:8]} (@top: begin): canceled\n")


async def test_processes_are_listed_while_they_run_and_all_directories_can_be_seen(
    tmp_path: Path, desk: Desk
) -> None:
    async with (
        open_model_server() as nobody,
        open_written(tmp_path, nobody, None, tools=None) as stage,
    ):
        where = ("--host", stage.flow.url)
        run_id = await stage.prompt("run echo up; sleep 60", approve="allow")
        async with asyncio.timeout(WAIT_S):
            while not (found := await stage.remote.processes()):
                await asyncio.sleep(0.01)
        (process,) = found
        shown = (await say(desk, "ps", *where)).out.splitlines()
        pid, kind, age, *memory, command = shown[-1].split(None, 5)
        assert (pid, kind, memory[1]) == (str(process.pid), "call", "MiB")
        assert (age, command) == ("0:00", "echo up; sleep 60")
        assert [line.split()[0] for line in shown[:2]] == ["id", run_id[:8]]
        place = stage.remote.info.path
        everywhere = await say(desk, "ps", "--all", "--dir", "/", *where)
        assert everywhere.out.splitlines()[:2] == [place, shown[0]]
        told = json.loads((await say(desk, "ps", "--all", "--json", *where)).out)
        assert [(one["path"], len(one["runs"])) for one in told] == [(place, 1)]
        stopped = await say(desk, "stop", *where, run_id[:8])
        assert stopped == Said(0, "", f"run {run_id[:8]} (run echo up; sleep 60): canceled\n")
        assert await say(desk, "ps", *where) == Said(0, "", "nothing runs here\n")


async def test_where_no_server_is_nothing_runs(tmp_path: Path, desk: Desk) -> None:
    nobody = ("--host", f"unix://{tmp_path}/s")
    assert await say(desk, "ps", *nobody) == Said(0, "", "nothing runs here\n")
    assert await say(desk, "ps", "--all", *nobody) == Said(0, "", "nothing runs here\n")
    none: dict[str, list[str]] = {"runs": [], "agents": [], "processes": []}
    assert json.loads((await say(desk, "ps", "--json", *nobody)).out) == none
    assert (await say(desk, "steer", *nobody, "a", "hi")).status == 2


# --- how it is shown


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


def test_agents_stand_below_the_run_that_started_them_or_the_session_that_has_none() -> None:
    going = WorkspaceActivity(
        [
            run_of("r1"),
            run_of("r2", state="queued"),
            run_of("ra", "s a", agent_id="a", parent_run_id="r2"),
        ],
        [
            agent_of("a", "s", "ra"),
            agent_of("b", "gone"),  # Whoever started it has ended ...
            agent_of("c", "old"),  # ... and here its session rests.
            agent_of("d", ""),
            agent_of("e", "a"),
        ],
        [],
    )
    known = ActivityNames(parents={"gone": "a", "old": "rest"})
    assert list(in_tree_order(parents_of(going, known))) == [
        (0, "r1"),
        (0, "r2"),
        (1, "a"),
        (2, "b"),
        (2, "e"),
        (0, "rest"),
        (1, "c"),
        (0, "d"),
    ]


def test_a_state_says_what_is_waited_for_and_what_was_used_is_told_of_the_whole_tree() -> None:
    going = WorkspaceActivity(
        [
            run_of("r1", state="waiting", tree_tokens=1200, tree_cost=0.5, created_at=40),
            run_of("r2", state="folded", host_run_id="r1", created_at=100),
            run_of("r3", "t", state="held", title="No model", created_at=100),
        ],
        [agent_of("a", "s", waiting_for="slot", started_at=99, tokens=7)],
        [Process(7, "culm worker a", "worker", "s a", "", "", 1.0, 1 << 20, stopping=True)],
    )
    known = ActivityNames(asks={"r1": "ask 68263f22"}, short={"a": "a"})
    assert lines_of(going, known, 100.0, 0) == [
        "id   kind   state                   age   tokens  cost     what",
        "r1   run    waits for ask 68263f22  1:00  1,200   $0.5000  do r1",
        "  a  agent  waits for a slot        0:01  7       -        the a",
        "r2   run    read by r1              0:00  -       -        do r2",
        "r3   run    held: No model          0:00  -       -        do r3",
        "",
        "pid  kind    age   memory   command",
        "7    worker  0:01  1.0 MiB  the a (a) (stopping)",
    ]
    assert max(map(len, lines_of(going, known, 100.0, 40))) <= 40


def test_everybody_comes_once_also_who_is_its_own_ancestor() -> None:
    parents = {"a": "b", "b": "a", "c": "", "d": "c", "e": "nobody"}
    order = [(0, "c"), (1, "d"), (0, "e"), (0, "a"), (1, "b")]
    assert list(in_tree_order(parents)) == order


def test_what_works_is_meant_before_what_has_ended_unless_an_id_is_given_whole() -> None:
    runs = [run_of("ab"), run_of("abc", state="ended"), run_of("x", state="ended")]
    runs[1].prompt = runs[0].prompt
    named = [
        *(NamedItem("run", run.id, run.prompt) for run in runs),
        NamedItem("session", "s", "Talk"),
    ]
    short = {one.id: one.id for one in named}
    targets = NamedTargets(named, {run.id: run for run in runs}, {}, short)
    assert [targets.get(text).id for text in ("a", "do ab", "abc", "x", "talk")] == [
        "ab",
        "ab",
        "abc",
        "x",
        "s",
    ]
    with pytest.raises(NotFound, match="no run or session is called zzz"):
        targets.get("zzz")
    runs[1].state = "active"
    with pytest.raises(InvalidRequest, match="2 of them are called a"):
        targets.get("a")


@pytest.mark.parametrize(
    ("fate", "line"),
    [
        (StopOutcome("run r", "canceled"), "run r: canceled"),
        (StopOutcome("run r", "finished_first"), "run r: finished first"),
        (StopOutcome("run r", "not_stopped", [7, 8]), "run r: did not stop; left: pid 7, 8"),
        (StopOutcome("run r", "already_ended", why="error"), "run r: had ended (error)"),
    ],
)
def test_what_became_of_it_is_told(fate: StopOutcome, line: str) -> None:
    assert fate.line() == line

"""A crash or a full disk at every commit of a scripted turn, enumerated."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Literal, get_args

import pytest

from culm.errors import AppError
from culm.ids import Ids, RunId, SessionId
from culm.model.base import AnswerDone, CallDelta, CallStarted, TextDelta, TokenUsage
from tests.sim.asks_actors import AskClient, AskObserver, AskServer
from tests.sim.asks_checks import check_asks
from tests.sim.asks_outside import AskWorld
from tests.sim.loop import SimLoop, simulate
from tests.sim.runs_actors import Client
from tests.sim.runs_checks import check_all, log_arrives_in_order
from tests.sim.runs_disk import Death, number_tasks
from tests.sim.runs_final import Final
from tests.sim.runs_outside import NEARLY_FULL, Question, Sent, Step, World
from tests.sim.runs_world import Gone, RunServer
from tests.support import contract

Then = Literal["pass", "cancel, pass", "pass, cancel", "kill", "cancel, kill"]
THENS: tuple[Then, ...] = get_args(Then)
DEATHS: tuple[Death, ...] = ("before", "after", "announced")
SHORT_S, LONG_S = 1.0, 700.0  # Outages after which waiting runs resume, or are held.


# --- scripts


def make_plan(
    world: World, names: Sequence[str] = ("write", "look", "look"), *, full: bool = False
) -> Callable[[Question], Sequence[Step]]:
    """Plan a first turn with three tool calls, two of them parallel, and then a text."""

    def plan(question: Question) -> Sequence[Step]:
        text = TextDelta(f"a{question.n}: done")
        turns = [q for q in world.questions if q.run_id == question.run_id and q.kind == "turn"]
        if question.kind != "turn" or question.run_id != "first" or len(turns) > 1:
            return [0.01, text, 0.2, TextDelta(" indeed"), AnswerDone("end_turn", TokenUsage(1, 1))]
        calls: list[Step] = []
        for key, name in enumerate(names):
            token = f"t{key + 1}"
            world.tokens[token] = question.run_id
            calls += [CallStarted(key, token, name), CallDelta(key, f'{{"token":"{token}"}}')]
        question.full = full
        usage = TokenUsage(NEARLY_FULL if full else 1, 1)
        return [0.01, text, 0.15, *calls, 0.01, AnswerDone("tool_use", usage)]

    return plan


Script = Callable[[RunServer, SessionId], Awaitable[None]]


async def a_turn(server: RunServer, session_id: SessionId, *, interactive: bool = False) -> None:
    """Send a prompt, one that waits for its turn, and one that joins."""
    client = Client(server, patient=True)
    for token, given in (("p1.", "first"), ("p2.", "second"), ("p3.", "")):
        sent = Sent(token, session_id, given, f"{token} do it", interactive=interactive)
        with contextlib.suppress(Gone, AppError):
            await client.send(sent)


async def a_turn_with_a_summary(server: RunServer, session_id: SessionId) -> None:
    """Fill the context in the first step, so that it is summarized in mid-turn."""
    server.plan = make_plan(server.world, full=True)
    await a_turn(server, session_id)


async def a_cancel_before_the_start(server: RunServer, session_id: SessionId) -> None:
    await a_turn(server, session_id)
    await cancel_and_continue(server, session_id)


async def a_cancel_during_a_call(server: RunServer, session_id: SessionId) -> None:
    await a_turn(server, session_id)
    deadline_s = server.loop.time() + 5
    while not server.world.effects and server.loop.time() < deadline_s:
        await server.file.after(1, timeout_s=1)
    await cancel_and_continue(server, session_id)


async def a_cancel_during_a_stubborn_call(server: RunServer, session_id: SessionId) -> None:
    """Cancel a tool that returns a result instead of stopping."""
    server.plan = make_plan(server.world, ("stubborn", "look", "look"))
    await a_cancel_during_a_call(server, session_id)


async def a_cancel_during_a_deaf_call(server: RunServer, session_id: SessionId) -> None:
    """Cancel a tool that is abandoned and returns after the end of its run."""
    server.plan = make_plan(server.world, ("deaf", "look", "look"))
    await a_cancel_during_a_call(server, session_id)


async def a_crowd(server: RunServer, session_id: SessionId) -> None:
    """Send joining prompts with every commit, also right before a step begins."""
    client = Client(server, patient=True)

    async def send_prompt(token: str, given: str = "") -> None:
        with contextlib.suppress(Gone, AppError):
            await client.send(Sent(token, session_id, given, f"{token} do it"))

    async with asyncio.TaskGroup() as crowd:
        crowd.create_task(send_prompt("p1.", "first"))
        for n in range(2, 14):
            await server.file.after(1, timeout_s=0.3)
            crowd.create_task(send_prompt(f"p{n}."))


async def asks(server: RunServer, session_id: SessionId) -> None:
    """Run three calls that ask, two of them in parallel; two people allow everything."""
    assert isinstance(server, AskServer)
    server.plan = make_plan(server.world, ("fetch", "drift", "edit"))
    await a_turn(server, session_id, interactive=True)
    async with asyncio.TaskGroup() as people:
        for _ in range(2):
            people.create_task(allow_all(server))


async def allow_all(server: AskServer) -> None:
    person = AskClient(server, patient=True)
    for _ in range(20):
        await asyncio.sleep(0.5)
        for row in server.file.rows("SELECT id FROM asks WHERE state = 'open' ORDER BY no DESC"):
            with contextlib.suppress(Gone, AppError):
                await person.permit(row["id"], "allow")


async def asks_and_a_stop(server: RunServer, session_id: SessionId) -> None:
    """Stop the server while it waits; the next one receives the answer."""
    server.loop.call_later(0.2, server.stop, SHORT_S)
    await asks(server, session_id)


async def cancel_and_continue(server: RunServer, session_id: SessionId) -> None:
    client = Client(server, patient=True)
    with contextlib.suppress(Gone, AppError):
        await client.cancel_session(session_id)
    with contextlib.suppress(Gone, AppError):
        await client.send(Sent("p4.", session_id, "fourth", "p4. go on"))


async def a_summary(server: RunServer, session_id: SessionId) -> None:
    """Request a summary, queue prompts behind it, and cancel it."""
    client = Client(server, patient=True)
    with contextlib.suppress(Gone, AppError):
        await client.send(Sent("p5.", session_id, "fifth", "p5. begin"))
    await asyncio.sleep(2)
    for ask in (client.accept_summary, client.cancel_session):
        with contextlib.suppress(Gone, AppError):
            await ask(session_id)
        with contextlib.suppress(Gone, AppError):
            token = f"p{6 + server.world.number()}."
            await client.send(Sent(token, session_id, "", f"{token} and this"))


async def a_stop(server: RunServer, session_id: SessionId) -> None:
    """Stop the server in mid-turn; it may be killed during the stop."""
    await a_turn(server, session_id)
    await asyncio.sleep(0.1)
    server.stop(SHORT_S)


SCRIPTS: tuple[Script, ...] = (
    a_turn,
    a_turn_with_a_summary,
    a_cancel_before_the_start,
    a_cancel_during_a_call,
    a_cancel_during_a_stubborn_call,
    a_cancel_during_a_deaf_call,
    a_crowd,
    a_summary,
    a_stop,
)

DISK_SCRIPTS: tuple[Script, ...] = (a_turn, a_cancel_during_a_call, a_summary)


# --- faults


@dataclass(frozen=True)
class Crash:
    """The server is killed at a commit of the script."""

    commit: int
    death: Death
    outage_s: float

    async def happen(self, server: RunServer, _: SessionId) -> None:
        server.file.die = (server.file.commits + self.commit, self.death)
        server.outages = (self.outage_s,)


@dataclass(frozen=True)
class BadCommit:
    """One commit fails, and the next one does not."""

    commit: int

    async def happen(self, server: RunServer, _: SessionId) -> None:
        server.file.bad = {server.file.groups + self.commit}
        server.world.store_failed = True


@dataclass(frozen=True)
class FullDisk:
    """From a commit on nothing can be stored, until the fault passes or the server is killed."""

    commit: int
    then: Then

    async def happen(self, server: RunServer, session_id: SessionId) -> None:
        file = server.file
        first = file.groups + self.commit
        file.bad = set(range(first, first + 10_000))
        server.world.store_failed = True
        server.outages = (SHORT_S,)
        deadline_s = server.loop.time() + 30
        while file.groups < first and server.loop.time() < deadline_s:
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.4)  # One retry has happened, and the next one is due soon.
        client = Client(server, patient=True)
        for what in self.then.split(", "):
            if what == "pass":
                file.bad.clear()
            elif what == "kill":
                server.kill()
                file.bad.clear()
            else:
                with contextlib.suppress(Gone, AppError):
                    await client.cancel_session(session_id)


Fault = Crash | BadCommit | FullDisk
Faults = Callable[[int], Iterator[Fault]]  # By the number of commits.


def commits_of(script: Script, fault: Fault | None) -> int:
    """Run the script in a new world; return its number of commits."""

    async def one_world(loop: SimLoop) -> int:
        world = AskWorld(loop, faulty=False)
        loop.set_exception_handler(world.on_problem)
        number_tasks(loop)
        server = AskServer(loop, world)
        server.file.group_max = 1
        server.plan = make_plan(world)
        with contextlib.closing(server.file):
            return await live_through(server, script, fault)

    return simulate(0, one_world)


async def live_through(server: AskServer, script: Script, fault: Fault | None) -> int:
    observer = AskObserver(server, Ids(1))
    server.observers = [observer]
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(server.run()), tasks.create_task(observer.run())]
        await server.up.wait()
        session = await server.request(lambda workspace: workspace.sessions.create("Untitled"))
        while not observer.loaded:
            await asyncio.sleep(0.01)
        await asyncio.sleep(1)
        began = server.file.commits
        if fault is not None:
            tasks.create_task(fault.happen(server, session.id))
            await asyncio.sleep(0)
        await script(server, session.id)
        await asyncio.sleep(60)
        commits = server.file.commits - began
        server.file.die = None
        await asyncio.sleep(LONG_S)
        await server.up.wait()
        differ = isinstance(fault, Crash) and fault.death == "announced"
        await decide_held_runs(server, differ=differ)
        await asyncio.sleep(60)
        assert not server.world.problems, server.world.problems
        check_all(server, [observer])
        check_asks(server, [observer])
        check_outcomes(Final(server))
        log_arrives_in_order([observer])
        for task in background:
            task.cancel()
    return commits


async def decide_held_runs(server: RunServer, *, differ: bool) -> None:
    """Start every held run; with `differ`, drop it concurrently."""
    client = Client(server, patient=True)

    async def drop(run_id: str) -> None:
        with contextlib.suppress(AppError):
            await client.drop_run(RunId(run_id))

    async def start(run_id: str) -> None:
        with contextlib.suppress(*([AppError] if differ else [])):
            await client.start_run(run_id)

    for row in server.file.rows("SELECT id FROM runs WHERE state = 'held' ORDER BY seq"):
        async with asyncio.TaskGroup() as persons:
            persons.create_task(start(row[0]))
            if differ:
                persons.create_task(drop(row[0]))


def check_outcomes(final: Final) -> None:
    """Check that a run was asked about in one life only, and ended by the model."""
    for run in final.runs.values():
        assert run.state == "ended", run
        lives = {q.life for q in final.world.questions if q.run_id == (run.host_run_id or run.id)}
        waited = final.world.reentered.get(run.host_run_id or run.id)
        assert len(lives) <= 1 or waited, f"{run} was asked about in lives {lives}"
        assert lives or run.outcome != "end_turn", f"{run} without a question"
        assert run.outcome != "error" or final.world.store_failed, f"{run}"


def survives(script: Script, faults: Faults) -> None:
    undisturbed = commits_of(script, None)
    assert undisturbed > 5
    for fault in faults(undisturbed):
        try:
            commits_of(script, fault)
        except BaseException as exc:
            exc.add_note(f"{fault} of {undisturbed} commits")
            raise


def crashes(commits: int, outage_s: float = SHORT_S) -> Iterator[Fault]:
    for commit in range(1, commits + 1):
        yield from (Crash(commit, death, outage_s) for death in DEATHS)


def long_crashes(commits: int) -> Iterator[Fault]:
    return crashes(commits, LONG_S)


def some_crashes(commits: int) -> Iterator[Fault]:
    """A crash at each commit, of one kind after the other; the soak has all kinds at each."""
    return islice(crashes(commits), 0, None, len(DEATHS) + 1)


def some_long_crashes(commits: int) -> Iterator[Fault]:
    return islice(long_crashes(commits), 1, None, len(DEATHS) + 1)


def full_disks(commits: int) -> Iterator[Fault]:
    for commit in range(1, commits + 1):
        yield BadCommit(commit)
        yield from (FullDisk(commit, then) for then in THENS)


def some_full_disks(commits: int) -> Iterator[Fault]:
    """Two of the six kinds at each commit, so that three commits have them all."""
    for commit, faults in groupby(full_disks(commits), key=lambda fault: fault.commit):
        yield from islice(faults, commit % 3, None, 3)


def crashes_after(commits: int) -> Iterator[Fault]:
    return (Crash(commit, "after", SHORT_S) for commit in range(1, commits + 1))


def bad_commits(commits: int) -> Iterator[Fault]:
    return (BadCommit(commit) for commit in range(1, commits + 1))


# Everything that can go wrong at any commit: minutes, for the soak.
ENUMERATED: tuple[tuple[Script, Faults], ...] = (
    *((script, faults) for script in SCRIPTS for faults in (crashes, long_crashes)),
    *((script, full_disks) for script in DISK_SCRIPTS),
)


def name_of(script: Script | Faults) -> str:
    return getattr(script, "__name__", "script")


@contract("EXC-9", "EXC-16", "INV-36", "INV-57")
@pytest.mark.parametrize("faults", [some_crashes, some_long_crashes])
@pytest.mark.parametrize("script", SCRIPTS, ids=name_of)
def test_crash_at_any_commit_leaves_a_consistent_record(script: Script, faults: Faults) -> None:
    survives(script, faults)


@contract("EXC-16", "INV-36", "INV-57")
@pytest.mark.parametrize("script", DISK_SCRIPTS, ids=name_of)
def test_full_disk_at_any_commit_leaves_a_consistent_record(script: Script) -> None:
    survives(script, some_full_disks)


@contract("EXC-5", "EXC-9", "INV-57")
@pytest.mark.parametrize(
    ("script", "faults"),
    [(asks, crashes_after), (asks_and_a_stop, crashes_after), (asks, bad_commits)],
    ids=name_of,
)
def test_no_ask_is_lost_or_answered_twice_whatever_ends_the_server(
    script: Script, faults: Faults
) -> None:
    survives(script, faults)

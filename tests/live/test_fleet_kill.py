"""Real `kill -9` of whatever a fleet is made of: runs end or go on, and nobody outlives it."""

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.fleet.provision import CliKind, EchoKind
from culm.processes.base import ProcessExit
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Rule, Script
from culm.tools.process.exit_text import exit_text
from tests.fleet.nursery import open_launcher
from tests.live.fleet_desk import FleetDesk, Seen, nothing_left, open_desk, strangers, until
from tests.live.fleet_owner import Ended
from tests.live.test_tools_kill import bash
from tests.processes.test_escapes import DAEMON
from tests.support import contract

# One child leaves its session and is deaf, another one leaves all it can leave.
TOOL = f"setsid sh -c 'trap \"\" TERM; sleep 100' & python3 -c '{DAEMON}'; sleep 100"
PLAY = Script(
    rules=[
        Rule("Think.", Reply(deltas=["Well", ", so."], hold_after=1)),
        Rule("Work.", Reply(calls=[bash("one", command=TOOL)]), 1),
        Rule("Work.", Reply(calls=[bash("two", command="echo on")]), 1),
        Rule("Work.", Reply(text="I see.")),
    ]
)
WAITS = CliKind("sh", ["-c", "echo up; exec sleep 100"])
CROWD = 24  # So many that some are not forked yet when the first is heard.
BUSY = ("thinking", "working", "outside")


@asynccontextmanager
async def open_busy_desk(folder: Path) -> AsyncGenerator[tuple[FleetDesk, ModelServer, Seen]]:
    """An owner with four workers: one waits for work, the others are in the middle of a run.

    Of those one listens to its model, one has a tool at work, one has a program that is an agent.
    """
    async with open_model_server(PLAY) as model, open_desk(folder, model) as desk:
        desk.begin("idle", "hello", EchoKind())
        desk.begin("thinking", "Think.")
        desk.begin("working", "Work.")
        desk.begin("outside", "", WAITS)
        assert await desk.end("idle") == completed("idle", "echo: hello", 2)
        await desk.event("thinking", "token", content="Well")
        await desk.event("outside", "token", content="up\n")
        await desk.event("working", "tool_start", tool_call_id="one")
        names = ["bash", "sh", "sleep", "sleep", "sleep", "sleep"]
        await until(lambda: desk.look().names["commands"] == names, lambda: desk.look().names)
        seen = await desk.seen(supervisor=1, zygote=1, workers=4, shims=2, commands=6)
        yield desk, model, seen


def completed(name: str, text: str, events: int) -> Ended:
    return Ended(name, "completed", text, events, began=True)


@contract("FLEET-57", "FLEET-P11")
@pytest.mark.parametrize("killed", [("server",), ("server", "keeper", "zygote")], ids=" and ".join)
async def test_of_a_killed_server_nothing_remains(folder: Path, killed: tuple[str, ...]) -> None:
    async with open_busy_desk(folder) as (_, _, seen):
        seen.kill(*killed)
        await nothing_left(folder, seen)
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []


@contract("FLEET-P11")
async def test_what_nobody_is_left_to_end_is_ended_by_the_next_server(folder: Path) -> None:
    async with open_busy_desk(folder) as (_, _, seen):
        for pid in seen.pids("workers"):
            os.kill(pid, signal.SIGSTOP)
        seen.kill("server", "keeper", "zygote", "wardens")
        await until(lambda: not seen.alive("server", "keeper"), seen.alive)
        assert len(seen.alive("workers")) == 4
        assert seen.alive("commands")  # Those that had left their warden's child.
        async with open_launcher(folder / "data"):
            assert seen.alive() == []
            assert files_in(folder / "data") == []
            await nothing_left(folder, seen)


async def test_a_stopped_worker_is_ended_by_the_keeper_of_a_killed_server(folder: Path) -> None:
    async with open_desk(folder) as desk:
        desk.begin("idle", "hello")
        await desk.end("idle")
        seen = await desk.seen(workers=1)
        os.kill(seen.pids("workers")[0], signal.SIGSTOP)
        seen.kill("server")
        await until(lambda: not seen.alive(), seen.alive)
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []
        await nothing_left(folder, seen)


@contract("FLEET-99")
async def test_a_killed_worker_costs_its_run_and_what_it_had_started(folder: Path) -> None:
    async with open_busy_desk(folder) as (desk, _, seen):
        seen.kill("workers")
        lost = ("the worker closed the link", "the link to the worker was lost")
        for name in BUSY:
            ended = await desk.end(name)
            assert (ended.status, ended.began, ended.text.startswith(lost)) == ("error", True, True)
        await until(lambda: not seen.alive("workers", "wardens", "commands"), seen.alive)
        desk.begin("next", "hello again", EchoKind())
        assert await desk.end("next") == completed("next", "echo: hello again", 3)
        after = await desk.seen(workers=1)
        assert after.pids("server", "keeper", "zygote") == seen.pids("server", "keeper", "zygote")
        assert list((folder / "data" / "workers").glob("*")) == []
        await desk.leave()
        await nothing_left(folder, after)


async def test_runs_outlive_the_zygote_and_the_keeper(folder: Path) -> None:
    async with open_busy_desk(folder) as (desk, model, seen):
        seen.kill("zygote")
        await until(lambda: not seen.alive("zygote"), seen.alive)
        desk.begin("second", "of another kind", EchoKind(), role="second")
        assert await desk.end("second") == completed("second", "echo: of another kind", 4)
        assert len(seen.alive("workers", "wardens", "commands")) == 4 + 2 + 6
        # Whose parent is gone can still be ended.
        desk.cancel("outside")
        assert (await desk.end("outside")).status == "cancelled"
        after = await desk.seen(supervisor=1, zygote=1, workers=4, shims=1, commands=5)

        after.kill("keeper")
        error = await desk.event("working", "tool_error", tool_call_id="one")
        assert str(error["error"]).endswith(exit_text(ProcessExit(None, lost=True)))
        # A worker hears of it when the wardens do, which then end what they hold.
        gone = ("keeper", "zygote", "wardens", "commands")
        await until(lambda: not after.alive(*gone), after.alive)
        again = await desk.event("working", "tool_complete", tool_call_id="two")
        assert again["result"] == {"success": True, "result": "on"}
        assert (await desk.end("working")).text == "I see."
        model.release()
        assert (await desk.end("thinking")).text == "Well, so."
        desk.begin("third", "and of a third", EchoKind(), role="third")
        assert await desk.end("third") == completed("third", "echo: and of a third", 5)

        # Those that waited still wait, and the others wait now.
        last = await desk.seen(supervisor=1, zygote=1, workers=5, shims=0, commands=0)
        assert set(after.pids("workers")) < set(last.pids("workers"))
        await desk.leave()
        await nothing_left(folder, last)


@contract("FLEET-P11")
@pytest.mark.parametrize("killed", ["zygote", "server"])
async def test_whoever_is_killed_while_workers_are_launched_leaves_none_behind(
    folder: Path, killed: str
) -> None:
    names = [f"child-{n}" for n in range(CROWD)]
    async with open_desk(folder) as desk:
        for name in names:
            desk.begin(name, "hello", role=name)  # Each is of another kind, so none is used twice.
        await desk.any_event()
        seen = desk.look()
        seen.kill(killed)
        if killed != "server":
            for name in names:
                assert await desk.end(name) == completed(name, "echo: hello", 2)
            await desk.leave()
            await nothing_left(folder, seen)
            return
        await until(lambda: not strangers(folder), lambda: strangers(folder))
    # The server may have been ending some of them itself: one that it had killed could not withdraw
    # its record, and the server did not get to it.
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []
        await nothing_left(folder, seen)


def files_in(data: Path) -> list[str]:
    """All that a server without work has on its disk."""
    return sorted(str(path.relative_to(data)) for path in data.rglob("*") if not path.is_dir())

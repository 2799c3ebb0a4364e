"""Real `kill -9` of every part of a fleet: runs end or continue, and no process is left."""

import os
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.fleet.provision import CliKind, EchoKind
from culm.processes.base import ProcessExit
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from culm.tools.process.running import exit_text
from tests.fleet.launch_harness import open_launcher
from tests.live.fleet_harness import (
    FleetHarness,
    FleetProcesses,
    open_fleet_harness,
    related_processes,
    until,
    until_nothing_left,
)
from tests.live.fleet_owner import Ended
from tests.live.test_tools_kill import bash
from tests.processes.test_escapes import DAEMON
from tests.support import contract

# One child leaves its session and ignores SIGTERM, another one daemonizes.
TOOL = f"setsid sh -c 'trap \"\" TERM; sleep 100' & python3 -c '{DAEMON}'; sleep 100"
PLAY = Script(
    rules=[
        ReplyRule("Think.", Reply(deltas=["Well", ", so."], hold_after=1)),
        ReplyRule("Work.", Reply(calls=[bash("one", command=TOOL)]), 1),
        ReplyRule("Work.", Reply(calls=[bash("two", command="echo on")]), 1),
        ReplyRule("Work.", Reply(text="I see.")),
    ]
)
WAITS = CliKind("sh", ["-c", "echo up; exec sleep 100"])
WORKERS = 24  # So many that some are not forked yet when the first event arrives.
BUSY = ("thinking", "working", "outside")


@asynccontextmanager
async def open_busy_fleet(
    folder: Path,
) -> AsyncGenerator[tuple[FleetHarness, ModelServer, FleetProcesses]]:
    """An owner with four workers: one is idle, the others are in the middle of a run.

    One of those waits for its model, one runs a tool, one runs an external agent program.
    """
    async with open_model_server(PLAY) as model, open_fleet_harness(folder, model) as harness:
        harness.begin("idle", "hello", EchoKind())
        harness.begin("thinking", "Think.")
        harness.begin("working", "Work.")
        harness.begin("outside", "", WAITS)
        assert await harness.end("idle") == completed("idle", "echo: hello", 2)
        await harness.event("thinking", "token", content="Well")
        await harness.event("outside", "token", content="up\n")
        await harness.event("working", "tool_start", tool_call_id="one")
        names = ["bash", "sh", "sleep", "sleep", "sleep", "sleep"]
        await until(
            lambda: harness.processes().names["commands"] == names,
            lambda: harness.processes().names,
        )
        processes = await harness.until_processes(
            supervisor=1, zygote=1, workers=4, shims=2, commands=6
        )
        yield harness, model, processes


def completed(name: str, text: str, events: int) -> Ended:
    return Ended(name, "completed", text, events, began=True)


@contract("FLEET-57", "FLEET-P11")
@pytest.mark.parametrize(
    "killed", [("server",), ("server", "supervisor", "zygote")], ids=" and ".join
)
async def test_killed_server_leaves_no_process_socket_or_record(
    folder: Path, killed: tuple[str, ...]
) -> None:
    async with open_busy_fleet(folder) as (_, _, processes):
        processes.kill(*killed)
        await until_nothing_left(folder, processes)
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []


@contract("FLEET-P11")
async def test_next_server_ends_stopped_workers_and_orphaned_commands(folder: Path) -> None:
    async with open_busy_fleet(folder) as (_, _, processes):
        for pid in processes.pids("workers"):
            os.kill(pid, signal.SIGSTOP)
        processes.kill("server", "supervisor", "zygote", "shims")
        await until(lambda: not processes.alive("server", "supervisor"), processes.alive)
        assert len(processes.alive("workers")) == 4
        assert processes.alive("commands")  # Those that had escaped from their shim's child.
        async with open_launcher(folder / "data"):
            assert processes.alive() == []
            assert files_in(folder / "data") == []
            await until_nothing_left(folder, processes)


async def test_supervisor_of_a_killed_server_ends_a_stopped_worker(folder: Path) -> None:
    async with open_fleet_harness(folder) as harness:
        harness.begin("idle", "hello")
        await harness.end("idle")
        processes = await harness.until_processes(workers=1)
        os.kill(processes.pids("workers")[0], signal.SIGSTOP)
        processes.kill("server")
        await until(lambda: not processes.alive(), processes.alive)
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []
        await until_nothing_left(folder, processes)


@contract("FLEET-99")
async def test_killed_worker_fails_its_run_and_its_commands_end(folder: Path) -> None:
    async with open_busy_fleet(folder) as (harness, _, processes):
        processes.kill("workers")
        lost = ("the worker closed the link", "the link to the worker was lost")
        for name in BUSY:
            ended = await harness.end(name)
            assert (ended.status, ended.began, ended.text.startswith(lost)) == ("error", True, True)
        await until(lambda: not processes.alive("workers", "shims", "commands"), processes.alive)
        harness.begin("next", "hello again", EchoKind())
        assert await harness.end("next") == completed("next", "echo: hello again", 3)
        after = await harness.until_processes(workers=1)
        assert after.pids("server", "supervisor", "zygote") == processes.pids(
            "server", "supervisor", "zygote"
        )
        assert list((folder / "data" / "workers").glob("*")) == []
        await harness.shut_down()
        await until_nothing_left(folder, after)


async def test_runs_survive_a_kill_of_the_zygote_and_of_the_supervisor(folder: Path) -> None:
    async with open_busy_fleet(folder) as (harness, model, processes):
        processes.kill("zygote")
        await until(lambda: not processes.alive("zygote"), processes.alive)
        harness.begin("second", "of another kind", EchoKind(), role="second")
        assert await harness.end("second") == completed("second", "echo: of another kind", 4)
        assert len(processes.alive("workers", "shims", "commands")) == 4 + 2 + 6
        # A worker whose parent is gone can still be ended.
        harness.cancel("outside")
        assert (await harness.end("outside")).status == "cancelled"
        after = await harness.until_processes(
            supervisor=1, zygote=1, workers=4, shims=1, commands=5
        )

        after.kill("supervisor")
        error = await harness.event("working", "tool_error", tool_call_id="one")
        assert str(error["error"]).endswith(exit_text(ProcessExit(None, lost=True)))
        # The worker and the shims notice at the same time; the shims then end their commands.
        ended = ("supervisor", "zygote", "shims", "commands")
        await until(lambda: not after.alive(*ended), after.alive)
        again = await harness.event("working", "tool_complete", tool_call_id="two")
        assert again["result"] == {"success": True, "result": "on"}
        assert (await harness.end("working")).text == "I see."
        model.release()
        assert (await harness.end("thinking")).text == "Well, so."
        harness.begin("third", "and of a third", EchoKind(), role="third")
        assert await harness.end("third") == completed("third", "echo: and of a third", 5)

        # All workers are idle now.
        last = await harness.until_processes(supervisor=1, zygote=1, workers=5, shims=0, commands=0)
        assert set(after.pids("workers")) < set(last.pids("workers"))
        await harness.shut_down()
        await until_nothing_left(folder, last)


@contract("FLEET-P11")
@pytest.mark.parametrize("killed", ["zygote", "server"])
async def test_kill_during_worker_launches_leaves_no_worker_behind(
    folder: Path, killed: str
) -> None:
    names = [f"child-{n}" for n in range(WORKERS)]
    async with open_fleet_harness(folder) as harness:
        for name in names:
            harness.begin(name, "hello", role=name)  # Different roles, so no worker is reused.
        await harness.any_event()
        processes = harness.processes()
        processes.kill(killed)
        if killed != "server":
            for name in names:
                assert await harness.end(name) == completed(name, "echo: hello", 2)
            await harness.shut_down()
            await until_nothing_left(folder, processes)
            return
        await until(lambda: not related_processes(folder), lambda: related_processes(folder))
    # The server may have killed some of them itself before it died: their records are still there.
    async with open_launcher(folder / "data"):
        assert files_in(folder / "data") == []
        await until_nothing_left(folder, processes)


def files_in(data: Path) -> list[str]:
    """Return all files in a data directory."""
    return sorted(str(path.relative_to(data)) for path in data.rglob("*") if not path.is_dir())

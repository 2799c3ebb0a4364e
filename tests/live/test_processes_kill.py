"""Real `kill -9` of servers, supervisors and shims: no supervised process survives."""

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from culm.processes.base import ProcessExit
from tests.live.harness import START_S
from tests.processes.process_harness import (
    WORKSPACE,
    is_alive,
    open_process_harness,
    wait_until_gone,
)
from tests.processes.test_escapes import parent_of

PidsByRole = Mapping[str, list[int]]


@asynccontextmanager
async def open_server(folder: Path) -> AsyncGenerator[PidsByRole]:
    """A server with two commands, each with an escaped descendant."""
    command = (sys.executable, "-m", "tests.live.processes_server", str(folder))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(START_S):
            yield json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


def kill(server: PidsByRole, *roles: str) -> None:
    """Kill all at once: none of them sees another one die."""
    pids = [pid for role in roles for pid in server[role]]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize(
    "killed", [("server",), ("server", "supervisor"), ("server", "shims")], ids=" and ".join
)
async def test_survivors_end_the_processes_of_a_killed_server(
    folder: Path, killed: tuple[str, ...]
) -> None:
    async with open_server(folder) as server:
        kill(server, *killed)
        await wait_until_gone(*(pid for pids in server.values() for pid in pids))
    async with open_process_harness(folder):
        assert list((folder / "custody").iterdir()) == []


async def test_orphans_of_a_fully_killed_server_are_ended_by_the_next_one(
    folder: Path,
) -> None:
    async with open_server(folder) as server:
        async with open_process_harness(folder) as beside:
            # They belong to another server that lives, so they are not touched.
            assert [is_alive(pid) for pid in server["escaped"]] == [True, True]
            assert await (await beside.bash("exit 3")).wait() == ProcessExit(3)
        kill(server, "server", "supervisor", "shims")
        await wait_until_gone(*server["server"])
        assert [is_alive(pid) for pid in server["escaped"]] == [True, True]
        async with open_process_harness(folder):
            assert [pid for pids in server.values() for pid in pids if is_alive(pid)] == []
            assert list((folder / "custody").iterdir()) == []


async def test_kill_ends_the_command_of_a_stopped_shim(folder: Path) -> None:
    async with open_process_harness(folder) as harness:
        running = await harness.bash("echo up; exec sleep 100")
        assert await running.line() == "up"
        os.kill(parent_of(running.handle.pid), signal.SIGSTOP)
        exit_ = await running.kill(0)
        assert (exit_.lost, exit_.left, is_alive(running.handle.pid)) == (True, (), False)
        assert await harness.processes.processes(WORKSPACE) == []


async def test_stopped_supervisor_is_replaced(folder: Path) -> None:
    async with open_process_harness(folder) as harness:
        running = await harness.bash("echo up; exec sleep 100")
        assert await running.line() == "up"
        shim = parent_of(running.handle.pid)
        os.kill(parent_of(shim), signal.SIGSTOP)
        os.kill(shim, signal.SIGKILL)
        exit_ = await running.wait()
        assert (exit_.lost, exit_.left, is_alive(running.handle.pid)) == (True, (), False)
        assert await (await harness.bash("exit 3")).wait() == ProcessExit(3)

"""Real `kill -9` of those who hold processes: whoever is left ends them, or the next server."""

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
from tests.processes.test_escapes import parent_of
from tests.processes.yard import WORKSPACE, gone, is_alive, open_yard

Who = Mapping[str, list[int]]


@asynccontextmanager
async def open_server(folder: Path) -> AsyncGenerator[Who]:
    """A server with two commands, each of which let something escape."""
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


def kill(who: Who, *roles: str) -> None:
    """All at once: none of them sees another one die."""
    pids = [pid for role in roles for pid in who[role]]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in pids:
            os.kill(pid, number)


@pytest.mark.parametrize(
    "killed", [("server",), ("server", "keeper"), ("server", "wardens")], ids=" and ".join
)
async def test_whoever_is_left_ends_what_a_killed_server_held(
    folder: Path, killed: tuple[str, ...]
) -> None:
    async with open_server(folder) as who:
        kill(who, *killed)
        await gone(*(pid for pids in who.values() for pid in pids))
    async with open_yard(folder):
        assert list((folder / "custody").iterdir()) == []


async def test_what_nobody_is_left_to_end_is_ended_by_the_next_server_and_not_before(
    folder: Path,
) -> None:
    async with open_server(folder) as who:
        async with open_yard(folder) as beside:
            # Another server's, and it lives: none of ours.
            assert [is_alive(pid) for pid in who["escaped"]] == [True, True]
            assert await (await beside.bash("exit 3")).wait() == ProcessExit(3)
        kill(who, "server", "keeper", "wardens")
        await gone(*who["server"])
        assert [is_alive(pid) for pid in who["escaped"]] == [True, True]
        async with open_yard(folder):
            assert [pid for pids in who.values() for pid in pids if is_alive(pid)] == []
            assert list((folder / "custody").iterdir()) == []


async def test_a_warden_that_is_stopped_does_not_keep_its_command_alive(folder: Path) -> None:
    async with open_yard(folder) as yard:
        running = await yard.bash("echo up; exec sleep 100")
        assert await running.line() == "up"
        os.kill(parent_of(running.held.pid), signal.SIGSTOP)
        exit_ = await running.kill(0)
        assert (exit_.lost, exit_.left, is_alive(running.held.pid)) == (True, (), False)
        assert await yard.processes.processes(WORKSPACE) == []


async def test_a_keeper_that_is_stopped_is_replaced(folder: Path) -> None:
    async with open_yard(folder) as yard:
        running = await yard.bash("echo up; exec sleep 100")
        assert await running.line() == "up"
        shim = parent_of(running.held.pid)
        os.kill(parent_of(shim), signal.SIGSTOP)
        os.kill(shim, signal.SIGKILL)
        exit_ = await running.wait()
        assert (exit_.lost, exit_.left, is_alive(running.held.pid)) == (True, (), False)
        assert await (await yard.bash("exit 3")).wait() == ProcessExit(3)

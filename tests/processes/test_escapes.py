"""Escape attempts, and recovery when a shim or supervisor is killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.processes.base import ProcessExit, ProcessStartFailed
from culm.processes.linux import descendants_of, find_stat, is_subreaper, read_table
from tests.processes.process_harness import (
    WORKSPACE,
    ProcessHarness,
    is_alive,
    make_request,
    open_process_harness,
)

# Forks twice, leaves its session, closes all it has and forgets its environment.
DAEMON = """
import os, sys
if not os.fork():
    os.setsid()
    if not os.fork():
        os.chdir("/")
        print(os.getpid(), flush=True)
        os.closerange(0, 100)
        os.execve("/bin/sleep", ["sleep", "100"], {})
    os._exit(0)
os.wait()
"""
ESCAPES = {
    "setsid": "setsid sh -c 'echo $$; exec sleep 100' &",
    "nohup": "trap '' HUP TERM; nohup sh -c 'echo $$; exec sleep 100' 2>&1 &",
    "disowned": "setsid nohup env -i sh -c 'trap \"\" TERM; echo $$; exec sleep 99' 2>&1 & disown;",
}
FLOOD = 200


def parent_of(pid: int) -> int:
    stat = find_stat(pid)
    assert stat is not None
    return stat.parent


def open_descriptors() -> list[str]:
    return sorted(entry.name for entry in os.scandir("/proc/self/fd"))


@pytest.mark.parametrize("case", ESCAPES)
async def test_detached_processes_end_with_their_command(tmp_path: Path, case: str) -> None:
    async with open_process_harness(tmp_path) as harness:
        script = f"{ESCAPES[case]} exec sleep 100"
        killed = await harness.bash(script)
        escaped = await killed.pid()
        assert (await killed.kill(0.02)).left == ()
        ended = await harness.bash(script)
        other = await ended.pid()
        os.kill(ended.handle.pid, signal.SIGKILL)
        assert await ended.wait() == ProcessExit(None, signal.SIGKILL, swept=1)
        assert (is_alive(escaped), is_alive(other)) == (False, False)


async def test_daemon_without_environment_and_descriptors_ends_with_its_command(
    tmp_path: Path,
) -> None:
    async with open_process_harness(tmp_path) as harness:
        running = await harness.python(DAEMON)
        daemon = await running.pid()
        assert await running.wait() == ProcessExit(0, swept=1)
        assert not is_alive(daemon)


async def test_many_children_are_listed_and_ended(tmp_path: Path) -> None:
    script = f"for i in $(seq {FLOOD}); do setsid sleep 100 & done; echo up; wait"
    async with open_process_harness(tmp_path) as harness:
        running = await harness.bash(script)
        assert await running.line() == "up"
        (shown,) = await harness.processes.processes(WORKSPACE)
        assert len(shown.pids) >= FLOOD
        assert shown.rss_bytes > FLOOD * 100_000
        assert await running.kill(0) == ProcessExit(None, signal.SIGKILL)
        assert [pid for pid in shown.pids if is_alive(pid)] == []


async def test_process_that_keeps_forking_away_is_ended(tmp_path: Path) -> None:
    hop = "import os\nwhile True:\n    if os.fork(): os._exit(0)\n    os.setsid()"
    async with open_process_harness(tmp_path) as harness:
        running = await harness.python(hop)
        assert replace(await running.kill(0), swept=0) in (
            ProcessExit(0),
            ProcessExit(None, signal.SIGKILL),
        )
        assert await harness.processes.processes(WORKSPACE) == []


async def test_command_that_kills_its_shim_is_ended_too(tmp_path: Path) -> None:
    async with open_process_harness(tmp_path) as harness:
        running = await harness.bash("setsid sleep 100 & echo $!; wait")
        escaped = await running.pid()
        os.kill(parent_of(running.handle.pid), signal.SIGKILL)  # As the command itself could.
        exit_ = await running.wait()
        assert replace(exit_, swept=0) == ProcessExit(None, lost=True)
        assert (is_alive(escaped), is_alive(running.handle.pid)) == (False, False)
        assert await harness.processes.processes(WORKSPACE) == []
        assert await (await harness.bash("exit 2")).wait() == ProcessExit(2)


async def test_dead_supervisor_is_replaced_and_its_processes_are_ended(
    tmp_path: Path,
) -> None:
    async with open_process_harness(tmp_path) as harness:
        stubborn = await harness.bash(
            "trap '' TERM; setsid sleep 100 & echo $!; while :; do wait; done"
        )
        daemon = await harness.python(DAEMON + "import time; time.sleep(100)")
        pids = [stubborn.handle.pid, daemon.handle.pid, await stubborn.pid(), await daemon.pid()]
        supervisor = parent_of(parent_of(stubborn.handle.pid))
        os.kill(supervisor, signal.SIGKILL)
        # The next start waits until the cleanup is done.
        assert await (await harness.bash("exit 2")).wait() == ProcessExit(2)
        assert [pid for pid in pids if is_alive(pid)] == []
        lost = [replace(await running.wait(), swept=0) for running in (stubborn, daemon)]
        assert lost == [ProcessExit(None, lost=True)] * 2
        assert await harness.processes.processes(WORKSPACE) == []
        # Of the first supervisor not even a zombie is left; the second one runs.
        below = descendants_of(os.getpid(), read_table())
        assert supervisor not in [stat.pid for stat in below]
        assert [stat.comm for stat in below if stat.comm != "culm-shim"] == ["culm-supervisor"]


async def test_processes_without_shim_and_supervisor_are_ended_by_the_server(
    tmp_path: Path,
) -> None:
    async with open_process_harness(tmp_path) as harness:
        running = await harness.python(DAEMON + "import time; time.sleep(100)")
        daemon = await running.pid()
        shim = parent_of(running.handle.pid)
        both = parent_of(shim), shim
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in both:
                os.kill(pid, number)
        assert replace(await running.wait(), swept=0) == ProcessExit(None, lost=True)
        assert (is_alive(daemon), is_alive(running.handle.pid)) == (False, False)
        assert descendants_of(os.getpid(), read_table()) == []


async def test_many_processes_leave_no_descriptor_child_or_folder(tmp_path: Path) -> None:
    was_subreaper = is_subreaper()
    before = open_descriptors()

    async def fail(harness: ProcessHarness) -> None:
        with pytest.raises(ProcessStartFailed):
            await harness.processes.start(make_request("no-such-command"))

    async def succeed(harness: ProcessHarness) -> None:
        await (await harness.bash("sleep 0 &")).wait()

    async def hang(harness: ProcessHarness) -> None:
        await harness.processes.start(make_request("sleep", "100"))

    async with open_process_harness(tmp_path) as harness, asyncio.TaskGroup() as group:
        for work in (fail, succeed, hang) * 8:
            group.create_task(work(harness))
    assert open_descriptors() == before
    assert descendants_of(os.getpid(), read_table()) == []
    assert list((tmp_path / "custody").iterdir()) == []
    assert is_subreaper() == was_subreaper

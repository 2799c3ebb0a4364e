"""What a keeper does for workers: ways of their own to it, and a companion with what that forks."""

import asyncio
import os
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.processes.base import ProcessExit, ProcessRequest, ProcessStartFailed, WorkerSupervisor
from culm.processes.channel import SupervisorChannel
from culm.processes.linux import read_table
from culm.processes.packets import send
from culm.processes.process_set import reap
from culm.processes.remote import open_remote_processes
from culm.processes.tree import descendants_of
from tests.processes.test_escapes import DAEMON, open_descriptors, parent_of
from tests.processes.yard import (
    ENV,
    OWNER,
    WORKSPACE,
    Ear,
    gone,
    is_alive,
    make_order,
    nursery_of,
    open_remote_yard,
    open_yard,
    readable,
)

# It forks two, which stay when it is gone. Each of them says its pid, and last it says its own.
SIDECAR = """
import os, signal
open("/proc/self/comm", "w").write("culm-zygote")
for _ in range(2):
    ear, mouth = os.pipe()
    if not os.fork():
        open("/proc/self/comm", "w").write("culm-worker")
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        os.close(mouth)
        signal.pause()
    os.close(mouth)
    os.read(ear, 1)
print(os.getpid(), flush=True)
signal.pause()
"""


async def start_sidecar(nursery: WorkerSupervisor) -> tuple[int, int, int]:
    """The pids of its two forks, and its own."""
    ear, mouth = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    argv = (sys.executable, "-I", "-S", "-c", SIDECAR)
    await nursery.start_sidecar(ProcessRequest(argv, "/", ENV, OWNER, (null, mouth, null)))
    os.close(mouth)
    os.close(null)
    said = Ear(ear)
    pids = await said.pid(), await said.pid(), await said.pid()
    said.close()
    return pids


async def test_what_a_worker_runs_ends_with_it_and_the_server_is_told_when_that_is_so(
    tmp_path: Path,
) -> None:
    async with open_yard(tmp_path) as server:
        worker_channel = await nursery_of(server.processes).connect()
        other = await nursery_of(server.processes).connect()
        assert (worker_channel.process_tag, worker_channel.base < other.base) == (
            other.process_tag,
            True,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            # As a worker does it that is killed a moment later.
            line = SupervisorChannel(
                worker_channel.socket, worker_channel.process_tag, worker_channel.base
            )
            body = b"3\0/\0sh\0-c\0trap '' TERM; setsid sleep 100 & wait\0PATH=/usr/bin:/bin"
            line.start(worker_channel.base + 1, theirs.fileno(), body, [])
            theirs.close()
            words = b""
            while not words.startswith(b"started"):
                await readable(ours.fileno())
                words = ours.recv(1000)
        pid = int(words.split()[1])
        worker_channel.socket.close()
        await worker_channel.over.wait()
        assert (is_alive(pid), other.over.is_set()) == (False, False)
        # Nonsense ends a way, and nothing else.
        send(other.socket, b"hold 7")
        send(other.socket, b"start one two")
        await other.over.wait()
        other.socket.close()
        assert await (await server.bash("exit 3")).wait() == ProcessExit(3)


async def test_a_keeper_that_dies_is_replaced_for_workers_too_and_what_it_held_is_told_as_lost(
    tmp_path: Path,
) -> None:
    async with (
        open_yard(tmp_path) as server,
        open_remote_yard(server.processes) as one,
        open_remote_yard(server.processes) as two,
    ):
        first, second, sidecar = await start_sidecar(nursery_of(server.processes))
        daemon = await one.python(DAEMON + "import time; time.sleep(100)")
        plain = await two.bash("exec sleep 100")
        pids = [daemon.held.pid, plain.held.pid, await daemon.pid()]
        supervisor = parent_of(sidecar)
        assert parent_of(parent_of(plain.held.pid)) == supervisor
        os.kill(supervisor, signal.SIGKILL)
        lost = [replace(await running.wait(), swept=0) for running in (daemon, plain)]
        assert lost == [ProcessExit(None, lost=True)] * 2
        assert await (await one.bash("exit 2")).wait() == ProcessExit(2)
        assert await (await two.bash("exit 3")).wait() == ProcessExit(3)
        assert [pid for pid in (*pids, sidecar) if is_alive(pid)] == []
        assert [await yard.processes.processes(WORKSPACE) for yard in (one, two)] == [[], []]
        # What the companion had forked lives on, and is ours.
        assert [parent_of(pid) for pid in (first, second)] == [os.getpid()] * 2
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)
            await gone(pid)
            assert reap(pid)
        # Of the first keeper and its companion not even a zombie is left.
        names = {stat.comm for stat in descendants_of(os.getpid(), read_table())}
        assert names <= {"culm-keeper", "culm-warden"}


async def test_what_a_companion_forked_outlives_it_and_is_no_stray(tmp_path: Path) -> None:
    async with open_yard(tmp_path) as server:
        first, second, sidecar = await start_sidecar(nursery_of(server.processes))
        supervisor = parent_of(sidecar)
        # A warden dies while the companion lives, and one after that.
        for dead in ((), (sidecar,)):
            for pid in dead:
                os.kill(pid, signal.SIGKILL)
            await gone(*dead)
            running = await server.bash("setsid sleep 100 & echo $!; wait")
            escaped = await running.pid()
            os.kill(parent_of(running.held.pid), signal.SIGKILL)
            assert replace(await running.wait(), swept=0) == ProcessExit(None, lost=True)
            assert (is_alive(escaped), is_alive(running.held.pid)) == (False, False)
            assert [is_alive(pid) for pid in (first, second)] == [True, True]
        assert [parent_of(pid) for pid in (first, second)] == [supervisor] * 2
        os.kill(second, signal.SIGKILL)
        await gone(second)
        # It is collected there, and a further companion can be had.
        *further, other = await start_sidecar(nursery_of(server.processes))
        assert parent_of(other) == supervisor
        assert second not in read_table()
        for pid in (first, other, *further):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.live
async def test_what_does_not_end_when_the_server_does_is_ended(tmp_path: Path) -> None:
    async with open_yard(tmp_path) as server:
        pids = await start_sidecar(nursery_of(server.processes))
    assert [is_alive(pid) for pid in pids] == [False] * 3
    assert descendants_of(os.getpid(), read_table()) == []


async def test_a_worker_that_gets_no_keeper_says_so_and_may_ask_again(tmp_path: Path) -> None:
    before = open_descriptors()
    async with open_yard(tmp_path) as server:
        asked = 0

        async def ask() -> SupervisorChannel:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise ProcessStartFailed("there is none today")
            worker_channel = await nursery_of(server.processes).connect()
            return SupervisorChannel(
                worker_channel.socket, worker_channel.process_tag, worker_channel.base
            )

        async with open_remote_processes(ask, LoopClock()) as processes:
            with pytest.raises(ProcessStartFailed, match="there is none today"):
                await processes.start(make_order("true"))
            async with asyncio.TaskGroup() as group:
                started = [group.create_task(processes.start(make_order("true"))) for _ in range(9)]
            assert [await task.result().wait() for task in started] == [ProcessExit(0)] * 9
        assert asked == 2
        with pytest.raises(ProcessStartFailed, match="the worker is stopping"):
            await processes.start(make_order("true"))
    assert open_descriptors() == before

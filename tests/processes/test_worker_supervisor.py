"""The supervisor for workers: channels of their own, and a sidecar with its forks."""

import asyncio
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.clock import LoopClock
from culm.processes.base import ProcessExit, ProcessRequest, ProcessStartFailed, WorkerSupervisor
from culm.processes.linux import descendants_of, read_table
from culm.processes.packets import SpawnCommand, send
from culm.processes.process_set import reap
from culm.processes.remote import open_remote_processes
from culm.processes.supervised import SupervisorChannel
from tests.processes.process_harness import (
    ENV,
    OWNER,
    WORKSPACE,
    PipeReader,
    is_alive,
    make_request,
    open_process_harness,
    open_remote_harness,
    wait_readable,
    wait_until_gone,
    worker_supervisor_of,
)
from tests.processes.test_escapes import DAEMON, open_descriptors, parent_of

# Forks two processes, which outlive it. Each prints its pid; the sidecar prints its own last.
SIDECAR = """
import os, signal
open("/proc/self/comm", "w").write("culm-zygote")
for _ in range(2):
    read_fd, write_fd = os.pipe()
    if not os.fork():
        open("/proc/self/comm", "w").write("culm-worker")
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print(os.getpid(), flush=True)
        os.close(write_fd)
        signal.pause()
    os.close(write_fd)
    os.read(read_fd, 1)
print(os.getpid(), flush=True)
signal.pause()
"""


async def start_sidecar(supervisor: WorkerSupervisor) -> tuple[int, int, int]:
    """Start a sidecar; return the pids of its two forks and its own."""
    read_fd, write_fd = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    argv = (sys.executable, "-I", "-S", "-c", SIDECAR)
    await supervisor.start_sidecar(ProcessRequest(argv, "/", ENV, OWNER, (null, write_fd, null)))
    os.close(write_fd)
    os.close(null)
    output = PipeReader(read_fd)
    pids = await output.pid(), await output.pid(), await output.pid()
    output.close()
    return pids


async def test_commands_of_a_worker_end_with_its_channel(
    tmp_path: Path,
) -> None:
    async with open_process_harness(tmp_path) as server:
        worker_channel = await worker_supervisor_of(server.processes).connect()
        other = await worker_supervisor_of(server.processes).connect()
        assert (worker_channel.process_tag, worker_channel.base < other.base) == (
            other.process_tag,
            True,
        )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            # A start request of a worker that is killed a moment later.
            channel = SupervisorChannel(
                worker_channel.socket, worker_channel.process_tag, worker_channel.base
            )
            command = SpawnCommand(
                [b"sh", b"-c", b"trap '' TERM; setsid sleep 100 & wait"],
                b"/",
                [b"PATH=/usr/bin:/bin"],
                1024,
            )
            head = f"start {worker_channel.base + 1}"
            channel.send_command(head, [theirs.fileno()], command, [])
            theirs.close()
            packet = b""
            while not packet.startswith(b"started"):
                await wait_readable(ours.fileno())
                packet = ours.recv(1000)
        pid = int(packet.split()[1])
        worker_channel.socket.close()
        await worker_channel.over.wait()
        assert (is_alive(pid), other.over.is_set()) == (False, False)
        # Invalid packets end a channel, and nothing else.
        send(other.socket, b"hold 7")
        send(other.socket, b"start one two")
        await other.over.wait()
        other.socket.close()
        assert await (await server.bash("exit 3")).wait() == ProcessExit(3)


async def test_dead_supervisor_is_replaced_for_workers_and_commands_are_lost(
    tmp_path: Path,
) -> None:
    async with (
        open_process_harness(tmp_path) as server,
        open_remote_harness(server.processes) as one,
        open_remote_harness(server.processes) as two,
    ):
        first, second, sidecar = await start_sidecar(worker_supervisor_of(server.processes))
        daemon = await one.python(DAEMON + "import time; time.sleep(100)")
        plain = await two.bash("exec sleep 100")
        pids = [daemon.handle.pid, plain.handle.pid, await daemon.pid()]
        supervisor = parent_of(sidecar)
        assert parent_of(parent_of(plain.handle.pid)) == supervisor
        os.kill(supervisor, signal.SIGKILL)
        lost = [replace(await running.wait(), swept=0) for running in (daemon, plain)]
        assert lost == [ProcessExit(None, lost=True)] * 2
        assert await (await one.bash("exit 2")).wait() == ProcessExit(2)
        assert await (await two.bash("exit 3")).wait() == ProcessExit(3)
        assert [pid for pid in (*pids, sidecar) if is_alive(pid)] == []
        assert [await harness.processes.processes(WORKSPACE) for harness in (one, two)] == [[], []]
        # The forks of the sidecar live on as our children.
        assert [parent_of(pid) for pid in (first, second)] == [os.getpid()] * 2
        for pid in (first, second):
            os.kill(pid, signal.SIGKILL)
            await wait_until_gone(pid)
            assert reap(pid)
        # Of the first supervisor and its sidecar not even a zombie is left.
        names = {stat.comm for stat in descendants_of(os.getpid(), read_table())}
        assert names <= {"culm-supervisor", "culm-shim"}


async def test_forks_of_a_dead_sidecar_live_on_and_are_not_swept(tmp_path: Path) -> None:
    async with open_process_harness(tmp_path) as server:
        first, second, sidecar = await start_sidecar(worker_supervisor_of(server.processes))
        supervisor = parent_of(sidecar)
        # A shim dies while the sidecar lives, and another one after that.
        for dead in ((), (sidecar,)):
            for pid in dead:
                os.kill(pid, signal.SIGKILL)
            await wait_until_gone(*dead)
            running = await server.bash("setsid sleep 100 & echo $!; wait")
            escaped = await running.pid()
            os.kill(parent_of(running.handle.pid), signal.SIGKILL)
            assert replace(await running.wait(), swept=0) == ProcessExit(None, lost=True)
            assert (is_alive(escaped), is_alive(running.handle.pid)) == (False, False)
            assert [is_alive(pid) for pid in (first, second)] == [True, True]
        assert [parent_of(pid) for pid in (first, second)] == [supervisor] * 2
        os.kill(second, signal.SIGKILL)
        await wait_until_gone(second)
        # It is reaped there, and another sidecar can be started.
        *further, other = await start_sidecar(worker_supervisor_of(server.processes))
        assert parent_of(other) == supervisor
        assert second not in read_table()
        for pid in (first, other, *further):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.live
async def test_sidecar_and_its_forks_end_with_the_server(tmp_path: Path) -> None:
    async with open_process_harness(tmp_path) as server:
        pids = await start_sidecar(worker_supervisor_of(server.processes))
    assert [is_alive(pid) for pid in pids] == [False] * 3
    assert descendants_of(os.getpid(), read_table()) == []


async def test_worker_without_a_supervisor_gets_an_error_and_may_retry(tmp_path: Path) -> None:
    before = open_descriptors()
    async with open_process_harness(tmp_path) as server:
        asked = 0

        async def ask() -> SupervisorChannel:
            nonlocal asked
            asked += 1
            if asked == 1:
                raise ProcessStartFailed("there is none today")
            worker_channel = await worker_supervisor_of(server.processes).connect()
            return SupervisorChannel(
                worker_channel.socket, worker_channel.process_tag, worker_channel.base
            )

        async with open_remote_processes(ask, LoopClock()) as processes:
            with pytest.raises(ProcessStartFailed, match="there is none today"):
                await processes.start(make_request("true"))
            async with asyncio.TaskGroup() as group:
                started = [
                    group.create_task(processes.start(make_request("true"))) for _ in range(9)
                ]
            assert [await task.result().wait() for task in started] == [ProcessExit(0)] * 9
        assert asked == 2
        with pytest.raises(ProcessStartFailed, match="the worker is stopping"):
            await processes.start(make_request("true"))
    assert open_descriptors() == before

"""Process test support: scripts with captured output, and liveness checks."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from culm.clock import LoopClock
from culm.ids import Ids
from culm.processes.base import (
    Processes,
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
    WorkerSupervisor,
)
from culm.processes.client import open_processes
from culm.processes.linux import find_stat
from culm.processes.remote import open_remote_processes
from culm.processes.supervised import SupervisorChannel
from tests.support import WAIT_S

WORKSPACE = "w"
OWNER = ProcessOwner(WORKSPACE, "call", session_id="s", run_id="r", tool_call_id="c")
ENV = {"PATH": os.environ["PATH"]}


def make_request(
    *argv: str, descriptors: Sequence[int] = (), cwd: str = "/", title: str = ""
) -> ProcessRequest:
    return ProcessRequest(argv, cwd, ENV, OWNER, descriptors, title)


def is_alive(pid: int) -> bool:
    """Return True if the process exists and is not a zombie."""
    stat = find_stat(pid)
    return stat is not None and stat.is_alive


def name_of(pid: int) -> str:
    stat = find_stat(pid)
    assert stat is not None
    return stat.comm


class ProcessHarness:
    """Starts scripts and reads their output; created by `open_process_harness`."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    async def start(self, *argv: str) -> "RunningScript":
        read_fd, write_fd = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            handle = await self.processes.start(
                make_request(*argv, descriptors=(null, write_fd, null))
            )
        except BaseException:
            os.close(read_fd)
            raise
        finally:
            os.close(write_fd)
            os.close(null)
        return RunningScript(handle, read_fd)

    async def bash(self, script: str) -> "RunningScript":
        return await self.start("bash", "-c", script)

    async def python(self, script: str) -> "RunningScript":
        return await self.start(sys.executable, "-I", "-S", "-c", script)


class PipeReader:
    """The reading end of a pipe."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._received = b""

    async def line(self) -> str:
        """Read the next line."""
        while b"\n" not in self._received:
            part = await self._more()
            assert part, "it ended without a further line"
            self._received += part
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    async def pid(self) -> int:
        return int(await self.line())

    async def rest(self) -> str:
        """Read until no process has the writing end open."""
        while part := await self._more():
            self._received += part
        return self._received.decode()

    async def _more(self) -> bytes:
        await wait_readable(self._descriptor)
        return os.read(self._descriptor, 1 << 16)

    def close(self) -> None:
        os.close(self._descriptor)


class RunningScript(PipeReader):
    """A script, and the pipe it writes to."""

    def __init__(self, handle: ProcessHandle, read_fd: int) -> None:
        super().__init__(read_fd)
        self.handle = handle

    async def wait(self) -> ProcessExit:
        exit_ = await self.handle.wait()
        self.close()
        return exit_

    async def kill(self, grace_s: float = 1.0) -> ProcessExit:
        exit_ = await self.handle.kill(grace_s)
        self.close()
        return exit_


async def wait_readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def wait_until_gone(*pids: int) -> None:
    """Wait until all of these processes have ended."""
    async with asyncio.timeout(WAIT_S):
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                await wait_readable(handle)
            finally:
                os.close(handle)


@asynccontextmanager
async def open_process_harness(
    folder: Path, bound_s: float = 2 * WAIT_S
) -> AsyncGenerator[ProcessHarness]:
    async with asyncio.timeout(bound_s), open_processes(folder, LoopClock(), Ids()) as processes:
        yield ProcessHarness(processes)


@asynccontextmanager
async def open_remote_harness(processes: Processes) -> AsyncGenerator[ProcessHarness]:
    """Processes of a worker: over its own channel to the supervisor of another process."""

    async def ask() -> SupervisorChannel:
        worker_channel = await worker_supervisor_of(processes).connect()
        return SupervisorChannel(
            worker_channel.socket, worker_channel.process_tag, worker_channel.base
        )

    async with open_remote_processes(ask, LoopClock()) as remote:
        yield ProcessHarness(remote)


def worker_supervisor_of(processes: Processes) -> WorkerSupervisor:
    assert processes.worker_supervisor is not None
    return processes.worker_supervisor

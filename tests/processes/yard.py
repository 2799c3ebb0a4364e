"""What the tests of custody share: scripts with an ear at their output, and who is alive."""

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
from culm.processes.channel import SupervisorChannel
from culm.processes.client import open_processes
from culm.processes.linux import find_stat
from culm.processes.remote import open_remote_processes
from tests.support import WAIT_S

WORKSPACE = "w"
OWNER = ProcessOwner(WORKSPACE, "call", session_id="s", run_id="r", tool_call_id="c")
ENV = {"PATH": os.environ["PATH"]}


def make_order(
    *argv: str, descriptors: Sequence[int] = (), cwd: str = "/", title: str = ""
) -> ProcessRequest:
    return ProcessRequest(argv, cwd, ENV, OWNER, descriptors, title)


def is_alive(pid: int) -> bool:
    """A zombie is not: it was ended, and waits for whoever is to collect it."""
    stat = find_stat(pid)
    return stat is not None and stat.is_alive


def name_of(pid: int) -> str:
    stat = find_stat(pid)
    assert stat is not None
    return stat.comm


class Yard:
    """Starts scripts and hears what they say. Made by `open_yard`."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes

    async def start(self, *argv: str) -> "Running":
        ear, mouth = os.pipe()
        null = os.open(os.devnull, os.O_RDWR)
        try:
            held = await self.processes.start(make_order(*argv, descriptors=(null, mouth, null)))
        except BaseException:
            os.close(ear)
            raise
        finally:
            os.close(mouth)
            os.close(null)
        return Running(held, ear)

    async def bash(self, script: str) -> "Running":
        return await self.start("bash", "-c", script)

    async def python(self, script: str) -> "Running":
        return await self.start(sys.executable, "-I", "-S", "-c", script)


class Ear:
    """The end of a pipe that somebody writes to."""

    def __init__(self, descriptor: int) -> None:
        os.set_blocking(descriptor, False)
        self._ear = descriptor
        self._heard = b""

    async def line(self) -> str:
        """Its next line."""
        while b"\n" not in self._heard:
            part = await self._more()
            assert part, "it ended without a further line"
            self._heard += part
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    async def pid(self) -> int:
        return int(await self.line())

    async def rest(self) -> str:
        """What it says until nobody holds its output open."""
        while part := await self._more():
            self._heard += part
        return self._heard.decode()

    async def _more(self) -> bytes:
        await readable(self._ear)
        return os.read(self._ear, 1 << 16)

    def close(self) -> None:
        os.close(self._ear)


class Running(Ear):
    """A script, and the pipe it writes to."""

    def __init__(self, held: ProcessHandle, ear: int) -> None:
        super().__init__(ear)
        self.held = held

    async def wait(self) -> ProcessExit:
        exit_ = await self.held.wait()
        self.close()
        return exit_

    async def kill(self, grace_s: float = 1.0) -> ProcessExit:
        exit_ = await self.held.kill(grace_s)
        self.close()
        return exit_


async def readable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)


async def gone(*pids: int) -> None:
    """Wait until none of them lives."""
    async with asyncio.timeout(WAIT_S):
        for pid in pids:
            try:
                handle = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            try:
                await readable(handle)
            finally:
                os.close(handle)


@asynccontextmanager
async def open_yard(folder: Path, bound_s: float = 2 * WAIT_S) -> AsyncGenerator[Yard]:
    async with asyncio.timeout(bound_s), open_processes(folder, LoopClock(), Ids()) as processes:
        yield Yard(processes)


@asynccontextmanager
async def open_remote_yard(processes: Processes) -> AsyncGenerator[Yard]:
    """As a worker has it: over a way of its own to the keeper of another process."""

    async def ask() -> SupervisorChannel:
        worker_channel = await nursery_of(processes).connect()
        return SupervisorChannel(
            worker_channel.socket, worker_channel.process_tag, worker_channel.base
        )

    async with open_remote_processes(ask, LoopClock()) as remote:
        yield Yard(remote)


def nursery_of(processes: Processes) -> WorkerSupervisor:
    assert processes.nursery is not None
    return processes.nursery

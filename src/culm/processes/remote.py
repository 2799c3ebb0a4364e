"""Processes started through another process's supervisor: a worker's side.

Owns the channel to the server's supervisor, which is requested with the first process and again
after that supervisor died. The server ends the processes of a dead supervisor and verifies that
before it hands out a new channel.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from culm.clock import Clock
from culm.processes.base import ProcessHandle, ProcessInfo, ProcessRequest, ProcessStartFailed
from culm.processes.channel import SupervisorChannel
from culm.processes.packets import receive
from culm.processes.process_handle import SupervisedProcess
from culm.processes.process_table import ProcessTable, find_members

_log = logging.getLogger(__name__)

RequestChannel = Callable[
    [], Awaitable[SupervisorChannel]
]  # In bounded time; raises `ProcessStartFailed`.


class RemoteProcesses:
    """Implements `Processes` and `ChannelSource`."""

    worker_supervisor = None

    def __init__(self, request_channel: RequestChannel, clock: Clock) -> None:
        self._request_channel = request_channel
        self._table = ProcessTable(self, clock)
        self._channel: SupervisorChannel | None = None
        self._requesting = asyncio.Lock()
        self._has_lost = asyncio.Event()  # A supervisor with processes of ours died.
        self._is_closing = False
        self._loop = asyncio.get_running_loop()

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        return await self._table.start(request)

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return await self._table.processes(workspace_id)

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self._table.end_all(workspace_id)

    def warm_nowait(self) -> None:
        """Do nothing: the server keeps its own supervisor ready."""

    async def get(self) -> SupervisorChannel:
        async with self._requesting:
            if self._is_closing:
                raise ProcessStartFailed("the worker is stopping")
            if self._channel is None:
                self._channel = await self._request_channel()
                self._loop.add_reader(self._channel.control, self._read, self._channel)
            return self._channel

    def drop(self, channel: SupervisorChannel) -> None:
        if self._channel is channel:
            self._channel = None
            channel.is_dropped = True
            self._loop.remove_reader(channel.control)
            channel.control.close()
            self._has_lost.set()

    def _read(self, channel: SupervisorChannel) -> None:
        packets, is_over = receive(channel.control)
        for fields in packets:
            match fields:
                case ["lost", number, swept, left]:
                    self._table.on_lost(number, swept, left)
                case _:
                    raise AssertionError(f"unknown packet from the supervisor: {fields}")
        if is_over:
            self.drop(channel)

    async def watch(self) -> None:
        """Clean up after each supervisor that dies, one after the other."""
        while True:
            await self._has_lost.wait()
            self._has_lost.clear()
            lost = [
                process for process in self._table.held if process.supervisor_channel.is_dropped
            ]
            for process in lost:
                process.is_stopping = True
            if lost:
                self._table.lose(lost, await self._wait_for_cleanup(lost))

    async def _wait_for_cleanup(self, lost: list[SupervisedProcess]) -> list[int]:
        """Wait until the server has ended them; return the pids that are left."""
        try:
            await self.get()
        except (ProcessStartFailed, OSError) as exc:
            _log.error("the supervisor died and cannot be replaced: %s", exc)
            found = await asyncio.to_thread(find_members, lost)
            return [stat.pid for _, members in found for stat in members]
        return []

    async def close(self) -> None:
        """End everything and verify it. Bounded."""
        self._is_closing = True
        try:
            left = await self._table.end(self._table.held)
            if left:
                _log.error("processes could not be ended: %s", left)
        finally:
            if self._channel is not None:
                self._loop.remove_reader(self._channel.control)
                self._channel.control.close()
            self._table.close()


@asynccontextmanager
async def open_remote_processes(
    request_channel: RequestChannel, clock: Clock
) -> AsyncGenerator[RemoteProcesses]:
    """At the end of the block, no process it started is left."""
    processes = RemoteProcesses(request_channel, clock)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(processes.watch(), name="supervisor watch")
        try:
            yield processes
        finally:
            await processes.close()
            watch.cancel()

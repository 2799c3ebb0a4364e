"""Custody by the keeper of another process: a worker's side of it.

Owns the line to the server's keeper, which is asked for with the first process and again after
that keeper died. What a dead keeper held is ended by the server, and verified there: who gives a
new line says so by it.
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

Ask = Callable[[], Awaitable[SupervisorChannel]]  # In bounded time; raises `StartFailed`.


class RemoteProcesses:
    """Implements `Custody` and `Lines`."""

    nursery = None

    def __init__(self, ask: Ask, clock: Clock) -> None:
        self._ask = ask
        self._holding = ProcessTable(self, clock)
        self._line: SupervisorChannel | None = None
        self._asking = asyncio.Lock()
        self._has_lost = asyncio.Event()  # A keeper died that held something.
        self._is_closing = False
        self._loop = asyncio.get_running_loop()

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        return await self._holding.start(order)

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return await self._holding.processes(workspace_id)

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self._holding.end_all(workspace_id)

    def warm_nowait(self) -> None:
        """The server's keeper is its own to have ready."""

    async def get(self) -> SupervisorChannel:
        async with self._asking:
            if self._is_closing:
                raise ProcessStartFailed("the worker is stopping")
            if self._line is None:
                self._line = await self._ask()
                self._loop.add_reader(self._line.control, self._read, self._line)
            return self._line

    def drop(self, line: SupervisorChannel) -> None:
        if self._line is line:
            self._line = None
            line.is_dropped = True
            self._loop.remove_reader(line.control)
            line.control.close()
            self._has_lost.set()

    def _read(self, line: SupervisorChannel) -> None:
        packets, is_over = receive(line.control)
        for words in packets:
            match words:
                case ["lost", number, swept, left]:
                    self._holding.on_lost(number, swept, left)
                case _:
                    raise AssertionError(f"no word of a keeper: {words}")
        if is_over:
            self.drop(line)

    async def watch(self) -> None:
        """Deal with every keeper that dies, one after the other."""
        while True:
            await self._has_lost.wait()
            self._has_lost.clear()
            lost = [kept for kept in self._holding.held if kept.line.is_dropped]
            for kept in lost:
                kept.is_stopping = True
            if lost:
                self._holding.lose(lost, await self._settle(lost))

    async def _settle(self, lost: list[SupervisedProcess]) -> list[int]:
        """Wait until the server has ended them, and name those that are left."""
        try:
            await self.get()
        except (ProcessStartFailed, OSError) as exc:
            _log.error("the keeper died, and there is no other: %s", exc)
            found = await asyncio.to_thread(find_members, lost)
            return [stat.pid for _, members in found for stat in members]
        return []

    async def close(self) -> None:
        """End everything and verify it. Bounded."""
        self._is_closing = True
        try:
            left = await self._holding.end(self._holding.held)
            if left:
                _log.error("processes could not be ended: %s", left)
        finally:
            if self._line is not None:
                self._loop.remove_reader(self._line.control)
                self._line.control.close()
            self._holding.close()


@asynccontextmanager
async def open_remote_processes(ask: Ask, clock: Clock) -> AsyncGenerator[RemoteProcesses]:
    """At the end of the block nothing it started is left."""
    processes = RemoteProcesses(ask, clock)
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(processes.watch(), name="custody")
        try:
            yield processes
        finally:
            await processes.close()
            watch.cancel()

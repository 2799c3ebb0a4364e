"""Custody that is opened by whoever first needs a process: most workers never do."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from culm.processes.base import (
    Processes,
    ProcessHandle,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
    WorkerSupervisor,
)

OpenCustody = Callable[[], AbstractAsyncContextManager[Processes]]


class LazyProcesses:
    """Implements `Custody`. Made by `open_lazy_custody`."""

    def __init__(self, opening: OpenCustody) -> None:
        self._opening = opening
        self._wanted = asyncio.Event()
        self._found: asyncio.Future[Processes] | None = None
        self._processes: Processes | None = None
        self._is_over = False

    @property
    def nursery(self) -> WorkerSupervisor | None:
        """A worker starts no workers: its host does."""
        return None

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        return await (await self._get()).start(order)

    def warm_nowait(self) -> None:
        if self._processes is not None:
            self._processes.warm_nowait()

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return [] if self._processes is None else await self._processes.processes(workspace_id)

    async def end_all(self, workspace_id: str) -> list[int]:
        return [] if self._processes is None else await self._processes.end_all(workspace_id)

    async def _get(self) -> Processes:
        if self._processes is not None:
            return self._processes
        if self._is_over:
            raise ProcessStartFailed("the worker is stopping")
        if self._found is None:
            self._found = asyncio.get_running_loop().create_future()
            self._wanted.set()
        # Others wait for it, too: the cancel of one of them is not theirs.
        return await asyncio.shield(self._found)

    async def hold(self) -> None:
        """Open it when it is wanted, and keep it until this is cancelled."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                try:
                    async with self._opening() as self._processes:
                        self._notify(self._processes)
                        await asyncio.Event().wait()
                except OSError as exc:
                    # The next process tries again.
                    self._notify(ProcessStartFailed(f"there is no keeper for processes: {exc}"))
        finally:
            self._is_over = True
            self._processes = None
            self._notify(ProcessStartFailed("the worker is stopping"))

    def _notify(self, result: Processes | ProcessStartFailed) -> None:
        found, self._found = self._found, None
        if found is None or found.done():
            return
        if isinstance(result, ProcessStartFailed):
            found.set_exception(result)
            found.exception()  # Whoever waited may have gone.
        else:
            found.set_result(result)


@asynccontextmanager
async def open_lazy_processes(opening: OpenCustody) -> AsyncGenerator[LazyProcesses]:
    """At the end of the block nothing is left of what was started, if anything was."""
    processes = LazyProcesses(opening)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(processes.hold(), name="custody")
        try:
            yield processes
        finally:
            task.cancel()

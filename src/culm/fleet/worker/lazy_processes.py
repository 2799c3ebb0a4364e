"""Processes that are opened when the first one is started: most workers never start any."""

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

OpenProcesses = Callable[[], AbstractAsyncContextManager[Processes]]


class LazyProcesses:
    """Implements `Processes`; created by `open_lazy_processes`."""

    def __init__(self, open_processes: OpenProcesses) -> None:
        self._open_processes = open_processes
        self._wanted = asyncio.Event()
        self._found: asyncio.Future[Processes] | None = None
        self._processes: Processes | None = None
        self._is_over = False

    @property
    def worker_supervisor(self) -> WorkerSupervisor | None:
        """None: a worker does not start workers, its host does."""
        return None

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        return await (await self._get()).start(request)

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
        # Shielded: the cancel of one waiter must not affect the others.
        return await asyncio.shield(self._found)

    async def keep_open(self) -> None:
        """Open the processes when they are needed, and keep them open until this is cancelled."""
        try:
            while True:
                await self._wanted.wait()
                self._wanted.clear()
                try:
                    async with self._open_processes() as self._processes:
                        self._notify(self._processes)
                        await asyncio.Event().wait()
                except OSError as exc:
                    # The next start tries again.
                    self._notify(ProcessStartFailed(f"cannot start the process supervisor: {exc}"))
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
            found.exception()  # The waiter may have been cancelled.
        else:
            found.set_result(result)


@asynccontextmanager
async def open_lazy_processes(open_processes: OpenProcesses) -> AsyncGenerator[LazyProcesses]:
    """End all processes at the end of the block."""
    processes = LazyProcesses(open_processes)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(processes.keep_open(), name="processes")
        try:
            yield processes
        finally:
            task.cancel()

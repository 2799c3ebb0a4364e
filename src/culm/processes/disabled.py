"""Custody of a server that starts nothing: for simulations, and where no tool needs a process."""

from culm.processes.base import ProcessHandle, ProcessInfo, ProcessRequest, ProcessStartFailed


class NoProcesses:
    nursery = None

    def warm_nowait(self) -> None:
        pass

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        raise ProcessStartFailed("no process can be started here")

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return []

    async def end_all(self, workspace_id: str) -> list[int]:
        return []

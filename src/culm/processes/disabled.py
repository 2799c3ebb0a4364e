"""Custody of a server that starts nothing: for simulations, and where no tool needs a process."""

from culm.processes.base import Held, Order, Process, StartFailed


class NoCustody:
    nursery = None

    def warm_nowait(self) -> None:
        pass

    async def start(self, order: Order) -> Held:
        raise StartFailed("no process can be started here")

    async def processes(self, workspace_id: str) -> list[Process]:
        return []

    async def end_all(self, workspace_id: str) -> list[int]:
        return []

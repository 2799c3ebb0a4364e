"""Workers that are other programs: they read a provision and publish themselves in discovery.

They run under the supervisor, so that they and all they start end with the server.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

from culm.clock import Clock, pause
from culm.fleet.discovery.base import Discovery
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.host.local_worker import LocalWorker
from culm.fleet.host.provision_file import make_stamp, stamped
from culm.fleet.host.startup import LAUNCH_S, WorkerStartup, open_startup
from culm.fleet.provision import Provision
from culm.processes.base import Processes
from culm.processes.linux import descendants_of, find_stat, read_table

POLL_S: Final = 0.02  # Interval at which its record is looked up.


class ForeignLauncher:
    """Implements `Launcher`. Created by `open_foreign_launcher`."""

    def __init__(
        self,
        argv: Sequence[str],
        processes: Processes,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        launch_s: float,
    ) -> None:
        self._argv = argv
        self._processes = processes
        self._clock = clock
        self._tasks = tasks
        self._launch_s = launch_s
        self._workers: set[LocalWorker] = set()

    def warm_nowait(self) -> None:
        self._processes.warm_nowait()

    async def launch(self, provision: Provision) -> LocalWorker:
        given = stamped(provision, make_stamp(self._clock.now_s()), None)
        discovery = FileDiscovery(Path(given.fabric_dir), self._clock)
        self._workers = {worker for worker in self._workers if not worker.is_ended}
        async with open_startup(given, discovery, self._launch_s) as startup:
            self._workers.add(startup.worker)
            # A record that an earlier worker with this id left must not be mistaken for this one's.
            await asyncio.to_thread(discovery.withdraw, startup.worker.id)
            started = await startup.start(self._processes, self._argv, [])
            self._tasks.create_task(started.watch(), name=f"worker {startup.worker.id}")
            await self._announced(startup, discovery)
            return startup.worker

    async def _announced(self, startup: WorkerStartup, discovery: Discovery) -> None:
        """Wait for its record; raises `LaunchFailed` if it ends before that."""
        worker = startup.worker
        while True:
            record = await asyncio.to_thread(discovery.resolve, worker.id)
            if not worker.is_alive:
                await startup.fail_ended()
            assert worker.pid is not None
            if record is not None and is_below(record.pid, worker.pid):
                break
            await pause(self._clock, POLL_S)
        worker.endpoint = record.endpoint

    async def close(self) -> None:
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.kill(), name=f"end {worker.id}")


def is_below(pid: int, root: int) -> bool:
    """Return True for that process and its descendants: a script may start the worker.

    The token is sent to the endpoint in the record, so the record must be the worker's own. Without
    /proc that is assumed.
    """
    if pid == root or find_stat(root) is None:
        return True
    return any(stat.pid == pid for stat in descendants_of(root, read_table()))


@asynccontextmanager
async def open_foreign_launcher(
    argv: Sequence[str], processes: Processes, clock: Clock, launch_s: float = LAUNCH_S
) -> AsyncGenerator[ForeignLauncher]:
    """At the end of the block no worker is left."""
    async with asyncio.TaskGroup() as tasks:
        launcher = ForeignLauncher(argv, processes, clock, tasks, launch_s)
        try:
            yield launcher
        finally:
            await launcher.close()

"""A fleet with fake workers; nothing of it is left at the end of each test."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from culm.fleet.executor import completed
from culm.fleet.host.caller import DenyAll, HostCallbacks, RunControl
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from tests.fleet.host_harness import FakeLauncher, in_time, open_fake_launcher, provision
from tests.support import FakeClock


@dataclass
class FleetHarness:
    clock: FakeClock
    launcher: FakeLauncher  # Local workers.
    remote_launcher: FakeLauncher
    fleet: Fleet
    tasks: asyncio.TaskGroup

    async def run(
        self, text: str, given: Provision | None = None, callbacks: HostCallbacks | None = None
    ) -> RunResult:
        work = self.fleet.run(
            given or provision(), RunSpec(text), callbacks or DenyAll(), RunControl()
        )
        return await in_time(work)

    def begin(
        self, text: str, given: Provision | None = None, controls: RunControl | None = None
    ) -> asyncio.Task[RunResult]:
        controls = controls or RunControl()
        work = self.fleet.run(given or provision(), RunSpec(text), DenyAll(), controls)
        return self.tasks.create_task(work)

    @property
    def pids(self) -> list[int | None]:
        """Pids of the live workers; they are numbered from 101."""
        assert self.fleet.workers == self.launcher.alive
        return [worker.pid for worker in self.launcher.alive]


@asynccontextmanager
async def open_fleet_harness(bounds: FleetBounds | None = None) -> AsyncGenerator[FleetHarness]:
    """Open a fleet; no worker, task or timer is left at the end of the block."""
    clock = FakeClock()
    bounds = bounds or FleetBounds()
    async with open_fake_launcher() as launcher, open_fake_launcher() as remote_launcher:
        async with (
            open_fleet(launcher, clock, bounds, remote_launcher) as fleet,
            asyncio.TaskGroup() as tasks,
        ):
            yield FleetHarness(clock, launcher, remote_launcher, fleet, tasks)
        assert (fleet.workers, launcher.alive, clock.armed()) == ([], [], 0)
        workers = (*launcher.workers, *remote_launcher.workers)
        assert all(link.is_closed for worker in workers for link in worker.links)


def completed_run(text: str) -> RunResult:
    return RunResult(completed(text), began=True, is_from_worker=True)

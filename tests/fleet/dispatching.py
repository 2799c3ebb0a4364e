"""A fleet whose workers are played, for its tests. At the end of each nothing of it is left."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from culm.fleet.executor import completed
from culm.fleet.host.callbacks import DenyAll, HostCallbacks
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from tests.fleet.parents import Stage, in_time, open_stage, provision
from tests.support import FakeClock


@dataclass
class World:
    clock: FakeClock
    stage: Stage  # Of workers here.
    elsewhere: Stage
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
        """Of the workers that are there; they are numbered from 101."""
        assert self.fleet.workers == self.stage.alive
        return [player.pid for player in self.stage.alive]


@asynccontextmanager
async def open_world(bounds: FleetBounds | None = None) -> AsyncGenerator[World]:
    """At the end of the block nothing is left: no worker, no task, no timer."""
    clock = FakeClock()
    bounds = bounds or FleetBounds()
    async with open_stage() as stage, open_stage() as elsewhere:
        async with (
            open_fleet(stage, clock, bounds, elsewhere) as fleet,
            asyncio.TaskGroup() as tasks,
        ):
            yield World(clock, stage, elsewhere, fleet, tasks)
        assert (fleet.workers, stage.alive, clock.armed()) == ([], [], 0)
        players = (*stage.players, *elsewhere.players)
        assert all(link.is_closed for player in players for link in player.links)


def clean(text: str) -> RunResult:
    return RunResult(completed(text), began=True, is_from_worker=True)

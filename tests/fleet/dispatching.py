"""A fleet whose workers are played, for its tests. At the end of each nothing of it is left."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from culm.fleet.executor import completed
from culm.fleet.host.callbacks import Nobody, Overseer
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.run_control import Controls
from culm.fleet.host.run_driver import Driven
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
        self, text: str, given: Provision | None = None, overseer: Overseer | None = None
    ) -> Driven:
        work = self.fleet.run(given or provision(), RunSpec(text), overseer or Nobody(), Controls())
        return await in_time(work)

    def begin(
        self, text: str, given: Provision | None = None, controls: Controls | None = None
    ) -> asyncio.Task[Driven]:
        controls = controls or Controls()
        work = self.fleet.run(given or provision(), RunSpec(text), Nobody(), controls)
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


def clean(text: str) -> Driven:
    return Driven(completed(text), began=True, is_told=True)

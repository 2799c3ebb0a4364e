"""The fleet under many seeds: lost links, late and repeated frames, killed workers and parents.

Every run ends once, and no process, link, record or task is left.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.sim.fleet_actors import FaultInjector
from tests.sim.fleet_checks import check_fleet
from tests.sim.fleet_foreign_parents import ForeignParent, check_foreign_parents, start_worker
from tests.sim.fleet_world import FleetWorld
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.support import contract

FLEETS = 4 * SEEDS_MAX  # They are small.
BATCH = 120
WORLD_S = 3_000.0  # A parent that lives longer hangs.
SETTLE_S = 80.0  # A worker's time to leave, and a lease.
FOREIGN_S = 300.0


async def one_world(loop: SimLoop) -> FleetWorld:
    return await run_world(FleetWorld(loop), live_through)


async def foreign_world(loop: SimLoop) -> FleetWorld:
    return await run_world(FleetWorld(loop), run_foreign_parents)


async def run_world(world: FleetWorld, live: Callable[[FleetWorld], Awaitable[None]]) -> FleetWorld:
    failure: AssertionError | None = None
    async with world.tasks:
        try:
            await live(world)
        except AssertionError as exc:
            failure = exc
        for process in world.processes:
            process.dispose()
    if failure is not None:
        failure.add_note("\n".join(world.trace))
        raise failure
    return world


async def live_through(world: FleetWorld) -> None:
    injector = FaultInjector(world)
    await injector.run()
    with suppress(TimeoutError):
        async with asyncio.timeout(WORLD_S):
            await injector.parent.process.gone.wait()
    for process in world.processes:
        process.resume()
    await asyncio.sleep(SETTLE_S)
    check_fleet(world)


async def run_foreign_parents(world: FleetWorld) -> None:
    """Run a worker with foreign parents."""
    world.faulty = False
    worker = start_worker(world)
    parents = [ForeignParent(world, worker) for _ in range(world.dice.randint(1, 3))]
    await asyncio.sleep(FOREIGN_S)
    worker.process.end()
    await asyncio.sleep(SETTLE_S)
    check_foreign_parents(world, parents)


@contract("FLEET-25", "FLEET-27", "FLEET-98", "FLEET-99", "FLEET-P4", "FLEET-P5")
@pytest.mark.parametrize("first", range(0, FLEETS, BATCH))
def test_every_run_ends_once_and_nothing_is_left(first: int) -> None:
    for seed in range(first, min(first + BATCH, FLEETS)):
        simulate(seed, one_world)


@contract("FLEET-7", "FLEET-26", "FLEET-27", "FLEET-P4", "FLEET-P5")
@pytest.mark.parametrize("first", range(0, SEEDS_MAX, BATCH))
def test_worker_ends_every_run_once_whatever_its_parent_sends(first: int) -> None:
    for seed in range(first, min(first + BATCH, SEEDS_MAX)):
        simulate(seed, foreign_world)


def test_seed_reproduces_the_same_trace() -> None:
    for seed in range(8):
        worlds = [simulate(seed, one_world) for _ in range(2)]
        assert worlds[0].trace == worlds[1].trace, f"seed {seed}"

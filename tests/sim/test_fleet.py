"""The fleet under many seeds: lost links, late and doubled frames, killed workers and parents.

Every run ends once, and no process, link, record or task is left.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from tests.sim.fleet_actors import Trouble
from tests.sim.fleet_checks import check_fleet
from tests.sim.fleet_strangers import Stranger, check_strangers, start_worker
from tests.sim.fleet_world import FleetWorld
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.support import contract

FLEETS = 4 * SEEDS_MAX  # They are small.
BATCH = 120
WORLD_S = 3_000.0  # A parent that is there for so long hangs.
SETTLE_S = 80.0  # The time that a worker has to leave, and a lease.
STRANGE_S = 300.0


async def one_world(loop: SimLoop) -> FleetWorld:
    return await see(FleetWorld(loop), live_through)


async def strange_world(loop: SimLoop) -> FleetWorld:
    return await see(FleetWorld(loop), suffer_strangers)


async def see(world: FleetWorld, live: Callable[[FleetWorld], Awaitable[None]]) -> FleetWorld:
    missed: AssertionError | None = None
    async with world.tasks:
        try:
            await live(world)
        except AssertionError as exc:
            missed = exc
        for process in world.processes:
            process.bury()
    if missed is not None:
        missed.add_note("\n".join(world.trace))
        raise missed
    return world


async def live_through(world: FleetWorld) -> None:
    trouble = Trouble(world)
    await trouble.run()
    with suppress(TimeoutError):
        async with asyncio.timeout(WORLD_S):
            await trouble.parent.process.gone.wait()
    for process in world.processes:
        process.go_on()
    await asyncio.sleep(SETTLE_S)
    check_fleet(world)


async def suffer_strangers(world: FleetWorld) -> None:
    """A worker whose parents are not ours, and which nobody ends in time."""
    world.faulty = False
    worker = start_worker(world)
    strangers = [Stranger(world, worker) for _ in range(world.dice.randint(1, 3))]
    await asyncio.sleep(STRANGE_S)
    worker.process.end()
    await asyncio.sleep(SETTLE_S)
    check_strangers(world, strangers)


@contract("FLEET-25", "FLEET-27", "FLEET-98", "FLEET-99", "FLEET-P4", "FLEET-P5")
@pytest.mark.parametrize("first", range(0, FLEETS, BATCH))
def test_every_run_ends_once_and_nothing_is_left(first: int) -> None:
    for seed in range(first, min(first + BATCH, FLEETS)):
        simulate(seed, one_world)


@contract("FLEET-7", "FLEET-26", "FLEET-27", "FLEET-P4", "FLEET-P5")
@pytest.mark.parametrize("first", range(0, SEEDS_MAX, BATCH))
def test_a_worker_ends_every_run_once_whatever_its_parent_says(first: int) -> None:
    for seed in range(first, min(first + BATCH, SEEDS_MAX)):
        simulate(seed, strange_world)


def test_a_seed_repeats_itself_to_the_last_frame() -> None:
    for seed in range(8):
        worlds = [simulate(seed, one_world) for _ in range(2)]
        assert worlds[0].trace == worlds[1].trace, f"seed {seed}"

"""Somebody sets the time of day while runs, workers and agents are at work: nothing notices."""

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest

from tests.sim import test_fleet, test_runs, test_tree
from tests.sim.loop import SimLoop, simulate
from tests.support import contract

HOUR_S = 3600.0
# By virtual time: forward and back again, so that both directions meet open runs.
CHANGES = ((0.2, HOUR_S), (1.0, -HOUR_S), (3.0, -HOUR_S), (9.0, 2 * HOUR_S), (30.0, -HOUR_S))
OneWorld = Callable[[SimLoop], Coroutine[Any, Any, object]]
WORLDS: tuple[tuple[OneWorld, int], ...] = (
    (test_runs.one_world, 25),
    (test_fleet.one_world, 60),
    (test_tree.one_world, 12),
)


async def changing(one_world: OneWorld, loop: SimLoop) -> None:
    for at_s, by_s in CHANGES:
        loop.call_later(at_s, loop.set_time, by_s)
    await one_world(loop)


@contract("EXC-29")
@pytest.mark.parametrize(("one_world", "seeds"), WORLDS, ids=("runs", "fleet", "tree"))
def test_setting_the_time_of_day_changes_no_run(one_world: OneWorld, seeds: int) -> None:
    for seed in range(seeds):
        simulate(seed, partial(changing, one_world))

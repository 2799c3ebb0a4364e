"""The fleet: a run that is cancelled, and a fleet that closes, at any moment, leave nothing."""

import asyncio

import pytest
from msgspec.structs import replace

from culm.errors import ShuttingDown
from culm.fleet.executor import CANCELLED, SteerMessage, completed
from culm.fleet.host.callbacks import DenyAll
from culm.fleet.host.dispatch import FleetBounds, open_fleet
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import CANCEL_S, RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import CulmExtension
from tests.fleet.dispatching import open_world
from tests.fleet.parents import (
    Play,
    dies,
    echoes,
    in_time,
    open_stage,
    provision,
    says_nothing,
    settle,
)
from tests.support import FakeClock

PLAYS: list[tuple[Play, str]] = [
    (echoes, "wait"),
    (echoes, "a"),
    (says_nothing, "a"),
    (dies, "a"),
]


@pytest.mark.parametrize(("play", "text"), PLAYS)
@pytest.mark.parametrize("way", ["task", "controls", "both"])
async def test_a_run_that_is_cancelled_at_any_moment_leaves_nothing(
    play: Play, text: str, way: str
) -> None:
    async with open_world() as world:
        for steps in range(24):
            world.stage.plays = [play, play]
            controls = RunControl()
            run = world.begin(text, controls=controls)
            await settle(steps)
            if way != "task":
                controls.cancel()
                await settle(steps % 3)
            if way != "controls":
                run.cancel()
            await settle()
            world.clock.advance(CANCEL_S)
            await in_time(asyncio.wait({run}))
            if not run.cancelled() and play is not dies:
                assert run.result().outcome in (CANCELLED, completed("a"))
            world.clock.advance(600)  # Who was parked goes by then.
            await settle(10)
            assert world.pids == []


@pytest.mark.parametrize(("play", "text"), PLAYS)
async def test_a_fleet_that_is_closed_at_any_moment_leaves_nothing(play: Play, text: str) -> None:
    for steps in range(1, 24, 2):
        async with open_world() as world:
            world.stage.plays = [play, play]
            run = world.begin(text)
            await settle(steps)
            await in_time(world.fleet.close())
            await in_time(run)
            assert world.pids == []


@pytest.mark.parametrize("first", ["controls", "task"])
async def test_a_launch_that_is_cancelled_twice_cleans_up_in_peace(first: str) -> None:
    async with open_world() as world:
        world.stage.doors.clear()
        controls = RunControl()
        run = world.begin("a", controls=controls)
        await settle()
        cancels = [controls.cancel, run.cancel]
        for cancel in cancels if first == "controls" else reversed(cancels):
            cancel()
            await settle(5)
        await in_time(asyncio.wait({run}))
        assert (run.cancelled(), world.stage.torn, world.stage.players) == (True, 0, [])


async def test_a_cancel_reaches_a_run_whose_worker_is_being_launched() -> None:
    async with open_world() as world:
        world.stage.doors.clear()
        controls = RunControl()
        run = world.begin("a", controls=controls)
        await settle()
        controls.steer("late")
        controls.cancel()
        await settle(5)
        controls.steer("later")
        driven = await in_time(run)
        assert driven == RunResult(
            CANCELLED, unadmitted=(SteerMessage("late"), SteerMessage("later"))
        )
        assert (world.stage.torn, world.stage.players) == (0, [])


async def test_a_fleet_that_closes_cancels_its_runs_and_ends_its_workers() -> None:
    clock = FakeClock()
    ours = replace(provision(), culm=CulmExtension(host_calls=True))
    async with open_stage() as stage, asyncio.TaskGroup() as tasks:
        async with open_fleet(stage, clock, FleetBounds(runs_max=2)) as fleet:
            await fleet.run(provision("parked", 2), RunSpec("a"), DenyAll(), RunControl())
            stage.plays = [echoes, says_nothing]
            given = [RunControl() for _ in range(3)]
            runs = [
                tasks.create_task(fleet.run(ours, RunSpec("wait"), DenyAll(), controls))
                for controls in given
            ]
            for controls in given:
                controls.steer("listen", id="1")
            await settle()
            assert len(stage.alive) == 3
        lost = (SteerMessage("listen", "1"),)
        assert [await in_time(run) for run in runs] == [
            RunResult(CANCELLED, began=True, unadmitted=lost),
            RunResult(CANCELLED, unadmitted=lost),
            RunResult(CANCELLED, unadmitted=lost),
        ]
        assert (stage.alive, fleet.workers, clock.armed()) == ([], [], 0)
        with pytest.raises(ShuttingDown):
            await fleet.run(provision(), RunSpec("a"), DenyAll(), RunControl())


async def test_a_fleet_that_closes_does_not_disturb_a_run_that_ends_its_worker() -> None:
    async with open_world() as world:
        run = world.begin("wait")
        await settle()
        player = world.stage.players[0]
        player.mortal.clear()
        run.cancel()
        await settle()
        closing = world.tasks.create_task(world.fleet.close())
        await settle()
        assert (world.pids, run.done(), closing.done()) == ([101], False, False)
        player.mortal.set()
        await in_time(closing)
        await asyncio.wait({run})


async def test_a_fleet_that_closes_tries_once_more_to_end_a_worker_that_would_not() -> None:
    async with open_world() as world:
        run = world.begin("wait")
        await settle()
        world.stage.players[0].kills_failing = 1
        run.cancel()
        await asyncio.wait({run})
        assert world.pids == [101]

"""The fleet: cancelling a run or closing the fleet at any moment leaves nothing behind."""

import asyncio

import pytest
from msgspec.structs import replace

from culm.errors import ShuttingDown
from culm.fleet.executor import CANCELLED, SteerMessage, completed
from culm.fleet.host.caller import DenyAll, RunControl
from culm.fleet.host.dispatch import FleetBounds, open_fleet
from culm.fleet.host.run_driver import CANCEL_S, RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import CulmExtension
from tests.fleet.dispatch_harness import open_fleet_harness
from tests.fleet.host_harness import (
    WorkerScript,
    crash_script,
    echo_script,
    in_time,
    open_fake_launcher,
    provision,
    run_pending,
    silent_script,
)
from tests.support import FakeClock

SCRIPTS: list[tuple[WorkerScript, str]] = [
    (echo_script, "wait"),
    (echo_script, "a"),
    (silent_script, "a"),
    (crash_script, "a"),
]


@pytest.mark.parametrize(("script", "text"), SCRIPTS)
@pytest.mark.parametrize("way", ["task", "controls", "both"])
async def test_run_canceled_at_any_moment_leaves_nothing(
    script: WorkerScript, text: str, way: str
) -> None:
    async with open_fleet_harness() as harness:
        for steps in range(24):
            harness.launcher.scripts = [script, script]
            controls = RunControl()
            run = harness.begin(text, controls=controls)
            await run_pending(steps)
            if way != "task":
                controls.cancel()
                await run_pending(steps % 3)
            if way != "controls":
                run.cancel()
            await run_pending()
            harness.clock.advance(CANCEL_S)
            await in_time(asyncio.wait({run}))
            if not run.cancelled() and script is not crash_script:
                assert run.result().outcome in (CANCELLED, completed("a"))
            harness.clock.advance(600)  # Idle workers are retired by then.
            await run_pending(10)
            assert harness.pids == []


@pytest.mark.parametrize(("script", "text"), SCRIPTS)
async def test_fleet_closed_at_any_moment_leaves_nothing(script: WorkerScript, text: str) -> None:
    for steps in range(1, 24, 2):
        async with open_fleet_harness() as harness:
            harness.launcher.scripts = [script, script]
            run = harness.begin(text)
            await run_pending(steps)
            await in_time(harness.fleet.close())
            await in_time(run)
            assert harness.pids == []


@pytest.mark.parametrize("first", ["controls", "task"])
async def test_launch_canceled_twice_completes_its_cleanup(first: str) -> None:
    async with open_fleet_harness() as harness:
        harness.launcher.launches_allowed.clear()
        controls = RunControl()
        run = harness.begin("a", controls=controls)
        await run_pending()
        cancels = [controls.cancel, run.cancel]
        for cancel in cancels if first == "controls" else reversed(cancels):
            cancel()
            await run_pending(5)
        await in_time(asyncio.wait({run}))
        assert (
            run.cancelled(),
            harness.launcher.unfinished_cleanups,
            harness.launcher.workers,
        ) == (True, 0, [])


async def test_cancel_reaches_a_run_whose_worker_is_launching() -> None:
    async with open_fleet_harness() as harness:
        harness.launcher.launches_allowed.clear()
        controls = RunControl()
        run = harness.begin("a", controls=controls)
        await run_pending()
        controls.steer("late")
        controls.cancel()
        await run_pending(5)
        controls.steer("later")
        result = await in_time(run)
        assert result == RunResult(
            CANCELLED, unadmitted=(SteerMessage("late"), SteerMessage("later"))
        )
        assert (harness.launcher.unfinished_cleanups, harness.launcher.workers) == (0, [])


async def test_closing_fleet_cancels_its_runs_and_ends_its_workers() -> None:
    clock = FakeClock()
    ours = replace(provision(), culm=CulmExtension(host_calls=True))
    async with open_fake_launcher() as launcher, asyncio.TaskGroup() as tasks:
        async with open_fleet(launcher, clock, FleetBounds(runs_max=2)) as fleet:
            await fleet.run(provision("parked", 2), RunSpec("a"), DenyAll(), RunControl())
            launcher.scripts = [echo_script, silent_script]
            given = [RunControl() for _ in range(3)]
            runs = [
                tasks.create_task(fleet.run(ours, RunSpec("wait"), DenyAll(), controls))
                for controls in given
            ]
            for controls in given:
                controls.steer("listen", id="1")
            await run_pending()
            assert len(launcher.alive) == 3
        lost = (SteerMessage("listen", "1"),)
        assert [await in_time(run) for run in runs] == [
            RunResult(CANCELLED, began=True, unadmitted=lost),
            RunResult(CANCELLED, unadmitted=lost),
            RunResult(CANCELLED, unadmitted=lost),
        ]
        assert (launcher.alive, fleet.workers, clock.armed()) == ([], [], 0)
        with pytest.raises(ShuttingDown):
            await fleet.run(provision(), RunSpec("a"), DenyAll(), RunControl())


async def test_closing_fleet_waits_for_a_run_that_is_ending_its_worker() -> None:
    async with open_fleet_harness() as harness:
        run = harness.begin("wait")
        await run_pending()
        worker = harness.launcher.workers[0]
        worker.kill_allowed.clear()
        run.cancel()
        await run_pending()
        closing = harness.tasks.create_task(harness.fleet.close())
        await run_pending()
        assert (harness.pids, run.done(), closing.done()) == ([101], False, False)
        worker.kill_allowed.set()
        await in_time(closing)
        await asyncio.wait({run})


async def test_closing_fleet_retries_a_failed_kill() -> None:
    async with open_fleet_harness() as harness:
        run = harness.begin("wait")
        await run_pending()
        harness.launcher.workers[0].kills_failing = 1
        run.cancel()
        await asyncio.wait({run})
        assert harness.pids == [101]

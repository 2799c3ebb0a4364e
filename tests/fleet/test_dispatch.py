"""The fleet: worker selection, retries, and what happens to a worker after its run."""

import asyncio

import pytest
from msgspec import Raw
from msgspec.structs import replace

from culm.errors import InvalidRequest, LimitExceeded, NotBuilt
from culm.fleet.executor import CANCELLED, Outcome, SteerMessage, completed, failed
from culm.fleet.host.base import LaunchFailed, NotReady
from culm.fleet.host.caller import RunControl
from culm.fleet.host.dispatch import FleetBounds
from culm.fleet.host.pool import IDLE_MARGIN_S, PoolBounds
from culm.fleet.host.run_driver import FIRST_FRAME_S, RunResult
from culm.fleet.protocol.frames import RunSpec, SteerFrame
from culm.fleet.provision import (
    Capabilities,
    Provision,
    ProvisionLimits,
    RemotePlacement,
    SchedulablePlacement,
)
from tests.fleet.dispatch_harness import completed_run, open_fleet_harness
from tests.fleet.host_harness import (
    RecordingCallbacks,
    WorkerScript,
    crash_during_run_script,
    crash_script,
    echo_script,
    in_time,
    late_cancel_script,
    provision,
    run_pending,
    silent_script,
)
from tests.support import contract

# --- warm workers


@contract("FLEET-99")
async def test_worker_with_a_clean_run_takes_the_next_run_of_its_kind() -> None:
    async with open_fleet_harness() as harness:
        assert await harness.run("a", provision("x")) == completed_run("a")
        assert await harness.run("b", provision("y")) == completed_run("b")
        assert await harness.run("c", provision("z", depth=2)) == completed_run("c")
        assert harness.pids == [101, 102]
        first, _ = harness.launcher.workers
    assert first.runs == [RunSpec("a"), RunSpec("b")]
    assert (first.id, first.provision.reusable) == ("x", True)


@contract("FLEET-99")
@pytest.mark.parametrize(
    ("script", "text", "outcome"),
    [
        (echo_script, "fail", failed("the model refused")),
        (echo_script, "wait", CANCELLED),
        (late_cancel_script, "wait", completed("done")),
    ],
)
async def test_worker_is_ended_after_a_failed_or_canceled_run(
    script: WorkerScript, text: str, outcome: Outcome
) -> None:
    async with open_fleet_harness() as harness:
        harness.launcher.scripts = [script]
        controls = RunControl()
        run = harness.begin(text, controls=controls)
        await run_pending()
        controls.cancel()
        assert await in_time(run) == RunResult(outcome, began=True, is_from_worker=True)
        assert harness.pids == []


@contract("FLEET-99")
async def test_idle_workers_are_limited_in_number_and_time() -> None:
    bounds = FleetBounds(pool=PoolBounds(idle_per_key_max=2, idle_max=3))
    async with open_fleet_harness(bounds) as harness:
        harness.launcher.launches_allowed.clear()
        runs = [harness.begin(str(n), provision(str(n), depth=1 + n // 4)) for n in range(8)]
        await run_pending()
        harness.launcher.launches_allowed.set()
        assert [await in_time(run) for run in runs] == [completed_run(str(n)) for n in range(8)]
        await run_pending()
        assert len(harness.launcher.workers) == 8
        assert len(harness.pids) == 3
        harness.clock.advance(299)
        await run_pending()
        assert len(harness.pids) == 3
        harness.clock.advance(31)
        await run_pending()
        assert harness.pids == []


async def test_worker_idle_timeout_is_longer_than_the_pool_timeout() -> None:
    async with open_fleet_harness() as harness:
        await harness.run("a")
        short = replace(
            provision(depth=2), limits=ProvisionLimits(idle_timeout_secs=5, max_rounds=7)
        )
        await harness.run("b", short)
        limits = [worker.provision.limits for worker in harness.launcher.workers]
        assert limits == [
            ProvisionLimits(idle_timeout_secs=300 + IDLE_MARGIN_S),
            ProvisionLimits(idle_timeout_secs=5 + IDLE_MARGIN_S, max_rounds=7),
        ]
        harness.clock.advance(5)
        assert await harness.run("c", short) == completed_run("c")
        await run_pending()
        assert harness.pids == [101, 103]


@pytest.mark.parametrize("is_known_dead", [True, False])
async def test_idle_worker_that_died_is_replaced_at_once(*, is_known_dead: bool) -> None:
    async with open_fleet_harness() as harness:
        await harness.run("a")
        worker = harness.launcher.workers[0]
        if is_known_dead:
            worker.die()
            await run_pending()
        else:
            worker.listener.close()
        assert await harness.run("b") == completed_run("b")
        await run_pending()
        assert harness.pids == [102]


async def test_live_workers_have_unique_names() -> None:
    async with open_fleet_harness() as harness:
        harness.launcher.scripts = [LaunchFailed("no memory")]
        await harness.run("a", provision("x"))
        await harness.run("a", provision("x"))
        run = harness.begin("wait", provision("y"))
        await run_pending()
        runs = [harness.begin("wait", provision("x")) for _ in range(2)]
        await run_pending()
        assert [worker.id for worker in harness.launcher.alive] == ["x", "x-2", "x-3"]
        for task in (run, *runs):
            task.cancel()
        await asyncio.wait({run, *runs})
        await harness.run("b", provision("x"))
        assert [worker.id for worker in harness.launcher.alive] == ["x"]


# --- failures


@contract("FLEET-98")
@pytest.mark.parametrize(
    ("scripts", "result", "launches"),
    [
        ([silent_script], completed_run("hi"), 2),
        ([crash_script], completed_run("hi"), 2),
        ([silent_script, silent_script], RunResult(failed("the worker sent nothing for 60 s")), 2),
        (
            [crash_script, crash_script],
            RunResult(
                failed(
                    "the link to the worker was lost: the process ended; "
                    "last output:\nSegmentation fault"
                )
            ),
            2,
        ),
        (
            [crash_during_run_script],
            RunResult(
                failed(
                    "the link to the worker was lost: the process ended; "
                    "last output:\nout of memory; token=[redacted]"
                ),
                began=True,
            ),
            1,
        ),
        (
            [LaunchFailed("status 2: unknown executor")],
            RunResult(failed("status 2: unknown executor")),
            0,
        ),
        ([silent_script, LaunchFailed("no memory")], RunResult(failed("no memory")), 1),
        ([NotReady("killed")], completed_run("hi"), 1),
        ([NotReady("killed"), NotReady("again")], RunResult(failed("again")), 0),
    ],
)
async def test_run_is_retried_once_and_only_before_the_first_frame(
    scripts: list[WorkerScript | LaunchFailed], result: RunResult, launches: int
) -> None:
    async with open_fleet_harness() as harness:
        other_run = harness.begin("wait", provision("other", depth=2))
        await run_pending()
        harness.launcher.scripts = [*scripts]
        run = harness.begin("hi")
        for _ in scripts:
            await run_pending()
            harness.clock.advance(FIRST_FRAME_S)
        assert await in_time(run) == result
        assert len(harness.launcher.workers) == 1 + launches
        assert not other_run.done()
        other_run.cancel()


async def test_retry_never_uses_an_idle_worker() -> None:
    async with open_fleet_harness() as harness:
        runs = [harness.begin(text, provision(text)) for text in ("a", "b")]
        assert [await in_time(run) for run in runs] == [completed_run("a"), completed_run("b")]
        for worker in harness.launcher.workers:
            worker.script = silent_script
        run = harness.begin("c")
        await run_pending()
        harness.clock.advance(FIRST_FRAME_S)
        assert await in_time(run) == completed_run("c")
        assert len(harness.pids) == 2
        assert harness.launcher.workers[2].runs == [RunSpec("c")]


async def test_messages_to_a_silent_worker_are_resent_to_the_next_one() -> None:
    async with open_fleet_harness() as harness:
        harness.launcher.scripts = [silent_script]
        controls = RunControl()
        run = harness.begin("wait", controls=controls)
        controls.steer("one")
        await run_pending()
        controls.steer("two", id="2")
        await run_pending()
        harness.clock.advance(FIRST_FRAME_S)
        await run_pending()
        controls.steer("three")
        await run_pending()
        expected = [RunSpec("wait"), SteerFrame("one"), SteerFrame("two")]
        first, second = harness.launcher.workers
        assert (first.runs, second.runs) == (expected, [*expected, SteerFrame("three")])
        controls.cancel()
        controls.steer("never mind")
        assert await in_time(run) == RunResult(
            CANCELLED, began=True, unadmitted=(SteerMessage("never mind"),), is_from_worker=True
        )


@contract("FLEET-98")
async def test_remote_worker_is_neither_retried_nor_pooled() -> None:
    there = replace(provision(), placement=RemotePlacement("ws://there"))
    async with open_fleet_harness() as harness:
        assert await harness.run("a", there) == completed_run("a")
        harness.remote_launcher.scripts = [silent_script]
        run = harness.begin("b", there)
        await run_pending()
        harness.clock.advance(FIRST_FRAME_S)
        silent = RunResult(failed("the worker sent nothing for 60 s"))
        assert await in_time(run) == silent
        harness.remote_launcher.scripts = [LaunchFailed("401")]
        assert await harness.run("c", there) == RunResult(failed("401"))
        assert (harness.fleet.workers, harness.launcher.workers) == ([], [])


async def test_worker_that_could_not_be_killed_is_killed_by_a_later_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_fleet_harness() as harness:
        run = harness.begin("wait")
        await run_pending()
        harness.launcher.workers[0].kills_failing = 2
        run.cancel()
        await asyncio.wait({run})
        assert harness.pids == [101]
        harness.clock.advance(30)
        await run_pending()
        assert harness.pids == [101]
        harness.clock.advance(30)
        await run_pending()
        assert harness.pids == []
    assert caplog.text.count("worker child could not be ended") == 2


async def test_callback_error_ends_its_run_and_no_other() -> None:
    class FailingCallbacks(RecordingCallbacks):
        async def on_event(self, event: Raw) -> None:
            raise KeyError("lost")

    async with open_fleet_harness() as harness:
        other = harness.begin("wait", provision("other", depth=2))
        await run_pending()
        with pytest.raises(KeyError):
            await harness.run("a", callbacks=FailingCallbacks())
        assert harness.pids == [101]
        assert not other.done()
        other.cancel()


# --- refusals


@contract("FLEET-100")
@pytest.mark.parametrize(
    ("given", "error"),
    [
        (provision(depth=5), LimitExceeded),
        (
            replace(provision(depth=2), capabilities=Capabilities(max_spawn_depth=1)),
            LimitExceeded,
        ),
        (replace(provision(), placement=SchedulablePlacement("big")), NotBuilt),
        (replace(provision(), limits=ProvisionLimits(idle_timeout_secs=-1)), InvalidRequest),
        (
            replace(provision(), limits=ProvisionLimits(idle_timeout_secs=float("nan"))),
            InvalidRequest,
        ),
    ],
)
async def test_invalid_provision_is_refused_before_launch(
    given: Provision, error: type[Exception]
) -> None:
    async with open_fleet_harness() as harness:
        with pytest.raises(error):
            await harness.run("a", given)
        assert harness.launcher.workers == []


@contract("FLEET-99")
async def test_runs_over_the_limit_queue_and_over_the_queue_are_refused() -> None:
    async with open_fleet_harness(FleetBounds(runs_max=2, waiting_max=2)) as harness:
        await harness.run("a")  # Its worker is idle and takes no slot.
        first = [RunControl() for _ in range(4)]
        runs = [harness.begin("wait", provision(str(n)), c) for n, c in enumerate(first)]
        await run_pending()
        assert len(harness.pids) == 2
        with pytest.raises(LimitExceeded):
            await harness.run("b")
        first[2].cancel()
        assert await in_time(runs[2]) == RunResult(CANCELLED)
        first[0].cancel()
        assert (await in_time(runs[0])).outcome == CANCELLED
        await run_pending()
        assert [p.runs[-1] for p in harness.launcher.alive] == [RunSpec("wait")] * 2
        for controls in first:
            controls.cancel()
        assert [(await in_time(run)).outcome for run in runs] == [CANCELLED] * 4


async def test_many_concurrent_runs_get_their_own_results() -> None:
    async with open_fleet_harness(FleetBounds(runs_max=30)) as harness:
        runs = [harness.begin(str(n), provision(str(n))) for n in range(50)]
        assert [await in_time(run) for run in runs] == [completed_run(str(n)) for n in range(50)]
        await run_pending()
        assert len(harness.pids) == 4

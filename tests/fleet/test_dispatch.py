"""The fleet: which worker a run gets, how often it is tried, and what becomes of the worker."""

import asyncio

import pytest
from msgspec import Raw
from msgspec.structs import replace

from culm.errors import InvalidRequest, LimitExceeded, NotBuilt
from culm.fleet.executor import CANCELLED, Outcome, SteerMessage, completed, failed
from culm.fleet.host.base import LaunchFailed, NotReady
from culm.fleet.host.dispatch import FleetBounds
from culm.fleet.host.pool import IDLE_MARGIN_S, PoolBounds
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import FIRST_FRAME_S, RunResult
from culm.fleet.protocol.frames import RunSpec, SteerFrame
from culm.fleet.provision import (
    Capabilities,
    Provision,
    ProvisionLimits,
    RemotePlacement,
    SchedulablePlacement,
)
from tests.fleet.dispatching import clean, open_world
from tests.fleet.parents import (
    Play,
    Witness,
    dies,
    dies_at_work,
    echoes,
    in_time,
    obeys_too_late,
    provision,
    says_nothing,
    settle,
)
from tests.support import contract

# --- warm workers


@contract("FLEET-99")
async def test_a_worker_that_ended_a_run_cleanly_takes_the_next_one_of_its_kind() -> None:
    async with open_world() as world:
        assert await world.run("a", provision("x")) == clean("a")
        assert await world.run("b", provision("y")) == clean("b")
        assert await world.run("c", provision("z", depth=2)) == clean("c")
        assert world.pids == [101, 102]
        first, _ = world.stage.players
    assert first.runs == [RunSpec("a"), RunSpec("b")]
    assert (first.id, first.provision.reusable) == ("x", True)


@contract("FLEET-99")
@pytest.mark.parametrize(
    ("play", "text", "outcome"),
    [
        (echoes, "fail", failed("the model refused")),
        (echoes, "wait", CANCELLED),
        (obeys_too_late, "wait", completed("done")),
    ],
)
async def test_a_worker_whose_run_failed_or_was_cancelled_is_ended(
    play: Play, text: str, outcome: Outcome
) -> None:
    async with open_world() as world:
        world.stage.plays = [play]
        controls = RunControl()
        run = world.begin(text, controls=controls)
        await settle()
        controls.cancel()
        assert await in_time(run) == RunResult(outcome, began=True, is_from_worker=True)
        assert world.pids == []


@contract("FLEET-99")
async def test_no_more_workers_wait_than_may_and_no_longer_than_they_may() -> None:
    bounds = FleetBounds(pool=PoolBounds(idle_per_key_max=2, idle_max=3))
    async with open_world(bounds) as world:
        world.stage.doors.clear()
        runs = [world.begin(str(n), provision(str(n), depth=1 + n // 4)) for n in range(8)]
        await settle()
        world.stage.doors.set()
        assert [await in_time(run) for run in runs] == [clean(str(n)) for n in range(8)]
        await settle()
        assert len(world.stage.players) == 8
        assert len(world.pids) == 3
        world.clock.advance(299)
        await settle()
        assert len(world.pids) == 3
        world.clock.advance(31)
        await settle()
        assert world.pids == []


async def test_a_worker_waits_longer_by_itself_than_its_parent_lets_it() -> None:
    async with open_world() as world:
        await world.run("a")
        short = replace(
            provision(depth=2), limits=ProvisionLimits(idle_timeout_secs=5, max_rounds=7)
        )
        await world.run("b", short)
        limits = [player.provision.limits for player in world.stage.players]
        assert limits == [
            ProvisionLimits(idle_timeout_secs=300 + IDLE_MARGIN_S),
            ProvisionLimits(idle_timeout_secs=5 + IDLE_MARGIN_S, max_rounds=7),
        ]
        world.clock.advance(5)
        assert await world.run("c", short) == clean("c")
        await settle()
        assert world.pids == [101, 103]


@pytest.mark.parametrize("is_known_dead", [True, False])
async def test_a_worker_that_went_while_it_waited_is_replaced_at_once(
    *, is_known_dead: bool
) -> None:
    async with open_world() as world:
        await world.run("a")
        player = world.stage.players[0]
        if is_known_dead:
            player.die()
            await settle()
        else:
            player.listener.close()
        assert await world.run("b") == clean("b")
        await settle()
        assert world.pids == [102]


async def test_no_two_workers_that_live_have_one_name() -> None:
    async with open_world() as world:
        world.stage.plays = [LaunchFailed("no memory")]
        await world.run("a", provision("x"))
        await world.run("a", provision("x"))
        run = world.begin("wait", provision("y"))
        await settle()
        runs = [world.begin("wait", provision("x")) for _ in range(2)]
        await settle()
        assert [player.id for player in world.stage.alive] == ["x", "x-2", "x-3"]
        for task in (run, *runs):
            task.cancel()
        await asyncio.wait({run, *runs})
        await world.run("b", provision("x"))
        assert [player.id for player in world.stage.alive] == ["x"]


# --- what goes wrong


@contract("FLEET-98")
@pytest.mark.parametrize(
    ("plays", "driven", "launches"),
    [
        ([says_nothing], clean("hi"), 2),
        ([dies], clean("hi"), 2),
        ([says_nothing, says_nothing], RunResult(failed("the worker said nothing for 60 s")), 2),
        (
            [dies, dies],
            RunResult(
                failed(
                    "the link to the worker was lost: the process ended; "
                    "it printed last:\nSegmentation fault"
                )
            ),
            2,
        ),
        (
            [dies_at_work],
            RunResult(
                failed(
                    "the link to the worker was lost: the process ended; "
                    "it printed last:\nout of memory; token=[redacted]"
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
        ([says_nothing, LaunchFailed("no memory")], RunResult(failed("no memory")), 1),
        ([NotReady("killed")], clean("hi"), 1),
        ([NotReady("killed"), NotReady("again")], RunResult(failed("again")), 0),
    ],
)
async def test_a_run_is_tried_once_more_and_only_if_its_worker_was_never_heard(
    plays: list[Play | LaunchFailed], driven: RunResult, launches: int
) -> None:
    async with open_world() as world:
        witness = world.begin("wait", provision("other", depth=2))
        await settle()
        world.stage.plays = [*plays]
        run = world.begin("hi")
        for _ in plays:
            await settle()
            world.clock.advance(FIRST_FRAME_S)
        assert await in_time(run) == driven
        assert len(world.stage.players) == 1 + launches
        assert not witness.done()
        witness.cancel()


async def test_a_second_try_is_never_with_a_worker_that_waited() -> None:
    async with open_world() as world:
        runs = [world.begin(text, provision(text)) for text in ("a", "b")]
        assert [await in_time(run) for run in runs] == [clean("a"), clean("b")]
        for player in world.stage.players:
            player.play = says_nothing
        run = world.begin("c")
        await settle()
        world.clock.advance(FIRST_FRAME_S)
        assert await in_time(run) == clean("c")
        assert len(world.pids) == 2
        assert world.stage.players[2].runs == [RunSpec("c")]


async def test_what_was_said_to_a_worker_that_was_never_heard_is_said_to_the_next() -> None:
    async with open_world() as world:
        world.stage.plays = [says_nothing]
        controls = RunControl()
        run = world.begin("wait", controls=controls)
        controls.steer("one")
        await settle()
        controls.steer("two", id="2")
        await settle()
        world.clock.advance(FIRST_FRAME_S)
        await settle()
        controls.steer("three")
        await settle()
        said = [RunSpec("wait"), SteerFrame("one"), SteerFrame("two")]
        first, second = world.stage.players
        assert (first.runs, second.runs) == (said, [*said, SteerFrame("three")])
        controls.cancel()
        controls.steer("never mind")
        assert await in_time(run) == RunResult(
            CANCELLED, began=True, unadmitted=(SteerMessage("never mind"),), is_from_worker=True
        )


@contract("FLEET-98")
async def test_a_worker_elsewhere_is_never_replaced_and_never_kept() -> None:
    there = replace(provision(), placement=RemotePlacement("ws://there"))
    async with open_world() as world:
        assert await world.run("a", there) == clean("a")
        world.elsewhere.plays = [says_nothing]
        run = world.begin("b", there)
        await settle()
        world.clock.advance(FIRST_FRAME_S)
        silent = RunResult(failed("the worker said nothing for 60 s"))
        assert await in_time(run) == silent
        world.elsewhere.plays = [LaunchFailed("401")]
        assert await world.run("c", there) == RunResult(failed("401"))
        assert (world.fleet.workers, world.stage.players) == ([], [])


async def test_a_worker_that_could_not_be_ended_is_ended_by_a_later_sweep(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with open_world() as world:
        run = world.begin("wait")
        await settle()
        world.stage.players[0].kills_failing = 2
        run.cancel()
        await asyncio.wait({run})
        assert world.pids == [101]
        world.clock.advance(30)
        await settle()
        assert world.pids == [101]
        world.clock.advance(30)
        await settle()
        assert world.pids == []
    assert caplog.text.count("worker child could not be ended") == 2


async def test_what_an_overseer_raises_ends_its_run_and_no_other() -> None:
    class Clumsy(Witness):
        async def on_event(self, event: Raw) -> None:
            raise KeyError("lost")

    async with open_world() as world:
        other = world.begin("wait", provision("other", depth=2))
        await settle()
        with pytest.raises(KeyError):
            await world.run("a", callbacks=Clumsy())
        assert world.pids == [101]
        assert not other.done()
        other.cancel()


# --- what is refused


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
async def test_what_cannot_be_done_is_refused_before_anything_is_launched(
    given: Provision, error: type[Exception]
) -> None:
    async with open_world() as world:
        with pytest.raises(error):
            await world.run("a", given)
        assert world.stage.players == []


@contract("FLEET-99")
async def test_runs_beyond_the_bound_wait_their_turn_and_beyond_that_are_refused() -> None:
    async with open_world(FleetBounds(runs_max=2, waiting_max=2)) as world:
        await world.run("a")  # Its worker waits, and holds no place.
        first = [RunControl() for _ in range(4)]
        runs = [world.begin("wait", provision(str(n)), c) for n, c in enumerate(first)]
        await settle()
        assert len(world.pids) == 2
        with pytest.raises(LimitExceeded):
            await world.run("b")
        first[2].cancel()
        assert await in_time(runs[2]) == RunResult(CANCELLED)
        first[0].cancel()
        assert (await in_time(runs[0])).outcome == CANCELLED
        await settle()
        assert [p.runs[-1] for p in world.stage.alive] == [RunSpec("wait")] * 2
        for controls in first:
            controls.cancel()
        assert [(await in_time(run)).outcome for run in runs] == [CANCELLED] * 4


async def test_many_runs_at_once_each_get_their_own_answer() -> None:
    async with open_world(FleetBounds(runs_max=30)) as world:
        runs = [world.begin(str(n), provision(str(n))) for n in range(50)]
        assert [await in_time(run) for run in runs] == [clean(str(n)) for n in range(50)]
        await settle()
        assert len(world.pids) == 4

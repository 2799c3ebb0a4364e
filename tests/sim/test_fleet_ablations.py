"""Each safeguard of the fleet, switched off: the simulation must detect it."""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from culm.fleet.host import dispatch, run_driver
from culm.fleet.host.base import Worker
from culm.fleet.host.dispatch import Fleet
from culm.fleet.host.pool import ParkedWorker, PoolBounds, PoolDecision, WorkerRoster
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.batching import Batch, BatchReader, NewEvents
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.protocol.host import HostMachine
from culm.fleet.protocol.worker import Effect, SteerRun, WorkerMachine
from culm.fleet.worker_server.connection import WorkerConnection
from culm.fleet.worker_server.outbox import RunEventSink
from culm.fleet.worker_server.run import ConnectedHost, WorkerRun
from culm.wire.codec import Json
from tests.sim.ablations import Ablation, is_found, name_of, searches
from tests.sim.loop import simulate
from tests.sim.test_fleet import foreign_world, one_world

# --- in a worker


def a_second_run_begins_at_once(patch: pytest.MonkeyPatch) -> None:
    def hasty(self: WorkerMachine, spec: RunSpec) -> list[Effect]:
        self._active = None  # pyright: ignore[reportPrivateUsage]
        return self._start(spec, ())  # pyright: ignore[reportPrivateUsage]

    patch.setattr(WorkerMachine, "_on_run", hasty)


def repeated_message_is_delivered(patch: pytest.MonkeyPatch) -> None:
    def careless(self: WorkerMachine, steer: Any) -> list[Effect]:  # noqa: ANN401
        active = self._active  # pyright: ignore[reportPrivateUsage]
        return [] if active is None else [SteerRun(active.run, steer)]

    patch.setattr(WorkerMachine, "_on_message", careless)


def ended_run_may_emit(patch: pytest.MonkeyPatch) -> None:
    emit = RunEventSink.emit

    async def careless(self: RunEventSink, event: Mapping[str, Json]) -> None:
        was, self._is_over = self._is_over, False  # pyright: ignore[reportPrivateUsage]
        try:
            await emit(self, event)
        finally:
            self._is_over = was  # pyright: ignore[reportPrivateUsage]

    patch.setattr(RunEventSink, "emit", careless)


def unanswered_ask_is_approved(patch: pytest.MonkeyPatch) -> None:
    ask = ConnectedHost.ask

    async def careless(self: ConnectedHost, body: Mapping[str, Json]) -> bool:
        await ask(self, body)
        return True

    patch.setattr(ConnectedHost, "ask", careless)


def durable_events_may_be_dropped(patch: pytest.MonkeyPatch) -> None:
    def careless(event: Mapping[str, Json]) -> str:
        return "ephemeral"

    patch.setattr("culm.fleet.worker_server.outbox.qos_of", careless)


def a_slow_host_counts_as_gone(patch: pytest.MonkeyPatch) -> None:
    on_watch = WorkerConnection._on_watch  # pyright: ignore[reportPrivateUsage]

    def hasty(self: WorkerConnection, _: int) -> None:
        on_watch(self, self._outbox.frames_taken)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(WorkerConnection, "_on_watch", hasty)


def cancelled_run_has_no_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WorkerRun, "is_cancelled", False)


def a_run_that_never_began_has_no_end(patch: pytest.MonkeyPatch) -> None:
    def nothing(_: WorkerMachine) -> list[Effect]:
        return []

    patch.setattr(WorkerMachine, "_report_skipped", nothing)


# --- in a host


def repeated_request_is_forwarded(patch: pytest.MonkeyPatch) -> None:
    def always(*_: object) -> bool:
        return True

    patch.setattr(HostMachine, "_is_new", always)


def repeated_events_are_published(patch: pytest.MonkeyPatch) -> None:
    def careless(self: BatchReader, batch: Batch) -> NewEvents:
        return NewEvents(batch.events)

    patch.setattr(BatchReader, "take", careless)


def unadmitted_messages_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostMachine, "unadmitted", ())


def a_silent_worker_is_waited_for(patch: pytest.MonkeyPatch) -> None:
    async def patient(*about: Any, first_frame_s: float, **more: Any) -> RunResult:  # noqa: ANN401
        return await run_driver.drive(*about, first_frame_s=1e6, **more)

    patch.setattr(dispatch, "drive", patient)


def a_cancel_waits_for_the_worker(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(run_driver, "CANCEL_S", 1e6)


def started_run_is_retried(patch: pytest.MonkeyPatch) -> None:
    attempt = Fleet._attempt  # pyright: ignore[reportPrivateUsage]

    async def careless(self: Fleet, job: Any, **about: bool) -> RunResult:  # noqa: ANN401
        result = await attempt(self, job, **about)
        return replace(result, began=result.outcome.status != "error")

    patch.setattr(Fleet, "_attempt", careless)


def nothing_is_retried(patch: pytest.MonkeyPatch) -> None:
    async def careless(self: Fleet, job: Any) -> RunResult:  # noqa: ANN401
        return await self._attempt(job, from_pool=bool(job.key))  # pyright: ignore[reportPrivateUsage]

    patch.setattr(Fleet, "_attempt_twice", careless)


def a_worker_is_kept_after_an_error(patch: pytest.MonkeyPatch) -> None:
    release = Fleet._release  # pyright: ignore[reportPrivateUsage]

    async def careless(self: Fleet, *about: Any, parks: bool) -> None:  # noqa: ANN401
        await release(self, *about, parks=True)

    patch.setattr(Fleet, "_release", careless)


def busy_worker_stays_in_the_pool(patch: pytest.MonkeyPatch) -> None:
    check_out = dispatch.check_out

    def careless(
        waiting: tuple[ParkedWorker[Worker], ...], key: str, now_s: float
    ) -> PoolDecision[Worker]:
        return replace(check_out(waiting, key, now_s), idle=waiting)

    patch.setattr(dispatch, "check_out", careless)


def pool_is_unlimited(patch: pytest.MonkeyPatch) -> None:
    park = dispatch.park

    def careless(
        waiting: tuple[ParkedWorker[Worker], ...],
        newcomer: ParkedWorker[Worker],
        bounds: PoolBounds,
        now_s: float,
    ) -> PoolDecision[Worker]:
        return park(waiting, newcomer, PoolBounds(100, 100), now_s)

    patch.setattr(dispatch, "park", careless)


def runs_are_unlimited(patch: pytest.MonkeyPatch) -> None:
    make = Fleet.__init__

    def careless(self: Fleet, *about: Any) -> None:  # noqa: ANN401
        make(self, *about)
        self._gate = asyncio.Semaphore(1_000)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(Fleet, "__init__", careless)


def closing_fleet_forgets_idle_workers(patch: pytest.MonkeyPatch) -> None:
    close = Fleet.close

    async def careless(self: Fleet) -> None:
        self._parked = ()  # pyright: ignore[reportPrivateUsage]
        await close(self)

    patch.setattr(Fleet, "close", careless)
    patch.setattr(WorkerRoster, "end_all", _wait_for_nobody)


async def _wait_for_nobody(_: WorkerRoster) -> None:
    pass


def two_workers_have_one_name(patch: pytest.MonkeyPatch) -> None:
    def careless(_: WorkerRoster, wanted: str) -> str:
        return wanted

    patch.setattr(WorkerRoster, "_free_name", careless)


# Each with a seed that detects it.
DRAWN: tuple[tuple[Ablation, int], ...] = (
    (a_second_run_begins_at_once, 5),
    (repeated_message_is_delivered, 6),
    (ended_run_may_emit, 12),
    (unanswered_ask_is_approved, 7),
    (durable_events_may_be_dropped, 2),
    (a_slow_host_counts_as_gone, 22),
    (repeated_request_is_forwarded, 50),
    (repeated_events_are_published, 6),
    (unadmitted_messages_are_forgotten, 3),
    (a_silent_worker_is_waited_for, 10),
    (a_cancel_waits_for_the_worker, 135),
    (started_run_is_retried, 0),
    (nothing_is_retried, 6),
    (a_worker_is_kept_after_an_error, 10),
    (busy_worker_stays_in_the_pool, 5),
    (pool_is_unlimited, 2),
    (runs_are_unlimited, 0),
    (closing_fleet_forgets_idle_workers, 2),
    (two_workers_have_one_name, 3),
)


# Ablations that foreign parents detect, or detect better.
FOREIGN: tuple[tuple[Ablation, int], ...] = (
    (a_second_run_begins_at_once, 0),
    (cancelled_run_has_no_deadline, 12),
    (a_run_that_never_began_has_no_end, 2),
)


@searches
@pytest.mark.parametrize(("ablation", "seed"), DRAWN, ids=name_of)
def test_simulation_detects_a_disabled_safeguard(
    ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)
    assert is_found(partial(simulate, scenario=one_world), seed)


@searches
@pytest.mark.parametrize(("ablation", "seed"), FOREIGN, ids=name_of)
def test_foreign_parent_detects_a_disabled_safeguard(
    ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)
    assert is_found(partial(simulate, scenario=foreign_world), seed)

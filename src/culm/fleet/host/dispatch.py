"""The fleet: accepts assignments and runs each on a pooled, new or remote worker.

Owns the active runs, the idle workers, and the limits on both. A run is driven by `run_driver.py`;
`pool.py` decides which workers stay idle and for how long. Opened by `open_fleet`.
"""

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace
from msgspec.structs import replace as with_

from culm.clock import Clock, pause
from culm.errors import InvalidRequest, LimitExceeded, NotBuilt, ShuttingDown
from culm.fleet.executor import CANCELLED, failed
from culm.fleet.host.base import Launcher, LaunchFailed, NotReady, Worker
from culm.fleet.host.caller import HostCallbacks, RunControl
from culm.fleet.host.pool import (
    IDLE_MARGIN_S,
    ParkedWorker,
    PoolBounds,
    PoolDecision,
    WorkerRoster,
    check_out,
    fingerprint,
    park,
    sweep,
)
from culm.fleet.host.remote import ConnectLauncher
from culm.fleet.host.run_driver import (
    FIRST_FRAME_S,
    RunResult,
    drive,
)
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import (
    BadProvision,
    Provision,
    RemotePlacement,
    SchedulablePlacement,
    WorkerLimits,
    check_provision,
    limits_of,
)
from culm.fleet.transport.base import ConnectFailed, Link
from culm.redaction import redact

_log = logging.getLogger(__name__)

CLOSE_S: Final = 12.0  # For the runs to release their workers, each of which is ended.


class FleetBounds(Struct, frozen=True):
    runs_max: int = 200  # At once; idle workers do not count.
    waiting_max: int = 1000  # Runs beyond those; further ones are refused.
    first_frame_s: float = FIRST_FRAME_S
    pool: PoolBounds = field(default_factory=PoolBounds)


DEFAULT_BOUNDS: Final = FleetBounds()


class _Job(Struct, eq=False):
    """An admitted run."""

    provision: Provision  # As the worker receives it.
    launcher: Launcher
    spec: RunSpec
    callbacks: HostCallbacks
    controls: RunControl
    limits: WorkerLimits
    key: str = ""  # The fingerprint a pooled worker must have; empty for a remote worker.
    idle_s: float = 0.0  # How long its worker may stay idle afterwards.
    # Its task is canceled once, by one of the two: a second cancel would interrupt the cleanup of
    # its worker.
    is_cancelled: bool = False  # By the caller, or because the fleet closes.
    is_stopped: bool = False  # By its controls, before it began.


class _Stopped(Exception):
    """The run was canceled before it began."""


class Fleet:
    def __init__(
        self,
        launcher: Launcher,
        remote: Launcher,
        clock: Clock,
        bounds: FleetBounds,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._launcher = launcher
        self._remote = remote
        self._clock = clock
        self._bounds = bounds
        self._tasks = tasks
        self._roster = WorkerRoster(tasks)
        self._parked: tuple[ParkedWorker[Worker], ...] = ()
        self._gate = asyncio.Semaphore(bounds.runs_max)
        self._runs: dict[asyncio.Task[RunResult | Exception], _Job] = {}
        self._is_closing = False

    @property
    def workers(self) -> list[Worker]:
        """All workers: busy, idle, or being ended."""
        return self._roster.workers

    async def run(
        self, provision: Provision, spec: RunSpec, callbacks: HostCallbacks, controls: RunControl
    ) -> RunResult:
        """Execute a run. When this returns, its worker is idle or gone.

        A worker's failure is an outcome. Raises `Rejected`, `NotBuilt` or `ShuttingDown` if nothing
        was begun, and any exception of the callbacks' `on_event`. Canceling this call ends the run
        and its worker. In any case `controls` has the messages that did not reach the run.
        """
        job = self._admit(provision, spec, callbacks, controls)
        task = self._tasks.create_task(
            self._contain(job), name=f"run on {provision.identity.child_id}"
        )
        self._runs[task] = job
        task.add_done_callback(self._runs.pop)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            _cancel(task, job)
            await asyncio.wait({task})
            raise
        finally:
            unadmitted = controls.close()
        if task.cancelled():  # The fleet is closing.
            return RunResult(CANCELLED, controls.has_begun, unadmitted)
        driven = task.result()
        if isinstance(driven, Exception):
            raise driven
        return with_(driven, unadmitted=unadmitted)

    # --- admission

    def _admit(
        self, provision: Provision, spec: RunSpec, callbacks: HostCallbacks, controls: RunControl
    ) -> _Job:
        """Refuse an impossible run before anything is started for it."""
        if self._is_closing:
            raise ShuttingDown
        if isinstance(provision.placement, SchedulablePlacement):
            raise NotBuilt("scheduled workers: use a local placement or an endpoint")
        try:
            check_provision(provision)
        except BadProvision as exc:
            raise InvalidRequest(str(exc)) from exc
        limits = limits_of(provision)
        if limits.depth > limits.depth_max:
            raise LimitExceeded("levels of agents", limits.depth_max)
        if len(self._runs) >= self._bounds.runs_max + self._bounds.waiting_max:
            raise LimitExceeded("runs that wait for a worker", self._bounds.waiting_max)
        if isinstance(provision.placement, RemotePlacement):
            return _Job(provision, self._remote, spec, callbacks, controls, limits)
        idle_s = self._bounds.pool.idle_s
        if provision.limits.idle_timeout_secs is not None:
            idle_s = min(idle_s, provision.limits.idle_timeout_secs)
        # A worker stays idle longer than its host allows, so that it is not gone when it is needed.
        # In whole seconds, because other workers count in seconds.
        waits_s = math.ceil(idle_s + IDLE_MARGIN_S)
        given = replace(provision.limits, idle_timeout_secs=waits_s)
        local = replace(provision, reusable=True, limits=given)
        key = fingerprint(local)
        return _Job(local, self._launcher, spec, callbacks, controls, limits, key, idle_s)

    # --- one run

    async def _contain(self, job: _Job) -> RunResult | Exception:
        """Execute a run to its end; an exception is returned for the caller of `run`."""
        try:
            async with _unless_stopped(job):
                await self._gate.acquire()
        except _Stopped:
            return RunResult(CANCELLED)
        try:
            return await self._attempt_twice(job)
        except (LaunchFailed, BadProvision) as exc:
            return RunResult(failed(str(exc)))
        except Exception as exc:  # boundary: the other runs go on
            return exc
        finally:
            self._gate.release()

    async def _attempt_twice(self, job: _Job) -> RunResult:
        try:
            driven = await self._attempt(job, from_pool=bool(job.key))
        except NotReady as exc:
            driven = RunResult(failed(str(exc)))
        # A worker that sent no frame has had no effect, so another one may try. A remote worker has
        # no substitute.
        if driven.began or job.controls.is_cancelled or not job.key:
            return driven
        reason = (driven.outcome.error or "").partition("\n")[0]
        _log.warning("retrying a run with another worker: %s", reason)
        return await self._attempt(job, from_pool=False)

    async def _attempt(self, job: _Job, *, from_pool: bool) -> RunResult:
        """Raises `LaunchFailed`, `BadProvision`."""
        worker: Worker | None = None
        link: Link | None = None
        parks = False
        try:
            async with _unless_stopped(job):
                if from_pool and (worker := self._check_out(job.key)) is not None:
                    link = await self._find_link(worker)
                if link is None:
                    worker = await self._roster.launch(job.launcher, job.provision)
                    link = await worker.connect()
            job.controls.pid = None if worker is None else worker.pid
            driven = await drive(
                link,
                job.spec,
                job.callbacks,
                job.controls,
                self._clock,
                limits=job.limits,
                first_frame_s=self._bounds.first_frame_s,
            )
            is_clean = driven.outcome.status == "completed" and not job.controls.is_cancelled
            parks = is_clean and bool(job.key)
            return await _with_stderr(driven, worker)
        except _Stopped:
            return RunResult(CANCELLED)
        except ConnectFailed as exc:
            driven = RunResult(failed(f"the worker cannot be reached: {exc}"))
            return await _with_stderr(driven, worker)
        finally:
            await self._release(job, worker, link, parks=parks)

    async def _find_link(self, worker: Worker) -> Link | None:
        """Connect to an idle worker; if it is gone, clean it up and return None."""
        try:
            return await worker.connect()
        except ConnectFailed as exc:
            _log.info("idle worker %s cannot be reached: %s", worker.id, exc)
            await self._roster.end(worker)
            return None

    async def _release(
        self, job: _Job, worker: Worker | None, link: Link | None, *, parks: bool
    ) -> None:
        """Park the worker for the next run, or end it: a failure may have left traces in it."""
        is_parked = False
        try:
            if parks and worker is not None and link is not None:
                await link.close()  # Until then it accepts no other connection.
                self._park(job, worker)
                is_parked = True
        finally:  # A cancel may interrupt this, too; the rest must still be done.
            try:
                if worker is not None and not is_parked:
                    await self._roster.end(worker)
            finally:
                if link is not None:
                    await link.close()

    # --- the pool

    def _check_out(self, key: str) -> Worker | None:
        decided = check_out(self._parked, key, self._clock.monotonic_s())
        self._apply(decided)
        return decided.chosen

    def _park(self, job: _Job, worker: Worker) -> None:
        now_s = self._clock.monotonic_s()
        parked = ParkedWorker(worker, job.key, now_s + job.idle_s)
        self._apply(park(self._parked, parked, self._bounds.pool, now_s))

    def _apply(self, decided: PoolDecision[Worker]) -> None:
        self._parked = decided.idle
        for worker in decided.retired:
            self._roster.end_nowait(worker)

    async def sweep(self) -> None:
        """Periodically end workers that were idle too long, died, or could not be ended."""
        while True:
            await pause(self._clock, self._bounds.pool.sweep_s)
            self._apply(sweep(self._parked, self._clock.monotonic_s()))
            self._roster.end_stuck_nowait()

    async def close(self) -> None:
        """Cancel all runs and end all workers. Bounded."""
        self._is_closing = True
        for parked in self._parked:
            self._roster.end_nowait(parked.worker)
        self._parked = ()
        for task, job in self._runs.items():
            _cancel(task, job)
        if self._runs:
            await asyncio.wait(tuple(self._runs), timeout=CLOSE_S)
        await self._roster.end_all()


@asynccontextmanager
async def open_fleet(
    launcher: Launcher,
    clock: Clock,
    bounds: FleetBounds = DEFAULT_BOUNDS,
    remote: Launcher | None = None,
) -> AsyncGenerator[Fleet]:
    """When the block ends, no run is active and no worker of ours is left.

    `launcher` starts local workers; `remote` connects to workers with a remote placement.
    """
    async with asyncio.TaskGroup() as tasks:
        fleet = Fleet(launcher, remote or ConnectLauncher(), clock, bounds, tasks)
        sweeper = tasks.create_task(fleet.sweep(), name="sweep of the fleet")
        try:
            yield fleet
        finally:
            try:
                await fleet.close()
            finally:
                sweeper.cancel()


def _cancel(task: asyncio.Task[RunResult | Exception], job: _Job) -> None:
    if not job.is_cancelled and not job.is_stopped:
        job.is_cancelled = True
        task.cancel()


async def _with_stderr(driven: RunResult, worker: Worker | None) -> RunResult:
    """Append the worker's last stderr output to an error that it did not report itself."""
    if worker is None or driven.is_from_worker or driven.outcome.status != "error":
        return driven
    text = redact(await worker.stderr_tail()).strip()
    if not text:
        return driven
    return with_(driven, outcome=failed(f"{driven.outcome.error}; last output:\n{text}"))


@asynccontextmanager
async def _unless_stopped(job: _Job) -> AsyncGenerator[None]:
    """Leave the block when the controls cancel the run; raises `_Stopped`."""
    loop = asyncio.get_running_loop()
    bound = asyncio.timeout(None)

    def check() -> None:
        if job.controls.is_cancelled and not job.is_cancelled and bound.when() is None:
            job.is_stopped = True
            bound.reschedule(loop.time())

    try:
        async with bound:
            job.controls.watch(check)
            try:
                check()
                yield
            finally:
                job.controls.watch(None)
    except TimeoutError:
        if not bound.expired():
            raise
        raise _Stopped from None

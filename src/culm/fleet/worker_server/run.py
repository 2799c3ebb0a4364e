"""One run in a worker: its executor's inputs, its task, and its outcome."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final, cast

from culm.clock import Timer
from culm.fleet.executor import CANCELLED, Executor, Outcome, RunEnded, failed
from culm.fleet.protocol.worker import StartRun
from culm.fleet.worker_server.base import ServingSettings
from culm.fleet.worker_server.event_sink import RunEventSink
from culm.fleet.worker_server.outbox import FrameOutbox
from culm.fleet.worker_server.run_channels import ConnectedHost, HostRequests, RunInbox

log = logging.getLogger(__name__)

PANICKED: Final = failed("actor executor panicked")  # The text that this protocol uses.
SUSPENDED: Final = failed("the run was suspended and cannot be resumed")


class WorkerRun:
    def __init__(
        self,
        start: StartRun,
        requests: HostRequests,
        outbox: FrameOutbox,
        settings: ServingSettings,
    ) -> None:
        self.number = start.run
        self.inbox = RunInbox(start.steers)
        self.host = ConnectedHost(requests, settings)
        self.sink = RunEventSink(start.spec, outbox, settings.clock)
        self._spec = start.spec
        self._settings = settings
        self._token = asyncio.Event()
        self._task: asyncio.Task[Outcome] | None = None
        self._limit: Outcome | None = None  # The outcome if a limit ended it.
        self._timers: list[Timer] = []
        self._is_over = False

    def begin(self, executor: Executor, tasks: asyncio.TaskGroup) -> None:
        self._task = tasks.create_task(self._work(executor), name=f"fleet run {self.number}")

    async def _work(self, executor: Executor) -> Outcome:
        try:
            return await executor.run(self._spec, self.sink, self.inbox, self._token, self.host)
        except Exception as exc:  # boundary: a failure ends only this run
            # A wait for something that ends with the run raises `RunEnded`.
            if self.is_stopped and _is_run_over(exc):
                return CANCELLED
            log.exception("an executor failed")
            return PANICKED

    async def outcome(self) -> Outcome:
        """Wait for the executor's end, of whatever kind."""
        assert self._task is not None, "a run begins before it is awaited"
        await asyncio.wait({self._task})
        if self._task.cancelled():
            outcome = CANCELLED if self.is_stopped else PANICKED
        else:
            outcome = self._task.result()
        if self._limit is not None and outcome.status != "completed":
            return self._limit
        return SUSPENDED if outcome.status == "suspended" else outcome

    @property
    def is_stopped(self) -> bool:
        """True once its end was requested."""
        return self._token.is_set()

    @property
    def is_cancelled(self) -> bool:
        """True if its host requested the end."""
        return self.is_stopped and self._limit is None

    @property
    def is_draining(self) -> bool:
        """The executor is done, but not all its events are in the outbox."""
        return self._task is not None and self._task.done() and not self.sink.is_drained

    def stop(self, limit: Outcome | None = None) -> None:
        """Request its end; answers from its host no longer arrive."""
        if limit is not None and not self.is_stopped:
            self._limit = limit
        self._token.set()
        self.inbox.end()
        self.host.end()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def finish(self) -> None:
        """The executor is done: none of its leftovers may send anything."""
        self.inbox.end()
        self.host.end()
        self.sink.finish()

    def revoke(self) -> None:
        """The run is over, even if its executor cannot be ended."""
        self._is_over = True
        self.stop()
        self.sink.discard()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Call `action` later, unless the run is over before."""
        if not self._is_over:
            self._timers.append(self._settings.clock.call_later(delay_s, action))


def _is_run_over(exc: Exception) -> bool:
    """Return True for `RunEnded` alone, possibly from several tasks at once."""
    if isinstance(exc, ExceptionGroup):
        return cast("ExceptionGroup[Exception]", exc).split(RunEnded)[1] is None
    return isinstance(exc, RunEnded)

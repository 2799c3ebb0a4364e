"""One run: what its executor is given, the task that it works in, and how that came out."""

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

PANICKED: Final = failed("actor executor panicked")  # The words of this wire.
SUSPENDED: Final = failed("the run was suspended, and no host takes it up again")


class WorkerRun:
    def __init__(
        self, start: StartRun, requests: HostRequests, outbox: FrameOutbox, terms: ServingSettings
    ) -> None:
        self.number = start.run
        self.inbox = RunInbox(start.steers)
        self.host = ConnectedHost(requests, terms)
        self.sink = RunEventSink(start.spec, outbox, terms.clock)
        self._spec = start.spec
        self._terms = terms
        self._token = asyncio.Event()
        self._task: asyncio.Task[Outcome] | None = None
        self._limit: Outcome | None = None  # What is said if it was ended by a limit.
        self._timers: list[Timer] = []
        self._is_over = False

    def begin(self, executor: Executor, tasks: asyncio.TaskGroup) -> None:
        self._task = tasks.create_task(self._work(executor), name=f"fleet run {self.number}")

    async def _work(self, executor: Executor) -> Outcome:
        try:
            return await executor.run(self._spec, self.sink, self.inbox, self._token, self.host)
        except Exception as exc:  # boundary: who fails ends one run and nothing else
            # Whoever waits for something that only a run has which goes on hears that it is over.
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
        """Whether it was told to end."""
        return self._token.is_set()

    @property
    def is_cancelled(self) -> bool:
        """Whether it was its host that told it to end."""
        return self.is_stopped and self._limit is None

    @property
    def is_draining(self) -> bool:
        """Its executor is done, its events are not all on their way."""
        return self._task is not None and self._task.done() and not self.sink.is_drained

    def stop(self, limit: Outcome | None = None) -> None:
        """Tell it to end; what it waits for from its host does not come any more."""
        if limit is not None and not self.is_stopped:
            self._limit = limit
        self._token.set()
        self.inbox.end()
        self.host.end()

    def abort(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def finish(self) -> None:
        """The executor is done: nothing it left behind can say or ask anything."""
        self.inbox.end()
        self.host.end()
        self.sink.finish()

    def revoke(self) -> None:
        """It is over, whether its executor is done or cannot be ended."""
        self._is_over = True
        self.stop()
        self.sink.discard()
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Do it unless the run is over before."""
        if not self._is_over:
            self._timers.append(self._terms.clock.call_later(delay_s, action))


def _is_run_over(exc: Exception) -> bool:
    """Whether it says that the run is over, and nothing else; perhaps in several tasks at once."""
    if isinstance(exc, ExceptionGroup):
        return cast("ExceptionGroup[Exception]", exc).split(RunEnded)[1] is None
    return isinstance(exc, RunEnded)

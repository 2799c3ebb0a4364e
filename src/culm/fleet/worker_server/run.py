"""One run in a worker: its task, its outcome, and its channels to the host.

The channels are steering messages, asks, host calls and events. All of them end with the run: waits
then fail, and nothing more is accepted.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, cast

from msgspec import Raw, Struct

from culm.clock import Clock, Timer, format_time, parse_time, within
from culm.errors import TooLarge
from culm.fleet.executor import (
    CANCELLED,
    ApprovalUnavailable,
    Executor,
    HostCallFailed,
    Outcome,
    RunEnded,
    SteerMessage,
    failed,
)
from culm.fleet.protocol.frames import (
    ApprovalReply,
    ApprovalRequest,
    SubAgentReply,
    SubAgentRequest,
)
from culm.fleet.protocol.worker import (
    StartRun,
    WorkerMachine,
)
from culm.fleet.provision import NO_LIMITS, WorkerLimits
from culm.fleet.worker_server.outbox import (
    ASKED_BYTES_MAX,
    FrameOutbox,
    RunEventSink,
    encode_safely,
    fit,
)
from culm.ids import Ids
from culm.wire.codec import Json

log = logging.getLogger(__name__)

ASK_S: Final = 300.0  # For an answer, if the executor sets no deadline.
ID_CHARS_MAX: Final = 256  # For a tool call id.
STEERS_MAX: Final = 64  # Not admitted yet; a host that sends more does not wait for admissions.
PANICKED: Final = failed("actor executor panicked")  # The text that this protocol uses.
SUSPENDED: Final = failed("the run was suspended and cannot be resumed")


class ServingSettings(Struct, frozen=True):
    """Settings for every run of a worker."""

    clock: Clock
    ids: Ids
    limits: WorkerLimits = NO_LIMITS


class WorkerRun:
    def __init__(
        self,
        start: StartRun,
        machine: WorkerMachine,
        outbox: FrameOutbox,
        settings: ServingSettings,
    ) -> None:
        self.number = start.run
        self.inbox = RunInbox(start.steers)
        self.host = ConnectedHost(start.run, machine, outbox, settings)
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


class RunInbox:
    """Implements `SteerInbox`."""

    def __init__(self, steers: tuple[SteerMessage, ...]) -> None:
        self._steers: deque[SteerMessage] = deque(steers)
        self._has_dropped = False
        self._changed = asyncio.Event()
        self._is_over = False

    async def next(self) -> SteerMessage:
        while not self._steers:
            if self._is_over:
                raise RunEnded("the run is over")
            self._changed.clear()
            await self._changed.wait()
        return self._steers.popleft()

    def take_nowait(self) -> list[SteerMessage]:
        taken = list(self._steers)
        self._steers.clear()
        return taken

    def put(self, steer: SteerMessage) -> None:
        if len(self._steers) >= STEERS_MAX:
            if not self._has_dropped:
                log.warning("messages to a run are dropped: %d wait already", STEERS_MAX)
                self._has_dropped = True
            return
        self._steers.append(steer)
        self._changed.set()

    def end(self) -> None:
        self._is_over = True
        self._steers.clear()
        self._changed.set()


class ConnectedHost:
    """Implements `RunHost`."""

    def __init__(
        self, run: int, machine: WorkerMachine, outbox: FrameOutbox, settings: ServingSettings
    ) -> None:
        self._run = run
        self._machine = machine
        self._outbox = outbox
        self._settings = settings
        self._open: dict[str, asyncio.Future[Json]] = {}  # Answers to asks and host calls.
        self._is_over = False

    @property
    def takes_calls(self) -> bool:
        return self._settings.limits.host_calls

    async def ask(self, body: Mapping[str, Json]) -> bool:
        now_s = self._settings.clock.now_s()
        given = body.get("deadline")
        deadline_s = parse_time(given) if isinstance(given, str) else None
        if deadline_s is None:
            deadline_s = now_s + ASK_S
            body = {**body, "deadline": format_time(deadline_s)}
        elif deadline_s <= now_s:
            return False
        try:
            request = ApprovalRequest(self._make_id(), Raw(fit(body, ASKED_BYTES_MAX)))
            sending = self._send(request, "asks")
            answer = await within(self._settings.clock, deadline_s - now_s, sending)
        except RunEnded:
            return False
        except TooLarge as exc:
            return self._refuse_ask(exc.message)
        except HostCallFailed as exc:
            return self._refuse_ask(str(exc))
        if answer is None:
            log.info("an ask was not answered in time and is refused")
        return bool(answer)

    def _refuse_ask(self, why: str) -> bool:
        """Refuse an ask; only our own executors get the reason, by an exception."""
        log.warning("an ask is refused: %s", why)
        if self.takes_calls:
            raise ApprovalUnavailable(why)
        return False

    async def call(self, args: Mapping[str, Json], tool_call_id: str = "") -> Json:
        if not self._settings.limits.host_calls:
            raise HostCallFailed("this host does not accept calls")
        if not self._settings.limits.may_call(args):
            raise HostCallFailed(f"agents nest at most {self._settings.limits.depth_max} deep")
        try:
            payload = Raw(fit(args, ASKED_BYTES_MAX))
        except TooLarge as exc:
            raise HostCallFailed(exc.message) from exc
        request = SubAgentRequest(self._make_id(), tool_call_id[:ID_CHARS_MAX], payload)
        return _result_of(await self._send(request, "calls to the host"))

    def _make_id(self) -> str:
        """Not guessable, because people answer by it."""
        return f"sa-{self._settings.ids.ask()}"

    async def _send(self, request: ApprovalRequest | SubAgentRequest, what: str) -> Json:
        """Wait for the answer to a request; raises `RunEnded`, `HostCallFailed`."""
        try:
            await self._outbox.request_room()
            if self._is_over:
                raise RunEnded("the run is over")
            if not self._machine.on_request(self._run, request):
                raise HostCallFailed(f"too many {what} wait already")
            self._outbox.put_request_nowait(encode_safely(request))
            self._open[request.id] = answer = asyncio.get_running_loop().create_future()
            return await answer
        finally:
            self._open.pop(request.id, None)
            self._machine.on_withdrawn(self._run, request.id)

    def on_answer(self, answer: ApprovalReply | SubAgentReply) -> None:
        waiting = self._open.pop(answer.id, None)
        if waiting is None or waiting.done():
            log.warning("an answer arrived that is no longer awaited: %s", answer.id[:64])
        elif isinstance(answer, SubAgentReply):
            waiting.set_result(answer.result)
        elif answer.reason and not answer.approved:
            waiting.set_exception(ApprovalUnavailable(answer.reason))
        else:
            waiting.set_result(answer.approved)

    def end(self) -> None:
        """Refuse all open and future requests."""
        self._is_over = True
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(RunEnded("the run is over"))


def _result_of(reply: Json) -> Json:
    """Unpack a host's reply, `{"result": …}` or `{"error": "…"}`."""
    if not isinstance(reply, dict):
        raise HostCallFailed("the host's answer cannot be read")
    fields = cast("dict[str, Json]", reply)
    if "error" in fields:
        raise HostCallFailed(str(fields["error"]))
    if "result" not in fields:
        raise HostCallFailed("the host's answer cannot be read")
    return fields["result"]

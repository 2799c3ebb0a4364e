"""Drives one run over one link: sends the assignment and the answers, receives events and the end.

Owns the run's timers, its open asks and host calls, and the frames to be sent. `protocol/host.py`
defines the meaning of a frame; `dispatch.py` picks the worker and decides its fate.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine
from functools import partial
from typing import Final, TypeVar

from msgspec import Raw, Struct

from culm.clock import Clock, Timer
from culm.errors import InvalidRequest, TooLarge
from culm.fleet.executor import (
    CANCELLED,
    ApprovalUnavailable,
    HostCallFailed,
    Outcome,
    SteerMessage,
    failed,
    limit_error,
)
from culm.fleet.host.caller import (
    STEERS_MAX,
    DenyAll,
    HostCallbacks,
    RunControl,
    WorkerAsk,
    parse_ask,
)
from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    BadFrame,
    EventFrame,
    ParentFrame,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_child_frame,
)
from culm.fleet.protocol.host import (
    ApprovalAsked,
    EventsLost,
    HostCalled,
    HostMachine,
)
from culm.fleet.provision import NO_LIMITS, SECONDS_MAX, WorkerLimits
from culm.fleet.transport.base import Link, LinkLost
from culm.wire.codec import Json, clean, encode

_log = logging.getLogger(__name__)

FIRST_FRAME_S: Final = 60.0  # A worker that sends nothing for this long hangs.
CANCEL_S: Final = 9.0  # The worker's grace period of 3 s, and 6 s for its last frame to arrive.
# Beyond a run's limit: the worker's grace periods and the transfer of its last frame.
OVERTIME_S: Final = 15.0
LAST_FRAMES_S: Final = 3.0  # For frames that a worker sent before it stopped reading.
OUTBOX_MAX: Final = 256  # Answers that wait to be sent; twice as many as can be open.
RESULT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)  # For a host call: it is sent in a frame.
DEADLINE_MAX_S: Final = 86_400.0  # An ask with a later deadline waits until its run ends.
T = TypeVar("T")


class RunResult(Struct, frozen=True):
    """The result of a driven run."""

    outcome: Outcome
    began: bool = False  # The worker sent a frame, so the run may have had effects.
    # Messages that, as far as is known, did not reach the run.
    unadmitted: tuple[SteerMessage, ...] = ()
    is_from_worker: bool = False  # The end was reported by the worker itself.


async def drive(
    link: Link,
    spec: RunSpec,
    callbacks: HostCallbacks,
    controls: RunControl,
    clock: Clock,
    *,
    limits: WorkerLimits = NO_LIMITS,
    first_frame_s: float = FIRST_FRAME_S,
) -> RunResult:
    """Execute a run on a worker, over a link that carries no other run.

    If it did not begin, another worker may be tried with the same controls; otherwise they are
    closed. After a cancel it ends in bounded time. Raises any exception of the callbacks'
    `on_event`, and `Rejected` if the run cannot be encoded. The caller closes the link.
    """
    frame = _encode_run(spec)
    machine = HostMachine(spec, host_calls=limits.host_calls)
    return await _Driving(link, machine, callbacks, controls, clock, limits).run(
        frame, first_frame_s
    )


class WorkerPeer:
    """The worker at the other end of a link. Created by `culm.fleet.connect`."""

    def __init__(self, link: Link, clock: Clock) -> None:
        self._link = link
        self._clock = clock
        self._is_usable = True

    async def run(
        self,
        spec: RunSpec | str,
        callbacks: HostCallbacks | None = None,
        controls: RunControl | None = None,
    ) -> Outcome:
        """Execute an assignment and return its outcome; raises `LinkLost`, `Rejected`.

        `callbacks` receives events and asks; without it, nothing is allowed. `controls` steers and
        cancels the run. Runs follow one another.
        """
        if not self._is_usable:
            raise LinkLost("the previous run did not report its end on this link")
        self._is_usable = False
        asked = RunSpec(spec) if isinstance(spec, str) else spec
        driven = await drive(
            self._link, asked, callbacks or DenyAll(), controls or RunControl(), self._clock
        )
        # Otherwise its late frames could be mistaken for those of the next run.
        self._is_usable = driven.is_from_worker
        return driven.outcome


def _encode_run(spec: RunSpec) -> bytes:
    try:
        frame = encode_frame(spec)
    except UnicodeEncodeError as exc:
        raise InvalidRequest("the assignment contains an unpaired surrogate") from exc
    if len(frame) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"a run and its conversation have at most {MESSAGE_BYTES_MAX >> 20} MiB")
    return frame


class _Driving:
    def __init__(
        self,
        link: Link,
        machine: HostMachine,
        callbacks: HostCallbacks,
        controls: RunControl,
        clock: Clock,
        limits: WorkerLimits,
    ) -> None:
        self._link = link
        self._machine = machine
        self._callbacks = callbacks
        self._controls = controls
        self._clock = clock
        self._limits = limits
        self._tasks = asyncio.TaskGroup()
        task = asyncio.current_task()
        assert task is not None, "a run is driven in a task"
        self._task = task
        self._cancels = task.cancelling()
        self._outbox: deque[bytes] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[None]] = set()  # Asks and host calls.
        self._sent: list[SteerMessage] = []  # Sent before the worker's first frame.
        self._admitting: list[SteerMessage] = []  # Admitted, but the callback has not returned yet.
        self._is_ahead = False  # So many messages are unadmitted that the rest waits here.
        self._timer: Timer | None = None
        self._overtime: Timer | None = None
        self._late: Outcome | None = None  # The outcome once the time is over.
        self._is_waiting = False  # For the link only.
        self._is_cut = False  # That wait was ended by a timer.
        self._is_started = False
        self._has_begun = False
        self._is_terminal = False
        self._is_stopping = False
        self._cannot_send = False  # The worker no longer reads, so nothing can be sent.

    async def run(self, frame: bytes, first_frame_s: float) -> RunResult:
        trouble: Exception | None = None
        outcome = CANCELLED
        async with self._tasks:
            try:
                self._limit(self._limits.run_s)
                self._controls.watch(self._on_change)
                self._on_change()
                outcome = await self._exchange(frame, first_frame_s)
            except Exception as exc:  # boundary: raised below as it is, which a group would wrap
                trouble = exc
            finally:
                self._release()
        if trouble is not None:
            raise trouble
        return RunResult(outcome, self._has_begun, self._controls.unadmitted, self._is_terminal)

    def _release(self) -> None:
        self._controls.watch(None)
        self._cannot_send = True
        for waiting in (self._timer, self._overtime, *self._open, self._sender):
            if waiting is not None:
                waiting.cancel()
        if self._has_begun:
            self._controls.put_back((*self._admitting, *self._machine.unadmitted))
            self._controls.close()
        else:
            self._controls.put_back(self._sent)

    # --- receiving

    async def _exchange(self, frame: bytes, first_frame_s: float) -> Outcome:
        silence = failed(f"the worker sent nothing for {first_frame_s:g} s")
        try:
            if self._late is None:
                self._arm(first_frame_s, silence)
                await self._unless_late(self._link.send(frame))
            if self._late is None:  # The frame is sent, which may have taken time.
                self._arm(first_frame_s, silence)
                self._is_started = True
                self._wake()
            while self._late is None:
                data = await self._unless_late(self._link.receive())
                if data is None:
                    break
                outcome = await self._on_data(data)
                if outcome is not None:
                    return outcome
        except LinkLost as exc:
            return self._lost(f"the link to the worker was lost: {exc}")
        return self._late or self._lost("the worker closed the link before the run ended")

    def _lost(self, reason: str) -> Outcome:
        return CANCELLED if self._is_stopping else failed(reason)

    async def _unless_late(self, wait: Awaitable[T]) -> T | None:
        """Wait for the link. A timer may interrupt only this wait, never a callback."""
        self._is_waiting = True
        try:
            return await wait
        except asyncio.CancelledError:
            # Suppressed if the timer caused it and nobody else wants this task to end.
            if not self._is_cut or self._task.uncancel() > self._cancels:
                raise
            return None
        finally:
            self._is_waiting = False

    async def _on_data(self, data: bytes) -> Outcome | None:
        """Handle a frame; return the outcome if it was the end."""
        if not self._has_begun:
            self._has_begun = True
            self._controls.has_begun = True
            if self._timer is not None and not self._is_stopping and not self._cannot_send:
                self._timer.cancel()
        try:
            frame = parse_child_frame(data)
        except BadFrame as exc:
            return failed(f"the worker sent an unreadable frame: {exc}")
        self._is_terminal = type(frame) is TerminalFrame
        outstanding = self._machine.unadmitted
        happenings = self._machine.on_frame(frame)
        if outstanding:
            left = set(self._machine.unadmitted)
            self._admitting = [steer for steer in outstanding if steer not in left]
        for happening in happenings:
            match happening:
                case EventFrame(event=event):
                    await self._callbacks.on_event(event)
                case EventsLost():
                    await self._callbacks.on_gap()
                case ApprovalAsked():
                    self._on_asked(happening)
                case HostCalled():
                    self._on_called(happening)
                case Outcome():
                    return happening
                case _:
                    self._queue_frame(happening)
        self._admitting = []
        if self._is_ahead:
            self._wake()
        return None

    # --- time

    def _arm(self, delay_s: float, outcome: Outcome) -> None:
        """Set the timer that ends the run with `outcome`, replacing the previous one."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(delay_s, partial(self._expire, outcome))

    def _limit(self, run_s: float | None) -> None:
        """Enforce the run's limit, because not every worker does so itself."""
        if run_s is not None and run_s < SECONDS_MAX:
            text = limit_error("run_timeout", f"the worker has not ended a run of {run_s:g} s")
            expire = partial(self._expire, failed(text))
            self._overtime = self._clock.call_later(run_s + OVERTIME_S, expire)

    def _expire(self, outcome: Outcome) -> None:
        if self._late is None:
            self._late = outcome
            if self._is_waiting:
                self._is_cut = True
                self._task.cancel()

    # --- sending

    def _on_change(self) -> None:
        """Handle a change of the controls: a cancel or a message."""
        if self._controls.is_cancelled and not self._is_stopping:
            self._stop()
        self._wake()

    def _stop(self) -> None:
        self._is_stopping = True
        if not self._is_started:
            self._expire(CANCELLED)
            return
        self._arm(CANCEL_S, CANCELLED)
        if (frame := self._machine.cancel()) is not None:
            self._outbox.appendleft(encode_frame(frame))
        for task in self._open:
            task.cancel()

    def _queue_frame(self, frame: ParentFrame) -> None:
        self._outbox.append(encode_frame(frame))
        if len(self._outbox) > OUTBOX_MAX:
            self._expire(failed("the worker sends requests but does not read the answers"))
        self._wake()

    def _wake(self) -> None:
        is_able = self._is_started and self._sender is None and not self._cannot_send
        if is_able and (self._outbox or self._controls.unadmitted):
            self._sender = self._tasks.create_task(self._send(), name="frames to a worker")

    async def _send(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                await self._link.send(frame)
        except LinkLost as exc:
            self._cannot_send = True
            if not self._is_stopping:  # Its last frames may still arrive.
                self._arm(LAST_FRAMES_S, failed(f"the link to the worker was lost: {exc}"))
        self._sender = None

    def _next_frame(self) -> bytes | None:
        if self._outbox:
            return self._outbox.popleft()
        outstanding = self._machine.unadmitted if self._has_begun else self._sent
        self._is_ahead = len(outstanding) >= STEERS_MAX
        if self._is_ahead or self._is_stopping:
            return None
        while (steer := self._controls.take_nowait()) is not None:
            if not self._has_begun:
                self._sent.append(steer)
            if (frame := self._machine.steer(steer)) is not None:
                return encode_frame(frame)
        return None

    # --- answering

    def _on_asked(self, asked: ApprovalAsked) -> None:
        if self._is_stopping:
            self._answer(asked.id, approved=False)
        else:
            self._begin(self._decide(asked.id, parse_ask(asked.body)), "ask of a worker")

    def _on_called(self, called: HostCalled) -> None:
        if self._is_stopping:
            self._reply(called.id, {"error": "the run is being cancelled"})
        elif not self._limits.may_call(called.args):
            why = f"an agent at depth {self._limits.depth} may not start others"
            self._reply(called.id, {"error": f"{why}: the limit is reached"})
        else:
            self._begin(self._carry_out(called), "host call of a worker")

    def _begin(self, work: Coroutine[None, None, None], name: str) -> None:
        task = self._tasks.create_task(work, name=name)
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    async def _decide(self, ask_id: str, ask: WorkerAsk) -> None:
        task = asyncio.current_task()
        assert task is not None

        def deny() -> None:
            _log.info("an ask was not answered in time and is denied: %s", ask_id[:64])
            self._answer(ask_id, approved=False, reason="nobody answered in time")
            task.cancel()

        timer: Timer | None = None
        if ask.deadline_s is not None:
            left_s = max(0.0, ask.deadline_s - self._clock.now_s())
            if left_s < DEADLINE_MAX_S:
                timer = self._clock.call_later(left_s, deny)
        approved, reason = False, ""
        try:
            approved = await self._callbacks.on_ask(ask)
        except ApprovalUnavailable as exc:
            reason = clean(str(exc))
        except Exception:  # boundary: a failure is not an approval
            _log.exception("an ask of a worker could not be decided and is denied")
            reason = "it could not be decided"
        finally:
            if timer is not None:
                timer.cancel()
        self._answer(ask_id, approved=approved, reason=reason)

    def _answer(self, ask_id: str, *, approved: bool, reason: str = "") -> None:
        frame = self._machine.answer(ask_id, approved=approved, reason=reason)
        if frame is None:
            _log.info("an answer came too late and was not sent: %s", ask_id[:64])
        else:
            self._queue_frame(frame)

    async def _carry_out(self, called: HostCalled) -> None:
        result: Json
        try:
            result = await self._callbacks.on_call(called.tool_call_id, called.args)
            data = encode({"result": result})
            result = (
                Raw(data) if len(data) <= RESULT_BYTES_MAX else {"error": "the result is too large"}
            )
        except HostCallFailed as exc:
            result = {"error": clean(str(exc))}
        except Exception:  # boundary: the run goes on without the result
            _log.exception("a host call of a worker failed")
            result = {"error": "the host call failed"}
        self._reply(called.id, result)

    def _reply(self, call_id: str, result: Json) -> None:
        if (frame := self._machine.reply(call_id, result)) is not None:
            self._queue_frame(frame)

"""One run over one link: say what is to be done, hear what happens, answer, and tell the end.

Owns the run's timers, its open asks and host calls, and the frames that wait to be sent. What a
frame means is `protocol/parent.py`'s; which worker it is, and what becomes of it, `dispatch.py`'s.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from msgspec import Raw

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
from culm.fleet.host.callbacks import HostCallbacks, WorkerAsk, parse_ask
from culm.fleet.host.run_control import STEERS_MAX, RunControl
from culm.fleet.protocol.frames import (
    MESSAGE_BYTES_MAX,
    BadFrame,
    ParentFrame,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_child_frame,
)
from culm.fleet.protocol.host import (
    ApprovalAsked,
    EventReceived,
    EventsLost,
    HostCalled,
    HostMachine,
    SendNow,
    WorkerRunEnded,
)
from culm.fleet.provision import DEPTH_MAX, SECONDS_MAX, Provision
from culm.fleet.transport.base import Link, LinkLost
from culm.wire.codec import Json, clean, encode

_log = logging.getLogger(__name__)

FIRST_FRAME_S: Final = 60.0  # A worker that says nothing for so long hangs.
CANCEL_S: Final = 9.0  # The worker's grace of 3 s, and 6 s for its last word to arrive.
OVERTIME_S: Final = 15.0  # Beyond a run's limit: the worker's graces, and its last word's way.
DEAF_S: Final = 3.0  # For what a worker said before it stopped listening.
OUTBOX_MAX: Final = 256  # Answers that wait to be sent; twice as many as can be open.
RESULT_BYTES_MAX: Final = MESSAGE_BYTES_MAX - (64 << 10)  # Of a host call: it travels in a frame.
DEADLINE_MAX_S: Final = 86_400.0  # An ask that may wait longer waits until its run ends.
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostSettings:
    """What a worker may have done by its host."""

    host_calls: bool = False
    depth: int = 1  # Of the worker in its tree ...
    depth_max: int = DEPTH_MAX  # ... where one at this depth starts no other.
    run_s: float | None = None  # No run takes longer. The worker says so, or is not waited for.

    def why_not(self, args: Mapping[str, Json]) -> str | None:
        """Why a host call is refused without asking anybody."""
        if args.get("op") == "agent" and self.depth >= self.depth_max:
            return f"an agent at depth {self.depth} may not start others: the limit is reached"
        return None


NO_TERMS: Final = HostSettings()


def host_terms_of(provision: Provision) -> HostSettings:
    return HostSettings(
        host_calls=provision.culm.host_calls,
        depth=provision.identity.depth,
        depth_max=provision.capabilities.depth_max,
        run_s=provision.limits.run_timeout_secs,
    )


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run went."""

    outcome: Outcome
    began: bool = False  # The worker was heard: something may have been done.
    unadmitted: tuple[
        SteerMessage, ...
    ] = ()  # What was said to it and, as far as is known, in vain.
    is_from_worker: bool = False  # The end came from the worker itself.


async def drive(
    link: Link,
    spec: RunSpec,
    callbacks: HostCallbacks,
    controls: RunControl,
    clock: Clock,
    *,
    terms: HostSettings = NO_TERMS,
    first_frame_s: float = FIRST_FRAME_S,
) -> RunResult:
    """Have a worker do a run, over a link that carries no other.

    If it did not begin, another worker may be tried with the same controls; else they are closed.
    After a cancel it ends in bounded time. Raises what the overseer raised when it was told of an
    event, and `Rejected` if the run cannot be said. Whoever calls this closes the link.
    """
    frame = _encode_run(spec)
    machine = HostMachine(spec, host_calls=terms.host_calls)
    return await _Driving(link, machine, callbacks, controls, clock, terms).run(
        frame, first_frame_s
    )


def _encode_run(spec: RunSpec) -> bytes:
    try:
        frame = encode_frame(spec)
    except UnicodeEncodeError as exc:
        raise InvalidRequest("the assignment is no text: it has half a surrogate pair") from exc
    if len(frame) > MESSAGE_BYTES_MAX:
        raise TooLarge(f"a run has at most {MESSAGE_BYTES_MAX >> 20} MiB, with its conversation")
    return frame


class _Driving:
    def __init__(
        self,
        link: Link,
        machine: HostMachine,
        callbacks: HostCallbacks,
        controls: RunControl,
        clock: Clock,
        terms: HostSettings,
    ) -> None:
        self._link = link
        self._machine = machine
        self._callbacks = callbacks
        self._controls = controls
        self._clock = clock
        self._terms = terms
        self._tasks = asyncio.TaskGroup()
        task = asyncio.current_task()
        assert task is not None, "whoever drives is a task"
        self._task = task
        self._cancels = task.cancelling()
        self._outbox: deque[bytes] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._open: set[asyncio.Task[None]] = set()  # Asks and host calls.
        self._sent: list[SteerMessage] = []  # Before the worker was heard.
        self._admitting: list[SteerMessage] = []  # The overseer has not taken notice of it yet.
        self._is_ahead = False  # So much was said, and not admitted, that the rest waits here.
        self._timer: Timer | None = None
        self._overtime: Timer | None = None
        self._late: Outcome | None = None  # Time is over: so it ends.
        self._is_waiting = False  # For the link, and for nothing else.
        self._is_cut = False  # That wait was ended by a timer.
        self._is_started = False
        self._is_heard = False
        self._is_told = False
        self._is_stopping = False
        self._is_deaf = False  # The worker: nothing can be sent any more.

    async def run(self, frame: bytes, first_frame_s: float) -> RunResult:
        trouble: Exception | None = None
        outcome = CANCELLED
        async with self._tasks:
            try:
                self._limit(self._terms.run_s)
                self._controls.watch(self._on_change)
                self._on_change()
                outcome = await self._converse(frame, first_frame_s)
            except Exception as exc:  # boundary: raised below as it is, which a group would wrap
                trouble = exc
            finally:
                self._let_go()
        if trouble is not None:
            raise trouble
        return RunResult(outcome, self._is_heard, self._controls.unadmitted, self._is_told)

    def _let_go(self) -> None:
        self._controls.watch(None)
        self._is_deaf = True
        for waiting in (self._timer, self._overtime, *self._open, self._sender):
            if waiting is not None:
                waiting.cancel()
        if self._is_heard:
            self._controls.put_back((*self._admitting, *self._machine.unadmitted))
            self._controls.close()
        else:
            self._controls.put_back(self._sent)

    # --- listening

    async def _converse(self, frame: bytes, first_frame_s: float) -> Outcome:
        silence = failed(f"the worker said nothing for {first_frame_s:g} s")
        try:
            if self._late is None:
                self._arm(first_frame_s, silence)
                await self._unless_late(self._link.send(frame))
            if self._late is None:  # All of it is sent, which may have taken its time.
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
        """Wait for the link. Only here time may cut in: an overseer is never torn from its work."""
        self._is_waiting = True
        try:
            return await wait
        except asyncio.CancelledError:
            # Kept to ourselves if it was the timer's, and no one else wants this task to end.
            if not self._is_cut or self._task.uncancel() > self._cancels:
                raise
            return None
        finally:
            self._is_waiting = False

    async def _on_data(self, data: bytes) -> Outcome | None:
        """Pass on what came; the outcome, if that was the end."""
        if not self._is_heard:
            self._is_heard = True
            self._controls.begin()
            if self._timer is not None and not self._is_stopping and not self._is_deaf:
                self._timer.cancel()
        try:
            frame = parse_child_frame(data)
        except BadFrame as exc:
            return failed(f"the worker sent what cannot be read: {exc}")
        self._is_told = type(frame) is TerminalFrame
        outstanding = self._machine.unadmitted
        happenings = self._machine.on_frame(frame)
        if outstanding:
            left = set(self._machine.unadmitted)
            self._admitting = [steer for steer in outstanding if steer not in left]
        for happening in happenings:
            match happening:
                case EventReceived(event=event):
                    await self._callbacks.on_event(event)
                case EventsLost():
                    await self._callbacks.on_gap()
                case ApprovalAsked():
                    self._on_asked(happening)
                case HostCalled():
                    self._on_called(happening)
                case SendNow(frame=answer):
                    self._queue_frame(answer)
                case WorkerRunEnded(outcome=outcome):
                    return outcome
        self._admitting = []
        if self._is_ahead:
            self._wake()
        return None

    # --- time

    def _arm(self, delay_s: float, outcome: Outcome) -> None:
        """End the run so, unless something happens; instead of what was to happen before."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._clock.call_later(delay_s, partial(self._expire, outcome))

    def _limit(self, run_s: float | None) -> None:
        """Workers of ours end a run at its limit by themselves; not all do, or can."""
        if run_s is not None and run_s < SECONDS_MAX:
            words = limit_error("run_timeout", f"the worker has not ended a run of {run_s:g} s")
            expire = partial(self._expire, failed(words))
            self._overtime = self._clock.call_later(run_s + OVERTIME_S, expire)

    def _expire(self, outcome: Outcome) -> None:
        if self._late is None:
            self._late = outcome
            if self._is_waiting:
                self._is_cut = True
                self._task.cancel()

    # --- speaking

    def _on_change(self) -> None:
        """Whoever wants the run has said something."""
        if self._controls.is_cancelled and not self._is_stopping:
            self._stop()
        self._wake()

    def _stop(self) -> None:
        self._is_stopping = True
        if not self._is_started:
            self._expire(CANCELLED)
            return
        self._arm(CANCEL_S, CANCELLED)
        for frame in self._machine.cancel():
            self._outbox.appendleft(encode_frame(frame))
        for task in self._open:
            task.cancel()

    def _queue_frame(self, frame: ParentFrame) -> None:
        self._outbox.append(encode_frame(frame))
        if len(self._outbox) > OUTBOX_MAX:
            self._expire(failed("the worker asks, and does not read the answers"))
        self._wake()

    def _wake(self) -> None:
        is_able = self._is_started and self._sender is None and not self._is_deaf
        if is_able and (self._outbox or self._controls.unadmitted):
            self._sender = self._tasks.create_task(self._send(), name="what is said to a worker")

    async def _send(self) -> None:
        try:
            while (frame := self._next_frame()) is not None:
                await self._link.send(frame)
        except LinkLost as exc:
            self._is_deaf = True
            if not self._is_stopping:  # Its last words may still be on the way.
                self._arm(DEAF_S, failed(f"the link to the worker was lost: {exc}"))
        self._sender = None

    def _next_frame(self) -> bytes | None:
        if self._outbox:
            return self._outbox.popleft()
        outstanding = self._machine.unadmitted if self._is_heard else self._sent
        self._is_ahead = len(outstanding) >= STEERS_MAX
        if self._is_ahead or self._is_stopping:
            return None
        while (steer := self._controls.take_nowait()) is not None:
            if not self._is_heard:
                self._sent.append(steer)
            for frame in self._machine.steer(steer):
                return encode_frame(frame)
        return None

    # --- answering

    def _on_asked(self, asked: ApprovalAsked) -> None:
        if self._is_stopping:
            self._answer(asked.id, approved=False)
        else:
            self._begin(self._decide(asked.id, parse_ask(asked.body)), "ask of a worker")

    def _on_called(self, called: HostCalled) -> None:
        why = "the run is being cancelled" if self._is_stopping else None
        why = why or self._terms.why_not(called.args)
        if why is not None:
            self._reply(called.id, {"error": why})
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
            _log.info("nobody answered an ask in time, so it is denied: %s", ask_id[:64])
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
        except Exception:  # boundary: who cannot decide has not approved
            _log.exception("an ask of a worker could not be decided, so it is denied")
            reason = "it could not be decided"
        finally:
            if timer is not None:
                timer.cancel()
        self._answer(ask_id, approved=approved, reason=reason)

    def _answer(self, ask_id: str, *, approved: bool, reason: str = "") -> None:
        frames = self._machine.answer(ask_id, approved=approved, reason=reason)
        if not frames:
            _log.info("an answer came too late and was not sent: %s", ask_id[:64])
        for frame in frames:
            self._queue_frame(frame)

    async def _carry_out(self, called: HostCalled) -> None:
        result: Json
        try:
            result = await self._callbacks.on_call(called.tool_call_id, called.args)
            data = encode({"result": result})
            result = Raw(data) if len(data) <= RESULT_BYTES_MAX else {"error": "it is too much"}
        except HostCallFailed as exc:
            result = {"error": clean(str(exc))}
        except Exception:  # boundary: the run goes on, without what it wanted
            _log.exception("a host call of a worker failed")
            result = {"error": "the host failed at it"}
        self._reply(called.id, result)

    def _reply(self, call_id: str, result: Json) -> None:
        for frame in self._machine.reply(call_id, result):
            self._queue_frame(frame)

"""State machine of one connection on the worker's side: the active run and its open requests.

Sans I/O: frames, executor endings and elapsed times go in; effects come out, to be carried out in
order. Two runs of a connection never overlap. While the link lasts, every requested run gets
exactly one terminal frame. Queueing and sending of events belong to `worker_server/`.
"""

import logging
from typing import Final, Literal

from msgspec import Struct, field

from culm.fleet.executor import CANCELLED, Outcome, SteerMessage, failed
from culm.fleet.protocol.frames import (
    OPEN_MAX,
    ApprovalReply,
    ApprovalRequest,
    Cancel,
    InitialInputRelease,
    OwnedTreeReply,
    ParentFrame,
    RunSpec,
    SessionMessage,
    SteerFrame,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
)

_log = logging.getLogger(__name__)

GRACE_S: Final = 3.0  # Between a cancel request and an abort, and again until the run is given up.
STEERS_MAX: Final = 64  # Kept for a run that waits for the previous one.
RECEIVED_IDS_MAX: Final = 1024  # Message ids by which a repetition is recognized.
IGNORED_LOGGED_MAX: Final = 10  # Per connection; more would add nothing.
STUCK = failed("the previous run does not end")


class StartRun(Struct, frozen=True):
    """Begin a run, with the messages that arrived before it could begin."""

    run: int
    spec: RunSpec
    steers: tuple[SteerMessage, ...] = ()


class RequestCancel(Struct, frozen=True):
    """Set its cancel token; call `on_grace` after `GRACE_S`."""

    run: int


class AbortRun(Struct, frozen=True):
    """Cancel the task of a run that did not end by itself; call `on_grace` after `GRACE_S`."""

    run: int


class RevokeRun(Struct, frozen=True):
    """The run is over: its open requests fail, and further events are refused."""

    run: int


class SteerRun(Struct, frozen=True):
    run: int
    steer: SteerMessage


# The answers to open requests are passed on, and a terminal frame is sent after all events of its
# run.
Effect = (
    StartRun
    | RequestCancel
    | AbortRun
    | RevokeRun
    | SteerRun
    | ApprovalReply
    | SubAgentReply
    | TerminalFrame
)
_Phase = Literal["running", "stopping", "aborting", "stuck"]


class _Active(Struct):
    run: int
    phase: _Phase = "running"
    asks: set[str] = field(default_factory=set[str])
    calls: set[str] = field(default_factory=set[str])
    received_ids: set[str] = field(default_factory=set[str])  # Ids of the messages it received.


class _Waiting(Struct):
    """The newest run, while the previous one ends."""

    spec: RunSpec
    steers: list[SteerMessage] = field(default_factory=list[SteerMessage])

    def has(self, steer: SteerMessage) -> bool:
        return steer.id != "" and any(known.id == steer.id for known in self.steers)


class WorkerMachine:
    def __init__(self, *, host_calls: bool = False) -> None:
        self._host_calls = host_calls
        self._runs = 0
        self._active: _Active | None = None
        self._waiting: _Waiting | None = None
        self._skipped = 0  # Runs that were superseded before they began.
        self._lost = False
        self._ignored = 0

    def on_frame(self, frame: ParentFrame) -> list[Effect]:
        match frame:
            case RunSpec():
                return self._on_run(frame)
            case Cancel():
                return self._on_cancel()
            case SteerFrame(text=text, id=steer_id):
                return self._on_message(SteerMessage(text, steer_id))
            case ApprovalReply(id=ask_id):
                if self._active is None or ask_id not in self._active.asks:
                    return self._ignore("an answer to no open ask", ask_id)
                self._active.asks.discard(ask_id)
                return [frame]
            case SubAgentReply(id=call_id):
                if self._active is None or call_id not in self._active.calls:
                    return self._ignore("an answer to no open host call", call_id)
                self._active.calls.discard(call_id)
                return [frame]
            case SessionMessage() | InitialInputRelease() | OwnedTreeReply():
                return self._ignore("a frame of a newer protocol", type(frame).__name__)

    def _ignore(self, what: str, which: str) -> list[Effect]:
        self._ignored += 1
        if self._ignored <= IGNORED_LOGGED_MAX:
            _log.warning("%s was ignored: %s", what, which[:64])
        return []

    def _on_run(self, spec: RunSpec) -> list[Effect]:
        if self._active is None:
            return self._start(spec, ())
        if self._active.phase == "stuck":
            return [_terminal(STUCK)]
        if self._waiting is not None:
            self._skipped += 1
        self._waiting = _Waiting(spec)
        return self._stop()

    def _on_cancel(self) -> list[Effect]:
        """Cancel the newest run, which may not have begun."""
        if self._waiting is not None:
            self._waiting = None
            self._skipped += 1
        return self._stop()

    def _on_message(self, steer: SteerMessage) -> list[Effect]:
        if self._waiting is not None:
            if len(self._waiting.steers) < STEERS_MAX and not self._waiting.has(steer):
                self._waiting.steers.append(steer)
            return []
        active = self._active
        if active is None or active.phase != "running" or steer.id in active.received_ids:
            return []
        if steer.id and len(active.received_ids) < RECEIVED_IDS_MAX:
            active.received_ids.add(steer.id)
        return [SteerRun(active.run, steer)]

    def on_request(self, run: int, request: ApprovalRequest | SubAgentRequest) -> bool:
        """Return True if it may be sent: not if it is too late, or if too many are open.

        Calls are sent only to a host that takes them.
        """
        active = self._find_open(run)
        if active is None:
            return False
        is_ask = isinstance(request, ApprovalRequest)
        waiting = active.asks if is_ask else active.calls
        if len(waiting) >= OPEN_MAX or not (is_ask or self._host_calls):
            return False
        waiting.add(request.id)
        return True

    def on_withdrawn(self, run: int, open_id: str) -> None:
        """Forget a request whose requester stopped waiting; a later answer is ignored."""
        if self._active is not None and self._active.run == run:
            self._active.asks.discard(open_id)
            self._active.calls.discard(open_id)

    def on_ended(self, run: int, outcome: Outcome) -> list[Effect]:
        """The executor returned, and all its events are queued."""
        if self._active is None or self._active.run != run:
            return []
        was, self._active = self._active.phase, None
        if was == "stuck":  # Its terminal was sent long ago.
            return []
        return [
            RevokeRun(run),
            *self._report_outcome(CANCELLED if was == "aborting" else outcome),
            *self._start_waiting(),
        ]

    def on_grace(self, run: int) -> list[Effect]:
        """A run that was requested to end has not ended."""
        if self._active is None or self._active.run != run:
            return []
        if self._active.phase == "stopping":
            self._active.phase = "aborting"
            return [AbortRun(run)]
        if self._active.phase != "aborting":
            return []
        # Nothing in this process can end it. The host is not kept waiting, and no other run begins
        # here.
        self._active.phase = "stuck"
        effects: list[Effect] = [
            RevokeRun(run),
            *self._report_outcome(CANCELLED),
            *self._report_skipped(),
        ]
        if self._waiting is not None:
            self._waiting = None
            effects += self._report_outcome(STUCK)
        return effects

    def on_lost(self) -> list[Effect]:
        """The link is gone, so nothing can be sent any more."""
        self._lost = True
        self._waiting = None
        self._skipped = 0
        return self._stop()

    def _start(self, spec: RunSpec, steers: tuple[SteerMessage, ...]) -> list[Effect]:
        if self._lost:
            return []
        self._runs += 1
        self._active = _Active(self._runs, received_ids={steer.id for steer in steers if steer.id})
        return [StartRun(self._runs, spec, steers)]

    def _stop(self) -> list[Effect]:
        if self._active is None or self._active.phase != "running":
            return []
        self._active.phase = "stopping"
        return [RequestCancel(self._active.run)]

    def _start_waiting(self) -> list[Effect]:
        effects = self._report_skipped()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            effects += self._start(waiting.spec, tuple(waiting.steers))
        return effects

    def _report_skipped(self) -> list[Effect]:
        skipped, self._skipped = self._skipped, 0
        return [effect for _ in range(skipped) for effect in self._report_outcome(CANCELLED)]

    def _report_outcome(self, outcome: Outcome) -> list[Effect]:
        return [] if self._lost else [_terminal(outcome)]

    def _find_open(self, run: int) -> _Active | None:
        """Return the run if it may still send requests."""
        active = self._active
        if self._lost or active is None or active.run != run or active.phase == "stuck":
            return None
        return active


def _terminal(outcome: Outcome) -> TerminalFrame:
    return TerminalFrame(outcome.status, result=outcome.result, error=outcome.error)

"""State machine of one run on the host's side: the meaning of a worker's frames.

Sans I/O, and for one run only: a worker of another version may end two runs of one connection in
any order, so a second run is never sent before the first has ended.
"""

import logging
from collections import deque
from typing import Final, cast

import msgspec
from msgspec import UNSET, Raw, Struct

from culm.fleet.executor import Outcome, SteerMessage, failed
from culm.fleet.protocol.batching import BatchReader
from culm.fleet.protocol.frames import (
    OPEN_MAX,
    ApprovalReply,
    ApprovalRequest,
    BadFrame,
    Cancel,
    ChildFrame,
    EventBatch,
    EventFrame,
    OwnedTreeReply,
    OwnedTreeRequest,
    RunSpec,
    SessionMessageAdmitted,
    SteerFrame,
    SubAgentReply,
    SubAgentRequest,
    TerminalFrame,
)
from culm.wire.codec import Json

_log = logging.getLogger(__name__)

OPEN_BYTES_MAX: Final = 8 << 20  # For all open requests; decoded, they take ten times as much.
ANSWERED_MAX: Final = 256  # Ids that are known to have been answered.
STEERS_MAX: Final = 256  # Messages that wait to be admitted.


class EventsLost(Struct, frozen=True):
    """Droppable events were dropped."""

    missing: int


class ApprovalAsked(Struct, frozen=True):
    id: str
    body: dict[str, Json]


class HostCalled(Struct, frozen=True):
    id: str
    tool_call_id: str
    args: dict[str, Json]


Answer = ApprovalReply | SubAgentReply | OwnedTreeReply  # To be sent to the worker at once.
# An outcome is the end of the run; no later frame belongs to it.
Happening = EventFrame | EventsLost | ApprovalAsked | HostCalled | Answer | Outcome


class _Receipt(Struct):
    """The fields of our own worker's events that this machine needs."""

    type: str = ""
    id: str = ""
    dropped_events: int = 0


_receipt = msgspec.json.Decoder(_Receipt)


class HostMachine:
    def __init__(self, spec: RunSpec, *, host_calls: bool = False) -> None:
        self._spec = spec
        self._host_calls = host_calls
        self._reader = BatchReader(spec)
        # Open requests with their sizes; the same holds for `_calls`.
        self._asks: dict[str, int] = {}
        self._calls: dict[str, int] = {}
        self._answered: deque[str] = deque(maxlen=ANSWERED_MAX)
        self._dropped: int | None = None  # By the worker's count.
        self._steers: dict[str, SteerMessage] = {}
        self.outcome: Outcome | None = None

    @property
    def unadmitted(self) -> tuple[SteerMessage, ...]:
        """The messages that never reached the run, as far as it reported."""
        return tuple(self._steers.values())

    def cancel(self) -> Cancel | None:
        return None if self.outcome is not None else Cancel()

    def steer(self, steer: SteerMessage) -> SteerFrame | None:
        """Return None if the run is over or too many messages wait already."""
        if not self._host_calls:
            return None if self.outcome is not None else SteerFrame(steer.text)
        if steer.id:
            self._steers[steer.id] = steer
        if self.outcome is not None or len(self._steers) > STEERS_MAX:
            return None
        return SteerFrame(steer.text, steer.id)

    def answer(self, ask_id: str, *, approved: bool, reason: str = "") -> ApprovalReply | None:
        """Answer an open ask; returns None if it has an answer or the run is over.

        A reason means that nobody made a decision.
        """
        if not self._close(self._asks, ask_id):
            return None
        return ApprovalReply(ask_id, approved=True) if approved else self._refusal(ask_id, reason)

    def _refusal(self, ask_id: str, reason: str) -> ApprovalReply:
        """Only our own worker gets a reason; others know only yes and no."""
        return ApprovalReply(ask_id, reason=(reason if self._host_calls else "") or UNSET)

    def reply(self, call_id: str, result: Json) -> SubAgentReply | None:
        return SubAgentReply(call_id, result) if self._close(self._calls, call_id) else None

    def on_frame(self, frame: ChildFrame) -> list[Happening]:
        """Translate a frame; after the end, return nothing."""
        if self.outcome is not None:
            return []
        match frame:
            case EventFrame(event=event):
                self._inspect_event(event)
                return [frame]
            case EventBatch():
                return self._on_batch(frame)
            case ApprovalRequest(id=ask_id, body=body):
                if not self._is_new(self._asks, ask_id):
                    return []
                if not self._may_open(self._asks, body):
                    return [self._refusal(ask_id, "too many asks are open")]
                self._asks[ask_id] = len(bytes(body))
                return [ApprovalAsked(ask_id, _object_in(body))]
            case SubAgentRequest():
                return self._on_call(frame)
            case TerminalFrame():
                return self._end(self._outcome_of(frame))
            case OwnedTreeRequest(id=request_id):
                # Without a page, which means a refusal.
                return [OwnedTreeReply(request_id)]
            case SessionMessageAdmitted():
                return []  # We send no typed input that could have been admitted.

    def on_broken(self, reason: str) -> list[Happening]:
        """End the run after an unreadable frame, or when no more frames can arrive."""
        return [] if self.outcome is not None else self._end(failed(reason))

    def _on_batch(self, frame: EventBatch) -> list[Happening]:
        try:
            taken = self._reader.take(frame.batch)
        except BadFrame as exc:
            return self.on_broken(f"the worker sent invalid events: {exc}")
        happenings: list[Happening] = [EventsLost(taken.missing)] if taken.missing else []
        for event in taken.events:
            self._inspect_event(event)
            happenings.append(EventFrame(event))
        return happenings

    def _on_call(self, frame: SubAgentRequest) -> list[Happening]:
        if not self._is_new(self._calls, frame.id):
            return []
        if not self._host_calls or not self._may_open(self._calls, frame.args):
            why = "too many host calls are open" if self._host_calls else "host calls are not taken"
            return [SubAgentReply(frame.id, {"error": why})]
        self._calls[frame.id] = len(bytes(frame.args))
        return [HostCalled(frame.id, frame.tool_call_id, _object_in(frame.args))]

    def _may_open(self, waiting: dict[str, int], payload: Raw) -> bool:
        """Return True if one more request may be open."""
        open_bytes = sum(self._asks.values()) + sum(self._calls.values())
        return len(waiting) < OPEN_MAX and open_bytes + len(bytes(payload)) <= OPEN_BYTES_MAX

    def _inspect_event(self, event: Raw) -> None:
        """Note receipts of steering messages and the worker's count of dropped events."""
        data = bytes(event)
        if not (self._steers and b"message_admitted" in data) and b"dropped_events" not in data:
            return
        try:
            receipt = _receipt.decode(data)
        except (msgspec.DecodeError, RecursionError):
            return
        if receipt.type == "message_admitted":
            self._steers.pop(receipt.id, None)
        elif receipt.type == "runner_progress":
            self._dropped = receipt.dropped_events

    def _outcome_of(self, frame: TerminalFrame) -> Outcome:
        """Return the worker's outcome, or an error if events are missing that are never dropped."""
        if self._dropped is not None and self._reader.missing > self._dropped:
            lost = self._reader.missing - self._dropped
            return failed(f"the run's history has a gap: {lost} events never arrived")
        if frame.status == "suspended":
            return failed("the worker suspended the run, which cannot be resumed")
        return Outcome(frame.status, frame.result, frame.error)

    def _end(self, outcome: Outcome) -> list[Happening]:
        self.outcome = outcome
        self._asks.clear()
        self._calls.clear()
        return [outcome]

    def _is_new(self, waiting: dict[str, int], open_id: str) -> bool:
        if open_id in waiting or open_id in self._answered:
            _log.warning("a request arrived twice and is answered once: %s", open_id[:64])
            return False
        return True

    def _close(self, waiting: dict[str, int], open_id: str) -> bool:
        """Return False if no such request is open."""
        if waiting.pop(open_id, None) is None:
            return False
        self._answered.append(open_id)
        return True


def _object_in(payload: Raw) -> dict[str, Json]:
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, RecursionError):
        return {}
    return cast("dict[str, Json]", value) if isinstance(value, dict) else {}

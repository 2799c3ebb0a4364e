"""Numbered events: collected into batches by the sender, checked and unpacked by the receiver.

Pure. Numbers count the events of one run, from 1. Events that only extend a text or repeat a state
may be dropped if the receiver is slow; the receiver sees this only by the missing numbers.
"""

from collections import deque
from collections.abc import Mapping
from typing import Final, cast

import msgspec
from msgspec import Raw, Struct

from culm.fleet.protocol.frames import BATCH_EVENTS_MAX, BadFrame, Batch, Qos, RunSpec
from culm.wire.codec import Json

LINGER_S: Final = 0.02  # How long an event waits for others of its class.
REMEMBERED: Final = 64  # Events whose repetition is recognized.

_EPHEMERAL = frozenset(("token", "reasoning_token", "tool_token", "sub_agent_heartbeat"))
_SNAPSHOT = frozenset(("runner_progress", "token_budget_updated", "context_pressure_notification"))


class _EventType(Struct):
    """The part of an event that determines its class."""

    type: str = ""
    event: "_EventType | None" = None


_type_decoder = msgspec.json.Decoder(_EventType)


def qos_of(event: Mapping[str, Json]) -> Qos:
    """Return the class of an event, which determines whether it may be dropped.

    Unknown events may not.
    """
    kind = event.get("type")
    if kind == "sub_agent_event":
        inner = event.get("event")
        return qos_of(cast("dict[str, Json]", inner)) if isinstance(inner, dict) else "durable"
    return _qos_of_type(kind if isinstance(kind, str) else "")


def _qos_of_type(kind: str) -> Qos:
    if kind in _EPHEMERAL:
        return "ephemeral"
    return "snapshot" if kind in _SNAPSHOT else "durable"


def _qos_of_raw(event: Raw) -> Qos:
    try:
        found: _EventType | None = _type_decoder.decode(event)
    except (msgspec.DecodeError, RecursionError):
        return "durable"
    while found is not None and found.type == "sub_agent_event":
        found = found.event
    return "durable" if found is None else _qos_of_type(found.type)


class EventBatcher:
    """Collects the outgoing events of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._pending: list[Raw] = []
        self._qos: Qos = "durable"
        self._seq = 0  # The last number assigned.
        self.due_s: float | None = None  # When the pending events have waited long enough.

    def add(self, event: Raw, qos: Qos, now_s: float) -> list[Batch]:
        """Add an event; return the batches to send now, in order."""
        ready = self.flush() if self._pending and qos != self._qos else []
        self._seq += 1
        self._pending.append(event)
        self._qos = qos
        if qos == "durable" or len(self._pending) == BATCH_EVENTS_MAX:
            return ready + self.flush()
        if self.due_s is None:
            self.due_s = now_s + LINGER_S
        return ready

    def flush(self) -> list[Batch]:
        """Return the pending events as a batch, if there are any."""
        if not self._pending:
            return []
        events, self._pending, self.due_s = self._pending, [], None
        batch = Batch(
            first_seq=self._seq - len(events) + 1,
            last_seq=self._seq,
            qos=self._qos,
            events=events,
            logical_session=self._spec.logical_session,
            activation_id=self._spec.activation_run_id,
            execution_epoch=self._spec.execution_epoch,
        )
        return [batch]

    def alone(self, event: Raw) -> Batch:
        """Make a batch of one event that must not be dropped. Nothing may be pending."""
        assert not self._pending, "events are sent in order"
        self._qos = "durable"
        self._seq += 1
        self._pending = [event]
        return self.flush()[0]


def check_batch(batch: Batch) -> None:
    """Raises `BadFrame` if its numbers, its size or its label is invalid."""
    if not 1 <= len(batch.events) <= BATCH_EVENTS_MAX:
        raise BadFrame(f"a batch has 1 to {BATCH_EVENTS_MAX} events, not {len(batch.events)}")
    if batch.first_seq < 1 or batch.last_seq != batch.first_seq + len(batch.events) - 1:
        raise BadFrame("the numbers of a batch do not fit its events")
    if batch.qos != "durable" and any(_qos_of_raw(event) != batch.qos for event in batch.events):
        raise BadFrame(f"a batch labeled {batch.qos} contains an event of another class")


class NewEvents(Struct, frozen=True):
    """The events of a batch that are new."""

    events: list[Raw]
    missing: int = 0  # Number of events dropped before them.


class BatchReader:
    """Checks and unpacks the incoming events of one run."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec = spec
        self._seq = 0
        self._recent: deque[tuple[int, int]] = deque(maxlen=REMEMBERED)
        self.missing = 0  # In total.

    def take(self, batch: Batch) -> NewEvents:
        """Return the new events; raises `BadFrame` if the batch cannot belong to this run."""
        check_batch(batch)
        self._check_scope(batch)
        missing = max(0, batch.first_seq - self._seq - 1)
        fresh: list[Raw] = []
        for seq, event in enumerate(batch.events, batch.first_seq):
            # The hash is keyed anew in every process, so collisions cannot be constructed.
            digest = hash(bytes(event))
            if seq > self._seq:
                self._recent.append((seq, digest))
                fresh.append(event)
            elif (seq, digest) not in self._recent and any(
                seq == known for known, _ in self._recent
            ):
                raise BadFrame(f"event {seq} was repeated with different content")
        self._seq = max(self._seq, batch.last_seq)
        self.missing += missing
        return NewEvents(fresh, missing)

    def _check_scope(self, batch: Batch) -> None:
        spec = self._spec
        if batch.execution_epoch != spec.execution_epoch:
            raise BadFrame("a batch belongs to another attempt")
        if batch.activation_id is not None and batch.activation_id != spec.activation_run_id:
            raise BadFrame("a batch belongs to another activation")
        sent, known = batch.logical_session, spec.logical_session
        if sent is not None and known is not None and sent.session_id != known.session_id:
            raise BadFrame("a batch belongs to another session")

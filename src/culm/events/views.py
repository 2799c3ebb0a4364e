"""Encoding of events for the two views: culm's own with deltas and ids, and that of Crush."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec.structs import replace

from culm.wire.codec import decode, encode
from culm.wire.events import CRUSH_PAYLOADS, MessageDelta
from culm.wire.runs import RunComplete

View = Literal["crush", "delta"]

# A bare newline is the only keep-alive that a Crush client ignores.
HEARTBEAT: dict[View, bytes] = {"crush": b"\n", "delta": b":\n\n"}

COMPLETE_BYTES = 4096  # A longer `run_complete` is sent without text in the delta view.

_DELTA_HEAD = b'data: {"type":"message_delta","payload":{"type":"updated","payload":'


class Frame(NamedTuple):
    """An encoded event, with the fields that a filter checks."""

    type: str
    session_id: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Filter:
    """The event types and sessions of a stream; empty sets pass everything."""

    types: frozenset[str] = frozenset()
    sessions: frozenset[str] = frozenset()

    def passes(self, type_: str, session_id: str) -> bool:
        # Events without a session (store health, presence) belong to all sessions.
        return _in(type_, self.types) and (not session_id or _in(session_id, self.sessions))

    @property
    def passes_all(self) -> bool:
        return not self.types and not self.sessions


def _in(value: str, wanted: Collection[str]) -> bool:
    return not wanted or value in wanted


def encode_frame(view: View, type_: str, op: str, payload: bytes, cursor: str = "") -> bytes:
    """Encode an event; stored events have a cursor, transient ones do not."""
    if view == "delta" and type_ == "run_complete" and len(payload) > COMPLETE_BYTES:
        # A client of deltas has the text already, and has just received the whole message.
        payload = encode(replace(decode(payload, RunComplete), text=""))
    head = f'{{"type":"{type_}","payload":{{"type":"{op}","payload":'.encode()
    if view == "delta":
        id_line = f"id: {cursor}\n".encode() if cursor else b""
        return b"%bdata: %b%b}}\n\n" % (id_line, head, payload)
    tail = f'}},"cursor":"{cursor}"}}\n\n'.encode() if cursor else b"}}\n\n"
    return b"data: %b%b%b" % (head, payload, tail)


def encode_delta(delta: MessageDelta) -> bytes:
    """Encode a delta. Optimized, because most events are deltas."""
    return b"%b%b}}\n\n" % (_DELTA_HEAD, encode(delta))


def shows(view: View, type_: str) -> bool:
    """Return True if a view has a type; types unknown to Crush are dropped, never mapped."""
    return view == "delta" or type_ in CRUSH_PAYLOADS

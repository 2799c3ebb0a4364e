"""Cursors, and the encoding of events for two views: culm's own with deltas, and Crush's."""

import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from culm.errors import InvalidRequest
from culm.ids import Epoch
from culm.wire.codec import decode, encode
from culm.wire.events import CRUSH_PAYLOADS, MessageDelta
from culm.wire.runs import RunComplete

View = Literal["crush", "delta"]

# A bare newline is the only keep-alive that a Crush client ignores.
HEARTBEAT: dict[View, bytes] = {"crush": b"\n", "delta": b":\n\n"}

COMPLETE_BYTES = 4096  # A longer `run_complete` is sent without text in the delta view.

_DELTA_HEAD = b'data: {"type":"message_delta","payload":{"type":"updated","payload":'
_CURSOR = re.compile(r"[0-9a-z]{1,32}\.[0-9]{1,18}")


class Cursor(NamedTuple):
    """The last event that a client has: the epoch of the database and the event's number.

    The epoch changes when a database is replaced, because its numbers start again.
    """

    epoch: Epoch
    seq: int

    def __str__(self) -> str:
        return f"{self.epoch}.{self.seq}"


def parse_cursor(text: str) -> Cursor:
    if _CURSOR.fullmatch(text) is None:
        raise InvalidRequest("cursor must be <epoch>.<number>, as an event's id gave it")
    epoch, _, seq = text.partition(".")
    return Cursor(Epoch(epoch), int(seq))


class Frame(NamedTuple):
    """An encoded event, with the fields that a filter checks."""

    type: str
    session_id: str
    data: bytes


class Filter(Struct, frozen=True):
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

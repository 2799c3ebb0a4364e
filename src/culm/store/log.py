"""Units and queries for the event log: replay with current payloads, and trimming."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from culm.store.base import StoredEvent, Tx, find_meta, last_seq
from culm.store.history import file_of
from culm.store.messages import load_message
from culm.store.sessions import session_of
from culm.store.sql import QUERIES
from culm.wire.codec import encode

PAGE_BYTES = 1 << 20  # A page of replay ends here even if it has few events.
TRIM_MAX = 10_000  # Rows that one trim may delete, so that no commit waits long for it.


class ReplayedEvents(NamedTuple):
    """One page of events after a cursor."""

    events: list[StoredEvent]
    upto: int  # The last number on this page, including skipped events.


def replay(
    after: int, upto: int, limit: int, wanted: Callable[[str, str], bool]
) -> Callable[[sqlite3.Connection], ReplayedEvents | None]:
    """The events in (after, upto], or None if some of them are trimmed.

    Each has the current state of its entity as payload; an event of a deleted row is skipped.
    `wanted(type, session_id)` avoids reading payloads that a filter would drop.
    """

    def query(connection: sqlite3.Connection) -> ReplayedEvents | None:
        if after < bounds(connection)[0]:
            return None
        rows = connection.execute(QUERIES["events_after"], (after, upto, limit)).fetchall()
        bodies: dict[tuple[str, str], bytes | None] = {}
        events: list[StoredEvent] = []
        size = 0
        for seq, type_, op, session_id, entity_id, fields in rows:
            if not wanted(type_, session_id):
                continue
            if size > PAGE_BYTES:
                return ReplayedEvents(events, seq - 1)
            if fields is not None:
                payload: bytes | None = fields.encode()
            else:
                key = (type_, entity_id)
                if key not in bodies:
                    bodies[key] = _present_body(connection, type_, entity_id)
                payload = bodies[key]
            if payload is not None:
                events.append(StoredEvent(seq, type_, op, session_id, entity_id, payload))
                size += len(payload)
        return ReplayedEvents(events, rows[-1][0] if len(rows) == limit else upto)

    return query


def bounds(connection: sqlite3.Connection) -> tuple[int, int]:
    """The seq up to which events are trimmed, and the last one in use."""
    return int(find_meta(connection, "trimmed_to") or 0), last_seq(connection)


def trim(keep_s: float, keep: int) -> Callable[[Tx], int]:
    """Delete events that are too old or too many; returns their number."""

    def unit(tx: Tx) -> int:
        trimmed, last = bounds(tx.connection)
        fresh: int = tx.run("first_fresh_seq", tx.now - int(keep_s), last + 1).fetchone()[0]
        upto = min(max(fresh - 1, last - keep), trimmed + TRIM_MAX)
        if upto <= trimmed:
            return 0
        gone = tx.run("trim_events", upto).rowcount
        tx.run("set_meta", "trimmed_to", str(upto))
        return gone

    return unit


_Body = Callable[[sqlite3.Connection, sqlite3.Row], bytes]
_BODIES: dict[str, tuple[str, _Body]] = {
    "message": ("get_message", lambda connection, row: encode(load_message(connection, row))),
    "session": ("get_session", lambda connection, row: encode(session_of(row))),
    "file": ("get_file", lambda connection, row: encode(file_of(row))),
}


def _present_body(connection: sqlite3.Connection, type_: str, entity_id: str) -> bytes | None:
    query, body = _BODIES[type_]
    row = connection.execute(QUERIES[query], (entity_id,)).fetchone()
    return None if row is None else body(connection, row)

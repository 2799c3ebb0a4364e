"""What a client makes of the log, compared with what is stored after any commit.

Only what the log itself carries is applied here. So nothing may change in silence of what a mirror
holds: neither runs, nor those that wait, nor agents.
"""

import sqlite3

import msgspec

from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent
from culm.store.agents import agents_at_work
from culm.store.runs import open_runs
from culm.store.sessions import all_sessions
from culm.wire.messages import Message
from culm.wire.state import Snapshot, StoreHealth

_EVENTS = "SELECT seq, type, op, fields FROM events WHERE seq > ? ORDER BY seq"
_LAST = "SELECT coalesce(max(seq), 0) FROM events"


class Mirrored:
    """One mirror that follows the log of a database, by its numbers alone."""

    def __init__(self) -> None:
        self._mirror: Mirror | None = None
        self._seq = 0

    def check(self, connection: sqlite3.Connection) -> list[str]:
        """Follow to the end of the log; what is then otherwise than stored."""
        if self._mirror is None or not self._follow(self._mirror, connection):
            self._seq = connection.execute(_LAST).fetchone()[0]
            self._mirror = _stored(connection, self._seq)
        mirror, stored = self._mirror, _stored(connection, self._seq)
        pairs = {
            "runs": (mirror.runs, stored.runs),
            "queue": (mirror.queue, stored.queue),
            "agents": (mirror.agents, stored.agents),
        }
        return [f"{what}: {a} is not {b}" for what, (a, b) in pairs.items() if a != b]

    def _follow(self, mirror: Mirror, connection: sqlite3.Connection) -> bool:
        """False if the log was trimmed past what is known, or is a shorter one after a crash."""
        if connection.execute(_LAST).fetchone()[0] < self._seq:
            return False
        for seq, type_, op, fields in connection.execute(_EVENTS, (self._seq,)).fetchall():
            if seq != self._seq + 1:
                return False
            self._seq = seq
            if fields is not None:  # Else it is a message, or a session that is there.
                mirror.apply(ServerEvent(type_, op, msgspec.Raw(fields.encode()), f"e.{seq}"))
        return True


def _stored(connection: sqlite3.Connection, seq: int) -> Mirror:
    mirror = Mirror()
    mirror.load(
        Snapshot[Message](
            cursor=f"e.{seq}",
            sessions=all_sessions(connection),
            messages=[],
            runs=open_runs(connection),
            agents=agents_at_work(connection),
            presence=[],
            store=StoreHealth("ok"),
        )
    )
    return mirror

"""A client mirror built from the event log, compared with the store after any commit.

Only events of the log are applied. So every change of runs, queues and agents must be in the log.
"""

import msgspec

from culm.client.mirror import Mirror
from culm.client.stream import ServerEvent
from culm.store.agents import agents_at_work
from culm.store.base import Connection
from culm.store.runs import open_runs
from culm.store.sessions import all_sessions
from culm.wire.messages import Message
from culm.wire.workspaces import Snapshot, StoreHealth

_EVENTS = "SELECT seq, type, op, fields FROM events WHERE seq > ? ORDER BY seq"
_LAST = "SELECT coalesce(max(seq), 0) FROM events"


class LogMirror:
    """A mirror that follows the event log of a database by sequence number."""

    def __init__(self) -> None:
        self._mirror: Mirror | None = None
        self._seq = 0

    def check(self, connection: Connection) -> list[str]:
        """Follow the log to its end; returns the differences from the stored state."""
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

    def _follow(self, mirror: Mirror, connection: Connection) -> bool:
        """Return False if the log was trimmed past our position, or got shorter in a crash."""
        if connection.execute(_LAST).fetchone()[0] < self._seq:
            return False
        for seq, type_, op, fields in connection.execute(_EVENTS, (self._seq,)).fetchall():
            if seq != self._seq + 1:
                return False
            self._seq = seq
            if fields is not None:  # Otherwise it is a message, or an existing session.
                mirror.apply(ServerEvent(type_, op, msgspec.Raw(fields.encode()), f"e.{seq}"))
        return True


def _stored(connection: Connection, seq: int) -> Mirror:
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

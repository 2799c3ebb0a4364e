"""The seam under the store: who runs a unit of work in a transaction, and who reads.

A unit is a plain function of a `Tx`; it may be run twice (a failed group is repeated one by one),
so it changes nothing but the database. What it tells becomes numbered events of the same
transaction.
"""

import logging
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeVar

from culm.errors import StoreBusy
from culm.store.sql import QUERIES

T = TypeVar("T")
log = logging.getLogger(__name__)

Op = Literal["created", "updated", "deleted"]


@dataclass(frozen=True, slots=True)
class Event:
    """A durable event, numbered inside the transaction that made it true."""

    seq: int
    type: str
    op: Op
    session_id: str
    entity_id: str
    payload: bytes  # JSON


@dataclass(slots=True)
class Tx:
    """One open transaction, seen by one unit of work."""

    connection: sqlite3.Connection
    now: int  # Unix seconds, one value for the whole unit.
    seq: int  # The last number given out.
    events: list[Event] = field(default_factory=list[Event])

    def run(self, query: str, *values: str | float | None) -> sqlite3.Cursor:
        return self.connection.execute(QUERIES[query], values)

    def tell(
        self,
        type_: str,
        op: Op,
        *,
        session_id: str,
        entity_id: str,
        payload: bytes,
        stored: bool = False,
    ) -> None:
        """Number an event. With `stored` its payload goes into the log; else a table has it."""
        self.seq += 1
        fields = payload.decode() if stored else None
        self.run("add_event", self.seq, type_, op, session_id, entity_id, fields, self.now)
        self.events.append(Event(self.seq, type_, op, session_id, entity_id, payload))


Unit = Callable[[Tx], object]


@dataclass(slots=True)
class Job:
    """A unit on its way through the database, and who wants to know how it went."""

    unit: Unit
    settle: "Callable[[Job], None]"  # Called on the event loop, in commit order.
    result: object = None
    error: Exception | None = None
    events: tuple[Event, ...] = ()


class Database(Protocol):
    """Runs jobs in submission order, in groups; reads beside them."""

    def submit(self, job: Job) -> None:
        """Queue a job; raises `StoreBusy` if too many wait."""
        ...

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run `query` in one read transaction over what is committed."""
        ...

    async def close(self) -> None:
        """Commit what is queued, then let go of the file."""
        ...


def run_group(connection: sqlite3.Connection, jobs: list[Job], seq: int, now: int) -> int:
    """Commit `jobs` in one transaction; return the last event number. Each job knows its fate.

    A job that fails before it wrote anything fails alone. One that fails after writing spoils
    the transaction: it is rolled back and every job is repeated in a transaction of its own, so
    nobody suffers for a neighbour.
    """
    try:
        return _run_together(connection, jobs, seq, now)
    except _Spoilt:
        if len(jobs) > 1:
            for job in jobs:
                job.error = None
                seq = run_group(connection, [job], seq, now)
    except sqlite3.Error as exc:
        log.error("commit failed: %s", exc)
        for job in jobs:
            job.result, job.events, job.error = None, (), StoreBusy(str(exc))
    return seq


class _Spoilt(Exception):
    """A job failed after it had written."""


def _run_together(connection: sqlite3.Connection, jobs: list[Job], seq: int, now: int) -> int:
    connection.execute("BEGIN IMMEDIATE")
    try:
        tx = Tx(connection, now, seq)
        for job in jobs:
            _run_job(job, tx)
        connection.execute("COMMIT")
        return tx.seq
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _run_job(job: Job, tx: Tx) -> None:
    changes, before, tx.events = tx.connection.total_changes, tx.seq, []
    try:
        job.result = job.unit(tx)
    except sqlite3.OperationalError:
        raise  # Disk full, I/O error: the file's trouble, not the unit's.
    except Exception as exc:  # boundary: a unit's failure belongs to whoever submitted it
        job.error, job.events, tx.seq = exc, (), before
        if tx.connection.total_changes != changes:
            raise _Spoilt from exc
    else:
        job.events = tuple(tx.events)


def settle_group(jobs: list[Job]) -> None:
    for job in jobs:
        job.settle(job)


def last_seq(connection: sqlite3.Connection) -> int:
    """The last number ever given out, also if its event was trimmed."""
    last: int = connection.execute(QUERIES["last_seq"]).fetchone()[0]
    return max(last, int(find_meta(connection, "trimmed_to") or 0))


def find_meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute(QUERIES["get_meta"], (key,)).fetchone()
    return None if row is None else str(row[0])

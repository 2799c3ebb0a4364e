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

from msgspec import Struct

from culm.errors import StoreBusy, StoreDamaged
from culm.store.sql import QUERIES

T = TypeVar("T")
log = logging.getLogger(__name__)

Op = Literal["created", "updated", "deleted"]
Connection = sqlite3.Connection  # What a query is a function of.


class StoredEvent(Struct, frozen=True):  # Not a dataclass: one is made for every durable change.
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
    events: list[StoredEvent] = field(default_factory=list[StoredEvent])
    # Rows of the log, which the group inserts together at its end.
    rows: list[tuple[int, str, str, str, str, str | None, int]] = field(
        default_factory=list[tuple[int, str, str, str, str, str | None, int]]
    )

    def run(self, query: str, *values: str | float | None) -> sqlite3.Cursor:
        return self.connection.execute(QUERIES[query], values)

    def publish_deleted(
        self, type_: str, *, session_id: str, entity_id: str, payload: bytes
    ) -> None:
        """Tell that an entity was deleted; no table will have its body."""
        self.publish(
            type_,
            "deleted",
            session_id=session_id,
            entity_id=entity_id,
            payload=payload,
            stored=True,
        )

    def publish(
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
        self.rows.append((self.seq, type_, op, session_id, entity_id, fields, self.now))
        self.events.append(StoredEvent(self.seq, type_, op, session_id, entity_id, payload))


Unit = Callable[[Tx], object]


def together(*units: Unit | None) -> Callable[[Tx], None]:
    """One unit of several: all of them happen, in this order, or none."""

    def unit(tx: Tx) -> None:
        for one in units:
            if one is not None:
                one(tx)

    return unit


@dataclass(slots=True)
class WriteJob:
    """A unit on its way through the database, and who wants to know how it went."""

    unit: Unit
    finish: "Callable[[WriteJob], None]"  # Called on the event loop, in commit order.
    result: object = None
    error: Exception | None = None
    events: tuple[StoredEvent, ...] = ()
    wrote: bool = False  # Whether it changed anything: only then has it shown that one can.

    def fail(self, error: Exception) -> None:
        """Whatever it had done so far, nothing of it is kept."""
        self.result, self.events, self.error = None, (), error


class Database(Protocol):
    """Runs jobs in submission order, in groups; reads beside them."""

    def submit(self, job: WriteJob) -> None:
        """Queue a job; raises `StoreBusy` if too many wait."""
        ...

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """Run `query` in one read transaction over what is committed."""
        ...

    async def close(self) -> None:
        """Commit what is queued, then let go of the file."""
        ...


def run_group(connection: sqlite3.Connection, jobs: list[WriteJob], now: int) -> None:
    """Commit `jobs` in one transaction; each job knows its fate afterwards.

    A job that fails before it wrote anything fails alone. One that fails after writing spoils
    the transaction: it is rolled back and every job is repeated in a transaction of its own, so
    nobody suffers for a neighbour.
    """
    try:
        _run_together(connection, jobs, now)
    except _Spoilt:
        if len(jobs) > 1:
            for job in jobs:
                job.error = None
                run_group(connection, [job], now)
    except sqlite3.Error as exc:
        log.error("commit failed: %s", exc)
        for job in jobs:
            job.fail(store_error(exc))


class _Spoilt(Exception):
    """A job failed after it had written."""


def _run_together(connection: sqlite3.Connection, jobs: list[WriteJob], now: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read here, under the write lock: without our own lock another process may write too.
        tx = Tx(connection, now, last_seq(connection))
        for job in jobs:
            _run_job(job, tx)
        _add_events(connection, jobs, tx)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _add_events(connection: sqlite3.Connection, jobs: list[WriteJob], tx: Tx) -> None:
    try:
        connection.executemany(QUERIES["add_event"], tx.rows)
    except Exception as exc:  # boundary: which job brought the row is found by trying each alone
        if _is_of_the_file(exc):
            raise
        for job in jobs:
            job.fail(exc)
        raise _Spoilt from exc


def _is_of_the_file(exc: Exception) -> bool:
    """Disk full, I/O error, damage; a violated constraint is the unit's."""
    return isinstance(exc, sqlite3.Error) and not isinstance(exc, sqlite3.IntegrityError)


def store_error(exc: sqlite3.Error) -> StoreBusy:
    """What whoever asked is told; damage is told apart, because it does not pass."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(str(exc))
    return StoreBusy(str(exc))


def _run_job(job: WriteJob, tx: Tx) -> None:
    changes, before, tx.events = tx.connection.total_changes, tx.seq, []
    rows = len(tx.rows)
    try:
        job.result = job.unit(tx)
    except Exception as exc:  # boundary: a unit's failure belongs to whoever submitted it
        if _is_of_the_file(exc):
            raise
        job.fail(exc)
        tx.seq = before
        del tx.rows[rows:]
        if tx.connection.total_changes != changes:
            raise _Spoilt from exc
    else:
        job.events = tuple(tx.events)
        job.wrote = bool(job.events) or tx.connection.total_changes != changes


def finish_group(jobs: list[WriteJob]) -> None:
    for job in jobs:
        try:
            job.finish(job)
        except Exception:  # boundary: one listener's bug must not leave the others waiting
            log.exception("telling of a commit failed")


def last_seq(connection: sqlite3.Connection) -> int:
    """The last number ever given out, also if its event was trimmed."""
    last: int = connection.execute(QUERIES["last_seq"]).fetchone()[0]
    return last


def find_meta(connection: sqlite3.Connection, key: str) -> str | None:
    row = connection.execute(QUERIES["get_meta"], (key,)).fetchone()
    return None if row is None else str(row[0])

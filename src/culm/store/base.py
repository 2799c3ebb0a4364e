"""The seam below the store: a database that runs units of work in transactions, and queries.

A unit is a plain function of a `Tx`. It may run twice, because the jobs of a failed group are
repeated one by one, so it must change nothing but the database. The events that it publishes are
numbered in the same transaction.
"""

import logging
import sqlite3
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, Literal, ParamSpec, Protocol, TypeVar

from msgspec import Struct, field

from culm.errors import StoreBusy, StoreDamaged
from culm.store.sql import QUERIES

P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C")
S = TypeVar("S", bound=Struct)
log = logging.getLogger(__name__)

Op = Literal["created", "updated", "deleted"]


class Connection(sqlite3.Connection):
    """A connection that runs the named queries of `store/sql`; the argument of every query."""

    def run(self, query: str, *values: str | float | None) -> sqlite3.Cursor:
        return self.execute(QUERIES[query], values)


ERASE_DUE = "erase_due"  # A key of `meta`: deleted text may still be in the files.


class StoredEvent(Struct, frozen=True):  # Faster than a dataclass; every change creates one.
    """A durable event, numbered in the transaction of its change."""

    seq: int
    type: str
    op: Op
    session_id: str
    entity_id: str
    payload: bytes  # JSON


class Tx(Struct):
    """One open transaction, as used by a unit of work."""

    connection: Connection
    now: int  # Unix seconds, one value for the whole unit.
    seq: int  # The last event number in use.
    events: list[StoredEvent] = field(default_factory=list[StoredEvent])
    erases: bool = False  # Deleted text must not stay in the files.
    # Rows of the event log, inserted together at the end of the group.
    rows: list[tuple[int, str, str, str, str, str | None, int]] = field(
        default_factory=list[tuple[int, str, str, str, str, str | None, int]]
    )

    def run(self, query: str, *values: str | float | None) -> sqlite3.Cursor:
        return self.connection.execute(QUERIES[query], values)

    def publish(
        self,
        type_: str,
        op: Op,
        session_id: str,
        entity_id: str,
        payload: bytes,
        *,
        in_table: bool = False,
        logged: bytes | None = None,
    ) -> None:
        """Number an event. The log stores its payload, unless a table has it.

        If a table has a part of the payload, `logged` is the rest.
        """
        self.seq += 1
        fields = None if in_table else (logged or payload).decode()
        self.rows.append((self.seq, type_, op, session_id, entity_id, fields, self.now))
        self.events.append(StoredEvent(self.seq, type_, op, session_id, entity_id, payload))

    def add_rows(self) -> None:
        """Insert the rows of the event log. Before the end of the group only to change them."""
        self.connection.executemany(QUERIES["add_event"], self.rows)
        self.rows.clear()


Unit = Callable[[Tx], object]


def deferred(function: Callable[Concatenate[C, P], T]) -> Callable[P, Callable[[C], T]]:
    """Make a unit (of a `Tx`) or a query (of a `Connection`) of a function.

    A call with its other arguments returns a function of the first, for `write` or `read`.
    """

    @wraps(function)
    def bind(*args: P.args, **kwargs: P.kwargs) -> Callable[[C], T]:
        return lambda first: function(first, *args, **kwargs)

    return bind


@deferred
def together(tx: Tx, *units: Unit | None) -> None:
    """Combine units into one: all of them run, in this order, or none."""
    for unit in units:
        if unit is not None:
            unit(tx)


class WriteJob(Struct):
    """A unit in the queue of the database, with its result and a callback."""

    unit: Unit
    finish: "Callable[[WriteJob], None]"  # Called on the event loop, in commit order.
    result: object = None
    error: Exception | None = None
    events: tuple[StoredEvent, ...] = ()
    wrote: bool = False  # It changed something, which proves that the file can be written.

    def fail(self, error: Exception) -> None:
        """Set the error and discard the result."""
        self.result, self.events, self.error = None, (), error


class Database(Protocol):
    """A database that runs jobs in groups, in submission order, and queries in parallel."""

    def submit(self, job: WriteJob) -> None:
        """Queue a job; raises `StoreBusy` if too many wait."""
        ...

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` in one read transaction over the committed state."""
        ...

    async def close(self) -> None:
        """Commit the queued jobs, then close the file."""
        ...


def run_group(connection: Connection, jobs: list[WriteJob], now: int) -> bool:
    """Commit `jobs` in one transaction and set the result or the error of each.

    Returns True if text was deleted, whose traces should be erased from the files.

    A job that fails before it has written anything fails alone. After a failure of one that has
    written, the transaction is rolled back and every job is repeated in a transaction of its own,
    so that no job fails because of another.
    """
    try:
        return _run_together(connection, jobs, now)
    except _Spoilt:
        if len(jobs) == 1:
            return False
        erases = False
        for job in jobs:
            job.error = None
            erases |= run_group(connection, [job], now)
        return erases
    except sqlite3.Error as exc:
        log.error("commit failed: %s", exc)
        for job in jobs:
            job.fail(store_error(exc))
        return False


class _Spoilt(Exception):
    """A job failed after it had written, so the transaction must be rolled back."""


def _run_together(connection: Connection, jobs: list[WriteJob], now: int) -> bool:
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Read under the write lock: without our own lock another process may also write.
        tx = Tx(connection, now, last_seq(connection))
        for job in jobs:
            _run_job(job, tx)
        _add_events(jobs, tx)
        if tx.erases:
            connection.run("set_meta", ERASE_DUE, "1")
        connection.execute("COMMIT")
        return tx.erases
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _add_events(jobs: list[WriteJob], tx: Tx) -> None:
    try:
        tx.add_rows()
    except Exception as exc:  # boundary: running each job alone finds the one with the bad row
        if _is_file_error(exc):
            raise
        for job in jobs:
            job.fail(exc)
        raise _Spoilt from exc


def _is_file_error(exc: Exception) -> bool:
    """True for a full disk, an I/O error or damage, and not for a violated constraint."""
    return isinstance(exc, sqlite3.Error) and not isinstance(exc, sqlite3.IntegrityError)


def store_error(exc: sqlite3.Error) -> StoreBusy:
    """The error for callers. Damage has a class of its own, because it is not temporary."""
    code = getattr(exc, "sqlite_errorcode", 0) & 0xFF
    if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return StoreDamaged(str(exc))
    return StoreBusy(str(exc))


def _run_job(job: WriteJob, tx: Tx) -> None:
    changes, before, tx.events = tx.connection.total_changes, tx.seq, []
    rows = len(tx.rows)
    try:
        job.result = job.unit(tx)
    except Exception as exc:  # boundary: the failure of a unit belongs to its submitter
        if _is_file_error(exc):
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
            log.exception("a commit callback failed")


def read_row(row: sqlite3.Row, kind: type[S], **others: object) -> S:
    """A struct of the columns with the names of its fields, and of `others` for the rest."""
    for name in kind.__struct_fields__:
        if name not in others:
            others[name] = row[name]
    return kind(**others)


def last_seq(connection: Connection) -> int:
    """The last event number ever used, even if its event has been trimmed."""
    last: int = connection.run("last_seq").fetchone()[0]
    return last


def find_meta(connection: Connection, key: str) -> str | None:
    row = connection.run("get_meta", key).fetchone()
    return None if row is None else str(row[0])

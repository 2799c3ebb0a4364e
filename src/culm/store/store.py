"""The store of one workspace: units are committed, then their events are published.

Owns the database, its epoch, its health and its event log, which is replayed with current payloads
and trimmed. The other modules of this package define the units for entities.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from msgspec import Struct

from culm.clock import Clock
from culm.errors import StoreBusy, StoreClosed, StoreDamaged
from culm.ids import Epoch, Ids
from culm.store.base import (
    Connection,
    Database,
    Op,
    StoredEvent,
    Tx,
    WriteJob,
    deferred,
    find_meta,
    last_seq,
)
from culm.store.files import prepare_file
from culm.store.memory import MemoryFile, open_memory_database
from culm.store.messages import find_message
from culm.store.sessions import find_file, find_session
from culm.store.text_tail import NoSync, TextTail, open_text_tail
from culm.store.writer import open_file_database
from culm.wire.codec import decode, encode
from culm.wire.messages import Part, full_text
from culm.wire.runs import RunComplete
from culm.wire.workspaces import StoreHealth

T = TypeVar("T")

MARK_TIMEOUT_S = 5.0
TRIAL_BYTES = 64 << 10  # More than a page, so that a full file has to grow.
PAGE_BYTES = 1 << 20  # A page of replay ends here even if it has few events.
TRIM_MAX = 10_000  # Rows that one trim may delete, so that no commit waits long for it.

Publish = Callable[[tuple[StoredEvent, ...]], None]


class Store:
    """A store, created by `open_store` or `open_memory_store`."""

    def __init__(
        self, database: Database, epoch: Epoch, seq: int, health: StoreHealth, tail: TextTail
    ) -> None:
        self.epoch = epoch
        self.tail = tail
        self.seq = seq  # The last published event.
        self.health = health
        self.damaged = False  # Damage was found; the next open checks the file's integrity.
        self._initial_health = health  # Restored after a failure, so that "replaced" is not lost.
        self.publish: Publish = _publish_nothing
        self.is_failing = False  # Nothing can be committed.
        self.on_health: Callable[[StoreHealth], None] = _ignore_health
        self._database = database
        self._loop = asyncio.get_running_loop()
        self._patient: list[Callable[[], None]] = []  # Submissions that wait for the next one.
        self._patience: asyncio.Handle | None = None

    def write(
        self,
        unit: Callable[[Tx], T],
        on_commit: Callable[[T], None] | None = None,
        on_fail: Callable[[Exception], None] | None = None,
        *,
        patience_s: float = 0.0,
    ) -> asyncio.Future[T]:
        """Run `unit` in the next group commit; the future gets its result once that is durable.

        After the commit, in one step without awaits: the unit's events are queued for publishing,
        `on_commit` runs, the future is done. The events are sent after that step, so a client that
        receives one finds the state that `on_commit` made. The future need not be awaited, and
        cancelling a wait does not undo the write. A failure (`StoreBusy`, or an exception of the
        unit) is passed to `on_fail` and to the future.

        With `patience_s` the unit waits so long for the next one, whose commit it then shares.
        """
        future: asyncio.Future[T] = self._loop.create_future()

        def fail(error: Exception) -> None:
            if on_fail is not None:
                on_fail(error)
            if not future.done():
                future.set_exception(error)
                future.exception()  # Mark it as retrieved: callers need not await the future.

        def finish(job: WriteJob) -> None:
            if job.error is not None:
                self.record_failure(job.error)
                fail(job.error)
                return
            if self.health.state == "failing" and job.wrote and not self.damaged:
                self.is_failing = False
                self._set_health(self._initial_health)
            result = cast("T", job.result)  # The result of `unit`; `WriteJob` has no type for it.
            if job.events:
                self.seq = job.events[-1].seq
                self.publish(job.events)
            if on_commit is not None:
                on_commit(result)
            if not future.done():
                future.set_result(result)

        def submit() -> None:
            try:
                self._database.submit(WriteJob(unit, finish))
            except StoreBusy as exc:
                # Overloaded or closed, which does not affect the health of the file.
                fail(exc)

        if patience_s:
            self._patient.append(submit)
            if self._patience is None:
                self._patience = self._loop.call_later(patience_s, self.end_patience)
        else:
            self.end_patience()
            submit()
        return future

    def end_patience(self) -> None:
        """Submit the units that wait for another one."""
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
            waiting, self._patient = self._patient, []
            for submit in waiting:
                submit()

    def probe_write(self) -> None:
        """Write and delete a row that needs space. If that works, the health is "ok" again."""

        def unit(tx: Tx) -> None:
            tx.run("set_meta", "trial", "x" * TRIAL_BYTES)
            tx.run("delete_meta", "trial")

        self.write(unit)

    def append(
        self,
        type_: str,
        op: Op,
        *,
        session_id: str = "",
        entity_id: str = "",
        payload: bytes,
        on_fail: Callable[[Exception], None] | None = None,
    ) -> asyncio.Future[None]:
        """Store and publish one event whose payload is in no table."""
        return self.write(
            lambda tx: tx.publish(type_, op, session_id, entity_id, payload), on_fail=on_fail
        )

    async def read(self, query: Callable[[Connection], T]) -> T:
        """Run `query` in one read transaction, off the event loop."""
        try:
            return await self._database.read(query)
        except StoreDamaged as exc:
            self.record_failure(exc)
            raise

    async def read_published(self, query: Callable[[Connection], T]) -> tuple[T, int]:
        """Run `query` and return its result with the seq, after all events up to it are published.

        Otherwise a reader could see a change between its commit and the publishing of its event,
        and then apply older events on top of it.
        """
        result, seq = await self.read(lambda c: (query(c), last_seq(c)))
        if self.seq < seq:
            await self.write(lambda tx: None)  # Writes finish in order, so the events are out.
        return result, seq

    def record_failure(self, error: Exception) -> None:
        """Report the health that an error of the database shows."""
        self.damaged = self.damaged or isinstance(error, StoreDamaged)
        if isinstance(error, StoreClosed) or self.is_failing:
            return
        if isinstance(error, StoreBusy):
            self.is_failing = True
            self._set_health(StoreHealth("failing", error.message))

    def record_tail_failure(self, error: OSError) -> None:
        """Report that text cannot be recorded; it is stored by commits instead, if those work."""
        if self.health.state != "failing":
            self._set_health(StoreHealth("failing", error.strerror or str(error)))

    def _set_health(self, health: StoreHealth) -> None:
        self.health = health
        self.on_health(health)


def _publish_nothing(events: tuple[StoredEvent, ...]) -> None:
    pass


def _ignore_health(health: StoreHealth) -> None:
    pass


@asynccontextmanager
async def open_store(path: Path, clock: Clock, ids: Ids) -> AsyncGenerator[Store]:
    """Open or create the database at `path`; raises `SchemaTooNew`.

    After an unclean end, its integrity is checked. A damaged file is moved aside, never deleted.
    """
    loop = asyncio.get_running_loop()
    health = await loop.run_in_executor(None, prepare_file, path, ids.epoch(), int(clock.now_s()))

    async with (
        open_file_database(path, clock) as database,
        _open(database, health, partial(open_text_tail, path)) as store,
    ):
        yield store


@asynccontextmanager
async def open_memory_store(file: MemoryFile, clock: Clock, ids: Ids) -> AsyncGenerator[Store]:
    if find_meta(file.connection, "epoch") is None:
        file.connection.run("set_meta", "epoch", ids.epoch())
    async with (
        open_memory_database(file, clock) as database,
        _open(database, StoreHealth("ok"), partial(TextTail, file.tail_files, NoSync())) as store,
    ):
        yield store


@asynccontextmanager
async def _open(
    database: Database, health: StoreHealth, open_tail: Callable[[Epoch], TextTail]
) -> AsyncGenerator[Store]:
    epoch, seq = await database.read(lambda c: (find_meta(c, "epoch"), last_seq(c)))
    assert epoch is not None, "a prepared database has an epoch"
    tail = open_tail(Epoch(epoch))
    try:
        store = Store(database, Epoch(epoch), seq, health, tail)
        await _mark(store, "0")
        try:
            yield store
        finally:
            store.end_patience()
        # Not in a `finally`: after an exception in the block the end is not clean.
        if not store.damaged:
            await _mark(store, "1")
    finally:
        await tail.close()


async def _mark(store: Store, clean: str) -> None:
    async with asyncio.timeout(MARK_TIMEOUT_S):
        await store.write(lambda tx: tx.run("set_meta", "clean", clean))


# --- the event log


class ReplayedEvents(NamedTuple):
    """One page of events after a cursor."""

    events: list[StoredEvent]
    upto: int  # The last number on this page, including skipped events.


# Events whose payloads are in tables.
_ENTITIES: dict[str, Callable[[str], Callable[[Connection], Struct | None]]] = {
    "message": find_message,
    "session": find_session,
    "file": find_file,
}


@deferred
def replay(
    connection: Connection,
    after: int,
    upto: int,
    limit: int,
    wanted: Callable[[str, str], bool],
) -> ReplayedEvents | None:
    """The events in (after, upto], or None if some of them are trimmed.

    Each has the current state of its entity as payload; an event of a deleted row is skipped, or
    has no text if it is logged with fields of its own.
    `wanted(type, session_id)` avoids reading payloads that a filter would drop.
    """
    if after < bounds(connection)[0]:
        return None
    rows = connection.run("events_after", after, upto, limit).fetchall()
    bodies: dict[tuple[str, str], bytes | None] = {}
    events: list[StoredEvent] = []
    size = 0
    for seq, type_, op, session_id, entity_id, fields in rows:
        if not wanted(type_, session_id):
            continue
        if size > PAGE_BYTES:
            return ReplayedEvents(events, seq - 1)
        if type_ == "run_complete":
            payload: bytes | None = _with_text(connection, fields)
        elif fields is not None:
            payload = fields.encode()
        else:
            key = (type_, entity_id)
            if key not in bodies:
                entity = _ENTITIES[type_](entity_id)(connection)
                bodies[key] = None if entity is None else encode(entity)
            payload = bodies[key]
        if payload is not None:
            events.append(StoredEvent(seq, type_, op, session_id, entity_id, payload))
            size += len(payload)
    return ReplayedEvents(events, rows[-1][0] if len(rows) == limit else upto)


def _with_text(connection: Connection, fields: str) -> bytes:
    """The end of a run with the text of its answer, unless that was deleted."""
    complete = decode(fields, RunComplete)
    answer = find_message(complete.message_id)(connection)
    if answer is not None:
        complete.text = full_text(decode(answer.parts, list[Part]))
    return encode(complete)


def bounds(connection: Connection) -> tuple[int, int]:
    """The seq up to which events are trimmed, and the last one in use."""
    return int(find_meta(connection, "trimmed_to") or 0), last_seq(connection)


@deferred
def trim(tx: Tx, keep_s: float, keep: int) -> int:
    """Delete events that are too old or too many; returns their number."""
    trimmed, last = bounds(tx.connection)
    fresh: int = tx.run("first_fresh_seq", tx.now - int(keep_s), last + 1).fetchone()[0]
    upto = min(max(fresh - 1, last - keep), trimmed + TRIM_MAX)
    if upto <= trimmed:
        return 0
    gone = tx.run("trim_events", upto).rowcount
    tx.run("set_meta", "trimmed_to", str(upto))
    return gone

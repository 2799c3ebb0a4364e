"""The database in a file: one writer thread that commits in groups, and a few reader threads.

Owns the connections and their threads. Independent of the tables.
"""

import asyncio
import contextlib
import logging
import shutil
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeVar

from msgspec import Struct

from culm.clock import Clock
from culm.errors import StoreBusy, StoreClosed, StoreDamaged
from culm.store.base import (
    ERASE_DUE,
    Connection,
    WriteJob,
    find_meta,
    finish_group,
    run_group,
    store_error,
)

T = TypeVar("T")
log = logging.getLogger(__name__)

JOBS_MAX = 20_000  # About a second of work; further jobs are refused.
GROUP_MAX = 1024  # Keeps one commit short, and so the wait of its first job.
READERS = 2  # For two cores. A long listing must not block a short one.
# A checkpoint inside a commit costs 7 ms at p99, so it normally runs in a reader thread.
CHECKPOINT_BYTES = 4 << 20
# If the log keeps growing nevertheless, the writer stops for a checkpoint.
WAL_BYTES_MAX = 64 << 20
IDLE_S = 0.5  # A writer without work for this long is idle.
# After a deletion the file is rewritten, at some 5 ms per MB, while nothing is written for ...
ERASE_IDLE_S = 0.2
ERASE_WITHIN_S = 30.0  # ... or, with steady writes, after this time.
ERASE_REST = 10  # Until the next rewrite passes this multiple of the time that the last one took.
ERASE_RETRY_S_MAX = 1.0  # A reader of old pages or a full disk delays an erasure.
ERASE_AT_CLOSE_BYTES = 64 << 20  # A larger file is erased after the next start instead.
BUSY_S = 5.0  # A commit waits for another process this long.
CLOSE_TIMEOUT_S = 5.0


_PRAGMAS = (
    "journal_mode = WAL",
    "synchronous = FULL",
    "foreign_keys = ON",
    "secure_delete = ON",  # Deleted rows are overwritten.
    "wal_autocheckpoint = 0",
    # After a reset the log is truncated, so that its size shows the need for a checkpoint.
    f"journal_size_limit = {CHECKPOINT_BYTES // 4}",
)


def connect(path: Path) -> Connection:
    # Each connection is used by one thread at a time; the readers share a pool.
    connection = sqlite3.connect(
        path, BUSY_S, isolation_level=None, check_same_thread=False, factory=Connection
    )
    connection.row_factory = sqlite3.Row
    try:
        for pragma in _PRAGMAS:
            connection.execute(f"PRAGMA {pragma}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


class FileDatabase:
    """A database, created by `open_file_database`."""

    def __init__(self, path: Path, clock: Clock, writer: Connection) -> None:
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._inode = path.stat().st_ino
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._jobs: SimpleQueue[WriteJob | None] = SimpleQueue()
        self._closing = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="culm-read")
        self._idle_readers: deque[Connection] = deque()
        self._wal_grew = False
        self._checkpointing = False
        self._checkpoint_at = CHECKPOINT_BYTES
        self._erasure: _Erasure | None = None
        self._rested_s = 0.0  # Not before this time is the file rewritten again.
        self._writer = writer
        self._written = asyncio.Event()
        self._thread = threading.Thread(target=self._write, name="culm-write", daemon=True)
        self._thread.start()

    def submit(self, job: WriteJob) -> None:
        if self._closing:
            raise StoreClosed
        if self._jobs.qsize() >= JOBS_MAX:
            raise StoreBusy(f"{JOBS_MAX} writes are waiting")
        self._jobs.put(job)

    async def read(self, query: Callable[[Connection], T]) -> T:
        if self._closing:
            raise StoreClosed
        try:
            return await self._loop.run_in_executor(self._readers, self._read, query)
        except sqlite3.Error as exc:
            raise store_error(exc) from exc
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closing and task is not None and not task.cancelling():
                raise StoreClosed from None  # The pool cancelled the read, not our caller.
            raise

    async def close(self) -> None:
        self._closing = True
        self._jobs.put(None)
        self._readers.shutdown(wait=False, cancel_futures=True)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._written.wait()
        finally:
            while self._idle_readers:
                self._idle_readers.popleft().close()

    def _end(self) -> None:
        """Fail the remaining jobs after the end of the writer thread."""
        while not self._jobs.empty():
            if (job := self._jobs.get()) is not None:
                job.fail(StoreClosed())
                finish_group([job])
        self._written.set()

    # --- on the reader threads

    def _read(self, query: Callable[[Connection], T]) -> T:
        try:
            connection = self._idle_readers.pop()
        except IndexError:
            connection = connect(self._path)
        try:
            connection.execute("BEGIN")
            return query(connection)
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if self._closing:
                connection.close()
            else:
                self._idle_readers.append(connection)

    def _checkpoint(self) -> None:
        try:
            with contextlib.closing(connect(self._path)) as connection:
                connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        except sqlite3.Error as exc:
            log.error("checkpoint of %s failed: %s", self._path, exc)
        finally:
            self._checkpointing = False

    # --- on the writer thread

    def _write(self) -> None:
        group: list[WriteJob] = []
        try:
            if find_meta(self._writer, ERASE_DUE) == "1":
                self._erasure = self._new_erasure()
            while group := self._take():
                if run_group(self._writer, group, int(self._clock.now_s())):
                    self._erasure = self._new_erasure()
                wal_bytes = self._wal_size()
                if wal_bytes is None:
                    # The commit went to files that are gone, so it is not durable.
                    for job in group:
                        job.fail(StoreDamaged("its files were removed or replaced"))
                self._loop.call_soon_threadsafe(finish_group, group)
                group = []
                self._wal_grew = True
                self._limit_wal(wal_bytes or 0)
                if self._erasure is not None and _monotonic_s() > self._erasure.latest_s:
                    self._erase(self._erasure)
            if self._erasure is not None and self._file_size() <= ERASE_AT_CLOSE_BYTES:
                self._erase(self._erasure)
        except Exception:  # boundary: nobody may wait for a write of a dead thread
            log.exception("the writer of %s ended", self._path)
            for job in group:
                job.fail(StoreBusy("the writer ended"))
            self._loop.call_soon_threadsafe(finish_group, group)
        finally:
            self._closing = True
            self._writer.close()
            self._loop.call_soon_threadsafe(self._end)

    def _take(self) -> list[WriteJob]:
        """Wait for jobs and take all of them; empty when closing and none are left."""
        group: list[WriteJob] = []
        job = self._next()
        while job is not None:
            group.append(job)
            if len(group) == GROUP_MAX or self._jobs.empty():
                return group
            job = self._jobs.get()
        if group:
            self._jobs.put(None)  # Closing: commit these jobs, then read the end marker again.
        return group

    def _next(self) -> WriteJob | None:
        """The next job. While idle, deleted text is erased and the log is checkpointed."""
        while self._wal_grew or self._erasure is not None:
            idle_s = IDLE_S
            if self._erasure is not None:
                idle_s = max(ERASE_IDLE_S, self._erasure.next_s - _monotonic_s())
            try:
                return self._jobs.get(timeout=idle_s)
            except Empty:
                if self._erasure is not None:
                    self._erase(self._erasure)
                else:
                    self._wal_grew = False
                    self._limit_wal(self._wal_size() or 0, idle=True)
        return self._jobs.get()

    def _wal_size(self) -> int | None:
        """The size of the log; None if the files at our path are no longer the ones in use."""
        try:
            is_ours = self._path.stat().st_ino == self._inode
            return self._wal.stat().st_size if is_ours else None
        except FileNotFoundError:
            return None
        except OSError as exc:
            log.error("cannot stat %s: %s", self._path, exc)
            return 0

    def _new_erasure(self) -> "_Erasure":
        """Erase what was deleted until now; an erasure that has begun begins again."""
        latest_s = _monotonic_s() + ERASE_WITHIN_S
        if self._erasure is not None:
            latest_s = min(latest_s, self._erasure.latest_s)
        return _Erasure(latest_s=max(latest_s, self._rested_s), next_s=self._rested_s)

    def _erase(self, erasure: "_Erasure") -> None:
        """Rewrite the file and empty the log, as far as that is possible now."""
        self._writer.execute("PRAGMA busy_timeout = 0")  # Other writes must not wait.
        try:
            if not erasure.is_rewritten:
                self._rewrite()
                erasure.is_rewritten = True
            # Also the log has old pages; it cannot be emptied while somebody reads them.
            busy: int = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
            if not busy:
                self._writer.run("set_meta", ERASE_DUE, "0")
                self._erasure = None
                return
        except (sqlite3.Error, OSError) as exc:
            if not erasure.has_failed:
                log.error("cannot erase deleted text from %s yet: %s", self._path, exc)
            erasure.has_failed = True
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        erasure.retry_s = min(2 * erasure.retry_s, ERASE_RETRY_S_MAX)
        erasure.next_s = max(_monotonic_s() + erasure.retry_s, self._rested_s)
        erasure.latest_s = max(erasure.latest_s, erasure.next_s)

    def _rewrite(self) -> None:
        """Copy the file without deleted text.

        Deleted rows are overwritten, but copies of them stay in unused space of pages from which
        SQLite has moved them before.
        """
        size, free = self._file_size(), free_bytes(self._path.parent)
        if free < 2 * size:
            raise sqlite3.OperationalError(f"{2 * size:,} bytes are needed and {free:,} are free")
        began_s = _monotonic_s()
        try:
            self._writer.execute("VACUUM")
        finally:
            now_s = _monotonic_s()
            self._rested_s = now_s + ERASE_REST * (now_s - began_s)

    def _file_size(self) -> int:
        pages: int = self._writer.execute("PRAGMA page_count").fetchone()[0]
        page_size: int = self._writer.execute("PRAGMA page_size").fetchone()[0]
        return pages * page_size

    def _limit_wal(self, size: int, *, idle: bool = False) -> None:
        if size > WAL_BYTES_MAX:
            try:
                self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
            except sqlite3.Error as exc:
                log.error("checkpoint of %s failed: %s", self._path, exc)
        elif size < CHECKPOINT_BYTES:
            self._checkpoint_at = CHECKPOINT_BYTES
        elif size > self._checkpoint_at or idle:
            # When idle, a checkpoint covers everything, and the next commit restarts the log.
            self._checkpoint_at = size + CHECKPOINT_BYTES
            if not self._checkpointing and not self._closing:
                self._checkpointing = True
                with contextlib.suppress(RuntimeError):  # The pool has just been closed.
                    self._readers.submit(self._checkpoint)


class _Erasure(Struct):
    """The removal of deleted text from the files."""

    latest_s: float  # From then on it does not wait for a pause between writes.
    next_s: float  # The time of the next attempt.
    retry_s: float = ERASE_IDLE_S
    is_rewritten: bool = False
    has_failed: bool = False


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(folder).free


def _monotonic_s() -> float:
    return time.monotonic()  # noqa: TID251 - a thread without a loop


@asynccontextmanager
async def open_file_database(path: Path, clock: Clock) -> AsyncGenerator[FileDatabase]:
    """Open a file that exists and has the current schema (`open_store` ensures both)."""
    writer = await asyncio.get_running_loop().run_in_executor(None, connect, path)
    database = FileDatabase(path, clock, writer)
    try:
        yield database
    finally:
        await database.close()

"""The database in a file: one writer thread that commits in groups, and a few reader threads.

Owns the connections and their threads. Independent of the tables.
"""

import asyncio
import contextlib
import logging
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

from culm.clock import Clock
from culm.errors import StoreBusy, StoreClosed, StoreDamaged
from culm.store.base import Connection, WriteJob, finish_group, run_group, store_error

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
# Between two steps of an erasure. It doubles while a reader of old pages holds the erasure up.
ERASE_S = 0.02
ERASE_S_MAX = 1.0
ERASE_PAGES = 256  # Returned to the file system in one step, which delays other writes by some ms.
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
        # Only for an empty file: in another one this statement writes.
        if not connection.execute("PRAGMA page_count").fetchone()[0]:
            connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
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
        self._erasing: tuple[Callable[[], bool], ...] = ()  # The steps that are left.
        self._erase_s = ERASE_S
        self._erase_at = 0.0
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
            while group := self._take():
                if run_group(self._writer, group, int(self._clock.now_s())):
                    # The log first: it has the old pages. Returning free pages fills it again.
                    self._erasing = (self._truncate_wal, self._return_pages, self._truncate_wal)
                wal_bytes = self._wal_size()
                if wal_bytes is None:
                    # The commit went to files that are gone, so it is not durable.
                    for job in group:
                        job.fail(StoreDamaged("its files were removed or replaced"))
                self._loop.call_soon_threadsafe(finish_group, group)
                group = []
                self._wal_grew = True
                self._limit_wal(wal_bytes or 0)
                self._erase()
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
        while self._wal_grew or self._erasing:
            try:
                return self._jobs.get(timeout=self._erase_s if self._erasing else IDLE_S)
            except Empty:
                if self._erasing:
                    self._erase()
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

    def _erase(self) -> None:
        """Take the next step of an erasure, if one is due."""
        now_s = time.monotonic()  # noqa: TID251 - a thread without a loop
        if not self._erasing or now_s < self._erase_at or self._closing:
            return
        try:
            is_done = self._erasing[0]()
        except sqlite3.Error as exc:
            log.error("cannot erase deleted rows of %s: %s", self._path, exc)
            is_done = True  # The next deletion or the next start does it.
        if is_done:
            self._erasing = self._erasing[1:]
            self._erase_s = ERASE_S
        self._erase_at = now_s + self._erase_s

    def _truncate_wal(self) -> bool:
        """Move the log into the file and empty it; False while somebody reads old pages."""
        self._writer.execute("PRAGMA busy_timeout = 0")
        try:
            busy: int = self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        finally:
            self._writer.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
        if busy:
            self._erase_s = min(2 * self._erase_s, ERASE_S_MAX)
        return not busy

    def _return_pages(self) -> bool:
        """Return some free pages to the file system; True when none can be returned."""
        before: int = self._writer.execute("PRAGMA freelist_count").fetchone()[0]
        # It returns a row without columns for each page, and `execute` takes only the first.
        self._writer.executescript(f"PRAGMA incremental_vacuum({ERASE_PAGES})")
        left: int = self._writer.execute("PRAGMA freelist_count").fetchone()[0]
        return left in (0, before)

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


@asynccontextmanager
async def open_file_database(path: Path, clock: Clock) -> AsyncGenerator[FileDatabase]:
    """Open a file that exists and has the current schema (`open_store` ensures both)."""
    writer = await asyncio.get_running_loop().run_in_executor(None, connect, path)
    database = FileDatabase(path, clock, writer)
    try:
        yield database
    finally:
        await database.close()

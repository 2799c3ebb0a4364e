"""The database in a file: one writer thread that commits in groups, a few readers beside it.

Owns the connections and their threads. Knows nothing of what is stored.
"""

import asyncio
import sqlite3
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from culm.clock import Clock
from culm.errors import StoreBusy
from culm.store.base import Job, last_seq, run_group, settle_group

T = TypeVar("T")

JOBS_MAX = 20_000  # About a second of work; whoever brings more is told to come back.
GROUP_MAX = 1024  # Keeps one commit, and so the wait of its first job, short.
READERS = 2  # Two cores; a long listing must not hold up a short one.
# A checkpoint inside a commit costs 7 ms at p99, so it runs beside the writer ...
CHECKPOINT_BYTES = 4 << 20
# ... unless the log never comes to rest; then the writer stops for one.
WAL_BYTES_MAX = 64 << 20
CLOSE_TIMEOUT_S = 5.0


def connect(path: Path) -> sqlite3.Connection:
    # Each connection is used by one thread at a time; the readers hand theirs on.
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=5.0)
    connection.row_factory = sqlite3.Row
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    # After a reset the file is cut, so that its size says how much awaits a checkpoint.
    connection.execute(f"PRAGMA journal_size_limit = {CHECKPOINT_BYTES // 4}")
    return connection


class FileDatabase:
    """Made by `open_file_database`."""

    def __init__(self, path: Path, clock: Clock, writer: sqlite3.Connection) -> None:
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._seq = last_seq(writer)
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._closing = False
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="culm-read")
        self._idle_readers: deque[sqlite3.Connection] = deque()
        self._checkpoint_at = CHECKPOINT_BYTES
        self._writer = writer
        self._written = asyncio.Event()
        self._thread = threading.Thread(target=self._write, name="culm-write", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self._closing:
            raise StoreBusy("it is closed")
        if self._jobs.qsize() >= JOBS_MAX:
            raise StoreBusy(f"{JOBS_MAX} writes are waiting")
        self._jobs.put(job)

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        if self._closing:
            raise StoreBusy("it is closed")
        return await self._loop.run_in_executor(self._readers, self._read, query)

    async def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._jobs.put(None)
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await self._written.wait()
            await self._loop.run_in_executor(None, self._readers.shutdown)
        while self._idle_readers:
            self._idle_readers.popleft().close()

    # --- on the reader threads

    def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
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
            self._idle_readers.append(connection)

    def _checkpoint(self) -> None:
        connection = connect(self._path)
        try:
            connection.execute("PRAGMA wal_checkpoint(PASSIVE)")
        finally:
            connection.close()

    # --- on the writer thread

    def _write(self) -> None:
        try:
            while group := self._take():
                now = int(self._clock.now_s())
                self._seq = run_group(self._writer, group, self._seq, now)
                self._loop.call_soon_threadsafe(settle_group, group)
                self._mind_the_wal()
        finally:
            self._writer.close()
            self._loop.call_soon_threadsafe(self._written.set)

    def _take(self) -> list[Job]:
        """Wait for work and take all of it; empty when closing and nothing is left."""
        group: list[Job] = []
        job = self._jobs.get()
        while job is not None:
            group.append(job)
            if len(group) == GROUP_MAX or self._jobs.empty():
                return group
            job = self._jobs.get()
        if group:
            self._jobs.put(None)  # Closing: commit these, then come back for the end.
        return group

    def _mind_the_wal(self) -> None:
        try:
            size = self._wal.stat().st_size
        except FileNotFoundError:
            return
        if size > WAL_BYTES_MAX:
            self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        elif size < CHECKPOINT_BYTES:
            self._checkpoint_at = CHECKPOINT_BYTES
        elif size > self._checkpoint_at and not self._closing:
            self._checkpoint_at = size + CHECKPOINT_BYTES
            self._readers.submit(self._checkpoint)


@asynccontextmanager
async def open_file_database(path: Path, clock: Clock) -> AsyncGenerator[FileDatabase]:
    """The file must exist with a current schema (`open_store` sees to that)."""
    writer = await asyncio.get_running_loop().run_in_executor(None, connect, path)
    database = FileDatabase(path, clock, writer)
    try:
        yield database
    finally:
        await database.close()

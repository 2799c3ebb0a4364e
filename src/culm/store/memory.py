"""The in-memory database: the same SQL on `:memory:`, with commits that take virtual time.

A simulated crash loses the jobs that are not committed, as the kill of a process would. The
`MemoryFile` survives and can be opened again.
"""

import asyncio
import sqlite3
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, closing
from functools import cache
from typing import TypeVar

from culm.clock import Clock
from culm.errors import StoreBusy, StoreClosed
from culm.store.base import Connection, WriteJob, finish_group, run_group
from culm.store.sql import migrate
from culm.store.text_tail import MemoryTailFile

T = TypeVar("T")

COMMIT_S = 0.0002  # The measured time of a single durable commit.


@cache  # Migrating takes milliseconds, and every run of a worker has its own database.
def empty_database() -> bytes:
    """An empty database file with the current schema."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection, ":memory:")
        return connection.serialize()


class MemoryFile:
    """The stored content, which survives a simulated crash."""

    def __init__(self) -> None:
        self.connection = sqlite3.connect(":memory:", isolation_level=None, factory=Connection)
        self.connection.deserialize(empty_database())
        self.connection.row_factory = sqlite3.Row
        self.connection.execute("PRAGMA foreign_keys = ON")
        self.database: MemoryDatabase | None = None  # The database that has it open.
        self.full = False  # While set, every commit fails as on a full disk.
        self.busy = False  # While set, every write is refused at once, as under overload.
        self.group_max = 1024  # The maximum number of writes in a commit.
        self.tail_files = MemoryTailFile(), MemoryTailFile()

    def crash(self) -> None:
        """Simulate the kill of the process that has it open."""
        if self.database is not None:
            self.database.crash()
        first, second = self.tail_files
        self.tail_files = first.survive(), second.survive()

    def close(self) -> None:
        self.connection.close()


class MemoryDatabase:
    """A database, created by `open_memory_database`."""

    def __init__(self, file: MemoryFile, clock: Clock) -> None:
        file.database = self
        self._file = file
        self._clock = clock
        self._jobs: deque[WriteJob] = deque()
        self._committed: deque[list[WriteJob]] = deque()  # Readers see these before their owners.
        self._commit_due = False
        self._closing = False
        self._idle = asyncio.Event()
        self._idle.set()

    def submit(self, job: WriteJob) -> None:
        if self._closing or self._file.busy:
            raise StoreClosed if self._closing else StoreBusy("too many writes are waiting")
        self._jobs.append(job)
        self._idle.clear()
        self._commit_soon()

    def _commit_soon(self) -> None:
        if self._jobs and not self._commit_due:
            self._commit_due = True
            self._clock.call_later(COMMIT_S, self._commit)

    async def read(self, query: Callable[[Connection], T]) -> T:
        if self._closing:
            raise StoreClosed
        await asyncio.sleep(0)  # A real read lets other tasks run.
        return query(self._file.connection)

    async def close(self) -> None:
        self._closing = True
        await self._idle.wait()

    def crash(self) -> None:
        """End without committing. Waiting callers never get a result."""
        self._closing = True
        self._jobs.clear()
        self._committed.clear()
        self._idle.set()

    def _commit(self) -> None:
        self._commit_due = False
        group = [self._jobs.popleft() for _ in range(min(len(self._jobs), self._file.group_max))]
        if group and self._file.full:
            for job in group:
                job.fail(StoreBusy("database or disk is full"))
        elif group:
            now = int(self._clock.now_s())
            run_group(self._file.connection, group, now)
        self._committed.append(group)
        asyncio.get_running_loop().call_soon(self._finish)  # As a writer thread would.
        self._commit_soon()

    def _finish(self) -> None:
        if self._committed:  # No crash meanwhile.
            finish_group(self._committed.popleft())
        if not self._jobs and not self._committed:
            self._idle.set()


@asynccontextmanager
async def open_memory_database(file: MemoryFile, clock: Clock) -> AsyncGenerator[MemoryDatabase]:
    database = MemoryDatabase(file, clock)
    try:
        yield database
    finally:
        await database.close()

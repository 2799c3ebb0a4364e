"""Durable appends through the store, compared with the same producers on bare SQLite."""

import asyncio
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from queue import SimpleQueue

import uvloop
from msgspec import Struct

from culm.clock import LoopClock
from culm.ids import Ids
from culm.store.store import open_store, replay

PRODUCERS = 20
PAYLOAD = b'{"text":"' + b"x" * 289 + b'"}'  # 300 bytes
SESSION = "01234567-0123-0123-0123-0123456789ab"
TIMEOUT_S = 60.0

_TABLE = """
CREATE TABLE events (
  seq INTEGER PRIMARY KEY, type TEXT NOT NULL, op TEXT NOT NULL, session_id TEXT NOT NULL,
  entity_id TEXT NOT NULL, fields TEXT, at INTEGER NOT NULL
)
"""
_INSERT = """
INSERT INTO events (seq, type, op, session_id, entity_id, fields, at) VALUES (?, ?, ?, ?, ?, ?, ?)
"""


class Appended(Struct):
    per_s: float
    wrong: int  # Rows missing or out of a producer's order, read back after closing.


async def _produce(count: int, append: Callable[[str], Awaitable[None]]) -> float:
    """Let each producer await every append; return appends per second."""

    async def producer(name: int) -> None:
        for n in range(count):
            await append(f"{name:04d}-{n:08d}")

    start_s = time.monotonic()
    async with asyncio.timeout(TIMEOUT_S), asyncio.TaskGroup() as tasks:
        for name in range(PRODUCERS):
            tasks.create_task(producer(name))
    return PRODUCERS * count / (time.monotonic() - start_s)


def count_wrong(entities: list[str], count: int) -> int:
    seen = [0] * PRODUCERS
    wrong = abs(len(entities) - PRODUCERS * count)
    for entity in entities:
        name, n = map(int, entity.split("-"))
        wrong += n != seen[name]
        seen[name] = n + 1
    return wrong


def through_store(file: Path, count: int) -> Appended:
    async def run() -> float:
        async with open_store(file, LoopClock(), Ids()) as store:

            def append(entity: str) -> Awaitable[None]:
                return store.append(
                    "session", "updated", session_id=SESSION, entity_id=entity, payload=PAYLOAD
                )

            return await _produce(count, append)

    async def read_back() -> list[str]:
        async with open_store(file, LoopClock(), Ids()) as store:
            page = await store.read(replay(0, store.seq, 1 << 30, lambda _type, _session: True))
            entities: list[str] = []
            while page is not None and page.events:
                entities += [e.entity_id for e in page.events if e.payload == PAYLOAD]
                after = page.upto
                query = replay(after, store.seq, 1 << 30, lambda _type, _session: True)
                page = await store.read(query)
            return entities

    per_s = uvloop.run(run())
    return Appended(per_s, count_wrong(uvloop.run(read_back()), count))


def through_sqlite(file: Path, count: int) -> Appended:
    per_s = uvloop.run(_run_raw(file, count))
    connection = sqlite3.connect(file)
    rows = connection.execute("SELECT entity_id, fields FROM events ORDER BY seq").fetchall()
    connection.close()
    return Appended(per_s, count_wrong([e for e, f in rows if f == PAYLOAD.decode()], count))


async def _run_raw(file: Path, count: int) -> float:
    """One writer thread: insert and commit all waiting rows, and resolve their futures at once."""
    loop = asyncio.get_running_loop()
    waiting: SimpleQueue[tuple[str, asyncio.Future[None]] | None] = SimpleQueue()

    def resolve(group: list[asyncio.Future[None]]) -> None:
        for future in group:
            future.set_result(None)

    def write() -> None:
        connection = sqlite3.connect(file, isolation_level=None)
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA wal_autocheckpoint = 0")
        connection.execute(_TABLE)
        seq = 0
        while (item := waiting.get()) is not None:
            group: list[asyncio.Future[None]] = []
            rows: list[tuple[object, ...]] = []
            while item is not None:
                entity, future = item
                seq += 1
                rows.append((seq, "session", "updated", SESSION, entity, PAYLOAD.decode(), 0))
                group.append(future)
                item = None if waiting.empty() else waiting.get()
            connection.execute("BEGIN IMMEDIATE")
            connection.executemany(_INSERT, rows)
            connection.execute("COMMIT")
            loop.call_soon_threadsafe(resolve, group)
        connection.close()

    def append(entity: str) -> Awaitable[None]:
        future: asyncio.Future[None] = loop.create_future()
        waiting.put((entity, future))
        return future

    thread = threading.Thread(target=write)
    thread.start()
    try:
        return await _produce(count, append)
    finally:
        waiting.put(None)
        await asyncio.to_thread(thread.join)

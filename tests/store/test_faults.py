"""Failures below the store: locks, removed files, two writers, lost chunks."""

import asyncio
import sqlite3
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.errors import StoreDamaged
from culm.ids import Ids
from culm.store.memory import MemoryFile
from culm.store.messages import (
    TextChunk,
    add_chunks,
    add_message,
    capture,
    close_open_messages,
    find_message,
)
from culm.store.sessions import add_session
from culm.store.store import open_memory_store, open_store, replay
from culm.wire.codec import decode, encode
from culm.wire.messages import Message, Text, TextPart
from tests.support import WAIT_S


async def test_locked_file_is_not_treated_as_damaged(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store:
        epoch = store.epoch
    holder = sqlite3.connect(path, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        async with open_store(path, LoopClock(), Ids()):
            pass
    holder.close()
    async with open_store(path, LoopClock(), Ids()) as store:
        assert (store.epoch, store.health.state) == (epoch, "ok")
    assert not list(tmp_path.glob("*damaged*"))


async def test_two_writers_of_one_file_number_their_events_consecutively(
    tmp_path: Path,
) -> None:
    path = tmp_path / "culm.db"
    async with (
        open_store(path, LoopClock(), Ids()) as one,
        open_store(path, LoopClock(), Ids()) as two,
        asyncio.timeout(WAIT_S),
    ):
        for store in (one, two, one, two):
            await store.append("run_changed", "updated", payload=b"1")
        assert (one.seq, two.seq) == (3, 4)


async def test_chunk_without_its_predecessor_leaves_the_message_readable() -> None:
    file, ids = MemoryFile(), Ids()
    session_id = ids.session()
    message = Message(ids.message(), "assistant", session_id, [TextPart(Text("known "))])
    async with open_memory_store(file, LoopClock(), ids) as store, asyncio.timeout(WAIT_S):
        await store.write(add_session(session_id, "one", sessions_max=10))
        await store.write(add_message(capture(message), is_open=True))
        await store.write(add_chunks([TextChunk(message.id, 0, 0, 100, "text", "adrift")]))
        raw = await store.read(find_message(message.id))
        assert decode(encode(raw), Message) == message
        assert await store.write(close_open_messages) == 1
    file.close()


async def test_failing_callback_does_not_block_other_writes() -> None:
    file = MemoryFile()
    async with open_memory_store(file, LoopClock(), Ids()) as store, asyncio.timeout(WAIT_S):

        def fail(_: None) -> None:
            raise RuntimeError("a bug of whoever listens")

        store.write(lambda tx: None, fail)
        await store.write(lambda tx: None)
    file.close()


@pytest.mark.parametrize("name", ["culm.db", "culm.db-wal"])
async def test_write_to_removed_files_fails(tmp_path: Path, name: str) -> None:
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store, asyncio.timeout(WAIT_S):
        await store.append("run_changed", "updated", payload=b"1")
        (tmp_path / name).unlink()
        for _ in range(2):
            with pytest.raises(StoreDamaged, match="removed"):
                await store.append("run_changed", "updated", payload=b"2")
        assert (store.seq, store.health.state) == (1, "failing")


async def test_unstorable_row_fails_alone_and_the_writer_continues(
    tmp_path: Path,
) -> None:
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store, asyncio.timeout(WAIT_S):
        good = store.append("run_changed", "updated", entity_id="1", payload=b"1")
        bad = store.append("run_changed", "updated", entity_id="\ud800", payload=b"2")
        also_good = store.append("run_changed", "updated", entity_id="3", payload=b"3")
        await asyncio.wait([good, bad, also_good])
        assert isinstance(bad.exception(), UnicodeEncodeError)
        assert (good.exception(), also_good.exception()) == (None, None)
        assert (store.seq, store.health.state) == (2, "ok")


async def test_damage_found_in_use_moves_the_file_aside_at_the_next_open(
    tmp_path: Path,
) -> None:
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store:
        for n in range(6000):
            store.append("run_changed", "updated", payload=b'"%d"' % n)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size * 3 // 4)
        file.write(b"\xff" * 40_000)
    async with open_store(
        path, LoopClock(), Ids()
    ) as store:  # Closed cleanly, so it is not checked.
        with pytest.raises(StoreDamaged):
            await store.read(replay(0, 6000, 7000, lambda type_, session_id: True))
        assert store.health.state == "failing"
    async with open_store(path, LoopClock(), Ids()) as store:
        assert store.health.state == "replaced"

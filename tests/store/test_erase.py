"""Deleted text does not stay in the files of a store."""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.ids import Ids, MessageId, RunId, SessionId
from culm.store import writer
from culm.store.files import open_reader
from culm.store.messages import (
    TextChunk,
    add_chunks,
    add_message,
    capture,
    delete_message,
    save_message,
)
from culm.store.sessions import add_file, add_session, delete_session
from culm.store.sql import MIGRATIONS
from culm.store.store import Store, bounds, open_store, replay
from culm.store.writer import connect
from culm.wire.codec import encode
from culm.wire.messages import Message, Text, TextPart
from culm.wire.runs import RunComplete
from tests.support import WAIT_S, contract

SECRET = "quokka"
KEPT = "wombat"


def _bytes(path: Path) -> bytes:
    return b"".join(file.read_bytes() for file in path.parent.iterdir())


async def _until_erased(path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while SECRET.encode() in _bytes(path):
            await asyncio.sleep(0.01)


async def _until_small(path: Path) -> None:
    async with asyncio.timeout(WAIT_S):
        while sum(file.stat().st_size for file in path.parent.iterdir()) > 1_000_000:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def _open(path: Path) -> AsyncGenerator[tuple[Store, Ids]]:
    ids = Ids()
    async with open_store(path, LoopClock(), ids) as store:
        yield store, ids


async def _session(store: Store, ids: Ids, title: str = "one") -> SessionId:
    session_id = ids.session()
    await store.write(add_session(session_id, title, sessions_max=100))
    return session_id


async def _message(store: Store, ids: Ids, session_id: SessionId, text: str) -> MessageId:
    message = Message(ids.message(), "user", session_id, [TextPart(Text(text))])
    await store.write(add_message(capture(message), is_open=False))
    return message.id


@contract("EXC-27")
@pytest.mark.parametrize("seed", range(5))
async def test_random_changes_leave_nothing_of_a_deleted_session(tmp_path: Path, seed: int) -> None:
    path, rng = tmp_path / "culm.db", random.Random(seed)
    async with _open(path) as (store, ids):
        doomed = await _session(store, ids, f"about {SECRET}")
        kept = await _session(store, ids, f"about {KEPT}")
        known: list[Message] = []

        def text(word: str) -> str:
            return f"{word} " * rng.choice((1, 30, 900, 8_000))

        async def add() -> None:
            message = Message(ids.message(), "user", doomed, [TextPart(Text(text(SECRET)))])
            known.append(message)
            await store.write(add_message(capture(message), is_open=False))

        async def change() -> None:
            if known:
                message = rng.choice(known)
                message.parts = [TextPart(Text(text(SECRET)))]
                message.rev += 1
                await store.write(save_message(capture(message), is_open=False))

        async def remove() -> None:
            if known:
                await store.write(delete_message(known.pop(rng.randrange(len(known))).id))

        async def store_file() -> None:
            await store.write(add_file(ids.file(), doomed, "/a", text(SECRET)))

        async def add_to_other() -> None:
            await _message(store, ids, kept, text(KEPT))

        steps: list[Callable[[], Awaitable[None]]] = [
            add, add, change, remove, store_file, add_to_other,
        ]  # fmt: skip
        for _ in range(60):
            await rng.choice(steps)()
        await add()
        assert SECRET.encode() in _bytes(path)
        await store.write(delete_session(doomed))
        await _until_erased(path)
        assert KEPT.encode() in _bytes(path)


@contract("EXC-27")
@pytest.mark.parametrize("seed", [12, 13, 16, 18])
async def test_nothing_stays_in_unused_space_of_pages(tmp_path: Path, seed: int) -> None:
    """SQLite moves rows between pages; the seeds leave copies of them."""
    path, rng = tmp_path / "culm.db", random.Random(seed)
    async with _open(path) as (store, ids):
        sessions = [await _session(store, ids) for _ in range(6)]
        growing: dict[int, tuple[Message, Text]] = {}
        for _ in range(800):
            number = rng.randrange(len(sessions))
            word = SECRET if number % 2 else KEPT
            if number not in growing:
                text = Text(word)
                message = Message(ids.message(), "assistant", sessions[number], [TextPart(text)])
                growing[number] = message, text
                await store.write(add_message(capture(message), is_open=True))
            elif rng.random() < 0.3:
                message, _ = growing.pop(number)
                message.rev += 1
                await store.write(save_message(capture(message), is_open=False))
            else:
                message, text = growing[number]
                more = f"{word} " * rng.choice((1, 5, 30, 200))
                chunk = TextChunk(message.id, message.rev, 0, len(text.text), "text", more)
                await store.write(add_chunks([chunk]))
                text.text += more
        for session_id in sessions[1::2]:
            await store.write(delete_session(session_id))
        await _until_erased(path)
        assert KEPT.encode() in _bytes(path)


async def test_deleted_message_is_erased(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with _open(path) as (store, ids):
        session_id = await _session(store, ids)
        message_id = await _message(store, ids, session_id, SECRET)
        await store.write(delete_message(message_id))
        await _until_erased(path)


async def test_erasure_waits_for_a_reader(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with _open(path) as (store, ids):
        session_id = await _session(store, ids)
        await _message(store, ids, session_id, SECRET)
        with open_reader(path) as reader:
            assert reader.execute("SELECT count(*) FROM messages").fetchone()[0] == 1
            await store.write(delete_session(session_id))
            # The store works meanwhile, and the reader still has its snapshot.
            await _session(store, ids, KEPT)
            await asyncio.sleep(0.2)
            assert reader.execute("SELECT count(*) FROM messages").fetchone()[0] == 1
            assert SECRET.encode() in _bytes(path)
        await _until_erased(path)


async def test_file_shrinks_after_a_deletion(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with _open(path) as (store, ids):
        session_id = await _session(store, ids)
        for _ in range(4):
            await _message(store, ids, session_id, SECRET * 200_000)
        await store.write(delete_session(session_id))
        await _until_erased(path)
        await _until_small(path)


def _old_file(path: Path, schema: int = 7) -> None:
    """Write a file of an earlier version, in which a session was deleted."""
    with closing(connect(path)) as connection:
        connection.execute("PRAGMA secure_delete = OFF")
        for script in MIGRATIONS[:schema]:
            connection.executescript(script)
        connection.execute(f"PRAGMA user_version = {schema}")
        add = "INSERT INTO sessions (id, title, created_at, updated_at) VALUES (?, ?, 5, 5)"
        connection.executemany(add, (("gone", SECRET), ("kept", KEPT)))
        for session_id in ("gone", "kept"):
            complete = RunComplete(
                SessionId(session_id), RunId("r"), text=SECRET, message_id=MessageId("gone")
            )
            connection.execute(
                "INSERT INTO events (type, op, session_id, entity_id, fields, at)"
                " VALUES ('run_complete', 'updated', ?, ?, ?, 5)",
                (session_id, session_id, encode(complete).decode()),
            )
        connection.execute("DELETE FROM sessions WHERE id = 'gone'")


async def test_file_of_an_earlier_version_is_rewritten_once(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    _old_file(path)
    assert SECRET.encode() in _bytes(path)
    async with _open(path) as (store, _):
        await _until_erased(path)
        assert KEPT.encode() in _bytes(path)
        after, upto = await store.read(bounds)
        page = await store.read(replay(after, upto, 10, lambda _type, _session: True))
        assert page is not None
        assert [event.entity_id for event in page.events] == ["gone", "kept"]


async def test_erasure_waits_for_free_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "culm.db"
    _old_file(path)
    free = {tmp_path: 1000}
    monkeypatch.setattr(writer, "free_bytes", free.get)
    async with _open(path) as (store, ids):
        async with asyncio.timeout(WAIT_S):
            while "1,000 are free" not in caplog.text:
                await asyncio.sleep(0.01)
        await _session(store, ids)  # It works meanwhile.
        assert SECRET.encode() in _bytes(path)
        free[tmp_path] = 1 << 30
        await _until_erased(path)
    assert caplog.text.count("cannot erase deleted text") == 1


async def test_erasure_continues_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "culm.db"
    with monkeypatch.context() as patch:
        patch.setattr(writer, "free_bytes", {tmp_path: 0}.get)
        async with _open(path) as (store, ids):
            session_id = await _session(store, ids)
            for _ in range(4):
                await _message(store, ids, session_id, SECRET * 200_000)
            await store.write(delete_session(session_id))
    assert path.stat().st_size > 1_000_000
    async with _open(path):
        await _until_small(path)
    assert SECRET.encode() not in _bytes(path)


async def test_text_is_erased_when_the_store_closes(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with _open(path) as (store, ids):
        session_id = await _session(store, ids)
        await _message(store, ids, session_id, SECRET * 200_000)
        await store.write(delete_session(session_id))
    assert path.stat().st_size < 1_000_000
    assert SECRET.encode() not in _bytes(path)


async def test_steady_writes_delay_an_erasure_only_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "ERASE_WITHIN_S", 0.3)
    path = tmp_path / "culm.db"
    async with _open(path) as (store, ids):
        session_id = await _session(store, ids)
        await _message(store, ids, session_id, SECRET * 200_000)

        async def write() -> None:
            while True:
                await store.write(lambda tx: tx.run("set_meta", "trial", "x"))

        async with asyncio.TaskGroup() as group:
            writing = group.create_task(write())
            await store.write(delete_session(session_id))
            await _until_small(path)
            writing.cancel()

"""The database file: refused or replaced files, and the stored form of messages."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from culm.clock import LoopClock
from culm.errors import SchemaTooNew
from culm.ids import Ids, MessageId
from culm.store import writer
from culm.store.messages import (
    TextChunk,
    add_chunks,
    add_message,
    all_messages,
    capture,
    close_open_messages,
    conversation,
    find_message,
    messages_of_session,
    user_messages,
    user_messages_of_session,
)
from culm.store.sessions import add_session
from culm.store.sql import MIGRATIONS
from culm.store.store import open_store
from culm.store.writer import connect
from culm.wire.codec import decode, encode
from culm.wire.messages import Finish, FinishPart, Message, Text, TextPart, ToolCall, ToolCallPart
from tests.support import WAIT_S, contract


async def test_newer_schema_is_refused_and_the_file_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    connection = connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    with pytest.raises(SchemaTooNew, match=r"schema 99, this version supports \d+"):
        async with open_store(path, LoopClock(), Ids()):
            pass
    connection = connect(path)
    assert connection.execute("PRAGMA user_version").fetchone()[0] == 99
    connection.close()


async def test_damaged_file_is_moved_aside_and_replaced_with_a_new_epoch(tmp_path: Path) -> None:
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store:
        epoch = store.epoch
    path.write_bytes(b"not a database, whatever it once was" * 200)
    async with open_store(path, LoopClock(), Ids()) as store:
        assert store.epoch != epoch
        assert store.health.state == "replaced"
        (aside,) = tmp_path.glob("culm.db.damaged-*")
        assert str(aside) in store.health.reason
        assert aside.read_bytes().startswith(b"not a database")


async def test_every_commit_reaches_the_disk_before_it_is_acknowledged(tmp_path: Path) -> None:
    connection = connect(tmp_path / "culm.db")
    pragmas = {
        name: connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("journal_mode", "synchronous", "wal_autocheckpoint", "foreign_keys")
    }
    connection.close()
    full = 2
    assert pragmas == {
        "journal_mode": "wal",
        "synchronous": full,
        "wal_autocheckpoint": 0,
        "foreign_keys": 1,
    }


async def test_write_ahead_log_is_checkpointed_between_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "IDLE_S", 0.01)
    path = tmp_path / "culm.db"
    async with open_store(path, LoopClock(), Ids()) as store, asyncio.timeout(30):
        payload = b'"' + b"x" * 8000 + b'"'
        for _ in range(40):
            await asyncio.wait(
                [store.append("run_changed", "updated", payload=payload) for _ in range(64)]
            )
        # 20 MB were written. Once the writer is idle, a checkpoint moves all of it out of the log,
        # and a later commit restarts the log.
        wal = path.with_name("culm.db-wal")
        while wal.stat().st_size > 2_000_000:
            await store.append("run_changed", "updated", payload=payload)
            await asyncio.sleep(0.05)
        assert path.stat().st_size > 20_000_000


async def test_large_part_is_stored_beside_its_row_and_read_back_complete(tmp_path: Path) -> None:
    ids = Ids()
    session_id = ids.session()
    large = TextPart(Text("wörd " * 10_000))
    message = Message(ids.message(), "user", session_id, [TextPart(Text("small")), large])
    async with open_store(tmp_path / "culm.db", LoopClock(), ids) as store:
        await store.write(add_session(session_id, "one", sessions_max=10))
        await store.write(add_message(capture(message), is_open=False))

        def sizes(connection: sqlite3.Connection) -> tuple[int, int]:
            row = connection.execute("SELECT length(parts), large FROM messages").fetchone()
            return row[0], row[1]

        size, count = await store.read(sizes)
        assert (size < 200, count) == (True, 1)
        (read,) = await store.read(messages_of_session(session_id))
        assert decode(encode(read), Message) == message


@contract("EXC-25")
async def test_messages_from_before_run_ids_have_no_run_id(tmp_path: Path) -> None:
    path, ids = tmp_path / "culm.db", Ids()
    session_id = ids.session()
    with closing(connect(path)) as connection:
        for script in MIGRATIONS[:6]:
            connection.executescript(script)
        connection.execute("PRAGMA user_version = 6")
        connection.execute(
            "INSERT INTO sessions (id, title, next_seq, message_count, created_at, updated_at)"
            " VALUES (?, 'one', 2, 1, 5, 5)",
            (session_id,),
        )
        connection.execute(
            "INSERT INTO messages (place, id, role, parts, created_at, updated_at)"
            " SELECT (no << 32) + 1, 'old', 'user', '[]', 5, 5 FROM sessions"
        )
    old = Message(MessageId("old"), "user", session_id, created_at=5, updated_at=5)
    new = Message(ids.message(), "user", session_id, created_at=6, updated_at=6, run_id="run_1")
    async with open_store(path, LoopClock(), ids) as store:
        await store.write(add_message(capture(new), is_open=False))
        for query, expected in (
            (messages_of_session(session_id), [old, new]),
            (user_messages_of_session(session_id), [new, old]),
            (user_messages, [new, old]),
            (all_messages(2), [old, new]),
        ):
            read = await store.read(query)
            assert [decode(encode(row), Message) for row in read] == expected
        shown = await store.read(conversation(session_id))
        assert shown is not None
        assert shown[1] == [old, new]


@contract("INV-64")
async def test_open_text_survives_in_chunks_and_is_closed_as_interrupted(tmp_path: Path) -> None:
    ids = Ids()
    session_id = ids.session()
    call = ToolCallPart(ToolCall("call_1", "bash"))
    message = Message(ids.message(), "assistant", session_id, [call], rev=3, run_id="run_1")
    async with (
        open_store(tmp_path / "culm.db", LoopClock(), ids) as store,
        asyncio.timeout(WAIT_S),
    ):
        await store.write(add_session(session_id, "one", sessions_max=10))
        await store.write(add_message(capture(message), is_open=True))
        chunks = [
            TextChunk(message.id, 3, 0, 0, "input", '{"a":'),
            TextChunk(message.id, 3, 1, 0, "text", "grü"),
            TextChunk(message.id, 3, 1, 3, "text", "ße"),
            TextChunk(message.id, 2, 1, 5, "text", "of an older rev"),
            TextChunk(ids.message(), 0, 0, 0, "text", "of a message that is gone"),
        ]
        await store.write(add_chunks(chunks))
        assert await store.write(close_open_messages) == 1
        raw = await store.read(find_message(message.id))
        closed = decode(encode(raw), Message)
        finish = closed.parts.pop()
        assert (closed.rev, closed.run_id) == (4, "run_1")
        assert closed.parts == [
            ToolCallPart(ToolCall("call_1", "bash", "{}", finished=True)),
            TextPart(Text("grüße")),
        ]
        assert isinstance(finish, FinishPart)
        assert finish.data == Finish(
            "error",
            finish.data.time,
            "Interrupted",
            "The server ended before this was finished.",
            "interrupted",
        )
        assert await store.write(close_open_messages) == 0

"""A damaged database is moved aside and named, and clients continue with a new one."""

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest

from culm.client.follower import open_mirror
from tests.live.harness import (
    PUBLISHER,
    RESUME_S,
    assert_same,
    caught_up,
    find_database,
    make_directory,
    open_client_of,
    open_process_server,
)
from tests.live.publisher import Order
from tests.support import WAIT_S, contract

PAGE = 4096
ORDER = Order(seed=5, sessions=3, messages=10, deletes=False, drip=True)


def damage(database: Path, *, where: str) -> bytes:
    """Checkpoint the log, overwrite pages, and return the new bytes of the file."""
    connection = sqlite3.connect(database)
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    data = bytearray(database.read_bytes())
    pages = len(data) // PAGE
    assert pages > 16, "large enough to have a middle"
    first, last = (0, 1) if where == "header" else (pages // 4, 3 * pages // 4)
    data[first * PAGE : last * PAGE] = random.Random(where).randbytes((last - first) * PAGE)
    database.write_bytes(data)
    return bytes(data)


@contract("EXC-13")
@pytest.mark.parametrize("where", ["middle", "header"])
async def test_damaged_database_is_moved_aside_and_followers_resync(
    folder: Path, where: str
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, program=PUBLISHER) as killed,
        open_client_of(killed) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        async with open_mirror(remote) as follower:
            killed.send_line(ORDER.line())
            await killed.until(lambda: len(killed.lines) > 150, RESUME_S)
            async with asyncio.timeout(WAIT_S):
                await follower.until(lambda mirror: bool(mirror.messages))
            old = (await remote.snapshot()).cursor.partition(".")[0]
            await killed.kill()
            database = find_database(folder)
            damaged = damage(database, where=where)

            async with open_process_server(folder, *host):
                again = await client.open_workspace(make_directory(folder))
                session = await again.create_session("after the damage")
                snapshot = await again.snapshot("*")
                assert [s.id for s in snapshot.sessions] == [session.id]
                assert snapshot.messages == []
                assert snapshot.cursor.partition(".")[0] != old
                (aside,) = database.parent.glob("culm.db.damaged-*[0-9]")
                assert snapshot.store.state == "replaced"
                assert str(aside) in snapshot.store.reason
                assert aside.read_bytes() == damaged, "the copy is unchanged"

                await caught_up(follower, snapshot)
                assert_same(follower.mirror, snapshot)
                async with asyncio.timeout(WAIT_S):
                    await follower.until(lambda mirror: mirror.store == snapshot.store)


async def test_damaged_database_does_not_overwrite_an_earlier_copy(folder: Path) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, program=PUBLISHER) as killed,
        open_client_of(killed) as client,
    ):
        await client.open_workspace(make_directory(folder))
        killed.send_line(ORDER.line())
        await killed.until(lambda: len(killed.lines) > 150, RESUME_S)
        await killed.kill()
    database = find_database(folder)
    damage(database, where="middle")
    # Damaged twice in one second, or a clock set back: the name exists already.
    now = int(database.stat().st_mtime)
    earlier = [database.with_name(f"culm.db.damaged-{now + n}") for n in range(30)]
    for path in earlier:
        path.write_text("an earlier copy")
    async with open_process_server(folder, *host) as server, open_client_of(server) as client:
        remote = await client.open_workspace(make_directory(folder))
        assert (await remote.snapshot()).store.state == "replaced"
    assert {path.read_bytes() for path in earlier} == {b"an earlier copy"}


async def test_clean_shutdown_keeps_all_sessions_and_store_state_ok(folder: Path) -> None:
    host = ("--host", f"unix://{folder}/s")
    for title in ("first", "second"):
        async with open_process_server(folder, *host) as server:
            async with open_client_of(server) as client:
                remote = await client.open_workspace(make_directory(folder))
                await remote.create_session(title)
                snapshot = await remote.snapshot("*")
            assert (await server.end()).status == 0
    assert [session.title for session in snapshot.sessions] == ["first", "second"]
    assert snapshot.store.state == "ok"

"""One suite for both databases under the store: SQLite file and memory."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import pytest

from culm.clock import LoopClock
from culm.errors import Rejected, StoreBusy
from culm.ids import Ids
from culm.store.base import Connection, Tx
from culm.store.memory import MemoryFile
from culm.store.sessions import add_session, all_sessions, rename_session
from culm.store.store import Store, bounds, open_memory_store, open_store, replay, trim
from tests.support import WAIT_S, contract


class OpenStore(Protocol):
    def __call__(self) -> AbstractAsyncContextManager[Store]: ...


@pytest.fixture(params=["file", "memory"])
async def opener(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[OpenStore]:
    """A function that opens the same store repeatedly."""
    if request.param == "file":
        yield lambda: open_store(tmp_path / "culm.db", LoopClock(), Ids())
        return
    file = MemoryFile()
    yield lambda: open_memory_store(file, LoopClock(), Ids())
    file.close()


def accept_all(type_: str, session_id: str) -> bool:
    return True


def count_rows(connection: Connection) -> int:
    count: int = connection.execute("SELECT COUNT(*) FROM meta WHERE key LIKE 'row%'").fetchone()[0]
    return count


async def test_events_are_numbered_and_published_in_submission_order(
    opener: OpenStore,
) -> None:
    async with opener() as store, asyncio.timeout(WAIT_S):
        published: list[tuple[int, bytes]] = []
        store.publish = lambda events: published.extend((e.seq, e.payload) for e in events)
        writes = [store.append("run_changed", "updated", payload=b"%d" % n) for n in range(200)]
        await asyncio.wait(writes)
        assert published == [(n + 1, b"%d" % n) for n in range(200)]
        stored = await store.read(replay(0, 200, 500, accept_all))
        assert stored is not None
        assert [(e.seq, e.payload) for e in stored.events] == published


async def test_write_refused_before_writing_fails_alone(opener: OpenStore) -> None:
    def refuse(tx: Tx) -> None:
        raise Rejected("no")

    async with opener() as store, asyncio.timeout(WAIT_S):
        before = store.append("run_changed", "updated", payload=b"1")
        refused = store.write(refuse)
        after = store.append("run_changed", "updated", payload=b"2")
        await asyncio.wait([before, refused, after])
        assert isinstance(refused.exception(), Rejected)
        assert await store.read(bounds) == (0, 2)


async def test_write_that_fails_midway_leaves_no_trace_and_affects_no_other(
    opener: OpenStore,
) -> None:
    def write_then_fail(tx: Tx) -> None:
        tx.run("set_meta", "row-bad", "x")
        tx.publish("run_changed", "updated", "", "", b"0")
        raise Rejected("too late")

    async with opener() as store, asyncio.timeout(WAIT_S):
        published: list[int] = []
        store.publish = lambda events: published.extend(e.seq for e in events)
        writes = [store.write(lambda tx: tx.run("set_meta", "row-1", "x"))]
        failed = store.write(write_then_fail)
        good = store.append("run_changed", "updated", payload=b"2")
        await asyncio.wait([*writes, failed, good])
        assert isinstance(failed.exception(), Rejected)
        assert await store.read(count_rows) == 1
        assert published == [1]


async def test_state_is_applied_before_the_waiter_continues(opener: OpenStore) -> None:
    steps: list[str] = []
    async with opener() as store, asyncio.timeout(WAIT_S):
        store.publish = lambda events: steps.append("published")
        unit = add_session(Ids().session(), "one", sessions_max=10)
        await store.write(unit, lambda _: steps.append("state"))
        steps.append("awaited")
        assert steps == ["published", "state", "awaited"]


async def test_canceling_the_wait_does_not_undo_the_write(opener: OpenStore) -> None:
    async with opener() as store, asyncio.timeout(WAIT_S):
        store.append("run_changed", "updated", payload=b"1").cancel()
        await store.append("run_changed", "updated", payload=b"2")
        assert await store.read(bounds) == (0, 2)


async def test_closing_commits_queued_writes_and_refuses_later_ones(opener: OpenStore) -> None:
    async with opener() as store:
        for n in range(50):
            store.append("run_changed", "updated", payload=b"%d" % n)
    late = store.append("run_changed", "updated", payload=b"late")
    assert isinstance(late.exception(), StoreBusy)
    async with opener() as store, asyncio.timeout(WAIT_S):
        assert await store.read(bounds) == (0, 50)


async def test_patient_write_is_committed_before_the_next_one(opener: OpenStore) -> None:
    order: list[str] = []
    async with opener() as store, asyncio.timeout(WAIT_S):
        patient = store.write(
            lambda tx: tx.run("set_meta", "row-1", "x"),
            lambda _: order.append("patient"),
            patience_s=2 * WAIT_S,
        )
        assert await store.read(count_rows) == 0
        await store.write(lambda tx: None, lambda _: order.append("next"))
        assert patient.done()
        assert order == ["patient", "next"]
        assert await store.read(count_rows) == 1


async def test_patient_write_does_not_need_another_one(opener: OpenStore) -> None:
    async with opener() as store, asyncio.timeout(WAIT_S):
        writes = [
            store.write(lambda tx: tx.run("set_meta", f"row-{tx.seq}", "x"), patience_s=0.001),
            store.write(lambda tx: None, patience_s=2 * WAIT_S),
        ]
        await asyncio.wait(writes)
        assert await store.read(count_rows) == 1


async def test_closing_commits_patient_writes(opener: OpenStore) -> None:
    async with opener() as store:
        patient = store.write(lambda tx: tx.run("set_meta", "row-1", "x"), patience_s=2 * WAIT_S)
    assert patient.done()
    async with opener() as store, asyncio.timeout(WAIT_S):
        assert await store.read(count_rows) == 1


async def test_event_numbers_continue_after_trim_and_reopen(
    opener: OpenStore,
) -> None:
    async with opener() as store, asyncio.timeout(WAIT_S):
        epoch = store.epoch
        for n in range(5):
            await store.append("run_changed", "updated", payload=b"%d" % n)
        assert await store.write(trim(keep_s=3600, keep=2)) == 3
        assert await store.write(trim(keep_s=-10, keep=10)) == 2
    async with opener() as store, asyncio.timeout(WAIT_S):
        assert store.epoch == epoch
        assert await store.read(bounds) == (5, 5)
        await store.append("run_changed", "updated", payload=b"5")
        assert store.seq == 6
        assert await store.read(replay(3, 6, 10, accept_all)) is None
        kept = await store.read(replay(5, 6, 10, accept_all))
        assert kept is not None
        assert [event.seq for event in kept.events] == [6]


@contract("EXC-18")
async def test_concurrent_updates_of_one_row_lose_nothing(opener: OpenStore) -> None:
    async with opener() as store, asyncio.timeout(WAIT_S):
        session_id = Ids().session()
        await store.write(add_session(session_id, "first", sessions_max=10))
        bump = "UPDATE sessions SET cost = cost + 1 WHERE id = ?"
        writes = [
            store.write(lambda tx: tx.connection.execute(bump, (session_id,))) for _ in range(40)
        ]
        renamed = store.write(rename_session(session_id, "renamed"))
        await asyncio.wait([*writes, renamed])
        (session,) = await store.read(all_sessions)
        assert (session.title, session.cost) == ("renamed", 40.0)


async def test_full_disk_is_reported_as_health_and_recovers() -> None:
    file = MemoryFile()
    async with open_memory_store(file, LoopClock(), Ids()) as store, asyncio.timeout(WAIT_S):
        states: list[str] = []
        store.on_health = lambda health: states.append(health.state)
        file.full = True
        with contextlib.suppress(StoreBusy):
            await store.append("run_changed", "updated", payload=b"1")
        file.full = False
        await store.append("run_changed", "updated", payload=b"2")
        assert states == ["failing", "ok"]
        assert store.seq == 1
    file.close()

"""A store that cannot write, and clients that do not read: visible, and recovered later."""

import asyncio
import threading
from pathlib import Path
from typing import cast

import pytest

from culm.client.follower import open_mirror
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.events import stream
from culm.ids import Ids, SessionId
from culm.store import store as store_module
from culm.store import writer
from culm.store.base import Connection
from culm.wire.messages import Text, TextPart
from culm.wire.workspaces import StoreHealth
from culm.workspace.roots import project_folder
from culm.workspace.workspace import HEAL_EVERY_S, TRIM_EVERY_S
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import closed, held_database, is_locked, open_events, send, until
from tests.flow.test_bad_bodies import message, opened
from tests.support import WAIT_S, contract

LONG = "x" * 50_000
LARGE = "x" * 9_000  # More than fits into one page of the file.
FLOOD = 300  # This many exceed the buffers of the socket and the server.

# The pragma that breaks the writer's connection, the one that fixes it, and the reported reason.
FAULTS = {
    "full": ("max_page_count = 1", "max_page_count = 1073741823", "full"),
    "read-only": ("query_only = ON", "query_only = OFF", "readonly"),
}
fault = pytest.mark.parametrize("fault", FAULTS)


async def writer_of(flow: FlowServer, remote: RemoteWorkspace) -> Connection:
    """The connection of the writer; use it only while nothing is written."""
    found: list[Connection] = []
    async with asyncio.timeout(WAIT_S):
        await flow.workspace(remote.id).store.write(lambda tx: found.append(tx.connection))
    return found[0]


async def assert_refused(remote: RemoteWorkspace, session_id: SessionId, reason: str) -> None:
    """Every kind of write is 503 with the reason."""
    for attempt in (
        remote.create_session(LARGE),
        remote.rename_session(session_id, LARGE),
    ):
        with pytest.raises(RequestRefused) as refused:
            await attempt
        assert (refused.value.status, refused.value.code) == (503, "store_busy")
        assert reason in refused.value.message


@fault
async def test_unwritable_disk_is_503_and_visible_and_recovers_without_loss(
    flow: FlowServer, fault: str
) -> None:
    breaks, fixes, reason = FAULTS[fault]
    remote = await opened(flow)
    kept = await remote.create_session("kept")
    connection = await writer_of(flow, remote)
    async with open_events(flow, remote) as events:
        connection.execute(f"PRAGMA {breaks}")
        before = await remote.snapshot("*")
        await assert_refused(remote, kept.id, reason)
        await events.until(b'"failing"')
        now = await remote.snapshot("*")
        assert (now.store.state, reason in now.store.reason) == ("failing", True)
        assert (now.sessions, now.cursor) == (before.sessions, before.cursor)
        assert await remote.sessions() == [await remote.session(kept.id)]
        assert await remote.messages(kept.id) == []
        async with open_events(flow, remote) as late:
            await late.until(b'"failing"')  # A new stream receives it, too.
        assert (await remote.snapshot()).store.state == "failing"

        connection.execute(f"PRAGMA {fixes}")
        after = await remote.create_session("after")
        await events.until(after.id.encode())
        published = [t.read(StoreHealth).state for t in events.events() if t.type == "store_health"]
        assert published == ["ok", "failing", "ok"]
        assert LARGE.encode() not in events.seen
        assert (await remote.snapshot()).store == StoreHealth("ok")
    await remote.release()
    await until(lambda: not is_locked(flow.folder / "data"))
    again = await opened(flow)
    assert {s.title for s in await again.sessions()} == {"kept", "after"}


@fault
async def test_unwritable_disk_of_one_workspace_does_not_affect_another(
    flow: FlowServer, fault: str
) -> None:
    breaks, fixes, reason = FAULTS[fault]
    remote = await opened(flow)
    session = await remote.create_session("kept")
    connection = await writer_of(flow, remote)
    other = await (await flow.client()).open_workspace(flow.directory("other"))
    connection.execute(f"PRAGMA {breaks}")
    await assert_refused(remote, session.id, reason)
    await other.create_session(LARGE)
    assert (await other.snapshot()).store == StoreHealth("ok")
    joined = await opened(flow)
    assert [s.id for s in await joined.sessions()] == [session.id]
    assert (await send(flow, "GET", "/v1/health")).status == 200
    connection.execute(f"PRAGMA {fixes}")
    await joined.create_session(LARGE)


@fault
async def test_mirrors_follow_a_store_failure_and_its_recovery(
    flow: FlowServer, fault: str
) -> None:
    breaks, fixes, reason = FAULTS[fault]
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    connection = await writer_of(flow, remote)
    async with open_mirror(remote) as follower, asyncio.timeout(WAIT_S):
        await follower.connected()
        connection.execute(f"PRAGMA {breaks}")
        await assert_refused(remote, session.id, reason)
        await follower.until(lambda m: m.store.state == "failing")
        connection.execute(f"PRAGMA {fixes}")
        _, durable = messages.add(session.id, "user", [TextPart(Text("heard"))])
        await durable
        await follower.until(lambda m: bool(m.messages) and m.store == StoreHealth("ok"))
        snapshot = await remote.snapshot("*")
        assert list(follower.mirror.messages.values()) == snapshot.messages
        assert list(follower.mirror.sessions.values()) == snapshot.sessions


@fault
async def test_store_recovery_is_published_without_a_write(flow: FlowServer, fault: str) -> None:
    breaks, fixes, reason = FAULTS[fault]
    remote = await opened(flow)
    kept = await remote.create_session("kept")
    connection = await writer_of(flow, remote)
    async with open_events(flow, remote) as events:
        connection.execute(f"PRAGMA {breaks}")
        await assert_refused(remote, kept.id, reason)
        before = await remote.snapshot("*")
        connection.execute(f"PRAGMA {fixes}")
        flow.clock.advance(HEAL_EVERY_S)
        await until(lambda: flow.workspace(remote.id).store.health.state == "ok")
        after = await remote.snapshot("*")
        assert (after.sessions, after.cursor) == (before.sessions, before.cursor)
        await events.until(b'"ok"')
        mark = await remote.create_session("after")
        await events.until(mark.id.encode())
        published = [t.read(StoreHealth).state for t in events.events() if t.type == "store_health"]
        assert published == ["ok", "failing", "ok"]


async def test_full_disk_stays_failing_after_an_empty_trim(
    flow: FlowServer,
) -> None:
    breaks, _, reason = FAULTS["full"]
    remote = await opened(flow)
    kept = await remote.create_session("kept")
    connection = await writer_of(flow, remote)
    async with open_events(flow, remote):
        connection.execute(f"PRAGMA {breaks}")
        await assert_refused(remote, kept.id, reason)
        flow.clock.advance(TRIM_EVERY_S)
        await flow.run_ready()
        assert (await remote.snapshot()).store.state == "failing"
        await assert_refused(remote, kept.id, reason)


# --- unusable data


async def refused_create(flow: FlowServer) -> tuple[int, str]:
    body = {"path": str(flow.directory()), "client_id": Ids().client()}
    answer = await send(flow, "POST", "/v1/workspaces", body)
    return answer.status, message(answer)


@pytest.mark.parametrize("what", ["projects", "database", "lock"])
async def test_create_with_unusable_data_is_500_with_the_reason_until_fixed(
    flow: FlowServer, what: str
) -> None:
    root = flow.folder / "data"
    inside = project_folder(root, flow.directory())
    path = {
        "projects": root / "projects",
        "database": inside / "culm.db",
        "lock": root / "culm.lock",
    }
    blocker = path[what]
    blocker.parent.mkdir(parents=True, exist_ok=True)
    if what == "projects":
        blocker.write_text("in the way")
    else:
        blocker.mkdir()
    for _ in range(2):
        status, text = await refused_create(flow)
        assert (status, str(root) in text) == (500, True), text
        assert not text.endswith((": ", "None")), text
        assert flow.server.registry.list() == []
    if what == "projects":
        blocker.unlink()
    else:
        blocker.rmdir()
    remote = await opened(flow)
    await remote.create_session("healed")


async def test_create_with_a_locked_database_is_500_with_the_reason(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_flow(tmp_path, kind) as flow:
        remote = await opened(flow)
        await remote.create_session("kept")
        await remote.release()
        await closed(flow, remote)
        await until(lambda: not is_locked(tmp_path / "data"))
        monkeypatch.setattr(store_module, "MARK_TIMEOUT_S", 0.2)
        monkeypatch.setattr(writer, "CLOSE_TIMEOUT_S", 0.2)
        with held_database(tmp_path / "data", flow.directory()):
            status, text = await refused_create(flow)
        # Its writer still waits for the lock; it must not outlive the loop.
        await until(lambda: all(thread.name != "culm-write" for thread in threading.enumerate()))
        assert status == 500, text
        assert not text.endswith((": ", "None")), f"no reason: {text!r}"
        monkeypatch.undo()
        again = await opened(flow)
        assert [s.title for s in await again.sessions()] == ["kept"]


async def test_config_that_cannot_be_written_is_500_and_unchanged(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    inside = project_folder(flow.folder / "data", flow.directory())
    before = await send(flow, "GET", remote.path("/config"))
    in_the_way = inside / "config.json.lock"
    in_the_way.mkdir()
    body: dict[str, object] = {"scope": 1, "enabled": True}
    answer = await send(flow, "POST", remote.path("/config/compact"), body)
    assert (answer.status, "irectory" in message(answer)) == (500, True)
    assert (await send(flow, "GET", remote.path("/config"))).body == before.body
    in_the_way.rmdir()
    answer = await send(flow, "POST", remote.path("/config/compact"), body)
    assert (answer.status, answer.body) == (200, b"")
    config = (await send(flow, "GET", remote.path("/config"))).json()
    assert cast("dict[str, dict[str, dict[str, bool]]]", config)["options"]["tui"]["compact_mode"]


# --- clients that do not read


@contract("INV-65")
@pytest.mark.parametrize("view", ["delta", "crush"])
async def test_client_that_reads_nothing_is_disconnected_and_can_resume(
    flow: FlowServer, view: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "STALL_S", 0.2)
    remote = await opened(flow)
    workspace = flow.workspace(remote.id)
    session = await remote.create_session("s")
    idle_client = Ids().client()
    start = (await remote.snapshot()).cursor
    async with open_events(flow, remote) as reader, asyncio.TaskGroup() as tasks:
        # It is on the same loop, and must read to avoid being disconnected itself.
        reading = tasks.create_task(reader.until(b"the last one"), name="reader")
        async with open_events(flow, remote, view=view, client_id=idle_client):
            for _ in range(FLOOD):
                _, durable = workspace.messages.add(session.id, "user", [TextPart(Text(LONG))])
                await durable
            await until(lambda: not workspace.lifetime.claims.by_client[idle_client].streams)
        await remote.create_session("the last one")
        assert (await reading).count(LONG.encode()) == FLOOD
    async with open_events(flow, remote, view=view, client_id=idle_client, cursor=start) as again:
        await again.until(b"the last one")
        numbers = [int(event.cursor.partition(".")[2]) for event in again.events() if event.cursor]
        assert len(numbers) > FLOOD
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

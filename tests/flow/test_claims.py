"""Claims that keep a workspace open: creates, streams and their grace periods."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import ClientId, Ids
from culm.settings import Settings
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import closed, open_events, send, status_of, until, until_lingering
from tests.support import contract

CREATE_GRACE_S = 30
DETACH_GRACE_S = 10


async def opened(flow: FlowServer, name: str = "project") -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory(name))


async def is_open(remote: RemoteWorkspace) -> bool:
    return await status_of(remote.client, remote.path()) == 200


def streams_of(flow: FlowServer, remote: RemoteWorkspace, client_id: ClientId) -> int:
    claim = flow.workspace(remote.id).lifetime.claims.by_client.get(client_id)
    return 0 if claim is None else claim.streams


async def detached(flow: FlowServer, remote: RemoteWorkspace) -> None:
    """Wait until the server has noticed that the streams of this client are closed."""
    await until(lambda: streams_of(flow, remote, remote.client.id) == 0)


@contract("INV-9")
async def test_client_without_stream_loses_its_claim_and_the_workspace_closes_once(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind, settings=Settings(linger_s=0)) as flow:
        remote = await opened(flow)
        flow.clock.advance(CREATE_GRACE_S - 0.1)
        assert await is_open(remote)
        flow.clock.advance(0.1)
        assert not await is_open(remote)
        await until(flow.left.is_set)
        flow.clock.advance(10 * CREATE_GRACE_S)
        await flow.run_ready()
        assert flow.leave_calls == 1


@contract("INV-10")
async def test_open_stream_suspends_the_create_grace(flow: FlowServer) -> None:
    remote = await opened(flow)
    flow.clock.advance(CREATE_GRACE_S - 1)
    async with open_events(flow, remote) as events:
        flow.clock.advance(3600)
        await flow.run_ready()
        assert await is_open(remote)
        session = await remote.create_session("told")
        await events.until(session.id.encode())


@contract("INV-11")
async def test_stream_without_a_create_keeps_the_workspace_open(flow: FlowServer) -> None:
    remote = await opened(flow)
    stranger = Ids().client()
    async with open_events(flow, remote, client_id=stranger):
        await remote.client.retire()
        flow.clock.advance(3600)
        assert await is_open(remote)
    await until(lambda: streams_of(flow, remote, stranger) == 0)
    flow.clock.advance(DETACH_GRACE_S)
    assert not await is_open(remote)


@contract("INV-12")
async def test_only_the_last_closed_stream_of_a_client_ends_its_claim(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        async with open_events(flow, remote), open_events(flow, remote):
            assert streams_of(flow, remote, remote.client.id) == 3
        await until(lambda: streams_of(flow, remote, remote.client.id) == 1)
        flow.clock.advance(3600)
        assert await is_open(remote)
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S)
    assert not await is_open(remote)


@contract("INV-13", "INV-14")
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 8, 12, 20])
async def test_stream_opened_as_the_grace_ends_is_attached_or_404(
    flow: FlowServer, turns: int
) -> None:
    remote = await opened(flow)
    flow.clock.advance(CREATE_GRACE_S - 1)
    async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
        opening = open_events(flow, remote)
        attaching = tasks.create_task(stack.enter_async_context(opening))
        for _ in range(turns):
            await asyncio.sleep(0)
        flow.clock.advance(1)
        events = await attaching
        if events.status == 200:
            assert streams_of(flow, remote, remote.client.id) == 1
            flow.clock.advance(3600)
            assert await is_open(remote)
        else:
            assert events.status == 404
            assert not await is_open(remote)


@contract("INV-14")
async def test_streams_opened_during_a_release_are_attached_or_404(
    flow: FlowServer,
) -> None:
    for _ in range(5):
        remote = await opened(flow)
        async with asyncio.TaskGroup() as tasks, AsyncExitStack() as stack:
            wanted = [open_events(flow, remote, client_id=Ids().client()) for _ in range(4)]
            tasks.create_task(remote.release())
            entering = [tasks.create_task(stack.enter_async_context(one)) for one in wanted]
            statuses = {(await one).status for one in entering}
            assert statuses <= {200, 404}
            assert await is_open(remote) == (200 in statuses)
        if flow.server.registry.list():
            await until(lambda: not list(flow.workspace(remote.id).lifetime.presence()))  # noqa: B023
            flow.clock.advance(DETACH_GRACE_S)
        await closed(flow, remote)


@contract("INV-15")
async def test_workspace_closes_a_detach_grace_after_the_stream_closes(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        pass
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S - 0.1)
    assert await is_open(remote)
    flow.clock.advance(0.1)
    assert not await is_open(remote)


@contract("INV-15")
async def test_new_stream_within_the_detach_grace_restores_the_claim(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        pass
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S - 1)
    async with open_events(flow, remote):
        flow.clock.advance(3600)
        assert await is_open(remote)
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S - 1)
    assert await is_open(remote)


@contract("INV-16")
async def test_release_and_closed_stream_close_the_workspace_at_once(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        await remote.release()
        assert await is_open(remote)
    await closed(flow, remote)


@contract("INV-16")
async def test_closed_stream_without_a_detach_grace_closes_the_workspace_at_once(
    tmp_path: Path, kind: str
) -> None:
    async with open_flow(tmp_path, kind, settings=Settings(detach_grace_s=0)) as flow:
        remote = await opened(flow)
        async with open_events(flow, remote):
            pass
        await closed(flow, remote)


@contract("INV-17")
async def test_create_during_the_detach_grace_gives_a_full_create_grace(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        pass
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S - 1)
    await remote.rejoin()
    flow.clock.advance(CREATE_GRACE_S - 1)  # The replaced timer would fire in here.
    assert await is_open(remote)
    flow.clock.advance(1)
    assert not await is_open(remote)


@contract("INV-17")
async def test_create_after_a_release_cancels_the_release(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote):
        await remote.release()
        await remote.rejoin()
    await detached(flow, remote)
    flow.clock.advance(DETACH_GRACE_S - 1)
    assert await is_open(remote)


@contract("INV-18")
async def test_disconnected_client_does_not_affect_the_other(flow: FlowServer) -> None:
    here, there = await opened(flow), await opened(flow)
    async with open_events(flow, there) as kept:
        async with open_events(flow, here):
            pass
        await detached(flow, here)
        flow.clock.advance(3600)
        assert await is_open(there)
        session = await there.create_session("after")
        await kept.until(session.id.encode())


@contract("INV-22")
async def test_client_without_a_stream_cannot_set_its_current_session(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    with pytest.raises(RequestRefused, match="client not attached") as refused:
        await remote.select_session(session.id)
    assert refused.value.status == 409
    async with open_events(flow, remote):
        await remote.select_session(session.id)
    await detached(flow, remote)
    with pytest.raises(RequestRefused, match="client not attached"):
        await remote.select_session(session.id)


@contract("INV-22")
async def test_presence_counts_clients_with_streams_and_ends_with_the_claim(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow)
    session = await here.create_session("s")

    async def count() -> int:
        return (await here.session(session.id)).attached_clients

    async with open_events(flow, here), open_events(flow, here):
        assert await count() == 0
        async with open_events(flow, there):
            await here.select_session(session.id)
            await there.select_session(session.id)
            assert await count() == 2
            assert [s.attached_clients for s in await here.sessions()] == [2]
        await detached(flow, there)
        assert await count() == 1
        async with open_events(flow, there):
            assert await count() == 2  # Kept through the grace.
            await there.select_session("")
            assert await count() == 1
            await here.client.retire()
            assert await count() == 0


@contract("INV-22")
@pytest.mark.parametrize("session_id", ["\\ud800", "x" * 100_000])
async def test_invalid_current_session_does_not_prevent_other_streams(
    flow: FlowServer, session_id: str
) -> None:
    here, there = await opened(flow), await opened(flow)
    async with open_events(flow, here):
        path = here.path(f"/current-session?client_id={here.client.id}")
        answer = await send(flow, "POST", path, f'{{"session_id": "{session_id}"}}'.encode())
        async with open_events(flow, there) as events:
            session = await there.create_session("unharmed")
            await events.until(session.id.encode())
            assert b"HTTP/1.1" not in events.seen
        assert (await there.snapshot()).sessions == [session]
        assert answer.status < 500


@contract("INV-23")
async def test_server_exits_only_after_the_last_client_grace_and_linger(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow)
    async with open_events(flow, there):
        async with open_events(flow, here):
            pass
        await detached(flow, here)
        flow.clock.advance(3600)
        await flow.run_ready()
        assert not flow.left.is_set()
        assert await is_open(there)
    await detached(flow, there)
    flow.clock.advance(DETACH_GRACE_S)
    await closed(flow, there)
    await until_lingering(flow)
    flow.clock.advance(59.9)
    assert not flow.left.is_set()
    flow.clock.advance(0.2)
    await until(flow.left.is_set)
    assert not await is_open(there)
    assert flow.leave_calls == 1

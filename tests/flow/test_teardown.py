"""Teardown of a workspace: requests meanwhile, its time limit, and reopening."""

import asyncio
import os
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.assemble import open_server
from culm.client.http import RequestRefused
from culm.client.workspace import RemoteWorkspace
from culm.ids import Ids, SessionId
from culm.settings import Settings
from culm.wire.messages import Finish, FinishPart, Text, TextPart
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import (
    closed,
    held_database,
    is_locked,
    noticed_writes,
    open_events,
    send,
    status_of,
    until,
)
from tests.live.fleet_harness import find_processes
from tests.support import WAIT_S, FakeClock, contract, serve_options


async def opened(flow: FlowServer, name: str = "project") -> RemoteWorkspace:
    return await (await flow.client()).open_workspace(flow.directory(name))


def data(flow: FlowServer) -> Path:
    return flow.folder / "data"


@contract("INV-27")
async def test_closing_workspace_answers_404_on_every_route(flow: FlowServer) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    with held_database(data(flow), flow.directory()):
        await remote.release()
        assert is_locked(data(flow))  # Its teardown waits for the database.
        for method, rest in [
            ("GET", ""),
            ("GET", "/snapshot"),
            ("POST", "/sessions"),
            ("PUT", f"/sessions/{session.id}"),
            ("DELETE", f"/sessions/{session.id}"),
            ("GET", f"/events?client_id={remote.client.id}"),
            ("POST", f"/current-session?client_id={remote.client.id}"),
            ("POST", "/agent"),
        ]:
            answer = await send(flow, method, remote.path(rest), {"title": "x"})
            assert (answer.status, answer.json()) == (
                404,
                {
                    "message": "workspace not found",
                    "code": "workspace_not_found",
                    "hint": "open it again with POST /v1/workspaces",
                },
            ), rest
        assert await remote.client.workspaces() == []


@contract("INV-27")
async def test_pending_write_is_answered_and_kept_when_the_workspace_closes(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with (
            held_database(data(flow), flow.directory()),
            noticed_writes(flow, remote) as begun,
        ):
            writing = tasks.create_task(remote.create_session("in time"))
            await begun.wait()
            await remote.release()
            await flow.run_ready()
            assert not writing.done()
    again = await opened(flow)
    assert await again.sessions() == [writing.result()]


@contract("INV-27")
async def test_open_message_is_closed_as_interrupted_before_the_store_closes(
    flow: FlowServer,
) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    messages = flow.workspace(remote.id).messages
    draft, _ = messages.open(session.id)
    messages.append(draft, 0, "text", "half a sent")
    async with open_events(flow, remote) as events:
        await remote.client.retire()
        received = (await events.end()).decode()
    assert "half a sent" in received
    assert '"culm_reason":"interrupted"' in received
    again = await opened(flow)
    (message,) = await again.messages(session.id)
    text, finish = message.parts
    assert text == TextPart(Text("half a sent"))
    assert isinstance(finish, FinishPart)
    assert (finish.data.reason, finish.data.culm_reason) == ("error", "interrupted")


@contract("INV-27")
async def test_create_during_teardown_waits_and_opens_a_new_workspace(flow: FlowServer) -> None:
    remote = await opened(flow)
    session = await remote.create_session("kept")
    old = flow.workspace(remote.id)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        with held_database(data(flow), flow.directory()):
            await remote.release()
            creating = tasks.create_task(opened(flow))
            await flow.run_ready()
            assert not creating.done()
    again = creating.result()
    assert flow.workspace(again.id) is not old
    assert again.id == remote.id
    assert await again.sessions() == [session]


@contract("INV-14", "INV-27")
async def test_old_stream_that_ended_before_reopening_does_not_affect_it(
    flow: FlowServer,
) -> None:
    first = await opened(flow)
    async with open_events(flow, first) as events:
        await first.client.retire()
        await events.end()
    again = await opened(flow)
    await flow.run_ready()
    flow.clock.advance(29)
    assert await status_of(again.client, again.path()) == 200


@contract("INV-14", "INV-27")
async def test_old_stream_that_ends_during_reopening_does_not_affect_it(
    flow: FlowServer,
) -> None:
    first = await opened(flow)
    async with (
        open_events(flow, first) as events,
        asyncio.timeout(WAIT_S),
        asyncio.TaskGroup() as tasks,
    ):
        with held_database(data(flow), flow.directory()):
            await first.client.retire()
            creating = tasks.create_task(opened(flow))
            await flow.run_ready()
        again = await creating
        await events.end()
    flow.clock.advance(29)
    assert await status_of(again.client, again.path()) == 200


@contract("INV-14", "INV-27")
async def test_old_stream_read_after_reopening_does_not_affect_it(
    flow: FlowServer,
) -> None:
    first = await opened(flow)
    session = await first.create_session("s")
    async with open_events(flow, first) as old:
        fill(flow, first, session.id, 1 << 20)
        await flow.workspace(first.id).messages.flush()
        await first.client.retire()
        await closed(flow, first)
        again = await opened(flow)
        async with open_events(flow, again) as new:
            await old.end()
            await flow.run_ready()
            later = await again.create_session("later")
            await new.until(later.id.encode())
            assert later.id.encode() not in old.seen


def fill(flow: FlowServer, remote: RemoteWorkspace, session_id: SessionId, size: int) -> None:
    """Add more than can be sent to a client that does not read."""
    messages = flow.workspace(remote.id).messages
    for _ in range(size >> 16):
        messages.add(session_id, "user", [TextPart(Text("x" * (1 << 16)))])


@contract("INV-19")
async def test_old_stream_of_a_retired_client_does_not_end_its_new_claim(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow)
    async with AsyncExitStack() as old:
        await old.enter_async_context(open_events(flow, here))
        await here.client.retire()
        async with open_events(flow, here) as newer:
            await old.aclose()
            await there.client.retire()
            await flow.run_ready()
            flow.clock.advance(3600)
            session = await there.create_session("alive")
            await newer.until(session.id.encode())


@contract("INV-19")
async def test_stream_of_a_retired_client_continues_until_the_workspace_closes(
    flow: FlowServer,
) -> None:
    here, there = await opened(flow), await opened(flow)
    async with open_events(flow, here) as events:
        await here.client.retire()
        session = await there.create_session("told")
        await events.until(session.id.encode())
        await there.release()
        await events.end()


@contract("EXC-17")
async def test_create_waits_for_a_teardown_at_most_teardown_s(tmp_path: Path, kind: str) -> None:
    async with open_flow(tmp_path, kind, settings=Settings(teardown_s=0.05)) as flow:
        remote = await opened(flow)
        with held_database(data(flow), flow.directory()):
            await remote.release()
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(RequestRefused, match="workspace closing") as refused:
                    await opened(flow)
        assert refused.value.status == 409
        await until(lambda: not is_locked(data(flow)))


@contract("EXC-17")
async def test_client_that_reads_nothing_does_not_delay_teardown(flow: FlowServer) -> None:
    remote = await opened(flow)
    session = await remote.create_session("s")
    async with open_events(flow, remote):
        fill(flow, remote, session.id, 16 << 20)
        await flow.workspace(remote.id).messages.flush()
        await remote.client.retire()
        await until(lambda: not is_locked(data(flow)))
        again = await opened(flow)
        assert len(await again.messages(session.id)) == 256


@contract("EXC-17")
async def test_closed_workspace_leaves_no_timer(flow: FlowServer) -> None:
    remote = await opened(flow)
    async with open_events(flow, remote) as events:
        await remote.client.retire()
        await events.end()
    # Those of the server stay: its linger and the sweep of its fleet.
    await until(lambda: flow.clock.armed() == 2)


async def test_workspace_that_closes_early_prepares_no_workers(tmp_path: Path) -> None:
    clock, options = FakeClock(), serve_options(tmp_path, "tcp://127.0.0.1:0")
    options = replace(options, settings=Settings(prepare_workers_s=5.0))
    async with open_server(options, clock, Ids(), lambda: None) as server:
        flow = FlowServer(server, clock, tmp_path)
        async with asyncio.timeout(WAIT_S):
            early = await opened(flow)
            await early.release()
            await until(lambda: not is_locked(data(flow)))
            clock.advance(5)
            await flow.run_ready()
            assert zygotes() == []
            await opened(flow)
            clock.advance(5)
            await until(lambda: zygotes() != [])
            await flow.aclose()
    assert zygotes() == []


def zygotes() -> list[int]:
    return find_processes(os.getpid()).pids("zygote", "supervisor")


@contract("EXC-19")
async def test_closing_one_workspace_does_not_affect_another(
    flow: FlowServer,
) -> None:
    left, right = await opened(flow, "left"), await opened(flow, "right")
    session = await right.create_session("s")
    messages = flow.workspace(right.id).messages
    draft, _ = messages.open(session.id)
    async with open_events(flow, right) as events:
        messages.append(draft, 0, "text", "before ")
        with held_database(data(flow), flow.directory("left")):
            await left.release()
            messages.append(draft, 0, "text", "after")
            async with asyncio.timeout(WAIT_S):
                await messages.finish(draft, Finish("end_turn", 1))
            await events.until(b"end_turn")
    await closed(flow, left)
    (message,) = await right.messages(session.id)
    assert message.parts[0] == TextPart(Text("before after"))

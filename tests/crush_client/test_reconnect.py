"""A TUI that loses its server reconnects to its sessions and never hangs."""

import asyncio
import signal
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from tests.crush_client.client import Tui, open_tui
from tests.crush_client.events import State
from tests.crush_client.servers import (
    Launcher,
    Pauses,
    open_flow,
    open_launcher,
    project,
    startup_for,
)
from tests.crush_client.startup import Project
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.live.harness import RESUME_S, START_S, make_directory
from tests.support import WAIT_S

pytestmark = pytest.mark.sockets

DETACH_GRACE_S = 10


@asynccontextmanager
async def attached(flow: FlowServer, pauses: Pauses) -> AsyncGenerator[Tui]:
    """Open a TUI with a connected stream and an open session."""
    startup = startup_for(flow.url, flow.folder)
    async with open_tui(project(flow), startup, sleep=pauses) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        await tui.sessions.create("kept")
        assert await tui.sessions.load(tui.screen.session_id)
        yield tui


async def cut(flow: FlowServer, tui: Tui) -> None:
    """Close every connection of a client and wait until both sides know. Hold pauses first."""
    await tui.api.transport.aclose()
    claims = flow.workspace(tui.api.workspace_id).lifetime.claims
    assert any(client_id == tui.api.client_id for client_id in claims.by_client)
    await until(lambda: not streams(flow, tui))
    await tui.events.until(lambda: tui.events.degraded)


def streams(flow: FlowServer, tui: Tui) -> int:
    claims = flow.workspace(tui.api.workspace_id).lifetime.claims.by_client
    return sum(c.streams for client_id, c in claims.items() if client_id == tui.api.client_id)


def since(tui: Tui, before: int, session_id: str) -> list[str]:
    return [line.replace(session_id, "S") for line in tui.sent[before:]]


# --- in this process


async def test_lost_connection_is_reopened_and_missed_changes_are_loaded(
    flow: FlowServer,
) -> None:
    pauses = Pauses()
    async with (
        asyncio.timeout(WAIT_S),
        attached(flow, Pauses()) as other,
        attached(flow, pauses) as tui,
    ):
        session_id = tui.screen.session_id
        pauses.hold()
        await cut(flow, tui)
        (session,) = [s for s in await other.sessions.pick() if s.text("id") == session_id]
        assert await other.sessions.rename(session, "while you were away")
        before = len(tui.sent)
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        calls = since(tui, before, session_id)
        assert calls[:2] == ["GET W/events?client_id=C", "POST W/current-session?client_id=C"]
        assert {"GET W/sessions/S", "GET W/sessions/S/messages"} <= set(calls)
        assert (tui.screen.title, tui.events.recreated) == ("while you were away", 0)
        assert pauses.requested == [0.25]
        assert (tui.calls.log, tui.screen.toasts) == ([], [])


async def test_workspace_that_closed_meanwhile_is_recreated_with_the_same_ids(
    flow: FlowServer,
) -> None:
    pauses = Pauses()
    async with asyncio.timeout(WAIT_S), attached(flow, pauses) as tui:
        session_id, workspace_id = tui.screen.session_id, tui.api.workspace_id
        pauses.hold()
        await cut(flow, tui)
        flow.clock.advance(DETACH_GRACE_S)
        assert flow.server.registry.list() == []
        before = len(tui.sent)
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        calls = since(tui, before, session_id)
        assert calls[:4] == [
            "GET W/events?client_id=C",
            "POST /v1/workspaces",
            "POST W/agent/init",
            "GET W/events?client_id=C",
        ]
        assert (tui.events.recreated, tui.api.workspace_id) == (1, workspace_id)
        assert streams(flow, tui) == 1  # A claim with the same client id.
        assert (tui.screen.session_id, tui.screen.title) == (session_id, "kept")
        assert (tui.calls.log, tui.screen.toasts) == ([], [])


async def test_reconnect_within_the_grace_period_keeps_the_workspace(
    flow: FlowServer,
) -> None:
    pauses = Pauses()
    async with asyncio.timeout(WAIT_S), attached(flow, pauses) as tui:
        workspace = flow.workspace(tui.api.workspace_id)
        pauses.hold()
        await cut(flow, tui)
        flow.clock.advance(DETACH_GRACE_S - 1)
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        flow.clock.advance(DETACH_GRACE_S)
        assert flow.workspace(tui.api.workspace_id) is workspace
        assert tui.events.recreated == 0


async def test_restarted_server_is_found_with_doubling_pauses(
    tmp_path: Path, folder: Path, kind: str
) -> None:
    pauses = Pauses()
    host = f"unix://{folder}/s" if kind == "unix" else ""  # The second server uses it again.
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as clients:
        async with AsyncExitStack() as first:
            flow = await first.enter_async_context(open_flow(tmp_path, kind, host=host))
            url = flow.url
            tui = await clients.enter_async_context(attached(flow, pauses))
        await pauses.until(9)
        assert pauses.requested[:9] == [0.25, 0.25, 0.5, 1, 2, 4, 8, 10, 10]
        pauses.hold()
        async with open_flow(tmp_path, kind, host=url):
            pauses.release()
            await tui.events.until(lambda: tui.events.connections == 2)
            assert (tui.events.state, tui.events.recreated) == (State.STREAMING, 1)
            assert (tui.screen.title, tui.screen.toasts) == ("kept", [])
            (session,) = await tui.sessions.pick()
            assert session.text("title") == "kept"
            await tui.quit()


async def test_tui_retired_by_another_client_shows_that_it_cannot_restore(
    flow: FlowServer,
) -> None:
    pauses = Pauses()
    async with asyncio.timeout(WAIT_S), attached(flow, pauses) as tui:
        await tui.api.call(
            5
        )  # Another client used its id: the workspace closes, the id is retired.
        await tui.until(lambda: tui.screen.toasts != [])
        assert tui.screen.toasts == ["can't restore the workspace"]
        assert tui.events.state is not State.HUNG


# --- real processes


@asynccontextmanager
async def attached_to(launcher: Launcher, pauses: Pauses) -> AsyncGenerator[Tui]:
    """Open a TUI with an open session at the first server of a launcher."""
    await launcher.spawn()
    await until(lambda: bool(launcher.started))
    (server,) = launcher.started
    await server.until(lambda: bool(server.urls), START_S)
    launcher.url = server.url  # With the real port.
    directory = Project(str(make_directory(launcher.folder)))
    async with open_tui(directory, launcher.startup(), sleep=pauses) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        await tui.sessions.create("kept")
        assert await tui.sessions.load(tui.screen.session_id)
        yield tui


@pytest.mark.live
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_tui_survives_a_server_restart_and_keeps_its_sessions(
    folder: Path, kind: str, number: signal.Signals
) -> None:
    url = f"unix://{folder}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    pauses = Pauses()
    async with (
        asyncio.timeout(RESUME_S),
        open_launcher(folder, url) as launcher,
        attached_to(launcher, pauses) as tui,
    ):
        session_id, workspace_id = tui.screen.session_id, tui.api.workspace_id
        await launcher.started[0].end(number)
        await pauses.until(5)
        assert (tui.events.degraded, tui.events.state) == (True, State.DEGRADED)
        pauses.hold()
        await launcher.spawn()
        await until(lambda: len(launcher.started) == 2)
        server = launcher.started[1]
        await server.until(lambda: bool(server.urls), START_S)
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        assert (tui.events.state, tui.events.recreated) == (State.STREAMING, 1)
        assert tui.api.workspace_id == workspace_id
        assert (tui.screen.session_id, tui.screen.title) == (session_id, "kept")
        assert [s.text("id") for s in await tui.sessions.pick()] == [session_id]
        assert tui.screen.toasts == []

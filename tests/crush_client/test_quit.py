"""Quitting: a TUI retires its claim; a killed TUI keeps it for a grace period."""

import asyncio
from pathlib import Path

import pytest

from tests.crush_client.api import Api, StatusError
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.events import State
from tests.crush_client.servers import (
    Pauses,
    never_spawn,
    open_script,
    project,
    read_request,
    startup_for,
)
from tests.crush_client.startup import Project, Startup
from tests.crush_client.transport import Transport, parse_host
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.support import WAIT_S

DETACH_GRACE_S, LINGER_S = 10, 60


async def test_quit_closes_the_stream_and_sends_only_a_retire(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup_for(flow.url, flow.folder)) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            before = len(tui.sent)
            await tui.quit()
            assert tui.sent[before:] == ["DELETE /v1/clients/C"]
            assert tui.calls.log == []
        assert flow.server.registry.list() == []


async def test_retired_client_id_is_refused_and_its_session_is_kept(
    flow: FlowServer,
) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup) as tui:
            await tui.sessions.create("kept")
            client_id = tui.api.client_id
        retired = r"^status code 409: client has been retired$"
        with pytest.raises(StatusError, match=retired):
            async with open_tui(project(flow), startup, client_id=client_id):
                pass
        async with open_tui(project(flow), startup, continue_last=True) as another:
            assert another.screen.title == "kept"


async def test_quit_of_one_tui_does_not_disturb_another(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as stays:
        await stays.events.until(lambda: stays.events.connections == 1)
        async with open_tui(project(flow), startup) as leaves:
            await leaves.sessions.create("left behind")
            session_id = leaves.screen.session_id
        assert await stays.sessions.load(session_id)
        (session,) = await stays.sessions.pick()
        await stays.sessions.rename(session, "found")
        await stays.until(lambda: stays.screen.title == "found")
        assert (stays.events.connections, stays.events.state) == (1, State.STREAMING)
        assert stays.calls.log == []


async def test_server_exits_when_its_linger_passes_after_the_last_quit(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup_for(flow.url, flow.folder)):
            pass
        await until(lambda: flow.clock.armed() > 0)
        flow.clock.advance(LINGER_S - 1)
        assert not flow.left.is_set()
        flow.clock.advance(1)
        await flow.left.wait()


async def test_killed_tui_keeps_its_claim_for_the_grace_period_only(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup_for(flow.url, flow.folder)) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            workspace = flow.workspace(tui.api.workspace_id)
            await tui.vanish()
            await until(
                lambda: all(not c.streams for c in workspace.lifetime.claims.by_client.values())
            )
        flow.clock.advance(DETACH_GRACE_S - 1)
        assert flow.server.registry.list() == [workspace]
        flow.clock.advance(1)
        assert flow.server.registry.list() == []


async def test_new_tui_within_the_grace_period_joins_the_workspace(
    flow: FlowServer,
) -> None:
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup) as gone:
            await gone.vanish()
        async with open_tui(project(flow), startup) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            workspace = flow.workspace(tui.api.workspace_id)
            flow.clock.advance(10 * DETACH_GRACE_S)
            assert flow.server.registry.list() == [workspace]


# --- other servers


async def quit_requests(folder: Path, status: int) -> list[str]:
    """Requests of a TUI that quits a server with this status for the retire request."""
    requests: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            requests.append((await read_request(reader)).decode().partition(" HTTP")[0])
            code = status if "/clients/" in requests[-1] else 200
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % code)

    async with open_script(folder, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        api.workspace_id = "w"
        startup = Startup(url, folder / "cache", never_spawn)
        await Tui(api, Project("/p"), startup, Pauses()).quit()
    return requests


async def test_server_without_retire_gets_a_release(tmp_path: Path) -> None:
    assert await quit_requests(tmp_path, 404) == [
        "DELETE /v1/clients/c",
        "DELETE /v1/workspaces/w?client_id=c",
    ]


@pytest.mark.parametrize("status", [200, 204, 400, 500])
async def test_other_retire_responses_send_no_release(tmp_path: Path, status: int) -> None:
    assert await quit_requests(tmp_path, status) == ["DELETE /v1/clients/c"]


async def test_tui_without_a_server_can_quit(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    api = Api(Transport(parse_host(url)), "c")
    tui = Tui(api, Project("/p"), Startup(url, tmp_path, never_spawn), Pauses())
    async with asyncio.timeout(WAIT_S):
        await tui.quit()
    assert len(tui.calls.log) == 1

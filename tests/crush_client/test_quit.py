"""Leaving: a TUI retires and its claim is gone; one that vanishes keeps it for its grace."""

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


async def test_a_tui_that_quits_closes_its_stream_and_retires_and_says_nothing_else(
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


async def test_the_claim_of_a_tui_that_quit_is_gone_and_its_id_is_never_taken_again(
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


async def test_a_tui_that_quits_disturbs_nobody_who_stays(flow: FlowServer) -> None:
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


async def test_the_server_leaves_when_the_last_tui_quit_and_its_linger_passed(
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


async def test_a_tui_that_vanishes_keeps_its_claim_for_the_grace_and_no_longer(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S):
        async with open_tui(project(flow), startup_for(flow.url, flow.folder)) as tui:
            await tui.events.until(lambda: tui.events.connections == 1)
            workspace = flow.workspace(tui.api.workspace_id)
            await tui.vanish()
            await until(lambda: all(not c.streams for c in workspace.claims.by_client.values()))
        flow.clock.advance(DETACH_GRACE_S - 1)
        assert flow.server.registry.list() == [workspace]
        flow.clock.advance(1)
        assert flow.server.registry.list() == []


async def test_a_new_tui_within_the_grace_of_one_that_vanished_joins_its_workspace(
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


# --- servers of other kinds


async def quitting(folder: Path, status: int) -> list[str]:
    """What a TUI sends as it quits a server that answers the retiring so."""
    heard: list[str] = []

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            heard.append((await read_request(reader)).decode().partition(" HTTP")[0])
            code = status if "/clients/" in heard[-1] else 200
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % code)

    async with open_script(folder, script) as url, asyncio.timeout(WAIT_S):
        api = Api(Transport(parse_host(url)), "c")
        api.workspace_id = "w"
        startup = Startup(url, folder / "cache", never_spawn)
        await Tui(api, Project("/p"), startup, Pauses()).quit()
    return heard


async def test_a_server_that_knows_no_retiring_is_told_to_release(tmp_path: Path) -> None:
    assert await quitting(tmp_path, 404) == [
        "DELETE /v1/clients/c",
        "DELETE /v1/workspaces/w?client_id=c",
    ]


@pytest.mark.parametrize("status", [200, 204, 400, 500])
async def test_any_other_answer_to_the_retiring_is_left_at_that(
    tmp_path: Path, status: int
) -> None:
    assert await quitting(tmp_path, status) == ["DELETE /v1/clients/c"]


async def test_a_tui_whose_server_is_gone_quits_all_the_same(tmp_path: Path) -> None:
    url = f"unix://{tmp_path}/nobody"
    api = Api(Transport(parse_host(url)), "c")
    tui = Tui(api, Project("/p"), Startup(url, tmp_path, never_spawn), Pauses())
    async with asyncio.timeout(WAIT_S):
        await tui.quit()
    assert len(tui.calls.log) == 1

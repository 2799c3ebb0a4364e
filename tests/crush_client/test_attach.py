"""A TUI attaches to the real server: the calls, their order, and decodable responses."""

import asyncio
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.crush_client.agents import assert_no_errors, open_agent, open_attached
from tests.crush_client.api import CallError, StatusError
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.golang import decode, record
from tests.crush_client.servers import project, startup_for
from tests.crush_client.startup import new_id
from tests.crush_client.transport import Request
from tests.crush_client.types import ROUTE_ANSWERS
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S


async def attached(flow: FlowServer, stack: AsyncExitStack, name: str = "project") -> Tui:
    """Open a TUI with a connected stream."""
    startup = startup_for(flow.url, flow.folder)
    tui = await stack.enter_async_context(open_tui(project(flow, name), startup))
    await tui.events.until(lambda: tui.events.connections == 1)
    return tui


async def test_tui_without_a_model_attaches_with_the_calls_of_crush(
    bare: FlowServer, kind: str
) -> None:
    startup = startup_for(bare.url, bare.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(bare), startup) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        assert tui.sent[:3] == ["POST /v1/workspaces", "GET W/permissions/skip", "GET W/agent"]
        assert Counter(tui.sent[3:]) == Counter(
            {
                "GET W/events?client_id=C": 1,
                "GET W/skills": 1,
                "GET W/messages/user": 1,
                "GET W/lsps": 1,
                "GET W/agent": 1,  # Once, as it is not ready.
                "GET W/permissions/skip": 1,
                "GET W/mcp/states": 1,
                "GET W/mcp/pending-auth": 1,
            }
        )
        assert (tui.calls.log, tui.screen.toasts) == ([], [])
    reused = ["shutdown_if_idle 409", "reuse", "ready"]
    assert startup.trail == (["tcp"] if kind == "tcp" else reused)


async def test_tui_with_a_model_finds_its_agent_ready_and_the_model_name(
    tmp_path: Path, kind: str
) -> None:
    async with open_agent(tmp_path, kind) as agent, open_attached(agent) as tui:
        assert tui.sent[:6] == [
            "POST /v1/workspaces",
            "POST W/agent/init",
            "GET W/permissions/skip",
            *["GET W/agent"] * 2,
            "GET W/project/needs-init",
        ]
        assert (
            Counter(tui.sent[6:])["GET W/agent"] == 3
        )  # For the ready flag, the busy flag and the model's name.
        assert (tui.screen.is_ready, tui.screen.is_busy, tui.needs_init) == (True, False, False)
        info = await tui.api.get(35)
        assert info.record("model").text("name") == "Demo One"
        assert info.record("model").integer("context_window") == 200_000
        chosen = info.record("model_cfg")
        assert (chosen.text("provider"), chosen.text("model")) == ("demo", "demo-1")
        provider = record(tui.calls.config.mapping("providers")["demo"])
        assert provider.text("api_key") == ""
        assert_no_errors(tui)


async def test_attached_workspace_has_the_requested_path_and_a_valid_config(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        assert tui.calls.workspace is not None
        assert tui.calls.workspace.text("path") == project(flow).path
        assert not tui.calls.config.record("options").flag("debug")
        assert tui.calls.config.record("options").text("data_directory")
        assert await tui.calls.attempt(11) == tui.calls.config
        assert tui.calls.log == []


async def test_yolo_is_set_by_the_first_client_and_any_client_can_clear_skip(
    flow: FlowServer,
) -> None:
    startup = startup_for(flow.url, flow.folder)
    requested = project(flow)
    yolo = type(requested)(requested.path, yolo=True)
    async with asyncio.timeout(WAIT_S), open_tui(yolo, startup) as first:
        assert first.screen.skip
        async with AsyncExitStack() as stack:
            second = await attached(flow, stack)
            assert second.screen.skip
            await second.set_skip(skip=False)
        await first.polling.tick(0)
        assert not first.screen.skip


async def test_two_tuis_of_one_directory_share_a_workspace_and_sessions(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        one, other = await attached(flow, stack), await attached(flow, stack)
        assert one.api.workspace_id == other.api.workspace_id
        assert await one.sessions.create("shared")
        await other.sessions.load(one.screen.session_id)
        (session,) = await other.sessions.pick()
        assert session.text("title") == "shared"
        assert await one.sessions.rename(session, "renamed")
        await other.until(lambda: other.screen.title == "renamed")
        assert await one.sessions.delete(session.text("id"))
        await other.until(lambda: other.screen.session_id == "")
        assert one.screen.toasts == other.screen.toasts == []


async def test_tui_polls_at_most_as_often_as_crush(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        counts: list[int] = []
        for now_s in (0.0, 0.4, 0.5, 2.0, 2.1, 5.0):
            before = len(tui.sent)
            await tui.polling.tick(now_s)
            counts.append(len(tui.sent) - before)
        # A round is four calls if the agent is ready, the queue two more, the LSP servers one.
        assert counts == [7, 0, 4, 6, 0, 7]
        assert tui.calls.log == []


async def test_sequential_requests_share_one_connection(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        before = tui.api.transport.dials
        for _ in range(20):
            await tui.polling.agent()
            await tui.calls.attempt(37, None, {"interactive": True})
        assert tui.api.transport.dials == before
        assert tui.calls.log == []


async def test_request_with_an_absolute_url_is_answered(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        transport = (await attached(flow, stack)).api.transport
        target = f"http://{transport.host.header}/v1/health"
        assert (await transport.exchange(Request("GET", target))).status == 200


async def test_session_is_loaded_with_the_calls_of_crush(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        session_id = tui.screen.session_id
        before = len(tui.sent)
        assert await tui.sessions.load(session_id)
        calls = [line.replace(session_id, "S") for line in tui.sent[before:]]
        loading = ["GET W/sessions/S", "GET W/sessions/S/history"]
        loading.append("GET W/sessions/S/filetracker/files")
        assert sorted(calls[:4]) == sorted([*loading, "POST W/current-session?client_id=C"])
        assert [line for line in calls[:4] if line in loading] == loading
        polls = [*["GET W/agent"] * 3, "GET W/permissions/skip", "GET W/agent"]
        polls.append("GET W/agent/sessions/S/prompts/list")
        assert calls[4:10] == polls
        assert calls[10:] == ["GET W/sessions/S/messages", "GET W/sessions/S/messages/user"]
        assert tui.calls.log == []
        (session,) = await tui.sessions.pick()
        assert session.integer("attached_clients") == 1


async def test_load_of_an_unknown_session_shows_no_error(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        assert not await tui.sessions.load(new_id())
        assert (tui.screen.session_id, tui.screen.toasts) == ("", [])


async def test_messages_of_a_missing_child_session_are_an_empty_list(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        assert await tui.api.call(20, sid=f"{new_id()}$$call_1") == []


async def test_ctrl_n_returns_to_the_landing_screen(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        await tui.sessions.load(tui.screen.session_id)
        before = len(tui.sent)
        await tui.sessions.begin_new()
        assert tui.sent[before:] == [
            "POST W/lsps/stop",
            "GET W/messages/user",
            "POST W/current-session?client_id=C",
        ]
        assert (tui.screen.session_id, tui.calls.log) == ("", [])
        (session,) = await tui.sessions.pick()
        assert session.integer("attached_clients") == 0


async def test_tui_can_start_on_a_given_or_the_last_session(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        for title in ("older", "newer"):
            await tui.sessions.create(title)
            flow.clock.advance(1)  # The list goes by whole seconds.
        newer, older = (session.text("id") for session in await tui.sessions.pick())
        startup = startup_for(flow.url, flow.folder)
        async with open_tui(project(flow), startup, session=older) as by_id:
            assert by_id.screen.title == "older"
        async with open_tui(project(flow), startup, session=newer[:8]) as by_prefix:
            assert by_prefix.screen.title == "newer"
        async with open_tui(project(flow), startup, continue_last=True) as last:
            assert last.screen.title == "newer"
        with pytest.raises(CallError, match="session not found"):
            async with open_tui(project(flow), startup, session=new_id()):
                pass


async def test_rename_and_delete_first_ask_if_the_session_is_busy(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        (session,) = await tui.sessions.pick()
        session_id, before = session.text("id"), len(tui.sent)
        await tui.sessions.rename(session, "b")
        await tui.sessions.delete(session_id)
        guard = ["GET W/agent", "GET W/agent/sessions/S"]
        calls = [line.replace(session_id, "S") for line in tui.sent[before:]]
        assert calls == [*guard, "PUT W/sessions/S", *guard, "DELETE W/sessions/S"]
        assert tui.calls.log == []  # Every guard was answered with an AgentSession.


async def test_refused_workspace_create_is_fatal_with_its_reason(flow: FlowServer) -> None:
    startup = startup_for(flow.url, flow.folder)
    bad = type(project(flow))("")
    with pytest.raises(StatusError, match=r"^status code 400: path is required$"):
        async with asyncio.timeout(WAIT_S), open_tui(bad, startup):
            pass


QUERIES = {25: "?path=%2Fa&session_id=s", 46: "?provider_id=demo", 65: "?name=gh"}
READS = [n for n, route in ROUTE_ANSWERS.items() if route.method == "GET" and route.answer]


@pytest.mark.parametrize("number", [n for n in READS if n != 27])
async def test_every_get_route_returns_json_that_go_can_decode(
    flow: FlowServer, number: int
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        ids = {"id": tui.api.workspace_id, "sid": tui.screen.session_id}
        method, path, kind = ROUTE_ANSWERS[number]
        target = path.format(**ids) + QUERIES.get(number, "")
        answer = await tui.api.transport.exchange(Request(method, target))
        assert kind is not None, "the stream is not among them"
        assert (answer.status, decode(answer.body, kind).error) == (200, None)
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.body.endswith(b"\n")


async def test_diagnostics_of_an_unknown_lsp_server_are_not_found(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        with pytest.raises(StatusError, match=r"^status code 404$"):
            await tui.api.call(27, lsp="gopls")

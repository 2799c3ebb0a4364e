"""Rejected prompts, cancels without a run, and dialogs without a request."""

import asyncio
from contextlib import AsyncExitStack

from tests.crush_client.client import LOST, NOT_READY, RESET, Tui, open_tui
from tests.crush_client.events import parse_line
from tests.crush_client.lines import EVENTS
from tests.crush_client.servers import Pauses, project, startup_for
from tests.crush_client.transport import UnixHost
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S


async def attached(flow: FlowServer, stack: AsyncExitStack) -> Tui:
    """Open a TUI with a connected stream and held pauses."""
    pauses = Pauses()
    pauses.hold()
    startup = startup_for(flow.url, flow.folder)
    tui = await stack.enter_async_context(open_tui(project(flow), startup, sleep=pauses))
    await tui.events.until(lambda: tui.events.connections == 1)
    return tui


async def deliver(tui: Tui, line: str) -> None:
    """Deliver a recorded line as if it came from the stream."""
    event = parse_line(line.encode())
    assert event is not None
    await tui.events.channel.put(event)


async def test_prompt_without_a_model_is_rejected_before_a_session_is_created(
    bare: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(bare, stack)
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [NOT_READY]
        assert await tui.sessions.pick() == []


async def test_prompt_refused_by_the_server_shows_its_reason(
    bare: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(bare, stack)
        await tui.sessions.create()
        session_id, before = tui.screen.session_id, len(tui.sent)
        await tui.post_prompt(session_id, "hi")
        reason = "status code 400: agent coordinator not initialized"
        assert tui.screen.toasts == [f"failed to send message to agent: {reason}"]
        calls = [line.replace(session_id, "S") for line in tui.sent[before:]]
        assert calls == [
            "POST W/agent",
            *("GET W/agent", "GET W/permissions/skip"),
            *("GET W/agent", "GET W/agent/sessions/S/prompts/list"),
        ]
        assert (tui.calls.log, tui.screen.is_busy) == ([], False)


async def test_cancel_and_queue_clear_succeed_without_a_run(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        await tui.cancel()
        await tui.escape()
        assert (tui.calls.log, tui.screen.is_busy, tui.screen.queue) == ([], False, [])


async def test_prompt_to_a_closed_workspace_shows_that_it_was_reset(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.api.call(5)  # The last claim ends, and with it the workspace.
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [RESET]


async def test_prompt_to_an_unreachable_server_shows_that_it_is_lost(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        tui.api.transport.host = UnixHost(flow.folder / "nobody")
        await tui.api.transport.aclose()
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [LOST]


async def test_answer_to_an_unknown_permission_request_is_not_resolved(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        for action in ("allow", "allow_session", "deny"):
            await deliver(tui, EVENTS["permission_notification"])
            await deliver(tui, EVENTS["permission_request"])
            await tui.until(lambda: tui.screen.permission is not None)
            assert not await tui.answer_permission(action)
            assert tui.screen.permission is None
        assert tui.calls.log == []


async def test_answer_to_unknown_questions_is_not_resolved(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await deliver(tui, EVENTS["question_batch_request"])
        await tui.until(lambda: tui.screen.questions is not None)
        answers = [{"request_id": "q1", "selected_ids": ["pg"]}, {"request_id": "q2", "yes": True}]
        assert not await tui.answer_questions([*answers])
        assert not await tui.cancel_questions()
        assert tui.calls.log == []


async def test_changed_configuration_is_fetched_again(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        known = tui.calls.workspace
        await deliver(tui, EVENTS["config_changed"])
        await tui.until(lambda: tui.calls.workspace is not known)
        assert tui.sent[-1] == "GET W"
        assert tui.calls.log == []


async def test_mcp_event_leads_to_four_successful_calls(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        before = len(tui.sent)
        await deliver(tui, EVENTS["mcp_event"])
        await tui.until(lambda: len(tui.sent) == before + 4)
        assert tui.sent[before:] == [
            "POST W/agent/update",
            "GET W/mcp/states",
            "GET W/mcp/pending-auth",
            "GET W/mcp/prompts",
        ]
        assert tui.calls.log == []

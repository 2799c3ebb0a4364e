"""Prompts that cannot be sent, cancels and dialogs of nobody: what a person gets to see."""

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
    """A TUI whose stream is open and whose pauses are held up."""
    pauses = Pauses()
    pauses.hold()
    startup = startup_for(flow.url, flow.folder)
    tui = await stack.enter_async_context(open_tui(project(flow), startup, sleep=pauses))
    await tui.events.until(lambda: tui.events.connections == 1)
    return tui


async def told(tui: Tui, line: str) -> None:
    """Put a recorded line where the stream would have put it."""
    event = parse_line(line.encode())
    assert event is not None
    await tui.events.channel.put(event)


async def test_a_prompt_without_a_model_is_rejected_before_a_session_is_made(
    bare: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(bare, stack)
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [NOT_READY]
        assert await tui.sessions.pick() == []


async def test_a_prompt_that_is_posted_all_the_same_shows_the_servers_reason(
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


async def test_a_cancel_and_a_clear_of_the_queue_succeed_although_nothing_runs(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.sessions.create()
        await tui.cancel()
        await tui.escape()
        assert (tui.calls.log, tui.screen.is_busy, tui.screen.queue) == ([], False, [])


async def test_a_prompt_to_a_workspace_that_is_gone_says_that_the_server_reset_it(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await tui.api.call(5)  # The last claim is gone, and with it the workspace.
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [RESET]


async def test_a_prompt_to_a_server_that_does_not_answer_says_that_it_is_lost(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        tui.api.transport.host = UnixHost(flow.folder / "nobody")
        await tui.api.transport.aclose()
        assert not await tui.send_prompt("hi")
        assert tui.screen.toasts == [LOST]


async def test_a_recorded_ask_opens_a_dialog_whose_answer_comes_too_late_for_the_server(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        for action in ("allow", "allow_session", "deny"):
            await told(tui, EVENTS["permission_notification"])
            await told(tui, EVENTS["permission_request"])
            await tui.until(lambda: tui.screen.permission is not None)
            assert not await tui.answer_permission(action)
            assert tui.screen.permission is None
        assert tui.calls.log == []


async def test_questions_that_nobody_asked_are_answered_and_cancelled_without_an_error(
    flow: FlowServer,
) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        await told(tui, EVENTS["question_batch_request"])
        await tui.until(lambda: tui.screen.questions is not None)
        answers = [{"request_id": "q1", "selected_ids": ["pg"]}, {"request_id": "q2", "yes": True}]
        assert not await tui.answer_questions([*answers])
        assert not await tui.cancel_questions()
        assert tui.calls.log == []


async def test_a_changed_configuration_is_fetched_again(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        known = tui.calls.workspace
        await told(tui, EVENTS["config_changed"])
        await tui.until(lambda: tui.calls.workspace is not known)
        assert tui.sent[-1] == "GET W"
        assert tui.calls.log == []


async def test_an_mcp_event_leads_to_four_calls_that_all_succeed(flow: FlowServer) -> None:
    async with asyncio.timeout(WAIT_S), AsyncExitStack() as stack:
        tui = await attached(flow, stack)
        before = len(tui.sent)
        await told(tui, EVENTS["mcp_event"])
        await tui.until(lambda: len(tui.sent) == before + 4)
        assert tui.sent[before:] == [
            "POST W/agent/update",
            "GET W/mcp/states",
            "GET W/mcp/pending-auth",
            "GET W/mcp/prompts",
        ]
        assert tui.calls.log == []

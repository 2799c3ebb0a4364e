"""Messages of the real server on a TUI's screen: streamed, reloaded and strictly decoded."""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import pytest

from culm.ids import SessionId
from culm.run.messages import Messages
from culm.wire import messages as wire
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.screen import Call, Item
from tests.crush_client.servers import project, startup_for
from tests.flow.conftest import FlowServer
from tests.support import WAIT_S

WINDOW_S = 0.05  # More than the 33 ms in which updates of one message are merged.
HEARTBEAT_S = 15.0
LOGGER = "tests.crush_client.events"


@asynccontextmanager
async def opened(flow: FlowServer) -> AsyncGenerator[tuple[Tui, Messages, SessionId]]:
    """Open a TUI with an open session, and the server's `Messages` of its workspace."""
    startup = startup_for(flow.url, flow.folder)
    async with asyncio.timeout(WAIT_S), open_tui(project(flow), startup) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        await tui.sessions.create()
        assert await tui.sessions.load(tui.screen.session_id)
        messages = flow.workspace(tui.api.workspace_id).messages
        yield tui, messages, SessionId(tui.screen.session_id)


def reader_log(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Log records of the client's event reader; on a slow machine other loggers add theirs."""
    return [r.getMessage() for r in caplog.records if r.name == LOGGER]


def text(value: str) -> wire.Part:
    return wire.TextPart(wire.Text(value))


async def test_streamed_answer_grows_and_is_the_same_after_a_reload(
    flow: FlowServer,
) -> None:
    async with opened(flow) as (tui, messages, session_id):
        messages.add(session_id, "user", [text("hi")])
        draft, durable = messages.open(session_id, model="m", provider="p")
        await durable
        answer = draft.message.id
        await tui.until(lambda: answer in tui.screen.items)
        for word, shown in (("Hello", "Hello"), (" there", "Hello there")):
            messages.append(draft, 0, "text", word)
            await flow.run_ready()
            flow.clock.advance(WINDOW_S)
            await tui.until(lambda shown=shown: tui.screen.items[answer].text == shown)
        await messages.finish(draft, wire.Finish("end_turn", 7))
        await tui.until(lambda: tui.screen.items[answer].finish == "end_turn")
        streamed = list(tui.screen.items.values())
        assert await tui.sessions.load(session_id)
        assert list(tui.screen.items.values()) == streamed
        assert [(item.role, item.text) for item in streamed] == [
            ("user", "hi"),
            ("assistant", "Hello there"),
        ]
        assert (tui.calls.log, tui.screen.toasts) == ([], [])


async def test_call_and_result_are_shown_live_and_after_a_reload(flow: FlowServer) -> None:
    async with opened(flow) as (tui, messages, session_id):
        draft, _ = messages.open(session_id)
        reasoning = wire.Reasoning("I should look.", "sig", 1, 2)
        messages.put(draft, 0, wire.ReasoningPart(reasoning))
        messages.put(draft, 1, wire.ToolCallPart(wire.ToolCall("call_1", "bash")))
        call = wire.ToolCall("call_1", "bash", '{"command":"ls"}', finished=True)
        messages.put(draft, 1, wire.ToolCallPart(call))
        messages.finish(draft, wire.Finish("tool_use", 3))
        result = wire.ToolResult("call_1", "bash", "done", metadata='{"output":"done"}')
        messages.add(session_id, "tool", [wire.ToolResultPart(result)])
        await tui.until(lambda: "call_1" in tui.screen.calls)
        await tui.until(lambda: tui.screen.calls["call_1"].state == "done")
        expected = Call(
            "call_1", "bash", '{"command":"ls"}', finished=True, state="done", result="done"
        )
        assert tui.screen.calls == {"call_1": expected}
        assert await tui.sessions.load(session_id)
        assert tui.screen.calls == {"call_1": expected}
        assert tui.calls.log == []


async def test_all_part_types_and_odd_text_pass_the_strict_decoder(
    flow: FlowServer, caplog: pytest.LogCaptureFixture
) -> None:
    parts: list[wire.Part] = [
        text("a\ud800b\x00\u2028 <&> \U0001f600"),
        wire.ImageUrlPart(wire.ImageUrl("https://x/y.png")),
        wire.BinaryPart(wire.Binary("shot.png", "image/png", bytes(range(256)))),
        wire.ShellCommandPart(wire.ShellCommand("ls", "\x1b[31mred", -1)),
    ]
    async with opened(flow) as (tui, messages, session_id):
        with caplog.at_level(logging.WARNING, logger=LOGGER):
            messages.add(session_id, "assistant", parts)
            message, durable = messages.add(session_id, "user", [text("mark")])
            await durable
            await tui.until(lambda: message.id in tui.screen.items)
        assert reader_log(caplog) == []
        assert await tui.sessions.load(session_id)
        first, mark = tui.screen.items.values()
        assert (first.text, mark.text) == ("a\ufffdb\x00\u2028 <&> \U0001f600", "mark")
        assert (tui.calls.log, tui.screen.toasts) == ([], [])


async def test_deleted_message_disappears(flow: FlowServer) -> None:
    async with opened(flow) as (tui, messages, session_id):
        message, _ = messages.add(session_id, "user", [text("oops")])
        await tui.until(lambda: message.id in tui.screen.items)
        await messages.delete(message.id)
        await tui.until(lambda: message.id not in tui.screen.items)


async def test_prompt_history_is_newest_first(flow: FlowServer) -> None:
    async with opened(flow) as (tui, messages, session_id):
        for prompt in ("first", "second"):
            _, durable = messages.add(session_id, "user", [text(prompt)])
            await durable
            flow.clock.advance(1)
        await tui.sessions.load_prompts()
        assert tui.sessions.prompts == ["second", "first"]
        await tui.sessions.load_prompts(session_id)
        assert tui.sessions.prompts == ["second", "first"]
        assert tui.calls.log == []


async def test_heartbeat_is_skipped_without_a_log_entry(
    flow: FlowServer, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(flow) as (tui, messages, session_id):
        with caplog.at_level(logging.DEBUG, logger=LOGGER):
            flow.clock.advance(10 * HEARTBEAT_S)
            message, _ = messages.add(session_id, "user", [text("after")])
            await tui.until(lambda: message.id in tui.screen.items)
        assert reader_log(caplog) == []
        assert list(tui.screen.items.values()) == [Item(message.id, "user", "after", "stop")]


async def test_burst_of_messages_arrives_complete_and_in_order(flow: FlowServer) -> None:
    async with opened(flow) as (tui, messages, session_id):
        sent = [messages.add(session_id, "user", [text(str(n))])[0].id for n in range(500)]
        await tui.until(lambda: len(tui.screen.items) == len(sent))
        assert list(tui.screen.items) == sent
        assert await tui.sessions.load(session_id)
        assert list(tui.screen.items) == sent

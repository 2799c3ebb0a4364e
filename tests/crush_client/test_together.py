"""Several prompts and several clients of one agent, and clients that disconnect."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from tests.crush_client.agents import (
    Agent,
    assert_no_errors,
    conversation,
    event_summaries,
    events_of,
    finishes,
    open_agent,
    open_attached,
    until_turn_ended,
)
from tests.crush_client.api import StatusError
from tests.crush_client.client import Tui
from tests.crush_client.servers import Pauses, open_flow
from tests.flow.drive import until
from tests.support import WAIT_S, model_config

WAITING = ScriptedCall(name="wait", id="call_1", input={"n": 1})


async def begin(tui: Tui, agent: Agent, text: str = "wait") -> None:
    """Send a prompt and wait until the agent's tool is waiting."""
    assert await tui.send_prompt(text)
    await agent.gate.entered.wait()


# --- the queue


async def test_prompts_to_a_busy_session_are_queued_in_order(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING])) as agent,
        open_attached(agent) as tui,
    ):
        await begin(tui, agent)
        for text in ("second", "third"):
            assert await tui.send_prompt(text)
        assert tui.screen.queue == ["second", "third"]
        assert await tui.calls.attempt(41, sid=tui.screen.session_id) == 2
        assert [item[:2] for item in conversation(tui) if item[0] == "user"] == [("user", "wait")]
        assert_no_errors(tui)


async def test_esc_clears_the_queue_and_the_turn_continues(tmp_path: Path, kind: str) -> None:
    replies = Reply(calls=[WAITING]), Reply(text="Waited.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        await begin(tui, agent)
        assert await tui.send_prompt("never mind")
        await tui.escape()
        await tui.polling.queue()
        assert tui.screen.queue == []
        agent.gate.opened.set()
        await until_turn_ended(tui)
        assert [text for role, text, _ in conversation(tui) if role == "user"] == ["wait"]
        ends = [summary for summary in event_summaries(tui) if summary.startswith("run_complete")]
        assert ends == ["run_complete cancelled", "run_complete"]
        assert_no_errors(tui)


async def test_queued_prompt_joins_the_turn_at_its_next_step(tmp_path: Path, kind: str) -> None:
    replies = Reply(calls=[WAITING]), Reply(text="Both done.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        await begin(tui, agent)
        assert await tui.send_prompt("and this")
        agent.gate.opened.set()
        await until_turn_ended(tui)
        assert conversation(tui) == [
            ("user", "wait", "stop"),
            ("assistant", "", "tool_use"),
            ("user", "and this", "stop"),
            ("assistant", "Both done.", "end_turn"),
        ]
        await tui.polling.queue()
        assert tui.screen.queue == []
        ends = [event.payload for event in events_of(tui) if event.type == "run_complete"]
        assert {end.text("text") for end in ends} == {"Both done."}
        assert_no_errors(tui)


async def test_esc_esc_ends_the_turn_and_clears_the_queue(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING]), Reply(text="Fresh.")) as agent,
        open_attached(agent) as tui,
    ):
        await begin(tui, agent)
        assert await tui.send_prompt("behind it")
        await tui.cancel()
        await until_turn_ended(tui, finish="canceled")
        assert tui.screen.queue == []
        assert [text for role, text, _ in conversation(tui) if role == "user"] == ["wait"]
        assert await tui.send_prompt("and now?")  # Later prompts are not affected.
        await until_turn_ended(tui)
        assert conversation(tui)[-1] == ("assistant", "Fresh.", "end_turn")
        assert_no_errors(tui)


async def test_busy_session_is_not_renamed_or_deleted(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING])) as agent,
        open_attached(agent) as tui,
    ):
        await begin(tui, agent)
        (session,) = await tui.sessions.pick()
        assert session.flag("is_busy")
        assert not await tui.sessions.rename(session, "other")
        assert not await tui.sessions.delete(tui.screen.session_id)
        with pytest.raises(StatusError, match=r"^status code 409$"):
            await tui.api.call(18, sid=tui.screen.session_id)  # Without the busy check.
        assert len(await tui.sessions.pick()) == 1
        assert_no_errors(tui)


# --- many clients


async def test_second_client_sees_the_same_turn(tmp_path: Path, kind: str) -> None:
    replies = Reply(text="I wait.", calls=[WAITING]), Reply(text="Waited.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as first:
        await first.sessions.create()
        async with open_attached(agent, session=first.screen.session_id) as second:
            await begin(first, agent)
            await second.until(lambda: "call_1" in second.screen.calls)
            await second.polling.agent()
            assert second.screen.is_busy
            agent.gate.opened.set()
            for tui in (first, second):
                await until_turn_ended(tui)
            assert second.screen.items == first.screen.items
            assert second.screen.calls == first.screen.calls
            assert_no_errors(first, second)


async def test_cancel_by_another_client_shows_no_error(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon"], hold_after=1)) as agent,
        open_attached(agent) as first,
    ):
        await first.sessions.create()
        async with open_attached(agent, session=first.screen.session_id) as second:
            assert await first.send_prompt("tell me a story")
            await agent.title_request()
            await second.cancel()
            for tui in (first, second):
                await until_turn_ended(tui, finish="canceled")
                await tui.until(lambda tui=tui: "run_complete cancelled" in event_summaries(tui))
                assert "error" not in event_summaries(tui)
            assert second.screen.items == first.screen.items
            assert_no_errors(first, second)


async def test_client_opening_a_session_in_mid_turn_sees_all_of_the_answer(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon", " a time."], hold_after=1)) as agent,
        open_attached(agent) as first,
    ):
        assert await first.send_prompt("tell me a story")
        request = await agent.model_request()
        await agent.title_request()
        async with open_attached(agent, continue_last=True) as late:
            assert conversation(late)[-1] == ("assistant", "Once upon", "")
            assert late.screen.is_busy
            agent.model.release(request)
            await until_turn_ended(late)
            assert conversation(late)[-1] == ("assistant", "Once upon a time.", "end_turn")
            assert_no_errors(late)


async def test_two_sessions_run_concurrently_and_each_client_shows_its_own(
    tmp_path: Path, kind: str
) -> None:
    replies = Reply(text="One.", hold_after=0), Reply(text="Two.", hold_after=0)
    async with (
        open_agent(tmp_path, kind, *replies) as agent,
        open_attached(agent) as first,
        open_attached(agent) as second,
    ):
        for tui, text in ((first, "1"), (second, "2")):
            assert await tui.send_prompt(text)
            await agent.model_request()
        agent.model.release()
        for tui, text in ((first, "One."), (second, "Two.")):
            await tui.until(lambda tui=tui: finishes(tui)[-1:] == ["end_turn"])
            assert [shown for _, shown, _ in conversation(tui)][1:] == [text]
        assert_no_errors(first, second)


# --- clients that disconnect


async def test_turn_continues_after_its_client_quits(tmp_path: Path, kind: str) -> None:
    async with open_agent(tmp_path, kind, Reply(text="Still here.", hold_after=0)) as agent:
        async with open_attached(agent) as tui:
            assert await tui.send_prompt("are you there?")
            request = await agent.model_request()
        agent.model.release(request)
        await until(lambda: agent.flow.server.registry.list() == [])  # No client needs it any more.
        async with open_attached(agent, continue_last=True) as another:
            assert conversation(another)[-1] == ("assistant", "Still here.", "end_turn")
            assert_no_errors(another)


async def test_turn_continues_while_its_client_is_disconnected(tmp_path: Path, kind: str) -> None:
    pauses = Pauses()
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon", " a time."], hold_after=1)) as agent,
        open_attached(agent, sleep=pauses) as tui,
    ):
        assert await tui.send_prompt("tell me a story")
        request = await agent.model_request()
        pauses.hold()
        await tui.api.transport.aclose()
        await tui.events.until(lambda: tui.events.degraded)
        agent.model.release(request)
        runs = agent.flow.workspace(tui.api.workspace_id).runs
        await until(lambda: not runs.live())
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        await until_turn_ended(tui)
        assert conversation(tui)[-1] == ("assistant", "Once upon a time.", "end_turn")
        assert_no_errors(tui)


async def test_turn_ended_by_server_shutdown_is_shown_as_interrupted(
    tmp_path: Path, kind: str
) -> None:
    pauses = Pauses()
    reply = Reply(deltas=["Once upon"], hold_after=1)
    async with (
        open_agent(tmp_path, kind, reply) as agent,
        open_attached(agent, sleep=pauses) as tui,
    ):
        assert await tui.send_prompt("tell me a story")
        await agent.title_request()
        pauses.hold()
        await agent.flow.server.registry.close()
        await tui.events.until(lambda: tui.events.degraded)
        answer = list(tui.screen.items.values())[-1]
        assert (answer.text, answer.finish) == ("Once upon", "error")
        assert answer.banner[0] == "Interrupted"
        assert event_summaries(tui)[-3:] == [
            "message updated assistant error",
            "error",
            "run_complete",
        ]
        await tui.vanish()
        shown, session_id = conversation(tui), tui.screen.session_id
        config = model_config(agent.model.url)
    async with (
        open_flow(tmp_path, kind, config=config) as flow,
        asyncio.timeout(WAIT_S),
        open_attached(Agent(flow, agent.model, agent.gate), session=session_id) as again,
    ):
        assert conversation(again) == shown
        assert_no_errors(again)


# --- summaries


async def test_summary_is_marked_and_restarts_the_context(tmp_path: Path, kind: str) -> None:
    usage = ScriptedUsage(input=900, output=7)
    replies = Reply(text="Hello.", usage=usage), Reply(text="They said hello.", usage=usage)
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await until_turn_ended(tui)
        assert tui.screen.tokens == 907
        assert await tui.summarize()
        await tui.until(lambda: len(tui.screen.items) == 3)
        await until_turn_ended(tui)
        summary = list(tui.screen.items.values())[-1]
        assert (summary.role, summary.text, summary.is_summary) == (
            "assistant",
            "They said hello.",
            True,
        )
        await tui.until(lambda: tui.screen.tokens == 7)
        session = await tui.api.get(16, sid=tui.screen.session_id)
        assert session.text("summary_message_id") == summary.message_id
        assert session.integer("prompt_tokens") == 0
        assert_no_errors(tui)


async def test_summary_is_refused_if_busy_and_immediate_if_empty(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING])) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        assert await tui.summarize()
        assert_no_errors(tui)
        await begin(tui, agent)
        assert not await tui.summarize()
        assert tui.screen.toasts == ["status code 409"]


async def test_canceled_summary_disappears_without_an_error(tmp_path: Path, kind: str) -> None:
    replies = Reply(text="Hello."), Reply(deltas=["They said"], hold_after=1)
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await until_turn_ended(tui)
        before = conversation(tui)
        async with asyncio.TaskGroup() as tasks:
            summing = tasks.create_task(tui.summarize(), name="summary")
            await tui.until(lambda: len(tui.screen.items) == 3)
            await tui.cancel()
        assert summing.result()
        await tui.until(lambda: len(tui.screen.items) == 2)
        assert conversation(tui) == before
        assert "message deleted " in event_summaries(tui)
        assert_no_errors(tui)

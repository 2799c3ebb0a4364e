"""Several prompts, several clients, and clients that leave: one agent, and everybody sees it."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from tests.crush_client.agents import (
    Agent,
    assert_flawless,
    events_of,
    finishes,
    open_agent,
    open_attached,
    said,
    told,
    until_over,
)
from tests.crush_client.api import StatusError
from tests.crush_client.client import Tui
from tests.crush_client.servers import Pauses, open_flow
from tests.flow.drive import until
from tests.support import WAIT_S, model_config

WAITING = ScriptedCall(name="wait", id="call_1", input={"n": 1})


async def begin(tui: Tui, agent: Agent, text: str = "wait") -> None:
    """Prompt, and come to where the agent's tool waits."""
    assert await tui.send_prompt(text)
    await agent.gate.entered.wait()


# --- the queue


async def test_prompts_to_a_busy_session_are_queued_and_shown_in_their_order(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING])) as agent,
        open_attached(agent) as tui,
    ):
        await begin(tui, agent)
        for text in ("second", "third"):
            assert await tui.send_prompt(text)
        assert tui.screen.queue == ["second", "third"]
        assert await tui.calls.attempt(41, sid=tui.screen.session_id) == 2
        assert [item[:2] for item in said(tui) if item[0] == "user"] == [("user", "wait")]
        assert_flawless(tui)


async def test_esc_clears_the_queue_and_the_turn_goes_on(tmp_path: Path, kind: str) -> None:
    replies = Reply(calls=[WAITING]), Reply(text="Waited.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        await begin(tui, agent)
        assert await tui.send_prompt("never mind")
        await tui.escape()
        await tui.polling.queue()
        assert tui.screen.queue == []
        agent.gate.opened.set()
        await until_over(tui)
        assert [text for role, text, _ in said(tui) if role == "user"] == ["wait"]
        ends = [words for words in told(tui) if words.startswith("run_complete")]
        assert ends == ["run_complete cancelled", "run_complete"]
        assert_flawless(tui)


async def test_a_queued_prompt_joins_the_turn_at_its_next_step(tmp_path: Path, kind: str) -> None:
    replies = Reply(calls=[WAITING]), Reply(text="Both done.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        await begin(tui, agent)
        assert await tui.send_prompt("and this")
        agent.gate.opened.set()
        await until_over(tui)
        assert said(tui) == [
            ("user", "wait", "stop"),
            ("assistant", "", "tool_use"),
            ("user", "and this", "stop"),
            ("assistant", "Both done.", "end_turn"),
        ]
        await tui.polling.queue()
        assert tui.screen.queue == []
        ends = [event.payload for event in events_of(tui) if event.type == "run_complete"]
        assert {end.text("text") for end in ends} == {"Both done."}
        assert_flawless(tui)


async def test_esc_esc_ends_the_turn_and_whatever_waits_behind_it(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING]), Reply(text="Fresh.")) as agent,
        open_attached(agent) as tui,
    ):
        await begin(tui, agent)
        assert await tui.send_prompt("behind it")
        await tui.cancel()
        await until_over(tui, finish="canceled")
        assert tui.screen.queue == []
        assert [text for role, text, _ in said(tui) if role == "user"] == ["wait"]
        assert await tui.send_prompt("and now?")  # What comes later is not touched.
        await until_over(tui)
        assert said(tui)[-1] == ("assistant", "Fresh.", "end_turn")
        assert_flawless(tui)


async def test_a_busy_session_is_neither_renamed_nor_deleted(tmp_path: Path, kind: str) -> None:
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
            await tui.api.call(18, sid=tui.screen.session_id)  # Without asking first.
        assert len(await tui.sessions.pick()) == 1
        assert_flawless(tui)


# --- many clients


async def test_a_second_client_sees_the_turn_as_the_first_does(tmp_path: Path, kind: str) -> None:
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
                await until_over(tui)
            assert second.screen.items == first.screen.items
            assert second.screen.calls == first.screen.calls
            assert_flawless(first, second)


async def test_a_cancel_by_another_client_is_an_error_to_nobody(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon"], hold_after=1)) as agent,
        open_attached(agent) as first,
    ):
        await first.sessions.create()
        async with open_attached(agent, session=first.screen.session_id) as second:
            assert await first.send_prompt("tell me a story")
            await agent.title()
            await second.cancel()
            for tui in (first, second):
                await until_over(tui, finish="canceled")
                await tui.until(lambda tui=tui: "run_complete cancelled" in told(tui))
                assert "error" not in told(tui)
            assert second.screen.items == first.screen.items
            assert_flawless(first, second)


async def test_a_client_that_opens_a_session_in_mid_turn_sees_what_was_said_and_the_rest(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon", " a time."], hold_after=1)) as agent,
        open_attached(agent) as first,
    ):
        assert await first.send_prompt("tell me a story")
        asked = await agent.question()
        await agent.title()
        async with open_attached(agent, continue_last=True) as late:
            assert said(late)[-1] == ("assistant", "Once upon", "")
            assert late.screen.is_busy
            agent.model.release(asked)
            await until_over(late)
            assert said(late)[-1] == ("assistant", "Once upon a time.", "end_turn")
            assert_flawless(late)


async def test_two_sessions_work_side_by_side_and_a_client_shows_its_own(
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
            await agent.question()
        agent.model.release()
        for tui, text in ((first, "One."), (second, "Two.")):
            await tui.until(lambda tui=tui: finishes(tui)[-1:] == ["end_turn"])
            assert [words for _, words, _ in said(tui)][1:] == [text]
        assert_flawless(first, second)


# --- clients that leave


async def test_a_turn_goes_on_when_its_client_quits_and_is_there_for_the_next(
    tmp_path: Path, kind: str
) -> None:
    async with open_agent(tmp_path, kind, Reply(text="Still here.", hold_after=0)) as agent:
        async with open_attached(agent) as tui:
            assert await tui.send_prompt("are you there?")
            asked = await agent.question()
        agent.model.release(asked)
        await until(lambda: agent.flow.server.registry.list() == [])  # Nobody needs it any more.
        async with open_attached(agent, continue_last=True) as another:
            assert said(another)[-1] == ("assistant", "Still here.", "end_turn")
            assert_flawless(another)


async def test_a_turn_goes_on_when_its_client_is_cut_off_and_is_caught_up_with(
    tmp_path: Path, kind: str
) -> None:
    pauses = Pauses()
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon", " a time."], hold_after=1)) as agent,
        open_attached(agent, sleep=pauses) as tui,
    ):
        assert await tui.send_prompt("tell me a story")
        asked = await agent.question()
        pauses.hold()
        await tui.api.transport.aclose()
        await tui.events.until(lambda: tui.events.degraded)
        agent.model.release(asked)
        runs = agent.flow.workspace(tui.api.workspace_id).runs
        await until(lambda: not runs.live())
        pauses.release()
        await tui.events.until(lambda: tui.events.connections == 2)
        await until_over(tui)
        assert said(tui)[-1] == ("assistant", "Once upon a time.", "end_turn")
        assert_flawless(tui)


async def test_a_turn_that_a_closing_server_cuts_off_is_shown_as_interrupted_and_found_so(
    tmp_path: Path, kind: str
) -> None:
    pauses = Pauses()
    reply = Reply(deltas=["Once upon"], hold_after=1)
    async with (
        open_agent(tmp_path, kind, reply) as agent,
        open_attached(agent, sleep=pauses) as tui,
    ):
        assert await tui.send_prompt("tell me a story")
        await agent.title()
        pauses.hold()
        await agent.flow.server.registry.close()
        await tui.events.until(lambda: tui.events.degraded)
        answer = list(tui.screen.items.values())[-1]
        assert (answer.text, answer.finish) == ("Once upon", "error")
        assert answer.banner[0] == "Interrupted"
        assert told(tui)[-3:] == ["message updated assistant error", "error", "run_complete"]
        await tui.vanish()
        shown, session_id = said(tui), tui.screen.session_id
        config = model_config(agent.model.url)
    async with (
        open_flow(tmp_path, kind, config=config) as flow,
        asyncio.timeout(WAIT_S),
        open_attached(Agent(flow, agent.model, agent.gate), session=session_id) as again,
    ):
        assert said(again) == shown
        assert_flawless(again)


# --- summaries


async def test_a_summary_is_shown_as_such_and_the_context_begins_again(
    tmp_path: Path, kind: str
) -> None:
    usage = ScriptedUsage(input=900, output=7)
    replies = Reply(text="Hello.", usage=usage), Reply(text="They said hello.", usage=usage)
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await until_over(tui)
        assert tui.screen.tokens == 907
        assert await tui.summarize()
        await tui.until(lambda: len(tui.screen.items) == 3)
        await until_over(tui)
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
        assert_flawless(tui)


async def test_a_summary_of_a_busy_session_is_refused_and_of_an_empty_one_done_at_once(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING])) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        assert await tui.summarize()
        assert_flawless(tui)
        await begin(tui, agent)
        assert not await tui.summarize()
        assert tui.screen.toasts == ["status code 409"]


async def test_a_summary_that_is_cancelled_disappears_and_is_no_failure(
    tmp_path: Path, kind: str
) -> None:
    replies = Reply(text="Hello."), Reply(deltas=["They said"], hold_after=1)
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await until_over(tui)
        before = said(tui)
        async with asyncio.TaskGroup() as tasks:
            summing = tasks.create_task(tui.summarize(), name="summary")
            await tui.until(lambda: len(tui.screen.items) == 3)
            await tui.cancel()
        assert summing.result()
        await tui.until(lambda: len(tui.screen.items) == 2)
        assert said(tui) == before
        assert "message deleted " in told(tui)
        assert_flawless(tui)

"""Prompts and cancels: the screen during a turn and after it."""

from pathlib import Path

from culm.events.hub import COALESCE_S
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from tests.crush_client.agents import (
    assert_no_errors,
    conversation,
    event_summaries,
    events_of,
    open_agent,
    open_attached,
    until_turn_ended,
)
from tests.crush_client.screen import Call
from tests.crush_client.types import part_type

WAITING = ScriptedCall(name="wait", id="call_1", input={"n": 1})
CANCELED_CALL = "Error: user cancelled assistant tool calling"


# --- a turn


async def test_events_of_a_prompt_have_the_reference_order(tmp_path: Path, kind: str) -> None:
    usage = ScriptedUsage(input=900, output=4)
    reply = Reply(deltas=["Hello", " there."], hold_after=1, usage=usage)
    async with open_agent(tmp_path, kind, reply) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        assert tui.screen.is_busy
        request = await agent.model_request()
        await tui.until(lambda: len(tui.screen.items) == 2)
        await agent.title_request()  # Requested once the answer has begun.
        agent.flow.clock.advance(COALESCE_S)
        await tui.until(lambda: conversation(tui)[-1] == ("assistant", "Hello", ""))
        agent.model.release(request)
        await until_turn_ended(tui)
        turn = [
            "session created",
            "message created user stop",
            "session updated",
            "message created assistant",
            "session updated",
            "message updated assistant",
            "session updated",
            "message updated assistant end_turn",
            "agent_finished",
            "run_complete",
        ]
        await tui.until(lambda: "run_complete" in event_summaries(tui))
        assert event_summaries(tui) == turn
        assert (tui.screen.tokens, tui.screen.title) == (904, "New Session")
        created = events_of(tui)[3].payload
        assert created.records("parts") == []
        assert (created.text("model"), created.text("provider")) == ("demo-1", "demo")
        agent.model.release(await agent.title_request())
        await tui.until(lambda: tui.screen.title == "Greeting")
        assert event_summaries(tui) == [*turn, "session updated"]
        assert conversation(tui) == [
            ("user", "hi", "stop"),
            ("assistant", "Hello there.", "end_turn"),
        ]
        assert_no_errors(tui)


async def test_run_complete_has_the_answer_and_finish_has_the_session_title(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(text="Hello there.")) as agent,
        open_attached(agent) as tui,
    ):
        assert await tui.send_prompt("hi")
        await tui.until(lambda: "run_complete" in event_summaries(tui))
        finished, complete = [
            event.payload
            for event in events_of(tui)
            if event.type in ("agent_event", "run_complete")
        ]
        answer = list(tui.screen.items)[-1]
        assert finished.text("session_id") == tui.screen.session_id
        assert finished.text("session_title") == "New Session"
        assert (complete.text("session_id"), complete.text("message_id")) == (
            tui.screen.session_id,
            answer,
        )
        assert (complete.text("text"), complete.text("error")) == ("Hello there.", "")
        assert complete.text("run_id")  # Created by the server, since the client gave none.
        assert_no_errors(tui)


async def test_call_is_shown_unfinished_then_complete_then_with_its_result(
    tmp_path: Path, kind: str
) -> None:
    replies = (
        Reply(reasoning="Hmm.", deltas=["I wait."], calls=[WAITING], hold_after=3),
        Reply(text="Waited."),
    )
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("wait for it")
        request = await agent.model_request()
        await tui.until(lambda: "call_1" in tui.screen.calls)
        shown = tui.screen.calls["call_1"]
        assert (shown.name, shown.finished, shown.state) == ("wait", False, "pending")
        agent.model.release(request)
        await tui.until(lambda: tui.screen.calls["call_1"].finished)
        whole = Call("call_1", "wait", '{"n":1}', finished=True)
        assert tui.screen.calls["call_1"] == whole
        agent.gate.opened.set()
        await until_turn_ended(tui)
        whole.state, whole.result = "done", "waited"
        assert tui.screen.calls == {"call_1": whole}
        assert conversation(tui) == [
            ("user", "wait for it", "stop"),
            ("assistant", "I wait.", "tool_use"),
            ("assistant", "Waited.", "end_turn"),
        ]
        assert_no_errors(tui)


async def test_result_message_comes_between_the_call_and_the_end_of_its_step(
    tmp_path: Path, kind: str
) -> None:
    replies = Reply(calls=[WAITING]), Reply(text="Waited.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        agent.gate.opened.set()
        assert await tui.send_prompt("wait for it")
        await until_turn_ended(tui)
        messages = [summary for summary in event_summaries(tui) if summary.startswith("message")]
        assert list(dict.fromkeys(messages)) == [
            "message created user stop",
            "message created assistant",
            "message updated assistant",
            "message created tool stop",
            "message updated assistant tool_use",
            "message updated assistant end_turn",
        ]
        first = next(
            part
            for event in events_of(tui)
            if event.type == "message"
            for part in event.payload.records("parts")
            if part_type(part) == "tool_call"
        )
        assert (first.text("input"), first.flag("finished")) == ("", False)
        assert_no_errors(tui)


async def test_finished_turn_is_the_same_after_a_reload(tmp_path: Path, kind: str) -> None:
    replies = Reply(reasoning="Hmm.", text="I wait.", calls=[WAITING]), Reply(text="Waited.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        agent.gate.opened.set()
        assert await tui.send_prompt("wait for it")
        await until_turn_ended(tui)
        items, calls = dict(tui.screen.items), dict(tui.screen.calls)
        assert await tui.sessions.load(tui.screen.session_id)
        assert (tui.screen.items, tui.screen.calls) == (items, calls)
        assert tui.sessions.prompts == ["wait for it"]
        assert "POST W/config/model" not in tui.sent
        assert_no_errors(tui)


async def test_interrupted_answer_is_cleared_and_retried(tmp_path: Path, kind: str) -> None:
    replies = Reply(deltas=["A first try"], cut_after=1), Reply(text="A second one.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("hi")
        await agent.model_request()
        shrunk = ("assistant", "", "")
        await tui.until(lambda: event_summaries(tui)[-1] == "message updated assistant")
        assert conversation(tui)[-1] == shrunk
        while len(agent.model.requests) < 3:  # Including the request for a title.
            agent.flow.clock.advance(1)
            await agent.flow.run_ready()
        await until_turn_ended(tui)
        assert conversation(tui)[-1] == ("assistant", "A second one.", "end_turn")
        assert_no_errors(tui)


# --- errors


async def test_failed_turn_shows_a_banner_with_title_and_details(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(status=401)) as agent,
        open_attached(agent) as tui,
    ):
        assert await tui.send_prompt("hi")
        await until_turn_ended(tui, finish="error")
        title, details = list(tui.screen.items.values())[-1].banner
        assert title == "Authentication problem"
        assert "refused the key (401)" in details
        await tui.until(lambda: "run_complete" in event_summaries(tui))
        assert event_summaries(tui)[-3:] == [
            "message updated assistant error",
            "error",
            "run_complete",
        ]
        error, complete = (event.payload for event in events_of(tui)[-2:])
        assert error.text("error") == complete.text("error") == f"{title}: {details}"
        assert error.text("run_id") == complete.text("run_id") != ""
        assert_no_errors(tui)


async def test_run_that_reaches_a_limit_ends_with_a_known_error(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(calls=[WAITING]), Reply(text="Never asked.")) as agent,
        open_attached(agent) as tui,
    ):
        agent.gate.opened.set()
        await tui.sessions.create()
        body = {"session_id": tui.screen.session_id, "prompt": "go", "limits": {"steps": 1}}
        await tui.api.call(36, body)
        await until_turn_ended(tui, finish="error")
        assert list(tui.screen.items.values())[-1].banner[0] == "Limit reached"
        await tui.until(lambda: "run_complete" in event_summaries(tui))
        assert b'"culm_reason":"budget"' in tui.events.lines[-2]
        assert_no_errors(tui)


async def test_finish_reasons_of_the_model_are_mapped_to_known_ones(
    tmp_path: Path, kind: str
) -> None:
    replies = [Reply(text="No.", finish=word) for word in ("content_filter", "max_tokens", "odd")]
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        for finish in ("content_filter", "max_tokens", "unknown"):
            assert await tui.send_prompt("please")
            await until_turn_ended(tui, finish=finish)
        assert_no_errors(tui)


# --- cancelling


async def test_esc_esc_ends_a_turn_and_keeps_its_text_without_an_error(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(deltas=["Once upon"], hold_after=1)) as agent,
        open_attached(agent) as tui,
    ):
        assert await tui.send_prompt("tell me a story")
        await agent.model_request()
        await agent.title_request()
        await tui.cancel()
        await until_turn_ended(tui, finish="canceled")
        assert conversation(tui)[-1] == ("assistant", "Once upon", "canceled")
        await tui.until(lambda: "run_complete cancelled" in event_summaries(tui))
        assert {"agent_finished", "error"}.isdisjoint(event_summaries(tui))
        finish = events_of(tui)[-2].payload.records("parts")[-1]
        assert finish.text("message") == "User canceled request"
        assert_no_errors(tui)


async def test_cancel_right_after_the_prompt_keeps_the_prompt(tmp_path: Path, kind: str) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(text="Never said.", hold_after=0)) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        await tui.api.call(36, {"session_id": tui.screen.session_id, "prompt": "oops"})
        await tui.cancel()
        await until_turn_ended(tui, finish="canceled")
        assert conversation(tui) == [("user", "oops", "stop"), ("assistant", "", "canceled")]
        await tui.until(lambda: "run_complete cancelled" in event_summaries(tui))
        assert_no_errors(tui)


async def test_cancel_during_call_arguments_completes_and_answers_the_call(
    tmp_path: Path, kind: str
) -> None:
    call = ScriptedCall(name="wait", id="call_1", input={"text": "long enough for two"})
    async with (
        open_agent(tmp_path, kind, Reply(calls=[call], hold_after=1)) as agent,
        open_attached(agent) as tui,
    ):
        assert await tui.send_prompt("call")
        await tui.until(lambda: "call_1" in tui.screen.calls)
        await tui.cancel()
        await until_turn_ended(tui, finish="canceled")
        await tui.until(lambda: tui.screen.calls["call_1"].state == "done")
        shown = Call("call_1", "wait", "{}", finished=True, state="done", result=CANCELED_CALL)
        assert tui.screen.calls == {"call_1": shown}
        assert not agent.gate.entered.is_set()
        assert_no_errors(tui)


async def test_cancel_during_a_tool_stops_it_without_a_new_model_request(
    tmp_path: Path, kind: str
) -> None:
    replies = Reply(text="I wait.", calls=[WAITING]), Reply(text="Never asked.")
    async with open_agent(tmp_path, kind, *replies) as agent, open_attached(agent) as tui:
        assert await tui.send_prompt("wait")
        await agent.gate.entered.wait()
        await tui.cancel()
        await until_turn_ended(tui, finish="canceled")
        assert tui.screen.calls["call_1"].result == CANCELED_CALL
        assert conversation(tui)[-1] == ("assistant", "I wait.", "canceled")
        await agent.title_request()
        assert len(agent.model.requests) == 2
        assert_no_errors(tui)


async def test_cancel_without_a_run_does_not_affect_the_next_prompt(
    tmp_path: Path, kind: str
) -> None:
    async with (
        open_agent(tmp_path, kind, Reply(text="Hello.")) as agent,
        open_attached(agent) as tui,
    ):
        await tui.sessions.create()
        await tui.cancel()
        assert await tui.send_prompt("hi")
        await until_turn_ended(tui)
        assert conversation(tui)[-1] == ("assistant", "Hello.", "end_turn")
        assert_no_errors(tui)

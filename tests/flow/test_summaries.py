"""Summaries: runs on request, or automatic when the context is nearly full."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall, ScriptedUsage
from culm.wire.messages import Message, full_text
from tests.flow.config_files import config_of, provider
from tests.flow.drive import UNKNOWN, connect, request_bytes
from tests.flow.probes import SUMMARY, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired, finish_of
from tests.flow.runs import Harness, open_harness, open_runs
from tests.support import contract, model_config

WINDOW = 10_000
SMALL: dict[str, object] = {
    "context_window": WINDOW,
    "cost_per_1m_in": 10.0,
    "cost_per_1m_out": 20.0,
}
HELD = Reply(deltas=["In ", "short."], hold_after=1)
FULL = ScriptedUsage(input=7_990, output=10)  # A fifth of the window is left.


def summary_script(reply: Reply, *replies: Reply, then: str = "Fine.") -> Script:
    """Replies as in `script`, and `reply` to every summary request."""
    return script(*replies, rules=[ReplyRule(when=SUMMARY, reply=reply)], then=then)


def nearly_full(reply: Reply) -> Reply:
    return Reply(text=reply.text, calls=reply.calls, finish=reply.finish, usage=FULL)


def summaries(messages: list[Message]) -> list[str]:
    return [full_text(m.parts) for m in messages if m.is_summary_message]


def users(harness: Harness, n: int) -> list[str]:
    """The user messages of the n-th model request."""
    return [str(message.content) for message in harness.sent(n) if message.role == "user"]


# --- on request


@contract("EXC-3")
@pytest.mark.parametrize("route", ["summarize", "compact"])
async def test_summary_is_a_run_and_replaces_the_earlier_messages(
    tmp_path: Path, kind: str, route: str
) -> None:
    short = Reply(text="In short.", usage=ScriptedUsage(input=500, output=7))
    async with open_runs(tmp_path, kind, summary_script(short), info=SMALL) as harness:
        await harness.talk("One.", "Two.")
        before = await harness.session()
        answer = await harness.of_session(route)
        assert (answer.status, answer.body) == (200 if route == "summarize" else 202, b"")
        (run,) = [run for run in await harness.runs() if run.kind == "summary"]
        complete = await harness.received.complete(run.id)
        if route == "compact":
            assert answer.headers["culm-run-id"] == run.id
        assert (complete.error, complete.cancelled) == ("", False)
        messages, session = await harness.messages(), await harness.session()
        assert summaries(messages) == ["In short."]
        assert session.summary_message_id == messages[-1].id
        assert finish_of(messages[-1]).reason == "end_turn"
        assert (session.prompt_tokens, session.completion_tokens) == (0, 7)
        assert session.cost - before.cost == pytest.approx((500 * 10 + 7 * 20) / 1e6)
        assert (await harness.run(run.id)).outcome == "end_turn"
        await harness.talk("Three.")
        assert users(harness, len(harness.seen())) == ["In short.", "Three."]
        assert [m.role for m in harness.sent(len(harness.seen()))] == ["user", "user"]


@contract("EXC-3")
async def test_summary_of_an_empty_session_is_not_a_run_and_of_an_unknown_is_404(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as harness:
        assert (await harness.of_session("summarize")).status == 200
        empty = await harness.of_session("compact")
        assert (empty.status, "culm-run-id" in empty.headers) == (202, False)
        for route in ("summarize", "compact"):
            answer = await harness.request("POST", f"/agent/sessions/{UNKNOWN}/{route}")
            assert (answer.status, b"session_not_found" in answer.body) == (404, True)
        assert (await harness.runs(), harness.model.requests) == ([], [])


async def test_summary_of_a_busy_session_is_409_and_its_run_continues(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("In ")
        for route in ("summarize", "compact"):
            answer = await harness.of_session(route)
            assert (answer.status, b"session_busy" in answer.body) == (409, True)
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "In short."
        assert len(await harness.runs()) == 1


@contract("INV-58", "EXC-3")
@pytest.mark.parametrize("route", ["summarize", "compact"])
async def test_cancelled_summary_is_removed_and_not_an_error(tmp_path: Path, route: str) -> None:
    async with open_runs(tmp_path, play=summary_script(HELD)) as harness:
        await harness.talk("One.")
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(harness.of_session(route))
            await harness.received.text("In ")
            await harness.cancel()
        assert answering.result().status == (200 if route == "summarize" else 202)
        (run,) = [run for run in await harness.runs() if run.kind == "summary"]
        assert (await harness.received.complete(run.id)).cancelled
        await harness.catch_up()
        assert harness.received.errors() == []
        assert [text for _, text, _ in await harness.rows()] == ["One.", "Fine."]
        assert (await harness.session()).summary_message_id == ""
        assert (await harness.run(run.id)).outcome == "canceled"
        await harness.talk("Two.")
        assert users(harness, len(harness.seen())) == ["One.", "Two."]


@contract("EXC-3")
async def test_summary_is_finished_after_its_client_disconnects(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, summary_script(HELD)) as harness:
        await harness.talk("One.")
        _, writer = await connect(harness.flow.server.addresses[0])
        path = harness.remote.path(f"/agent/sessions/{harness.session_id}/summarize")
        writer.write(request_bytes(harness.flow, "POST", path, {}))
        await harness.received.text("In ")
        writer.transport.abort()
        await harness.flow.run_ready()
        harness.model.release()
        (run,) = [run for run in await harness.runs() if run.kind == "summary"]
        assert (await harness.received.complete(run.id)).error == ""
        assert summaries(await harness.messages()) == ["In short."]


@contract("EXC-3")
async def test_prompts_during_a_summary_wait_and_read_it(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=summary_script(HELD)) as harness:
        await harness.talk("One.")
        await harness.of_session("compact")
        await harness.received.text("In ")
        two, three = await harness.prompt("Two.", run_id="two"), await harness.prompt("Three.")
        assert [item.run_id for item in await harness.queue()] == [two, three]
        harness.model.release()
        for run_id in (two, three):
            assert (await harness.received.complete(run_id)).text == "Fine."
        # It did not join the summary; it joins the turn after it.
        assert users(harness, len(harness.seen())) == ["In short.", "Two.", "Three."]
        assert (await harness.run(three)).host_run_id == two


@contract("EXC-1", "EXC-3")
@pytest.mark.parametrize("reply", [Reply(status=401), Reply(text="  \n")])
async def test_failed_summary_is_an_error_and_replaces_nothing(
    tmp_path: Path, reply: Reply
) -> None:
    async with open_runs(tmp_path, play=summary_script(reply)) as harness:
        await harness.talk("One.")
        answer = await harness.of_session("summarize")
        assert (answer.status, b"model_failed" in answer.body) == (502, True)
        (run,) = [run for run in await harness.runs() if run.kind == "summary"]
        assert (run.outcome, bool(run.title), bool(run.details)) == ("error", True, True)
        await harness.catch_up()
        assert [error.run_id for error in harness.received.errors()] == [run.id]
        assert harness.received.completed().count(run.id) == 1
        assert (await harness.session()).summary_message_id == ""
        await harness.talk("Two.")
        assert users(harness, len(harness.seen())) == ["One.", "Two."]


# --- automatic, when the context is nearly full


async def test_turn_with_a_nearly_full_context_continues_from_a_summary(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("count")
    play = summary_script(Reply(text="In short."), nearly_full(calling("count", text="So far.")))
    async with open_runs(tmp_path, kind, play, tools=[tool], info=SMALL) as harness:
        run_id = await harness.prompt("Count the files.", run_id="mine")
        complete = await harness.received.complete(run_id)
        await harness.catch_up()
        assert (complete.text, harness.received.completed()) == ("Fine.", ["mine"])
        assert await harness.rows() == [
            ("user", "Count the files.", "stop"),
            ("assistant", "So far.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "In short.", "end_turn"),
            ("assistant", "Fine.", "end_turn"),
        ]
        messages = await harness.messages()
        assert summaries(messages) == ["In short."]
        assert complete.message_id == messages[-1].id
        asked, summary, going_on = (harness.sent(n) for n in (1, 2, 3))
        assert [m.role for m in asked] == ["user"]
        assert_paired(summary)
        assert [m.role for m in summary] == ["user", "assistant", "tool", "user"]
        assert [m.role for m in going_on] == ["user", "user"]
        assert going_on[0].content == "In short."
        assert "Count the files." in str(going_on[1].content)
        assert len(tool.calls) == 1


async def test_answer_that_fills_the_context_is_followed_by_a_summary(
    tmp_path: Path,
) -> None:
    play = summary_script(Reply(text="In short."), nearly_full(Reply(text="All of it.")))
    async with open_runs(tmp_path, play=play, info=SMALL) as harness:
        complete = await harness.received.complete(await harness.prompt("Tell me."))
        assert complete.text == "All of it."
        assert await harness.rows() == [
            ("user", "Tell me.", "stop"),
            ("assistant", "All of it.", "end_turn"),
            ("assistant", "In short.", "end_turn"),
        ]
        await harness.talk("And now?")
        assert users(harness, 3) == ["In short.", "And now?"]


@contract("INV-57", "INV-82")
async def test_truncated_calls_are_answered_before_the_summary(
    tmp_path: Path,
) -> None:
    cut = nearly_full(Reply(calls=[ScriptedCall(name="count")], finish="max_tokens"))
    tool = Probe("count")
    play = summary_script(Reply(text="In short."), cut)
    async with open_runs(tmp_path, play=play, tools=[tool], info=SMALL) as harness:
        run_id = await harness.prompt("Count.")
        await harness.received.complete(run_id)
        assert (await harness.run(run_id)).outcome == "max_tokens"
        assert_answered(await harness.messages())
        assert tool.calls == []
        assert_paired(harness.sent(2))


@contract("EXC-2")
async def test_cancel_of_a_summary_within_a_turn_ends_the_turn_without_a_summary(
    tmp_path: Path, kind: str
) -> None:
    play = summary_script(HELD, nearly_full(calling("count", text="So far.")))
    async with open_runs(tmp_path, kind, play, tools=[Probe("count")], info=SMALL) as harness:
        run_id = await harness.prompt("Count.")
        await harness.received.text("In ")
        await harness.cancel()
        complete = await harness.received.complete(run_id)
        await harness.until_idle()
        await harness.catch_up()
        assert (complete.cancelled, harness.received.completed()) == (True, [run_id])
        assert harness.received.errors() == []
        assert len(harness.seen()) == 2  # The turn does not continue.
        assert await harness.queue() == []
        assert [(role, text, reason) for role, text, reason in await harness.rows()] == [
            ("user", "Count.", "stop"),
            ("assistant", "So far.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "", "canceled"),
        ]
        assert (await harness.session()).summary_message_id == ""


@contract("EXC-2")
async def test_cancel_of_a_summary_after_an_answer_keeps_the_answer(tmp_path: Path) -> None:
    play = summary_script(HELD, nearly_full(Reply(text="All of it.")))
    async with open_runs(tmp_path, play=play, info=SMALL) as harness:
        run_id = await harness.prompt("Tell me.")
        await harness.received.text("In ")
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        assert await harness.rows() == [
            ("user", "Tell me.", "stop"),
            ("assistant", "All of it.", "end_turn"),
        ]
        assert (await harness.session()).summary_message_id == ""


@contract("INV-35")
async def test_prompt_during_the_summary_of_a_turn_joins_the_turn_after_it(
    tmp_path: Path,
) -> None:
    play = summary_script(HELD, nearly_full(calling("count")))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=SMALL) as harness:
        host = await harness.prompt("Count.")
        await harness.received.text("In ")
        guest = await harness.prompt("Only the green ones.")
        harness.model.release()
        await harness.received.complete(guest)
        assert harness.received.completed() == [host, guest]
        assert users(harness, 3)[0] == "In short."
        assert users(harness, 3)[2:] == ["Only the green ones."]


@contract("EXC-1")
async def test_failed_summary_within_a_turn_ends_the_run_and_the_next_run_starts(
    tmp_path: Path,
) -> None:
    play = summary_script(Reply(status=401, delay_s=0.05), nearly_full(calling("count")))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=SMALL) as harness:
        await harness.prompt("Count.", run_id="one")
        await harness.until_asked(1)
        await harness.prompt("Next.", run_id="two")
        assert "Authentication" in (await harness.received.complete("one")).error
        assert (await harness.received.complete("two")).text == "Fine."
        assert_paired(harness.sent(3))
        assert users(harness, 3) == ["Count.", "Next."]


@pytest.mark.parametrize("why", ["switched off", "window unknown", "room enough"])
async def test_no_summary_when_disabled_or_not_needed(tmp_path: Path, why: str) -> None:
    window = {"switched off": WINDOW, "window unknown": 0, "room enough": WINDOW + 1}[why]
    play = summary_script(Reply(text="In short."), nearly_full(Reply(text="All of it.")))
    async with open_model_server(play) as model:
        config = model_config(model.url, context_window=window)
        if why == "switched off":
            config["options"] = {"disable_auto_summarize": True}
        async with open_harness(tmp_path, "unix", model, config=config) as harness:
            await harness.talk("Tell me.")
            assert summaries(await harness.messages()) == []
            assert len(harness.seen()) == 1


async def test_cached_input_counts_as_used_context(tmp_path: Path) -> None:
    cached = ScriptedUsage(input=10, output=10, cache_write=7_980)
    play = summary_script(Reply(text="In short."), Reply(text="All of it.", usage=cached))
    about = {"id": "demo-1", "name": "Demo One", "context_window": WINDOW}
    async with open_model_server(play) as model:
        config = config_of({"demo": provider(model.url, type="anthropic", models=[about])})
        async with open_harness(tmp_path, "unix", model, config=config) as harness:
            await harness.talk("Tell me.")
            await harness.until_idle()
            assert summaries(await harness.messages()) == ["In short."]

"""Summaries: runs like any other, asked for or made when the context is nearly full."""

import asyncio
from pathlib import Path

import pytest

from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Rule, Script, ScriptedCall, ScriptedUsage
from culm.wire.messages import Message, full_text
from tests.flow.drive import UNKNOWN, connect, request_bytes
from tests.flow.probes import SUMMARY, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired, finish_of
from tests.flow.runs import Stage, open_runs, open_stage
from tests.flow.written import config_of, provider
from tests.support import contract, model_config

WINDOW = 10_000
SMALL: dict[str, object] = {
    "context_window": WINDOW,
    "cost_per_1m_in": 10.0,
    "cost_per_1m_out": 20.0,
}
HELD = Reply(deltas=["In ", "short."], hold_after=1)
FULL = ScriptedUsage(input=7_990, output=10)  # A fifth of the window is left.


def summing(reply: Reply, *replies: Reply, then: str = "Fine.") -> Script:
    """Replies as in `script`, and this one to whoever wants a summary."""
    return script(*replies, rules=[Rule(when=SUMMARY, reply=reply)], then=then)


def nearly_full(reply: Reply) -> Reply:
    return Reply(text=reply.text, calls=reply.calls, finish=reply.finish, usage=FULL)


def summaries(messages: list[Message]) -> list[str]:
    return [full_text(m.parts) for m in messages if m.is_summary_message]


def users(stage: Stage, n: int) -> list[str]:
    """What users said in the n-th question, as the model read it."""
    return [str(message.content) for message in stage.sent(n) if message.role == "user"]


# --- asked for


@contract("EXC-3")
@pytest.mark.parametrize("route", ["summarize", "compact"])
async def test_a_summary_is_a_run_and_the_model_reads_it_instead_of_what_was_before(
    tmp_path: Path, kind: str, route: str
) -> None:
    short = Reply(text="In short.", usage=ScriptedUsage(input=500, output=7))
    async with open_runs(tmp_path, kind, summing(short), info=SMALL) as stage:
        await stage.talk("One.", "Two.")
        before = await stage.session()
        answer = await stage.of_session(route)
        assert (answer.status, answer.body) == (200 if route == "summarize" else 202, b"")
        (run,) = [run for run in await stage.runs() if run.kind == "summary"]
        complete = await stage.heard.complete(run.id)
        if route == "compact":
            assert answer.headers["culm-run-id"] == run.id
        assert (complete.error, complete.cancelled) == ("", False)
        messages, session = await stage.messages(), await stage.session()
        assert summaries(messages) == ["In short."]
        assert session.summary_message_id == messages[-1].id
        assert finish_of(messages[-1]).reason == "end_turn"
        assert (session.prompt_tokens, session.completion_tokens) == (0, 7)
        assert session.cost - before.cost == pytest.approx((500 * 10 + 7 * 20) / 1e6)
        assert (await stage.run(run.id)).outcome == "end_turn"
        await stage.talk("Three.")
        assert users(stage, len(stage.seen())) == ["In short.", "Three."]
        assert [m.role for m in stage.sent(len(stage.seen()))] == ["user", "user"]


@contract("EXC-3")
async def test_the_summary_of_an_empty_session_is_no_run_and_of_none_is_404(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        assert (await stage.of_session("summarize")).status == 200
        empty = await stage.of_session("compact")
        assert (empty.status, "culm-run-id" in empty.headers) == (202, False)
        for route in ("summarize", "compact"):
            answer = await stage.request("POST", f"/agent/sessions/{UNKNOWN}/{route}")
            assert (answer.status, b"session_not_found" in answer.body) == (404, True)
        assert (await stage.runs(), stage.model.requests) == ([], [])


async def test_a_busy_session_is_not_summarized_and_its_run_goes_on(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("In ")
        for route in ("summarize", "compact"):
            answer = await stage.of_session(route)
            assert (answer.status, b"session_busy" in answer.body) == (409, True)
        stage.model.release()
        assert (await stage.heard.complete(run_id)).text == "In short."
        assert len(await stage.runs()) == 1


@contract("INV-58", "EXC-3")
@pytest.mark.parametrize("route", ["summarize", "compact"])
async def test_a_cancel_of_a_summary_removes_it_and_is_no_error(tmp_path: Path, route: str) -> None:
    async with open_runs(tmp_path, play=summing(HELD)) as stage:
        await stage.talk("One.")
        async with asyncio.TaskGroup() as tasks:
            answering = tasks.create_task(stage.of_session(route))
            await stage.heard.text("In ")
            await stage.cancel()
        assert answering.result().status == (200 if route == "summarize" else 202)
        (run,) = [run for run in await stage.runs() if run.kind == "summary"]
        assert (await stage.heard.complete(run.id)).cancelled
        await stage.catch_up()
        assert stage.heard.errors() == []
        assert [text for _, text, _ in await stage.rows()] == ["One.", "Fine."]
        assert (await stage.session()).summary_message_id == ""
        assert (await stage.run(run.id)).outcome == "canceled"
        await stage.talk("Two.")
        assert users(stage, len(stage.seen())) == ["One.", "Two."]


@contract("EXC-3")
async def test_a_summary_is_finished_although_whoever_asked_for_it_is_gone(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind, summing(HELD)) as stage:
        await stage.talk("One.")
        _, writer = await connect(stage.flow.server.addresses[0])
        path = stage.remote.path(f"/agent/sessions/{stage.session_id}/summarize")
        writer.write(request_bytes(stage.flow, "POST", path, {}))
        await stage.heard.text("In ")
        writer.transport.abort()
        await stage.flow.settle()
        stage.model.release()
        (run,) = [run for run in await stage.runs() if run.kind == "summary"]
        assert (await stage.heard.complete(run.id)).error == ""
        assert summaries(await stage.messages()) == ["In short."]


@contract("EXC-3")
async def test_prompts_during_a_summary_wait_and_read_it(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=summing(HELD)) as stage:
        await stage.talk("One.")
        await stage.of_session("compact")
        await stage.heard.text("In ")
        two, three = await stage.prompt("Two.", run_id="two"), await stage.prompt("Three.")
        assert [item.run_id for item in await stage.queue()] == [two, three]
        stage.model.release()
        for run_id in (two, three):
            assert (await stage.heard.complete(run_id)).text == "Fine."
        # It did not join the summary; it joins the turn after it.
        assert users(stage, len(stage.seen())) == ["In short.", "Two.", "Three."]
        assert (await stage.run(three)).host_run_id == two


@contract("EXC-1", "EXC-3")
@pytest.mark.parametrize("reply", [Reply(status=401), Reply(text="  \n")])
async def test_a_summary_that_fails_says_so_replaces_nothing_and_lets_the_next_run(
    tmp_path: Path, reply: Reply
) -> None:
    async with open_runs(tmp_path, play=summing(reply)) as stage:
        await stage.talk("One.")
        answer = await stage.of_session("summarize")
        assert (answer.status, b"model_failed" in answer.body) == (502, True)
        (run,) = [run for run in await stage.runs() if run.kind == "summary"]
        assert (run.outcome, bool(run.title), bool(run.details)) == ("error", True, True)
        await stage.catch_up()
        assert [error.run_id for error in stage.heard.errors()] == [run.id]
        assert stage.heard.completed().count(run.id) == 1
        assert (await stage.session()).summary_message_id == ""
        await stage.talk("Two.")
        assert users(stage, len(stage.seen())) == ["One.", "Two."]


# --- by itself, when the context is nearly full


async def test_a_turn_whose_context_is_nearly_full_goes_on_from_a_summary(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("count")
    play = summing(Reply(text="In short."), nearly_full(calling("count", text="So far.")))
    async with open_runs(tmp_path, kind, play, tools=[tool], info=SMALL) as stage:
        run_id = await stage.prompt("Count the files.", run_id="mine")
        complete = await stage.heard.complete(run_id)
        await stage.catch_up()
        assert (complete.text, stage.heard.completed()) == ("Fine.", ["mine"])
        assert await stage.rows() == [
            ("user", "Count the files.", "stop"),
            ("assistant", "So far.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "In short.", "end_turn"),
            ("assistant", "Fine.", "end_turn"),
        ]
        messages = await stage.messages()
        assert summaries(messages) == ["In short."]
        assert complete.message_id == messages[-1].id
        asked, summary, going_on = (stage.sent(n) for n in (1, 2, 3))
        assert [m.role for m in asked] == ["user"]
        assert_paired(summary)
        assert [m.role for m in summary] == ["user", "assistant", "tool", "user"]
        assert [m.role for m in going_on] == ["user", "user"]
        assert going_on[0].content == "In short."
        assert "Count the files." in str(going_on[1].content)
        assert len(tool.calls) == 1


async def test_an_answer_that_fills_the_context_ends_its_run_and_is_summarized_after_it(
    tmp_path: Path,
) -> None:
    play = summing(Reply(text="In short."), nearly_full(Reply(text="All of it.")))
    async with open_runs(tmp_path, play=play, info=SMALL) as stage:
        complete = await stage.heard.complete(await stage.prompt("Tell me."))
        assert complete.text == "All of it."
        assert await stage.rows() == [
            ("user", "Tell me.", "stop"),
            ("assistant", "All of it.", "end_turn"),
            ("assistant", "In short.", "end_turn"),
        ]
        await stage.talk("And now?")
        assert users(stage, 3) == ["In short.", "And now?"]


@contract("INV-57", "INV-82")
async def test_calls_that_were_cut_off_are_answered_before_the_context_is_summarized(
    tmp_path: Path,
) -> None:
    cut = nearly_full(Reply(calls=[ScriptedCall(name="count")], finish="max_tokens"))
    tool = Probe("count")
    play = summing(Reply(text="In short."), cut)
    async with open_runs(tmp_path, play=play, tools=[tool], info=SMALL) as stage:
        run_id = await stage.prompt("Count.")
        await stage.heard.complete(run_id)
        assert (await stage.run(run_id)).outcome == "max_tokens"
        assert_answered(await stage.messages())
        assert tool.calls == []
        assert_paired(stage.sent(2))


@contract("EXC-2")
async def test_a_cancel_of_a_summary_in_mid_turn_ends_the_turn_and_leaves_no_summary(
    tmp_path: Path, kind: str
) -> None:
    play = summing(HELD, nearly_full(calling("count", text="So far.")))
    async with open_runs(tmp_path, kind, play, tools=[Probe("count")], info=SMALL) as stage:
        run_id = await stage.prompt("Count.")
        await stage.heard.text("In ")
        await stage.cancel()
        complete = await stage.heard.complete(run_id)
        await stage.until_idle()
        await stage.catch_up()
        assert (complete.cancelled, stage.heard.completed()) == (True, [run_id])
        assert stage.heard.errors() == []
        assert len(stage.seen()) == 2  # Nothing goes on.
        assert await stage.queue() == []
        assert [(role, text, reason) for role, text, reason in await stage.rows()] == [
            ("user", "Count.", "stop"),
            ("assistant", "So far.", "tool_use"),
            ("tool", "", "stop"),
            ("assistant", "", "canceled"),
        ]
        assert (await stage.session()).summary_message_id == ""


@contract("EXC-2")
async def test_a_cancel_of_the_summary_behind_an_answer_keeps_the_answer(tmp_path: Path) -> None:
    play = summing(HELD, nearly_full(Reply(text="All of it.")))
    async with open_runs(tmp_path, play=play, info=SMALL) as stage:
        run_id = await stage.prompt("Tell me.")
        await stage.heard.text("In ")
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        assert await stage.rows() == [
            ("user", "Tell me.", "stop"),
            ("assistant", "All of it.", "end_turn"),
        ]
        assert (await stage.session()).summary_message_id == ""


@contract("INV-35")
async def test_a_prompt_during_the_summary_of_a_turn_joins_that_turn_behind_it(
    tmp_path: Path,
) -> None:
    play = summing(HELD, nearly_full(calling("count")))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=SMALL) as stage:
        host = await stage.prompt("Count.")
        await stage.heard.text("In ")
        guest = await stage.prompt("Only the green ones.")
        stage.model.release()
        await stage.heard.complete(guest)
        assert stage.heard.completed() == [host, guest]
        assert users(stage, 3)[0] == "In short."
        assert users(stage, 3)[2:] == ["Only the green ones."]


@contract("EXC-1")
async def test_a_summary_that_fails_in_mid_turn_ends_the_run_and_the_next_one_runs(
    tmp_path: Path,
) -> None:
    play = summing(Reply(status=401, delay_s=0.05), nearly_full(calling("count")))
    async with open_runs(tmp_path, play=play, tools=[Probe("count")], info=SMALL) as stage:
        await stage.prompt("Count.", run_id="one")
        await stage.asked(1)
        await stage.prompt("Next.", run_id="two")
        assert "Authentication" in (await stage.heard.complete("one")).error
        assert (await stage.heard.complete("two")).text == "Fine."
        assert_paired(stage.sent(3))
        assert users(stage, 3) == ["Count.", "Next."]


@pytest.mark.parametrize("why", ["switched off", "window unknown", "room enough"])
async def test_nothing_is_summarized_that_need_not_or_must_not_be(tmp_path: Path, why: str) -> None:
    window = {"switched off": WINDOW, "window unknown": 0, "room enough": WINDOW + 1}[why]
    play = summing(Reply(text="In short."), nearly_full(Reply(text="All of it.")))
    async with open_model_server(play) as model:
        config = model_config(model.url, context_window=window)
        if why == "switched off":
            config["options"] = {"disable_auto_summarize": True}
        async with open_stage(tmp_path, "unix", model, config=config) as stage:
            await stage.talk("Tell me.")
            assert summaries(await stage.messages()) == []
            assert len(stage.seen()) == 1


async def test_a_context_that_was_written_to_a_cache_is_as_full_as_any(tmp_path: Path) -> None:
    cached = ScriptedUsage(input=10, output=10, cache_write=7_980)
    play = summing(Reply(text="In short."), Reply(text="All of it.", usage=cached))
    about = {"id": "demo-1", "name": "Demo One", "context_window": WINDOW}
    async with open_model_server(play) as model:
        config = config_of({"demo": provider(model.url, type="anthropic", models=[about])})
        async with open_stage(tmp_path, "unix", model, config=config) as stage:
            await stage.talk("Tell me.")
            await stage.until_idle()
            assert summaries(await stage.messages()) == ["In short."]

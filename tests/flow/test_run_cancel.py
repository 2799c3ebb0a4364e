"""Cancels are never lost, never hit the wrong run, and are not errors."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from culm.testing.script import Reply, Script, ScriptedCall
from culm.wire.messages import ReasoningPart, ToolCall
from culm.wire.runs import AgentEvent, CancelChanged, CancelledRun, RunComplete
from tests.flow.drive import UNKNOWN, send, until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, calls_of, finish_of, results_of
from tests.flow.runs import Harness, held_readers, held_writer, open_received, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
USER_CANCELLED = "Error: user cancelled assistant tool calling"


def cancel_state(cancel: CancelChanged) -> tuple[str, dict[str, str | None]]:
    return cancel.state, {run.run_id: run.settled for run in cancel.runs}


async def assert_two_rows(harness: Harness, text: str = "") -> None:
    """A cancelled prompt leaves its text and an answer marked as canceled."""
    rows = [("user", "Hi.", "stop"), ("assistant", text, "canceled")]
    assert await harness.rows() == rows
    assert finish_of((await harness.messages())[1]).message == "User canceled request"


# --- by any client, at any time


@contract("INV-42")
async def test_cancel_by_another_client_is_not_an_error(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as harness:
        joined = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        async with open_received(joined) as other, open_received(joined, view="crush") as crush:
            run_id = await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            path = joined.path(f"/agent/sessions/{harness.session_id}/cancel")
            await joined.client.request("POST", path)
            for received in (harness.received, other, crush):
                complete = await received.complete(run_id)
                assert (complete.cancelled, complete.error, complete.text) == (True, "", "Hello ")
            await harness.catch_up(other, crush)
            for received in (harness.received, other, crush):
                assert received.completed() == ["mine"]
                assert received.all("agent_event", AgentEvent) == []
            await assert_two_rows(harness, "Hello ")
            assert harness.seen()[0].left


@contract("INV-43", "INV-51", "INV-56")
async def test_cancel_right_after_the_202_leaves_two_rows_and_asks_no_model(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as harness:
        async with held_readers(harness):  # The turn has not read the conversation yet.
            run_id = await harness.prompt("Hi.")
            await harness.cancel()
        complete = await harness.received.complete(run_id)
        assert complete == RunComplete(harness.session_id, run_id, cancelled=True)
        await harness.catch_up()
        assert harness.received.completed() == [run_id]
        await assert_two_rows(harness)
        assert harness.received.states(run_id) == ["accepted", "ended"]
        assert harness.model.requests == []


@contract("INV-43", "INV-56")
async def test_cancel_before_the_202_leaves_two_rows_and_asks_no_model(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as harness:
        runs = harness.flow.workspace(harness.remote.id).runs
        async with asyncio.TaskGroup() as tasks:
            with held_writer(harness):
                posting = tasks.create_task(harness.prompt("Hi.", run_id="mine"))
                await until(lambda: runs.find("mine") is not None)
                cancelling = tasks.create_task(harness.cancel())
                await until(lambda: (run := runs.find("mine")) is not None and bool(run.stop))
                assert not posting.done()
                assert not cancelling.done()  # It is answered after it is durable.
        assert (await harness.received.complete("mine")).cancelled
        await assert_two_rows(harness)
        assert harness.model.requests == []


@contract("INV-43", "INV-56")
async def test_cancel_sent_with_the_202_leaves_two_rows_at_any_point(
    tmp_path: Path, kind: str
) -> None:
    held = Script([], [TITLE], Reply(deltas=["Never."], hold_after=0))
    async with open_runs(tmp_path, kind, held) as harness:
        for n in range(10):
            session = await harness.remote.create_session("s")
            await harness.prompt("Hi.", session.id, run_id=f"r{n}")
            await harness.request("POST", f"/agent/sessions/{session.id}/cancel")
            assert (await harness.received.complete(f"r{n}")).cancelled
            messages = await harness.remote.messages(session.id)
            assert [message.role for message in messages] == ["user", "assistant"]
            assert finish_of(messages[1]).reason == "canceled"
        await harness.catch_up()
        assert harness.received.completed() == [f"r{n}" for n in range(10)]
        assert harness.received.all("agent_event", AgentEvent) == []


@contract("INV-45", "INV-56")
async def test_cancel_between_active_and_the_first_answer_leaves_two_rows(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as harness:
        runs = harness.flow.workspace(harness.remote.id).runs
        with ExitStack() as holding:
            async with asyncio.TaskGroup() as tasks:
                async with held_readers(harness):
                    run_id = await harness.prompt("Hi.")
                    holding.enter_context(held_writer(harness))
                await harness.flow.run_ready()  # Its start waits for the writer.
                cancelling = tasks.create_task(harness.cancel())
                await until(lambda: (run := runs.find(run_id)) is not None and bool(run.stop))
                await harness.flow.run_ready()
                assert not cancelling.done()
                holding.close()
        assert (await harness.received.complete(run_id)).cancelled
        await harness.catch_up()
        await assert_two_rows(harness)
        assert harness.received.states(run_id) == ["accepted", "active", "ended"]
        assert harness.received.all("agent_event", AgentEvent) == []
        assert harness.seen() == []


@contract("INV-44", "INV-59")
async def test_idle_cancel_leaves_no_trace_and_the_next_prompt_runs(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as harness:
        before = (await harness.remote.snapshot()).cursor
        await harness.cancel()
        assert (await harness.remote.snapshot()).cursor == before
        complete = await harness.received.complete(await harness.prompt("Hi."))
        assert (complete.cancelled, complete.text) == (False, "Fine.")
        await harness.cancel()
        await harness.catch_up()
        assert harness.received.cancels() == []
        assert (await harness.rows())[1] == ("assistant", "Fine.", "end_turn")


@contract("INV-59")
async def test_cancel_is_200_for_any_session_and_404_for_an_unknown_workspace(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as harness:
        for session_id in (UNKNOWN, "no-uuid", "%20"):
            answer = await harness.request("POST", f"/agent/sessions/{session_id}/cancel")
            assert (answer.status, answer.body) == (200, b"")
        elsewhere = f"/v1/workspaces/{UNKNOWN}/agent/sessions/{harness.session_id}/cancel"
        assert (await send(harness.flow, "POST", elsewhere)).status == 404


async def test_cancel_during_reasoning_closes_the_reasoning_part(tmp_path: Path) -> None:
    thinking = Reply(reasoning="one two three", text="Never said.", hold_after=2)
    async with open_runs(tmp_path, play=script(thinking)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("two")
        await harness.cancel()
        await harness.received.complete(run_id)
        (part,) = [p for p in (await harness.messages())[1].parts if isinstance(p, ReasoningPart)]
        assert (part.data.thinking, part.data.finished_at > 0) == ("one two ", True)


async def test_cancel_during_a_retry_pause_ends_the_run_without_a_retry(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(Reply(status=500))) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: harness.clock.is_armed(5.0))
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        harness.clock.advance(60)
        await harness.catch_up()
        assert len(harness.seen()) == 1
        await assert_two_rows(harness)


# --- covered runs


@contract("INV-46", "INV-47", "INV-49", "INV-53")
@pytest.mark.parametrize("given", [True, False])
async def test_cancel_covers_every_run_accepted_before_it(tmp_path: Path, *, given: bool) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        ids = [await harness.prompt("Hi.", run_id="first")]
        await harness.received.text("Hello")
        names = [{"run_id": f"r{n}"} if given else {} for n in range(3)]
        ids += [await harness.prompt("More.", **name) for name in names]
        await harness.cancel()
        for run_id in ids:
            assert (await harness.received.complete(run_id)).cancelled
        await harness.until_idle()
        await harness.catch_up()
        assert sorted(harness.received.completed()) == sorted(ids)
        await assert_two_rows(harness, "Hello ")  # The queued prompts left no rows.
        assert len(harness.seen()) == 1
        assert {run.outcome for run in await harness.runs()} == {"canceled"}
        settled = cancel_state(harness.received.cancels()[-1])
        assert settled == ("settled", dict.fromkeys(ids, "canceled"))


@contract("INV-48", "EXC-1")
async def test_prompt_accepted_after_a_cancel_runs_after_the_cancelled_turn(
    tmp_path: Path, kind: str
) -> None:
    cleaning = Gate()
    tool = Probe("slow", cleaning.clean_up_slowly)
    async with open_runs(tmp_path, kind, script(calling("slow")), tools=[tool]) as harness:
        await harness.prompt("Hi.", run_id="before")
        await until(lambda: cleaning.inside == 1)
        await harness.cancel()
        await harness.prompt("And now?", run_id="after")
        assert (await harness.session()).is_busy
        assert harness.received.completes() == []
        cleaning.release()
        assert (await harness.received.complete("before")).cancelled
        after = await harness.received.complete("after")
        assert (after.cancelled, after.text) == (False, "Fine.")
        assert (await harness.run("after")).outcome == "end_turn"


async def test_cancel_of_one_session_does_not_affect_another(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD, HELD)) as harness:
        other = await harness.remote.create_session("other")
        await harness.prompt("Hi.", run_id="mine")
        await harness.prompt("Hi.", other.id, run_id="theirs")
        await harness.until_asked(2)
        await harness.cancel()
        assert (await harness.received.complete("mine")).cancelled
        harness.model.release()
        assert (await harness.received.complete("theirs")).text == "Hello there."


@contract("INV-50")
async def test_repeated_cancel_changes_nothing_and_is_published_once(tmp_path: Path) -> None:
    cleaning = Gate()
    tool = Probe("slow", cleaning.clean_up_slowly)
    async with open_runs(tmp_path, play=script(calling("slow")), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: cleaning.inside == 1)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(harness.cancel())
        before = (await harness.remote.snapshot()).cursor
        await harness.cancel()
        assert (await harness.remote.snapshot()).cursor == before
        cleaning.release()
        await harness.received.complete(run_id)
        await harness.cancel()
        await harness.catch_up()
        requested, settled = harness.received.cancels()
        assert (requested.state, requested.target) == ("requested", "session")
        assert requested.runs == [CancelledRun(run_id)]
        assert settled.cancel_id == requested.cancel_id
        assert cancel_state(settled) == ("settled", {run_id: "canceled"})
        assert harness.received.completed() == [run_id]


# --- during tools


@contract("INV-57", "EXC-8")
async def test_cancel_during_a_call_answers_every_call_and_starts_no_other(
    tmp_path: Path, kind: str
) -> None:
    gate = Gate()
    first, held, last = Probe("first"), Probe("held", gate.pass_through), Probe("last")
    play = script(calling("first", "held", "last", text="Let me see."))
    async with open_runs(tmp_path, kind, play, tools=[first, held, last]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await harness.cancel()
        complete = await harness.received.complete(run_id)
        assert (complete.cancelled, complete.text) == (True, "Let me see.")
        messages = await harness.messages()
        assert_answered(messages)
        results = {r.name: (r.content, r.is_error) for r in results_of(messages)}
        assert results["first"] == ("first 1", False)  # Its result is kept.
        assert results["last"] == (USER_CANCELLED, True)
        assert results["held"][1]
        assert [len(tool.calls) for tool in (first, held, last)] == [1, 1, 0]
        assert (gate.inside, len(harness.seen())) == (0, 1)
        assert finish_of(messages[1]).reason == "canceled"


@contract("INV-57", "EXC-8")
async def test_cancel_during_parallel_calls_starts_no_waiting_call(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tool = Probe("side", gate.pass_through, parallel=True)
    async with open_runs(tmp_path, play=script(calling(*["side"] * 8)), tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 5)
        await harness.cancel()
        await harness.received.complete(run_id)
        assert (gate.inside, len(tool.calls)) == (0, 5)
        assert_answered(await harness.messages())
        assert len(results_of(await harness.messages())) == 8


@contract("EXC-8")
@pytest.mark.parametrize("parallel", [False, True])
async def test_result_of_a_cancelled_tool_does_not_continue_the_run(
    tmp_path: Path, *, parallel: bool
) -> None:
    gate = Gate()
    tool, other = Probe("kind", gate.answer_when_cancelled, parallel=parallel), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("kind", "other")), tools=[tool, other]
    ) as harness:
        run_id = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        assert (await harness.run(run_id)).outcome == "canceled"
        assert (other.calls, len(harness.seen())) == ([], 1)
        assert_answered(await harness.messages())


@contract("INV-57")
async def test_cancel_while_a_call_streams_stores_it_finished_and_empty(
    tmp_path: Path,
) -> None:
    call = ScriptedCall(name="tool", input={"path": "a long name of a file"}, id="c1")
    whole = ScriptedCall(name="tool", input={}, id="c0")
    play = script(Reply(calls=[whole, call], hold_after=2))
    tool = Probe("tool")
    async with open_runs(tmp_path, play=play, tools=[tool]) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.event_with("message_delta", '"kind":"input"', "pat")
        await harness.cancel()
        await harness.received.complete(run_id)
        messages = await harness.messages()
        empty = [ToolCall(id_, "tool", "{}", finished=True) for id_ in ("c0", "c1")]
        assert calls_of(messages) == empty
        assert_answered(messages)
        assert [(r.content, r.is_error) for r in results_of(messages)] == [
            (USER_CANCELLED, True)
        ] * 2
        assert tool.calls == []

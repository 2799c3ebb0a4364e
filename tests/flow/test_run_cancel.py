"""Cancels: never lost, never of the wrong run, nobody's error, and said only once."""

import asyncio
from contextlib import ExitStack
from pathlib import Path

import pytest

from culm.testing.script import Reply, Script, ScriptedCall
from culm.wire.agent import AgentEvent, RunComplete
from culm.wire.messages import ReasoningPart, ToolCall
from culm.wire.runs import CancelChanged, CancelledRun
from tests.flow.drive import UNKNOWN, send, until
from tests.flow.probes import TITLE, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, calls_of, finish_of, results_of
from tests.flow.runs import Stage, held_readers, held_writer, open_heard, open_runs
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
USER_CANCELLED = "Error: user cancelled assistant tool calling"


def words(cancel: CancelChanged) -> tuple[str, dict[str, str | None]]:
    return cancel.state, {run.run_id: run.settled for run in cancel.runs}


async def assert_two_rows(stage: Stage, text: str = "") -> None:
    """What a cancelled prompt leaves: what was said, and an answer that says so."""
    rows = [("user", "Hi.", "stop"), ("assistant", text, "canceled")]
    assert await stage.rows() == rows
    assert finish_of((await stage.messages())[1]).message == "User canceled request"


# --- by anybody, at any moment


@contract("INV-42")
async def test_a_cancel_by_another_client_is_nobodys_error(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as stage:
        joined = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        async with open_heard(joined) as other, open_heard(joined, view="crush") as crush:
            run_id = await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            path = joined.path(f"/agent/sessions/{stage.session_id}/cancel")
            await joined.client.request("POST", path)
            for heard in (stage.heard, other, crush):
                complete = await heard.complete(run_id)
                assert (complete.cancelled, complete.error, complete.text) == (True, "", "Hello ")
            await stage.catch_up(other, crush)
            for heard in (stage.heard, other, crush):
                assert heard.completed() == ["mine"]
                assert heard.all("agent_event", AgentEvent) == []
            await assert_two_rows(stage, "Hello ")
            assert stage.seen()[0].left


@contract("INV-43", "INV-51", "INV-56")
async def test_a_cancel_right_after_the_202_leaves_two_rows_and_no_model_is_asked(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as stage:
        async with held_readers(stage):  # The turn has not read what was said before.
            run_id = await stage.prompt("Hi.")
            await stage.cancel()
        complete = await stage.heard.complete(run_id)
        assert complete == RunComplete(stage.session_id, run_id, cancelled=True)
        await stage.catch_up()
        assert stage.heard.completed() == [run_id]
        await assert_two_rows(stage)
        assert stage.heard.states(run_id) == ["accepted", "ended"]
        assert stage.model.requests == []


@contract("INV-43", "INV-56")
async def test_a_cancel_before_the_202_was_answered_leaves_two_rows_and_no_model_is_asked(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as stage:
        runs = stage.flow.workspace(stage.remote.id).runs
        async with asyncio.TaskGroup() as tasks:
            with held_writer(stage):
                posting = tasks.create_task(stage.prompt("Hi.", run_id="mine"))
                await until(lambda: runs.find("mine") is not None)
                cancelling = tasks.create_task(stage.cancel())
                await until(lambda: (run := runs.find("mine")) is not None and bool(run.stop))
                assert not posting.done()
                assert not cancelling.done()  # It is answered when it is durable.
        assert (await stage.heard.complete("mine")).cancelled
        await assert_two_rows(stage)
        assert stage.model.requests == []


@contract("INV-43", "INV-56")
async def test_a_cancel_sent_with_the_202_leaves_two_rows_however_far_the_run_has_come(
    tmp_path: Path, kind: str
) -> None:
    held = Script([], [TITLE], Reply(deltas=["Never."], hold_after=0))
    async with open_runs(tmp_path, kind, held) as stage:
        for n in range(10):
            session = await stage.remote.create_session("s")
            await stage.prompt("Hi.", session.id, run_id=f"r{n}")
            await stage.request("POST", f"/agent/sessions/{session.id}/cancel")
            assert (await stage.heard.complete(f"r{n}")).cancelled
            messages = await stage.remote.messages(session.id)
            assert [message.role for message in messages] == ["user", "assistant"]
            assert finish_of(messages[1]).reason == "canceled"
        await stage.catch_up()
        assert stage.heard.completed() == [f"r{n}" for n in range(10)]
        assert stage.heard.all("agent_event", AgentEvent) == []


@contract("INV-45", "INV-56")
async def test_a_cancel_between_becoming_active_and_the_first_answer_leaves_two_rows(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as stage:
        runs = stage.flow.workspace(stage.remote.id).runs
        with ExitStack() as holding:
            async with asyncio.TaskGroup() as tasks:
                async with held_readers(stage):
                    run_id = await stage.prompt("Hi.")
                    holding.enter_context(held_writer(stage))
                await stage.flow.settle()  # It wants to begin, and cannot yet.
                cancelling = tasks.create_task(stage.cancel())
                await until(lambda: (run := runs.find(run_id)) is not None and bool(run.stop))
                await stage.flow.settle()
                assert not cancelling.done()
                holding.close()
        assert (await stage.heard.complete(run_id)).cancelled
        await stage.catch_up()
        await assert_two_rows(stage)
        assert stage.heard.states(run_id) == ["accepted", "active", "ended"]
        assert stage.heard.all("agent_event", AgentEvent) == []
        assert stage.seen() == []


@contract("INV-44", "INV-59")
async def test_an_idle_cancel_leaves_no_trace_and_does_not_poison_the_next_prompt(
    tmp_path: Path, kind: str
) -> None:
    async with open_runs(tmp_path, kind) as stage:
        before = (await stage.remote.snapshot()).cursor
        await stage.cancel()
        assert (await stage.remote.snapshot()).cursor == before
        complete = await stage.heard.complete(await stage.prompt("Hi."))
        assert (complete.cancelled, complete.text) == (False, "Fine.")
        await stage.cancel()
        await stage.catch_up()
        assert stage.heard.cancels() == []
        assert (await stage.rows())[1] == ("assistant", "Fine.", "end_turn")


@contract("INV-59")
async def test_a_cancel_of_any_session_of_a_workspace_is_200_and_of_no_workspace_404(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as stage:
        for session_id in (UNKNOWN, "no-uuid", "%20"):
            answer = await stage.request("POST", f"/agent/sessions/{session_id}/cancel")
            assert (answer.status, answer.body) == (200, b"")
        elsewhere = f"/v1/workspaces/{UNKNOWN}/agent/sessions/{stage.session_id}/cancel"
        assert (await send(stage.flow, "POST", elsewhere)).status == 404


async def test_a_cancel_while_the_model_thinks_closes_its_reasoning(tmp_path: Path) -> None:
    thinking = Reply(reasoning="one two three", text="Never said.", hold_after=2)
    async with open_runs(tmp_path, play=script(thinking)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("two")
        await stage.cancel()
        await stage.heard.complete(run_id)
        (part,) = [p for p in (await stage.messages())[1].parts if isinstance(p, ReasoningPart)]
        assert (part.data.thinking, part.data.finished_at > 0) == ("one two ", True)


async def test_a_cancel_while_a_retry_waits_ends_the_run_and_nobody_asks_again(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(Reply(status=500))) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: stage.clock.is_armed(5.0))
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        stage.clock.advance(60)
        await stage.catch_up()
        assert len(stage.seen()) == 1
        await assert_two_rows(stage)


# --- what it covers


@contract("INV-46", "INV-47", "INV-49", "INV-53")
@pytest.mark.parametrize("given", [True, False])
async def test_a_cancel_of_the_running_covers_all_accepted_before_it_and_starts_none(
    tmp_path: Path, *, given: bool
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        ids = [await stage.prompt("Hi.", run_id="first")]
        await stage.heard.text("Hello")
        names = [{"run_id": f"r{n}"} if given else {} for n in range(3)]
        ids += [await stage.prompt("More.", **name) for name in names]
        await stage.cancel()
        for run_id in ids:
            assert (await stage.heard.complete(run_id)).cancelled
        await stage.until_idle()
        await stage.catch_up()
        assert sorted(stage.heard.completed()) == sorted(ids)
        await assert_two_rows(stage, "Hello ")  # Of those that only waited there is none.
        assert len(stage.seen()) == 1
        assert {run.outcome for run in await stage.runs()} == {"canceled"}
        settled = words(stage.heard.cancels()[-1])
        assert settled == ("settled", dict.fromkeys(ids, "canceled"))


@contract("INV-48", "EXC-1")
async def test_a_prompt_accepted_after_the_cancel_runs_when_the_cancelled_turn_has_unwound(
    tmp_path: Path, kind: str
) -> None:
    cleaning = Gate()
    tool = Probe("slow", cleaning.clean_up_slowly)
    async with open_runs(tmp_path, kind, script(calling("slow")), tools=[tool]) as stage:
        await stage.prompt("Hi.", run_id="before")
        await until(lambda: cleaning.inside == 1)
        await stage.cancel()
        await stage.prompt("And now?", run_id="after")
        assert (await stage.session()).is_busy
        assert stage.heard.completes() == []
        cleaning.release()
        assert (await stage.heard.complete("before")).cancelled
        after = await stage.heard.complete("after")
        assert (after.cancelled, after.text) == (False, "Fine.")
        assert (await stage.run("after")).outcome == "end_turn"


async def test_a_cancel_of_one_session_is_not_heard_in_another(tmp_path: Path) -> None:
    async with open_runs(tmp_path, play=script(HELD, HELD)) as stage:
        other = await stage.remote.create_session("other")
        await stage.prompt("Hi.", run_id="mine")
        await stage.prompt("Hi.", other.id, run_id="theirs")
        await stage.asked(2)
        await stage.cancel()
        assert (await stage.heard.complete("mine")).cancelled
        stage.model.release()
        assert (await stage.heard.complete("theirs")).text == "Hello there."


@contract("INV-50")
async def test_a_repeated_cancel_changes_nothing_and_is_told_once(tmp_path: Path) -> None:
    cleaning = Gate()
    tool = Probe("slow", cleaning.clean_up_slowly)
    async with open_runs(tmp_path, play=script(calling("slow")), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: cleaning.inside == 1)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(5):
                tasks.create_task(stage.cancel())
        before = (await stage.remote.snapshot()).cursor
        await stage.cancel()
        assert (await stage.remote.snapshot()).cursor == before
        cleaning.release()
        await stage.heard.complete(run_id)
        await stage.cancel()
        await stage.catch_up()
        requested, settled = stage.heard.cancels()
        assert (requested.state, requested.target) == ("requested", "session")
        assert requested.runs == [CancelledRun(run_id)]
        assert settled.cancel_id == requested.cancel_id
        assert words(settled) == ("settled", {run_id: "canceled"})
        assert stage.heard.completed() == [run_id]


# --- during tools


@contract("INV-57", "EXC-8")
async def test_a_cancel_during_a_call_answers_every_call_once_and_starts_no_other(
    tmp_path: Path, kind: str
) -> None:
    gate = Gate()
    first, held, last = Probe("first"), Probe("held", gate.pass_through), Probe("last")
    play = script(calling("first", "held", "last", text="Let me see."))
    async with open_runs(tmp_path, kind, play, tools=[first, held, last]) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await stage.cancel()
        complete = await stage.heard.complete(run_id)
        assert (complete.cancelled, complete.text) == (True, "Let me see.")
        messages = await stage.messages()
        assert_answered(messages)
        results = {r.name: (r.content, r.is_error) for r in results_of(messages)}
        assert results["first"] == ("first 1", False)  # What was answered stays.
        assert results["last"] == (USER_CANCELLED, True)
        assert results["held"][1]
        assert [len(tool.calls) for tool in (first, held, last)] == [1, 1, 0]
        assert (gate.inside, len(stage.seen())) == (0, 1)
        assert finish_of(messages[1]).reason == "canceled"


@contract("INV-57", "EXC-8")
async def test_a_cancel_during_parallel_calls_starts_none_of_those_that_waited_for_room(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tool = Probe("side", gate.pass_through, parallel=True)
    async with open_runs(tmp_path, play=script(calling(*["side"] * 8)), tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 5)
        await stage.cancel()
        await stage.heard.complete(run_id)
        assert (gate.inside, len(tool.calls)) == (0, 5)
        assert_answered(await stage.messages())
        assert len(results_of(await stage.messages())) == 8


@contract("EXC-8")
@pytest.mark.parametrize("parallel", [False, True])
async def test_a_tool_that_answers_when_it_is_cancelled_does_not_make_the_run_go_on(
    tmp_path: Path, *, parallel: bool
) -> None:
    gate = Gate()
    tool, other = Probe("kind", gate.answer_a_cancel, parallel=parallel), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("kind", "other")), tools=[tool, other]
    ) as stage:
        run_id = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        assert (await stage.run(run_id)).outcome == "canceled"
        assert (other.calls, len(stage.seen())) == ([], 1)
        assert_answered(await stage.messages())


@contract("INV-57")
async def test_a_cancel_while_a_call_is_written_stores_it_finished_and_empty(
    tmp_path: Path,
) -> None:
    call = ScriptedCall(name="tool", input={"path": "a long name of a file"}, id="c1")
    whole = ScriptedCall(name="tool", input={}, id="c0")
    play = script(Reply(calls=[whole, call], hold_after=2))
    tool = Probe("tool")
    async with open_runs(tmp_path, play=play, tools=[tool]) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.saying("message_delta", '"kind":"input"', "pat")
        await stage.cancel()
        await stage.heard.complete(run_id)
        messages = await stage.messages()
        empty = [ToolCall(id_, "tool", "{}", finished=True) for id_ in ("c0", "c1")]
        assert calls_of(messages) == empty
        assert_answered(messages)
        assert [(r.content, r.is_error) for r in results_of(messages)] == [
            (USER_CANCELLED, True)
        ] * 2
        assert tool.calls == []

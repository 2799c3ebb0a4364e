"""Stopping one run by its name: the answer says what came of it, in one of four words."""

import asyncio
from pathlib import Path

import pytest

from culm.run import runs as runs_module
from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.runs import CancelChanged, Run
from tests.flow.drive import UNKNOWN, until
from tests.flow.probes import Gate, Probe, Wound, calling, script
from tests.flow.reading import assert_answered, results_of
from tests.flow.runs import Stage, held_writer, open_runs, open_stage
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def told(cancel: CancelChanged) -> tuple[str, str, list[tuple[str, str | None]]]:
    return cancel.target, cancel.state, [(run.run_id, run.settled) for run in cancel.runs]


async def test_a_running_one_is_canceled_and_only_it(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        await stage.prompt("Two.", run_id="two")
        answer = await stage.cancel_run("one")
        assert (answer.result, answer.run.outcome) == ("canceled", "canceled")
        assert answer.run == await stage.run("one")
        assert (await stage.heard.complete("two")).text == "Fine."
        assert [told(cancel) for cancel in stage.heard.cancels()] == [
            ("run", "requested", [("one", None)]),
            ("run", "settled", [("one", "canceled")]),
        ]


async def test_a_queued_one_is_canceled_without_rows_and_the_running_one_goes_on(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.text("Hello")
        await stage.prompt("Two.", run_id="two")
        answer = await stage.cancel_run("two")
        assert (answer.result, answer.run.outcome) == ("canceled", "canceled")
        assert await stage.queue() == []
        stage.model.release()
        assert (await stage.heard.complete("one")).text == "Hello there."
        assert [text for _, text, _ in await stage.rows()] == ["One.", "Hello there."]
        assert stage.heard.completed() == ["two", "one"]


async def test_one_that_ended_before_is_already_ended_and_nothing_is_written(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.complete(run_id)
        await stage.until_idle()
        answer = await stage.cancel_run(run_id)
        assert (answer.result, answer.run.outcome) == ("already_ended", "end_turn")
        await stage.catch_up()
        assert stage.heard.cancels() == []


@pytest.mark.parametrize("target", ["run", "session"])
async def test_one_whose_end_is_on_its_way_to_the_disk_finished_first(
    tmp_path: Path, target: str
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        await stage.catch_up()
        live = stage.flow.workspace(stage.remote.id).runs.find(run_id)
        assert live is not None
        async with asyncio.TaskGroup() as tasks:
            with held_writer(stage):
                stage.model.release()
                await until(lambda: live.task is not None and live.task.done())
                await stage.flow.settle()
                rest = f"/runs/{run_id}/cancel"
                if target == "session":
                    rest = f"/agent/sessions/{stage.session_id}/cancel"
                answering = tasks.create_task(stage.request("POST", rest))
                await until(lambda: live.stop is not None)
        said = b"finished_first" if target == "run" else b""
        assert (answering.result().status, said in answering.result().body) == (200, True)
        complete = await stage.heard.complete(run_id)
        assert (complete.cancelled, complete.text) == (False, "Hello there.")
        await stage.catch_up()
        assert stage.heard.completed() == [run_id]
        words = [told(cancel) for cancel in stage.heard.cancels()]
        assert words[-1] == (target, "settled", [(run_id, "finished_first")])
        assert (await stage.rows())[-1] == ("assistant", "Hello there.", "end_turn")


async def deafly(stage: Stage, gate: Gate, run_id: str) -> Run:
    """Cancel a run whose tool does not listen; its end is written all the same."""
    await until(lambda: gate.inside == 1)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(stage.cancel_run(run_id))
        await stage.clock.pass_pause(runs_module.STOP_S)
    assert answering.result().result == "not_stopped"
    return answering.result().run


@contract("INV-57", "EXC-8")
async def test_one_that_does_not_stop_in_time_is_not_stopped_and_does_nothing_more(
    tmp_path: Path,
) -> None:
    gate = Gate()
    deaf, other = Probe("deaf", gate.be_deaf), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("deaf", "other")), tools=[deaf, other]
    ) as stage:
        run_id = await stage.prompt("Hi.")
        try:
            run = await deafly(stage, gate, run_id)
            assert (run.state, run.outcome) == ("ended", "canceled")
            assert not (await stage.session()).is_busy
        finally:
            gate.release()
        await stage.flow.settle()
        await stage.catch_up()
        assert [told(cancel)[2] for cancel in stage.heard.cancels()] == [
            [(run_id, None)],
            [(run_id, "not_stopped")],
        ]
        assert stage.heard.completed() == [run_id]
        assert_answered(await stage.messages())
        assert len(results_of(await stage.messages())) == 2
        assert (other.calls, len(stage.seen())) == ([], 1)


async def test_the_next_run_of_a_session_begins_although_the_last_did_not_stop(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("deaf", gate.be_deaf)]
    async with open_runs(tmp_path, play=script(calling("deaf")), tools=tools) as stage:
        run_id = await stage.prompt("Hi.")
        try:
            await deafly(stage, gate, run_id)
            assert (await stage.heard.complete(await stage.prompt("Again."))).text == "Fine."
        finally:
            gate.release()
        await stage.flow.settle()
        rows = await stage.rows()
        assert [text for role, text, _ in rows if role != "tool"] == ["Hi.", "", "Again.", "Fine."]


@contract("EXC-17")
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_server_ends_although_a_tool_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    monkeypatch.setattr(runs_module, "STOP_S", 0.05)
    gate = Gate()
    async with open_model_server(script(calling("deaf", "last"))) as model:
        tools = [Probe("deaf", gate.be_deaf), Probe("last")]
        bound = Settings(teardown_s=0.5)
        opening = open_stage(tmp_path, "unix", model, tools=tools, settings=bound)
        async with asyncio.timeout(WAIT_S), opening as stage:
            run_id = await stage.prompt("Hi.", run_id="mine")
            await until(lambda: gate.inside == 1)
            if cancelled:
                await deafly(stage, gate, run_id)
        assert gate.inside == 1  # It is still at it.
        gate.release()
        await stage.flow.settle()
        later = Wound(stage.clock.now_s() + 10)
        again = open_stage(
            tmp_path, "unix", model, tools=tools, clock=later, session_id=stage.session_id
        )
        async with again as stage:
            outcome = "canceled" if cancelled else "interrupted"
            assert (await stage.run("mine")).outcome == outcome
            assert_answered(await stage.messages())
            assert (tools[1].calls, len(stage.seen())) == ([], 1)


async def test_one_that_shares_a_turn_is_409_and_its_host_is_named(tmp_path: Path) -> None:
    gate = Gate()
    play = script(calling("held"), HELD)
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as stage:
        host = await stage.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        guest = await stage.prompt("And this.")
        gate.release()
        await stage.heard.state(guest, "folded")
        answer = await stage.request("POST", f"/runs/{guest}/cancel")
        assert (answer.status, host.encode() in answer.body) == (409, True)
        assert (await stage.run(guest)).host_run_id == host
        assert (await stage.cancel_run(host)).result == "canceled"
        for run_id in (host, guest):
            assert (await stage.heard.complete(run_id)).cancelled
        assert stage.heard.completed() == [host, guest]


async def test_one_that_never_was_is_404(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as stage:
        for method, rest in [
            ("GET", ""), ("PUT", ""), ("POST", "/cancel"), ("POST", "/start"), ("POST", "/drop"),
        ]:  # fmt: skip
            answer = await stage.request(method, f"/runs/{UNKNOWN}{rest}", {"prompt": "x"})
            assert (answer.status, b"run_not_found" in answer.body) == (404, True), rest


async def test_many_who_stop_one_run_at_once_get_the_same_word_and_it_is_told_once(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(stage.cancel_run(run_id)) for _ in range(6)]
        assert {answer.result().result for answer in answers} <= {"canceled", "already_ended"}
        await stage.catch_up()
        assert (len(stage.heard.cancels()), stage.heard.completed()) == (2, [run_id])

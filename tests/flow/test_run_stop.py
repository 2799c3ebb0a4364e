"""Cancel of one run by its id; the answer has one of four results."""

import asyncio
from pathlib import Path

import pytest

from culm.run import runs as runs_module
from culm.settings import Settings
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.runs import CancelChanged, Run
from tests.flow.drive import UNKNOWN, until
from tests.flow.probes import Gate, Probe, WaitableClock, calling, script
from tests.flow.reading import assert_answered, results_of
from tests.flow.runs import Harness, held_writer, open_harness, open_runs
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


def cancel_entry(cancel: CancelChanged) -> tuple[str, str, list[tuple[str, str | None]]]:
    return cancel.target, cancel.state, [(run.run_id, run.settled) for run in cancel.runs]


async def test_cancel_of_a_running_run_affects_only_that_run(tmp_path: Path, kind: str) -> None:
    async with open_runs(tmp_path, kind, script(HELD)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        await harness.prompt("Two.", run_id="two")
        answer = await harness.cancel_run("one")
        assert (answer.result, answer.run.outcome) == ("canceled", "canceled")
        assert answer.run == await harness.run("one")
        assert (await harness.received.complete("two")).text == "Fine."
        assert [cancel_entry(cancel) for cancel in harness.received.cancels()] == [
            ("run", "requested", [("one", None)]),
            ("run", "settled", [("one", "canceled")]),
        ]


async def test_cancel_of_a_queued_run_leaves_no_rows_and_the_running_continues(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.text("Hello")
        await harness.prompt("Two.", run_id="two")
        answer = await harness.cancel_run("two")
        assert (answer.result, answer.run.outcome) == ("canceled", "canceled")
        assert await harness.queue() == []
        harness.model.release()
        assert (await harness.received.complete("one")).text == "Hello there."
        assert [text for _, text, _ in await harness.rows()] == ["One.", "Hello there."]
        assert harness.received.completed() == ["two", "one"]


async def test_cancel_of_an_ended_run_is_already_ended_and_writes_nothing(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.complete(run_id)
        await harness.until_idle()
        answer = await harness.cancel_run(run_id)
        assert (answer.result, answer.run.outcome) == ("already_ended", "end_turn")
        await harness.catch_up()
        assert harness.received.cancels() == []


@pytest.mark.parametrize("target", ["run", "session"])
async def test_cancel_while_the_end_is_being_stored_is_finished_first(
    tmp_path: Path, target: str
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        await harness.catch_up()
        live = harness.flow.workspace(harness.remote.id).runs.find(run_id)
        assert live is not None
        async with asyncio.TaskGroup() as tasks:
            with held_writer(harness):
                harness.model.release()
                await until(lambda: (turn := live.control.turn) is not None and turn.task.done())
                await harness.flow.run_ready()
                rest = f"/runs/{run_id}/cancel"
                if target == "session":
                    rest = f"/agent/sessions/{harness.session_id}/cancel"
                answering = tasks.create_task(harness.request("POST", rest))
                await until(lambda: live.stop is not None)
        expected = b"finished_first" if target == "run" else b""
        assert (answering.result().status, expected in answering.result().body) == (200, True)
        complete = await harness.received.complete(run_id)
        assert (complete.cancelled, complete.text) == (False, "Hello there.")
        await harness.catch_up()
        assert harness.received.completed() == [run_id]
        published = [cancel_entry(cancel) for cancel in harness.received.cancels()]
        assert published[-1] == (target, "settled", [(run_id, "finished_first")])
        assert (await harness.rows())[-1] == ("assistant", "Hello there.", "end_turn")


async def cancel_unstoppable(harness: Harness, gate: Gate, run_id: str) -> Run:
    """Cancel a run whose tool ignores cancels; its end is stored anyway."""
    await until(lambda: gate.inside == 1)
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        answering = tasks.create_task(harness.cancel_run(run_id))
        await harness.clock.pass_pause(runs_module.STOP_S)
    assert answering.result().result == "not_stopped"
    return answering.result().run


@contract("INV-57", "EXC-8")
async def test_run_that_ignores_a_cancel_is_not_stopped_and_starts_no_call(
    tmp_path: Path,
) -> None:
    gate = Gate()
    deaf, other = Probe("deaf", gate.ignore_cancel), Probe("other")
    async with open_runs(
        tmp_path, play=script(calling("deaf", "other")), tools=[deaf, other]
    ) as harness:
        run_id = await harness.prompt("Hi.")
        try:
            run = await cancel_unstoppable(harness, gate, run_id)
            assert (run.state, run.outcome) == ("ended", "canceled")
            assert not (await harness.session()).is_busy
        finally:
            gate.release()
        await harness.flow.run_ready()
        await harness.catch_up()
        assert [cancel_entry(cancel)[2] for cancel in harness.received.cancels()] == [
            [(run_id, None)],
            [(run_id, "not_stopped")],
        ]
        assert harness.received.completed() == [run_id]
        assert_answered(await harness.messages())
        assert len(results_of(await harness.messages())) == 2
        assert (other.calls, len(harness.seen())) == ([], 1)


async def test_next_run_starts_although_the_last_did_not_stop(
    tmp_path: Path,
) -> None:
    gate = Gate()
    tools = [Probe("deaf", gate.ignore_cancel)]
    async with open_runs(tmp_path, play=script(calling("deaf")), tools=tools) as harness:
        run_id = await harness.prompt("Hi.")
        try:
            await cancel_unstoppable(harness, gate, run_id)
            assert (await harness.received.complete(await harness.prompt("Again."))).text == "Fine."
        finally:
            gate.release()
        await harness.flow.run_ready()
        rows = await harness.rows()
        assert [text for role, text, _ in rows if role != "tool"] == ["Hi.", "", "Again.", "Fine."]


@contract("EXC-17")
@pytest.mark.parametrize("cancelled", [False, True])
async def test_server_exits_although_a_tool_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cancelled: bool
) -> None:
    monkeypatch.setattr(runs_module, "STOP_S", 0.05)
    gate = Gate()
    async with open_model_server(script(calling("deaf", "last"))) as model:
        tools = [Probe("deaf", gate.ignore_cancel), Probe("last")]
        bound = Settings(teardown_s=0.5)
        opening = open_harness(tmp_path, "unix", model, tools=tools, settings=bound)
        async with asyncio.timeout(WAIT_S), opening as harness:
            run_id = await harness.prompt("Hi.", run_id="mine")
            await until(lambda: gate.inside == 1)
            if cancelled:
                await cancel_unstoppable(harness, gate, run_id)
        assert gate.inside == 1  # The tool is still running.
        gate.release()
        await harness.flow.run_ready()
        later = WaitableClock(harness.clock.now_s() + 10)
        again = open_harness(
            tmp_path, "unix", model, tools=tools, clock=later, session_id=harness.session_id
        )
        async with again as harness:
            outcome = "canceled" if cancelled else "interrupted"
            assert (await harness.run("mine")).outcome == outcome
            assert_answered(await harness.messages())
            assert (tools[1].calls, len(harness.seen())) == ([], 1)


async def test_cancel_of_a_folded_run_is_409_and_names_its_host(tmp_path: Path) -> None:
    gate = Gate()
    play = script(calling("held"), HELD)
    async with open_runs(tmp_path, play=play, tools=[Probe("held", gate.pass_through)]) as harness:
        host = await harness.prompt("Hi.")
        await until(lambda: gate.inside == 1)
        guest = await harness.prompt("And this.")
        gate.release()
        await harness.received.state(guest, "folded")
        answer = await harness.request("POST", f"/runs/{guest}/cancel")
        assert (answer.status, host.encode() in answer.body) == (409, True)
        assert (await harness.run(guest)).host_run_id == host
        assert (await harness.cancel_run(host)).result == "canceled"
        for run_id in (host, guest):
            assert (await harness.received.complete(run_id)).cancelled
        assert harness.received.completed() == [host, guest]


async def test_unknown_run_is_404(tmp_path: Path) -> None:
    async with open_runs(tmp_path) as harness:
        for method, rest in [
            ("GET", ""), ("PUT", ""), ("POST", "/cancel"), ("POST", "/start"), ("POST", "/drop"),
        ]:  # fmt: skip
            answer = await harness.request(method, f"/runs/{UNKNOWN}{rest}", {"prompt": "x"})
            assert (answer.status, b"run_not_found" in answer.body) == (404, True), rest


async def test_simultaneous_cancels_of_one_run_are_published_once(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        async with asyncio.TaskGroup() as tasks:
            answers = [tasks.create_task(harness.cancel_run(run_id)) for _ in range(6)]
        assert {answer.result().result for answer in answers} <= {"canceled", "already_ended"}
        await harness.catch_up()
        assert (len(harness.received.cancels()), harness.received.completed()) == (2, [run_id])

"""A store that fails in mid-run: the run stops, and its end is told once when it can be."""

import asyncio
from pathlib import Path

import pytest

from culm.run import runs as runs_module
from culm.run.journal import RETRY_S
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.state import StoreHealth
from culm.workspace.workspace import HEAL_EVERY_S
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, Wound, calling, script
from tests.flow.reading import assert_answered, assert_paired
from tests.flow.runs import Stage, open_heard, open_runs, open_stage
from tests.flow.test_store_trouble import FAULTS, fault, writer_of
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
LARGE = "x" * 9_000  # More than any page of the file has room for.


async def test_an_answer_that_is_removed_under_its_run_costs_that_run_and_not_its_session(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        answer = (await stage.messages())[1]
        async with asyncio.timeout(WAIT_S):
            await stage.flow.workspace(stage.remote.id).messages.delete(answer.id)
        stage.model.release()
        await stage.heard.complete(run_id)
        await stage.catch_up()
        assert stage.heard.completed() == [run_id]
        assert answer.id not in [message.id for message in await stage.messages()]
        assert (await stage.heard.complete(await stage.prompt("Again."))).text == "Fine."


@pytest.mark.parametrize("event", ["INSERT ON calls", "UPDATE ON calls"])
async def test_a_write_that_cannot_be_done_ends_its_run_as_an_error_and_starts_no_call(
    tmp_path: Path, event: str
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(calling("tool")), tools=[tool]) as stage:
        connection = await writer_of(stage.flow, stage.remote)
        refuse = "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        connection.execute(f"CREATE TRIGGER refusal BEFORE {event} {refuse}")
        run_id = await stage.prompt("Hi.")
        assert "Internal error" in (await stage.heard.complete(run_id)).error
        await until(lambda: stage.model.requests[-1].ended)
        connection.execute("DROP TRIGGER refusal")
        await stage.catch_up()
        assert (stage.heard.completed(), tool.calls) == ([run_id], [])
        assert (await stage.heard.complete(await stage.prompt("Again."))).text == "Fine."
        assert_paired(stage.sent(2))


async def failing(stage: Stage) -> None:
    await stage.heard.saying("store_health", '"failing"')


async def assert_ending(stage: Stage, run_id: str) -> None:
    """It is over, and cannot yet be said to be."""
    await until(lambda: stage.live(run_id).state == "ending")
    assert (await stage.run(run_id)).state == "ending"
    assert (await stage.session()).is_busy
    assert (await stage.remote.snapshot()).store.state == "failing"
    assert stage.heard.completes() == []
    answer = await stage.post(LARGE, run_id="refused")
    assert (answer.status, b"store_busy" in answer.body) == (503, True)


async def assert_told_once(stage: Stage, run_id: str, text: str) -> None:
    complete = await stage.heard.complete(run_id)
    assert "stored" in complete.error
    await stage.catch_up()
    assert stage.heard.completed() == [run_id]
    assert [error.run_id for error in stage.heard.errors()] == [run_id]
    assert (await stage.run(run_id)).outcome == "error"
    assert (await stage.rows())[1] == ("assistant", text, "error")
    health = stage.heard.all("store_health", StoreHealth)
    assert [state.state for state in health] == ["ok", "failing", "ok"]
    assert not (await stage.session()).is_busy
    assert (await stage.heard.complete(await stage.prompt("After."))).text == "Fine."
    assert [run.id for run in await stage.runs()][1:] == [run_id]  # What was refused is nowhere.


@fault
async def test_a_store_that_fails_in_mid_stream_stops_the_run_and_its_end_is_told_when_it_heals(
    tmp_path: Path, kind: str, fault: str
) -> None:
    breaks, mends, _ = FAULTS[fault]
    long = Reply(deltas=[LARGE, " and more", "."], hold_after=2)
    async with open_runs(tmp_path, kind, script(long)) as stage:
        run_id = await stage.prompt("Hi.", run_id="mine")
        await stage.heard.saying("session", "A title")
        await stage.heard.text("and more")
        await stage.catch_up()
        connection = await writer_of(stage.flow, stage.remote)
        connection.execute(f"PRAGMA {breaks}")
        stage.clock.advance(0.1)  # What has streamed is to be kept.
        await stage.flow.settle()
        refused = await stage.request("POST", "/sessions", {"title": LARGE})
        assert refused.status == 503
        await failing(stage)
        await assert_ending(stage, run_id)
        await stage.model.until_left(stage.seen()[0].n)
        connection.execute(f"PRAGMA {mends}")
        stage.clock.advance(max(RETRY_S, HEAL_EVERY_S))
        await assert_told_once(stage, run_id, LARGE + " and more")


async def test_a_store_that_fails_during_a_call_stops_the_call_and_starts_no_other(
    tmp_path: Path,
) -> None:
    breaks, mends, _ = FAULTS["read-only"]
    gate, other = Gate(), Probe("other")
    tools = [Probe("held", gate.pass_through), other]
    async with open_runs(tmp_path, play=script(calling("held", "other")), tools=tools) as stage:
        run_id = await stage.prompt("Hi.", run_id="mine")
        await until(lambda: gate.inside == 1)
        await stage.heard.saying("session", "A title")
        connection = await writer_of(stage.flow, stage.remote)
        connection.execute(f"PRAGMA {breaks}")
        assert (await stage.request("POST", "/sessions", {"title": LARGE})).status == 503
        await failing(stage)
        await until(lambda: gate.inside == 0)
        await assert_ending(stage, run_id)
        connection.execute(f"PRAGMA {mends}")
        stage.clock.advance(HEAL_EVERY_S)
        await assert_told_once(stage, run_id, "")
        assert (other.calls, len(stage.seen())) == ([], 2)
        assert_answered(await stage.messages())


async def test_a_cancel_that_cannot_be_stored_is_503_and_the_run_stops_all_the_same(
    tmp_path: Path,
) -> None:
    breaks, mends, _ = FAULTS["read-only"]
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        run_id = await stage.prompt("Hi.")
        await stage.heard.text("Hello")
        await stage.heard.saying("session", "A title")
        connection = await writer_of(stage.flow, stage.remote)
        connection.execute(f"PRAGMA {breaks}")
        answer = await stage.of_session("cancel")
        assert (answer.status, b"store_busy" in answer.body) == (503, True)
        await stage.model.until_left(stage.seen()[0].n)
        await until(lambda: stage.live(run_id).state == "ending")  # Its end could not be stored.
        connection.execute(f"PRAGMA {mends}")
        stage.clock.advance(HEAL_EVERY_S)
        complete = await stage.heard.complete(run_id)
        assert complete.cancelled
        await stage.cancel()
        await stage.catch_up()
        assert stage.heard.completed() == [run_id]
        assert (await stage.rows())[-1][2] == "canceled"


@pytest.mark.parametrize(("fixed", "outcome"), [(True, "error"), (False, "interrupted")])
async def test_an_end_that_could_not_be_stored_is_told_at_the_latest_after_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, *, fixed: bool
) -> None:
    monkeypatch.setattr(runs_module, "STOP_S", 0.05)
    breaks, mends, _ = FAULTS["read-only"]
    clock = Wound()
    async with open_model_server(script(HELD)) as model:
        async with open_stage(tmp_path, "unix", model, clock=clock) as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.heard.saying("session", "A title")
            cursor = (await stage.remote.snapshot()).cursor
            connection = await writer_of(stage.flow, stage.remote)
            connection.execute(f"PRAGMA {breaks}")
            assert (await stage.request("POST", "/sessions", {"title": "s"})).status == 503
            await assert_ending(stage, "mine")
            if fixed:
                connection.execute(f"PRAGMA {mends}")
        later = Wound(clock.now_s() + 10)
        async with (
            open_stage(tmp_path, "unix", model, clock=later, session_id=stage.session_id) as stage,
            open_heard(stage.remote, cursor=cursor) as heard,
        ):
            run = await stage.run("mine")
            assert (run.state, run.outcome) == ("ended", outcome)
            await stage.catch_up(heard)
            assert (heard.completed(), len(stage.seen())) == (["mine"], 1)
            assert (await stage.rows())[1][2] == "error"


@contract("EXC-1")
async def test_what_waited_behind_a_store_that_failed_runs_when_it_has_healed(
    tmp_path: Path,
) -> None:
    breaks, mends, _ = FAULTS["read-only"]
    async with open_runs(tmp_path, play=script(HELD)) as stage:
        await stage.prompt("One.", run_id="one")
        await stage.heard.saying("session", "A title")
        await stage.prompt("Two.", run_id="two")
        connection = await writer_of(stage.flow, stage.remote)
        connection.execute(f"PRAGMA {breaks}")
        assert (await stage.request("POST", "/sessions", {"title": "s"})).status == 503
        await until(lambda: stage.live("one").state == "ending")
        connection.execute(f"PRAGMA {mends}")
        stage.clock.advance(HEAL_EVERY_S)
        assert "stored" in (await stage.heard.complete("one")).error
        assert (await stage.heard.complete("two")).text == "Fine."

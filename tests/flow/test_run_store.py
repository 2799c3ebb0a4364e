"""Store failures during a run: the run stops, and its end is published once after recovery."""

import asyncio
import errno
from pathlib import Path

import pytest

from culm.run import runs as runs_module
from culm.run.journal import RETRY_S
from culm.store.text_tail import DiskFile
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply
from culm.wire.workspaces import StoreHealth
from culm.workspace.workspace import HEAL_EVERY_S
from tests.flow.drive import until
from tests.flow.probes import Gate, Probe, WaitableClock, calling, script
from tests.flow.reading import assert_answered, assert_paired
from tests.flow.runs import Harness, open_harness, open_received, open_runs
from tests.flow.test_store_failures import FAULTS, fault, writer_of
from tests.support import WAIT_S, contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)
LARGE = "x" * 9_000  # More than fits into one page of the file.


async def test_deleted_answer_ends_its_run_and_the_session_stays_usable(
    tmp_path: Path,
) -> None:
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        answer = (await harness.messages())[1]
        async with asyncio.timeout(WAIT_S):
            await harness.flow.workspace(harness.remote.id).messages.delete(answer.id)
        harness.model.release()
        await harness.received.complete(run_id)
        await harness.catch_up()
        assert harness.received.completed() == [run_id]
        assert answer.id not in [message.id for message in await harness.messages()]
        assert (await harness.received.complete(await harness.prompt("Again."))).text == "Fine."


@pytest.mark.parametrize("event", ["INSERT ON calls", "UPDATE ON calls"])
async def test_failed_write_ends_the_run_with_an_error_and_starts_no_call(
    tmp_path: Path, event: str
) -> None:
    tool = Probe("tool")
    async with open_runs(tmp_path, play=script(calling("tool")), tools=[tool]) as harness:
        connection = await writer_of(harness.flow, harness.remote)
        refuse = "BEGIN SELECT RAISE(ABORT, 'refused'); END"
        connection.execute(f"CREATE TRIGGER refusal BEFORE {event} {refuse}")
        run_id = await harness.prompt("Hi.")
        assert "Internal error" in (await harness.received.complete(run_id)).error
        await until(lambda: harness.model.requests[-1].ended)
        connection.execute("DROP TRIGGER refusal")
        await harness.catch_up()
        assert (harness.received.completed(), tool.calls) == ([run_id], [])
        assert (await harness.received.complete(await harness.prompt("Again."))).text == "Fine."
        assert_paired(harness.sent(2))


@contract("EXC-26")
async def test_run_goes_on_if_only_its_text_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_file: DiskFile, _data: bytes, _at: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        monkeypatch.setattr(DiskFile, "write", refuse)
        harness.model.release()
        assert (await harness.received.complete(run_id)).text == "Hello there."
        await harness.catch_up()
        health = harness.received.all("store_health", StoreHealth)
        assert [state.state for state in health] == ["ok", "failing", "ok"]
        assert health[1].reason == "Input/output error"
        assert (await harness.rows())[1] == ("assistant", "Hello there.", "end_turn")


async def until_failing(harness: Harness) -> None:
    await harness.received.event_with("store_health", '"failing"')


async def assert_ending(harness: Harness, run_id: str) -> None:
    """The run has ended, but its end cannot be stored yet."""
    await until(lambda: harness.live(run_id).state == "ending")
    assert (await harness.run(run_id)).state == "ending"
    assert (await harness.session()).is_busy
    assert (await harness.remote.snapshot()).store.state == "failing"
    assert harness.received.completes() == []
    answer = await harness.post(LARGE, run_id="refused")
    assert (answer.status, b"store_busy" in answer.body) == (503, True)


async def assert_published_once(harness: Harness, run_id: str, text: str) -> None:
    complete = await harness.received.complete(run_id)
    assert "stored" in complete.error
    await harness.catch_up()
    assert harness.received.completed() == [run_id]
    assert [error.run_id for error in harness.received.errors()] == [run_id]
    assert (await harness.run(run_id)).outcome == "error"
    assert (await harness.rows())[1] == ("assistant", text, "error")
    health = harness.received.all("store_health", StoreHealth)
    assert [state.state for state in health] == ["ok", "failing", "ok"]
    assert not (await harness.session()).is_busy
    assert (await harness.received.complete(await harness.prompt("After."))).text == "Fine."
    assert [run.id for run in await harness.runs()][1:] == [
        run_id
    ]  # The refused prompt left no run.


@fault
async def test_store_failure_during_a_stream_ends_the_run_after_recovery(
    tmp_path: Path, kind: str, fault: str
) -> None:
    breaks, fixes, _ = FAULTS[fault]
    long = Reply(deltas=[LARGE, " and more", "."], hold_after=2)
    async with open_runs(tmp_path, kind, script(long)) as harness:
        run_id = await harness.prompt("Hi.", run_id="mine")
        await harness.received.event_with("session", "A title")
        await harness.received.text("and more")
        await harness.catch_up()
        connection = await writer_of(harness.flow, harness.remote)
        connection.execute(f"PRAGMA {breaks}")
        harness.clock.advance(0.1)  # The streamed text is due to be stored.
        await harness.flow.run_ready()
        refused = await harness.request("POST", "/sessions", {"title": LARGE})
        assert refused.status == 503
        await until_failing(harness)
        await assert_ending(harness, run_id)
        await harness.model.until_left(harness.seen()[0].n)
        connection.execute(f"PRAGMA {fixes}")
        harness.clock.advance(max(RETRY_S, HEAL_EVERY_S))
        await assert_published_once(harness, run_id, LARGE + " and more")


async def test_store_failure_during_a_call_stops_it_and_starts_no_other(
    tmp_path: Path,
) -> None:
    breaks, fixes, _ = FAULTS["read-only"]
    gate, other = Gate(), Probe("other")
    tools = [Probe("held", gate.pass_through), other]
    async with open_runs(tmp_path, play=script(calling("held", "other")), tools=tools) as harness:
        run_id = await harness.prompt("Hi.", run_id="mine")
        await until(lambda: gate.inside == 1)
        await harness.received.event_with("session", "A title")
        connection = await writer_of(harness.flow, harness.remote)
        connection.execute(f"PRAGMA {breaks}")
        assert (await harness.request("POST", "/sessions", {"title": LARGE})).status == 503
        await until_failing(harness)
        await until(lambda: gate.inside == 0)
        await assert_ending(harness, run_id)
        connection.execute(f"PRAGMA {fixes}")
        harness.clock.advance(HEAL_EVERY_S)
        await assert_published_once(harness, run_id, "")
        assert (other.calls, len(harness.seen())) == ([], 2)
        assert_answered(await harness.messages())


async def test_cancel_that_cannot_be_stored_is_503_and_the_run_stops(
    tmp_path: Path,
) -> None:
    breaks, fixes, _ = FAULTS["read-only"]
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        run_id = await harness.prompt("Hi.")
        await harness.received.text("Hello")
        await harness.received.event_with("session", "A title")
        connection = await writer_of(harness.flow, harness.remote)
        connection.execute(f"PRAGMA {breaks}")
        answer = await harness.of_session("cancel")
        assert (answer.status, b"store_busy" in answer.body) == (503, True)
        await harness.model.until_left(harness.seen()[0].n)
        await until(lambda: harness.live(run_id).state == "ending")  # Its end could not be stored.
        connection.execute(f"PRAGMA {fixes}")
        harness.clock.advance(HEAL_EVERY_S)
        complete = await harness.received.complete(run_id)
        assert complete.cancelled
        await harness.cancel()
        await harness.catch_up()
        assert harness.received.completed() == [run_id]
        assert (await harness.rows())[-1][2] == "canceled"


@pytest.mark.parametrize(("fixed", "outcome"), [(True, "error"), (False, "interrupted")])
async def test_end_that_could_not_be_stored_is_published_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: str, *, fixed: bool
) -> None:
    monkeypatch.setattr(runs_module, "STOP_S", 0.05)
    breaks, fixes, _ = FAULTS["read-only"]
    clock = WaitableClock()
    async with open_model_server(script(HELD)) as model:
        async with open_harness(tmp_path, "unix", model, clock=clock) as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.received.event_with("session", "A title")
            cursor = (await harness.remote.snapshot()).cursor
            connection = await writer_of(harness.flow, harness.remote)
            connection.execute(f"PRAGMA {breaks}")
            assert (await harness.request("POST", "/sessions", {"title": "s"})).status == 503
            await assert_ending(harness, "mine")
            if fixed:
                connection.execute(f"PRAGMA {fixes}")
        later = WaitableClock(clock.now_s() + 10)
        async with (
            open_harness(
                tmp_path, "unix", model, clock=later, session_id=harness.session_id
            ) as harness,
            open_received(harness.remote, cursor=cursor) as received,
        ):
            run = await harness.run("mine")
            assert (run.state, run.outcome) == ("ended", outcome)
            await harness.catch_up(received)
            assert (received.completed(), len(harness.seen())) == (["mine"], 1)
            assert (await harness.rows())[1][2] == "error"


@contract("EXC-1")
async def test_queued_run_starts_after_the_store_recovers(
    tmp_path: Path,
) -> None:
    breaks, fixes, _ = FAULTS["read-only"]
    async with open_runs(tmp_path, play=script(HELD)) as harness:
        await harness.prompt("One.", run_id="one")
        await harness.received.event_with("session", "A title")
        await harness.prompt("Two.", run_id="two")
        connection = await writer_of(harness.flow, harness.remote)
        connection.execute(f"PRAGMA {breaks}")
        assert (await harness.request("POST", "/sessions", {"title": "s"})).status == 503
        await until(lambda: harness.live("one").state == "ending")
        connection.execute(f"PRAGMA {fixes}")
        harness.clock.advance(HEAL_EVERY_S)
        assert "stored" in (await harness.received.complete("one")).error
        assert (await harness.received.complete("two")).text == "Fine."

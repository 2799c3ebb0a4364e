"""Runs after an orderly shutdown: active runs are interrupted, queued runs are held."""

import asyncio
from pathlib import Path

import pytest

from culm.run.rules import BEHIND_INTERRUPTED
from culm.testing.script import Reply, ReplyRule
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.drive import until
from tests.flow.probes import SUMMARY, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired
from tests.flow.restarts import ends, open_restarts, outcomes
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@contract("EXC-16", "INV-36")
async def test_streaming_run_is_interrupted_at_shutdown_and_keeps_its_text(
    tmp_path: Path, kind: str
) -> None:
    async with open_restarts(tmp_path, script(HELD), kind) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.prompt("And then?", run_id="next")
        async with restarts.next() as harness:
            assert await outcomes(harness) == {"mine": "interrupted", "next": "held"}
            assert (await harness.run("next")).title == BEHIND_INTERRUPTED
            rows = [("user", "Hi.", "stop"), ("assistant", "Hello ", "error")]
            assert await harness.rows() == rows
            assert await ends(harness) == [("mine", "interrupted")]
            assert (await harness.received.state("next", "held")).reason == BEHIND_INTERRUPTED
            assert harness.received.cancels() == []  # Nothing was cancelled.
            assert len(harness.seen()) == 1


@contract("EXC-16")
async def test_held_run_waits_until_a_person_starts_it(tmp_path: Path, kind: str) -> None:
    async with open_restarts(tmp_path, script(HELD), kind) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.prompt("And then?", run_id="next")
        async with restarts.next() as harness:
            assert not (await harness.session()).is_busy
            assert await harness.queue() == []
            assert [run.id for run in await harness.runs(state="held")] == ["next"]
            assert [run.id for run in (await harness.remote.snapshot()).runs] == ["next"]
            await harness.cancel()  # It does not cover held runs.
            assert (
                await harness.received.complete(await harness.prompt("Go on.", run_id="new"))
            ).text
            assert (await harness.run("next")).state == "held"
            answer = await harness.request("POST", "/runs/next/start")
            assert (answer.status, decode(answer.body, Run).title) == (200, "")
            assert (await harness.received.complete("next")).text == "Fine."
            assert (await harness.request("POST", "/runs/next/start")).status == 409
            assert await ends(harness) == [
                ("mine", "interrupted"),
                ("new", "good"),
                ("next", "good"),
            ]
            assert_paired(harness.sent(len(harness.seen())))
            assert [text for role, text, _ in await harness.rows() if role == "user"] == [
                "Hi.", "Go on.", "And then?",
            ]  # fmt: skip


@pytest.mark.parametrize("way", ["drop", "cancel"])
async def test_held_run_can_be_dropped_and_leaves_no_messages(tmp_path: Path, way: str) -> None:
    async with open_restarts(tmp_path, script(HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.prompt("And then?", run_id="next")
        async with restarts.next() as harness:
            assert (await harness.request("POST", f"/runs/next/{way}")).status == 200
            assert await outcomes(harness) == {"mine": "interrupted", "next": "canceled"}
            assert await ends(harness) == [("mine", "interrupted"), ("next", "canceled")]
            assert len(await harness.messages()) == 2
            assert (await harness.request("POST", "/runs/next/start")).status == 409
            assert len(harness.seen()) == 1


@contract("INV-36")
async def test_simultaneous_start_and_drop_of_a_held_run_end_it_once(tmp_path: Path) -> None:
    async with open_restarts(tmp_path, script(HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            for n in range(8):
                await harness.prompt("And then?", run_id=f"r{n}")
        async with restarts.next() as harness:
            for n in range(8):
                async with asyncio.TaskGroup() as tasks:
                    for way in ("start", "drop", "start", "cancel"):
                        tasks.create_task(harness.request("POST", f"/runs/r{n}/{way}"))
                await harness.received.complete(f"r{n}")
                await harness.until_idle()
            ended = [run_id for run_id, _ in await ends(harness)]
            assert ended == ["mine", *(f"r{n}" for n in range(8))]
            for n in range(8):
                assert harness.received.states(f"r{n}").count("ended") == 1


@contract("EXC-20")
async def test_held_run_started_in_a_busy_session_is_queued_last(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script(HELD, HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.prompt("Old.", run_id="old")
        async with restarts.next() as harness:
            await harness.prompt("Now.", run_id="now")
            await harness.until_asked(2)
            await harness.prompt("Next.", run_id="next")
            answer = await harness.request("POST", "/runs/old/start")
            assert decode(answer.body, Run).state == "queued"
            assert [item.run_id for item in await harness.queue()] == ["next", "old"]
            await harness.received.event_with("queue_changed", '"next"', '"old"')
            harness.model.release()
            await harness.received.complete("old")
            assert [run_id for run_id, _ in await ends(harness)] == ["mine", "now", "next", "old"]


@contract("EXC-16")
@pytest.mark.parametrize("moment", ["calling", "waiting", "summing up"])
async def test_run_is_interrupted_once_at_shutdown_in_any_phase(
    tmp_path: Path, moment: str
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through), Probe("last")]
    play = {
        "calling": script(calling("held", "last")),
        "waiting": script(Reply(status=503)),
        "summing up": script(rules=[ReplyRule(when=SUMMARY, reply=HELD)]),
    }[moment]
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(*tools) as harness:
            if moment == "summing up":
                await harness.talk("Hi.")
                run_id = (await harness.of_session("compact")).headers["culm-run-id"]
                await harness.received.text("Hello")
            else:
                run_id = await harness.prompt("Hi.")
                await until(lambda: gate.inside == 1 or harness.clock.is_armed(5.0))
        async with restarts.next(*tools) as harness:
            assert (await ends(harness))[-1] == (run_id, "interrupted")
            assert len(harness.received.completed()) == len(set(harness.received.completed()))
            messages = await harness.messages()
            assert_answered(messages)
            assert not any(message.is_summary_message for message in messages)
            assert tools[1].calls == []
            asked = len(harness.seen())
            harness.clock.advance(600)
            await harness.talk("Again.")
            assert len(harness.seen()) == asked + 1
            assert_paired(harness.sent(asked + 1))


@contract("INV-36")
async def test_deleted_session_ends_its_held_runs(tmp_path: Path) -> None:
    async with open_restarts(tmp_path, script(HELD)) as restarts:
        async with restarts.first() as harness:
            await harness.prompt("Hi.", run_id="mine")
            await harness.received.text("Hello")
            await harness.prompt("And then?", run_id="next")
        async with restarts.next() as harness:
            answer = await harness.request("DELETE", f"/sessions/{harness.session_id}")
            assert answer.status == 200
            assert await ends(harness) == [("mine", "interrupted"), ("next", "canceled")]
            assert (await harness.request("GET", "/runs/next")).status == 404
            assert (await harness.request("POST", "/runs/next/start")).status == 404
            assert await harness.runs() == []

"""After the server ended as it was told to: what ran is interrupted, what waited is held."""

import asyncio
from pathlib import Path

import pytest

from culm.run.rules import BEHIND_INTERRUPTED
from culm.testing.script import Reply, Rule
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.drive import until
from tests.flow.lives import ends, open_lives, outcomes
from tests.flow.probes import SUMMARY, Gate, Probe, calling, script
from tests.flow.reading import assert_answered, assert_paired
from tests.support import contract

HELD = Reply(deltas=["Hello ", "there."], hold_after=1)


@contract("EXC-16", "INV-36")
async def test_a_run_that_streams_when_the_server_ends_is_interrupted_and_keeps_its_text(
    tmp_path: Path, kind: str
) -> None:
    async with open_lives(tmp_path, script(HELD), kind) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.prompt("And then?", run_id="next")
        async with lives.next() as stage:
            assert await outcomes(stage) == {"mine": "interrupted", "next": "held"}
            assert (await stage.run("next")).title == BEHIND_INTERRUPTED
            rows = [("user", "Hi.", "stop"), ("assistant", "Hello ", "error")]
            assert await stage.rows() == rows
            assert await ends(stage) == [("mine", "interrupted")]
            assert (await stage.heard.state("next", "held")).reason == BEHIND_INTERRUPTED
            assert stage.heard.cancels() == []  # Nobody cancelled anything.
            assert len(stage.seen()) == 1


@contract("EXC-16")
async def test_what_is_held_is_at_rest_until_a_person_starts_it(tmp_path: Path, kind: str) -> None:
    async with open_lives(tmp_path, script(HELD), kind) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.prompt("And then?", run_id="next")
        async with lives.next() as stage:
            assert not (await stage.session()).is_busy
            assert await stage.queue() == []
            assert [run.id for run in await stage.runs(state="held")] == ["next"]
            assert [run.id for run in (await stage.remote.snapshot()).runs] == ["next"]
            await stage.cancel()  # It does not cover what rests.
            assert (await stage.heard.complete(await stage.prompt("Go on.", run_id="new"))).text
            assert (await stage.run("next")).state == "held"
            answer = await stage.request("POST", "/runs/next/start")
            assert (answer.status, decode(answer.body, Run).title) == (200, "")
            assert (await stage.heard.complete("next")).text == "Fine."
            assert (await stage.request("POST", "/runs/next/start")).status == 409
            assert await ends(stage) == [("mine", "interrupted"), ("new", "good"), ("next", "good")]
            assert_paired(stage.sent(len(stage.seen())))
            assert [text for role, text, _ in await stage.rows() if role == "user"] == [
                "Hi.", "Go on.", "And then?",
            ]  # fmt: skip


@pytest.mark.parametrize("way", ["drop", "cancel"])
async def test_what_is_held_can_be_dropped_and_leaves_nothing_in_the_conversation(
    tmp_path: Path, way: str
) -> None:
    async with open_lives(tmp_path, script(HELD)) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.prompt("And then?", run_id="next")
        async with lives.next() as stage:
            assert (await stage.request("POST", f"/runs/next/{way}")).status == 200
            assert await outcomes(stage) == {"mine": "interrupted", "next": "canceled"}
            assert await ends(stage) == [("mine", "interrupted"), ("next", "canceled")]
            assert len(await stage.messages()) == 2
            assert (await stage.request("POST", "/runs/next/start")).status == 409
            assert len(stage.seen()) == 1


@contract("INV-36")
async def test_starting_and_dropping_what_is_held_at_once_ends_it_once(tmp_path: Path) -> None:
    async with open_lives(tmp_path, script(HELD)) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            for n in range(8):
                await stage.prompt("And then?", run_id=f"r{n}")
        async with lives.next() as stage:
            for n in range(8):
                async with asyncio.TaskGroup() as tasks:
                    for way in ("start", "drop", "start", "cancel"):
                        tasks.create_task(stage.request("POST", f"/runs/r{n}/{way}"))
                await stage.heard.complete(f"r{n}")
                await stage.until_idle()
            told = [run_id for run_id, _ in await ends(stage)]
            assert told == ["mine", *(f"r{n}" for n in range(8))]
            for n in range(8):
                assert stage.heard.states(f"r{n}").count("ended") == 1


@contract("EXC-20")
async def test_what_was_held_and_is_started_in_a_busy_session_waits_behind_the_others(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script(HELD, HELD)) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.prompt("Old.", run_id="old")
        async with lives.next() as stage:
            await stage.prompt("Now.", run_id="now")
            await stage.asked(2)
            await stage.prompt("Next.", run_id="next")
            answer = await stage.request("POST", "/runs/old/start")
            assert decode(answer.body, Run).state == "queued"
            assert [item.run_id for item in await stage.queue()] == ["next", "old"]
            await stage.heard.saying("queue_changed", '"next"', '"old"')
            stage.model.release()
            await stage.heard.complete("old")
            assert [run_id for run_id, _ in await ends(stage)] == ["mine", "now", "next", "old"]


@contract("EXC-16")
@pytest.mark.parametrize("moment", ["calling", "waiting", "summing up"])
async def test_whatever_a_run_does_when_the_server_ends_it_is_interrupted_and_told_once(
    tmp_path: Path, moment: str
) -> None:
    gate = Gate()
    tools = [Probe("held", gate.pass_through), Probe("last")]
    play = {
        "calling": script(calling("held", "last")),
        "waiting": script(Reply(status=503)),
        "summing up": script(rules=[Rule(when=SUMMARY, reply=HELD)]),
    }[moment]
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(*tools) as stage:
            if moment == "summing up":
                await stage.talk("Hi.")
                run_id = (await stage.of_session("compact")).headers["culm-run-id"]
                await stage.heard.text("Hello")
            else:
                run_id = await stage.prompt("Hi.")
                await until(lambda: gate.inside == 1 or stage.clock.is_armed(5.0))
        async with lives.next(*tools) as stage:
            assert (await ends(stage))[-1] == (run_id, "interrupted")
            assert len(stage.heard.completed()) == len(set(stage.heard.completed()))
            messages = await stage.messages()
            assert_answered(messages)
            assert not any(message.is_summary_message for message in messages)
            assert tools[1].calls == []
            asked = len(stage.seen())
            stage.clock.advance(600)
            await stage.talk("Again.")
            assert len(stage.seen()) == asked + 1
            assert_paired(stage.sent(asked + 1))


@contract("INV-36")
async def test_a_session_that_is_deleted_ends_what_it_held(tmp_path: Path) -> None:
    async with open_lives(tmp_path, script(HELD)) as lives:
        async with lives.first() as stage:
            await stage.prompt("Hi.", run_id="mine")
            await stage.heard.text("Hello")
            await stage.prompt("And then?", run_id="next")
        async with lives.next() as stage:
            answer = await stage.request("DELETE", f"/sessions/{stage.session_id}")
            assert answer.status == 200
            assert await ends(stage) == [("mine", "interrupted"), ("next", "canceled")]
            assert (await stage.request("GET", "/runs/next")).status == 404
            assert (await stage.request("POST", "/runs/next/start")).status == 404
            assert await stage.runs() == []

"""Runs that wait for a person when the server ends: they wait on, and what is called runs once."""

import sqlite3
from pathlib import Path

import pytest

from culm.testing.script import Reply
from culm.wire.asks import AskChanged
from culm.workspace.roots import project_folder
from tests.flow.asking import (
    Questioning,
    Shifting,
    answer,
    answer_batch,
    asking,
    asks,
    batch_in,
    call,
    denied,
    granted,
    notified,
    questions,
    request_in,
    when,
)
from tests.flow.conftest import open_flow
from tests.flow.drive import closed
from tests.flow.lives import AWAY_S, ends, open_lives, outcomes
from tests.flow.probes import Gate, Probe, Wound, calling, script
from tests.flow.reading import assert_answered, assert_paired, results_of
from tests.flow.runs import Image, Stage, open_heard, says
from tests.support import contract, model_config


async def contents(stage: Stage) -> list[str]:
    """What every call was answered, in order, each once."""
    messages = await stage.messages()
    assert_answered(messages)
    return [result.content for result in results_of(messages)]


@pytest.mark.parametrize("killed", [True, False])
async def test_an_open_ask_outlives_the_server_and_its_call_runs_once(
    tmp_path: Path, *, killed: bool
) -> None:
    play = script(calling("done", "look", "later", path="a"))
    tools = done, look, later = Probe("done"), Probe("look", asks=True), Probe("later")
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(*tools) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            image = Image(stage) if killed else None
        async with lives.next(*tools, image=image, away_s=7200):
            pass  # Nobody came.
        async with lives.next(*tools, away_s=7200) as stage:
            async with open_heard(stage.remote, view="crush") as crush:
                assert await request_in(crush) == ask
            assert await asks(stage) == {ask.id: "open"}
            assert await outcomes(stage) == {run_id: "waiting"}
            assert await request_in(stage.heard) == ask  # It is told how things stand by then.
            assert await answer(stage, ask.id, "allow")
            complete = await stage.heard.complete(run_id)
            assert complete.text == "Fine."
            assert [len(tool.calls) for tool in (done, look, later)] == [1, 1, 1]
            assert await contents(stage) == ["done 1", "look 1", "later 1"]
            assert [(m.role, m.content) for m in stage.sent(2)][-3:] == [
                ("tool", "done 1"), ("tool", "look 1"), ("tool", "later 1"),
            ]  # fmt: skip
            assert_paired(stage.sent(2))
            assert await ends(stage) == [(run_id, "good")]
            assert [c.state for c in stage.heard.all("ask_changed", AskChanged)] == [
                "open", "open", "allowed",
            ]  # fmt: skip


async def test_an_open_question_outlives_the_server_with_the_ids_it_was_asked_by(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, script(asking("Who?", "Why?"))) as lives:
        async with lives.first(Questioning()) as stage:
            run_id = await stage.prompt("Hi.")
            batch = await batch_in(stage.heard)
            image = Image(stage)
        async with lives.next(Questioning(), image=image) as stage:
            assert await questions(stage) == {batch.id: "open"}
            who, why = batch.questions
            said = [{"request_id": q.id, "fill_in_text": q.question[:3]} for q in (who, why)]
            assert await answer_batch(stage, "", *said)
            assert (await stage.heard.complete(run_id)).text == "Fine."
            assert await contents(stage) == ["Who?\nWho\n\nWhy?\nWhy"]


async def test_a_call_that_would_now_do_something_else_asks_anew_and_the_old_ask_counts_no_more(
    tmp_path: Path,
) -> None:
    tool = Shifting("look", world="before")
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            old = await request_in(stage.heard)
            image = Image(stage)
        tool.world = "after"
        async with lives.next(tool, image=image) as stage:
            await stage.heard.saying("permission_request", "after")
            [new_id] = await asks(stage)
            assert new_id != old.id
            assert not await answer(stage, old.id, "allow")
            assert not tool.calls
            assert await answer(stage, new_id, "allow")
            await stage.heard.complete(run_id)
            assert await asks(stage, "all") == {new_id: "allowed", old.id: "withdrawn"}
            assert len(tool.calls) == 1
            changed = stage.heard.all("ask_changed", AskChanged)
            assert ("withdrawn", old.id) in [(c.state, c.ask_id) for c in changed]
            assert notified(stage.heard)[-1] == granted(old)  # It is the same call.


async def test_parallel_calls_wait_on_together_and_are_answered_in_any_order(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    play = script(Reply(calls=[call("look", n=n) for n in range(3)]))
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            asked = [await request_in(stage.heard, n) for n in (1, 2, 3)]
            assert await answer(stage, asked[1].id, "allow")
            await stage.heard.saying("message", "look 1")
            image = Image(stage)
        async with lives.next(tool, image=image) as stage:
            first, _, third = asked
            assert await asks(stage) == {third.id: "open", first.id: "open"}
            assert await outcomes(stage) == {run_id: "waiting"}
            for ask in (third, first):
                assert await answer(stage, ask.id, "allow")
            await stage.heard.complete(run_id)
            assert sorted(str(c.arguments) for c in tool.calls) == [str({"n": n}) for n in range(3)]
            assert len(await contents(stage)) == 3
            assert_paired(stage.sent(2))


@contract("INV-77")
@pytest.mark.parametrize("killed", [True, False])
async def test_a_turn_in_which_a_call_was_denied_does_not_go_on_after_the_end_of_the_server(
    tmp_path: Path, *, killed: bool
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    async with open_lives(tmp_path, script(calling("look", "look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            first, second = [await request_in(stage.heard, n) for n in (1, 2)]
            assert await answer(stage, first.id, "deny")
            await stage.heard.saying("message", "User denied permission")
            image = Image(stage) if killed else None
        async with lives.next(tool, image=image) as stage:
            assert await ends(stage) == [(run_id, "interrupted")]
            assert not await answer(stage, second.id, "allow")
            assert await asks(stage, "all") == {second.id: "withdrawn", first.id: "denied"}
            assert await contents(stage) == [
                "User denied permission",
                "Not run: the server ended before this call was started.",
            ]
            assert (tool.calls, len(stage.seen())) == ([], 1)


async def test_a_started_call_beside_an_open_ask_is_interrupted_and_the_ask_withdrawn(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow = Probe("slow", gate.pass_through, parallel=True, crash="never")
    look = Probe("look", asks=True, parallel=True)
    async with open_lives(tmp_path, script(calling("slow", "look"))) as lives:
        async with lives.first(slow, look) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            assert (await stage.run(run_id)).state == "active"
            image = Image(stage)
        async with lives.next(slow, look, image=image) as stage:
            assert await ends(stage) == [(run_id, "interrupted")]
            assert await asks(stage, "all") == {ask.id: "withdrawn"}
            assert not await answer(stage, ask.id, "allow")
            started, waited = await contents(stage)
            assert "Do not repeat it" in started
            assert waited == "Not run: the server ended before this call was started."
            assert (len(slow.calls), look.calls) == (1, [])


async def test_an_allowed_call_that_had_not_started_is_interrupted_and_said_not_to_have_run(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            image = Image(stage)
            folder = project_folder(tmp_path / "image", stage.flow.directory().resolve())
        connection = sqlite3.connect(folder / "culm.db")
        with connection:
            connection.execute("UPDATE asks SET state = 'allowed'")
        connection.close()
        async with lives.next(tool, image=image) as stage:
            assert await ends(stage) == [(run_id, "interrupted")]
            assert await asks(stage, "all") == {ask.id: "allowed"}
            assert await contents(stage) == [
                "Not run: the server ended before this call was started."
            ]
            assert not tool.calls


@pytest.mark.parametrize("change", ["rule", "gone"])
async def test_an_ask_whose_call_no_longer_needs_it_is_withdrawn_and_the_turn_goes_on(
    tmp_path: Path, change: str
) -> None:
    tool = Probe("look", asks=True)
    held = Reply(deltas=["Hello ", "there."], hold_after=1)
    async with open_lives(tmp_path, script(calling("look"), held)) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
        rules = {"permission_rules": [{"decision": "deny", "tool": "look"}]}
        config = model_config(lives.model.url) | (rules if change == "rule" else {})
        tools = [] if change == "gone" else [tool]
        async with lives.next(*tools, config=config) as stage:
            # It may have said so before anybody listened: then that is in what they are shown.
            await stage.heard.until(lambda told: "message" in told.type and says(told, "Hello"))
            assert await asks(stage, "all") == {ask.id: "withdrawn"}
            assert not await answer(stage, ask.id, "allow")
            assert await outcomes(stage) == {run_id: "active"}
            lives.model.release()
            assert (await stage.heard.complete(run_id)).text == "Hello there."
            [content] = await contents(stage)
            assert ("denies it" if change == "rule" else "no tool 'look'") in content
            assert not tool.calls


async def test_a_run_whose_model_is_gone_says_so_and_asks_no_longer(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
        async with lives.next(tool, config={}) as stage:
            complete = await stage.heard.complete(run_id)
            assert "demo" in complete.error
            assert await asks(stage, "all") == {ask.id: "withdrawn"}
            assert len(await contents(stage)) == 1
            assert not tool.calls


async def test_a_server_that_ends_while_it_starts_loses_no_ask(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
        config = model_config(lives.model.url)
        for _ in range(3):
            clock = Wound(lives.clock.now_s() + AWAY_S)
            async with open_flow(
                tmp_path, "unix", clock=clock, config=config, tools={"look": tool}
            ):
                pass
        async with lives.next(tool) as stage:
            assert await asks(stage) == {ask.id: "open"}
            assert await answer(stage, ask.id, "allow")
            assert (await stage.heard.complete(run_id)).text == "Fine."
            assert len(tool.calls) == 1


@contract("EXC-5")
@pytest.mark.parametrize("target", ["session", "run"])
async def test_a_run_that_waits_on_is_cancelled_as_any_other(tmp_path: Path, target: str) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look", "look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            image = Image(stage)
        async with lives.next(tool, image=image) as stage:
            found = await stage.request("DELETE", f"/sessions/{stage.session_id}")
            assert (found.status, await asks(stage)) == (409, {ask.id: "open"})
            await (stage.cancel() if target == "session" else stage.cancel_run(run_id))
            assert (await stage.heard.complete(run_id)).cancelled
            assert await asks(stage, "all") == {ask.id: "withdrawn"}
            assert notified(stage.heard)[-1] == denied(ask)
            assert not await answer(stage, ask.id, "allow")
            assert set(await contents(stage)) == {"Error: user cancelled assistant tool calling"}
            assert not tool.calls
            await stage.talk("Again.")
            await stage.remote.delete_session(stage.session_id)
            assert await asks(stage, "all") == {}


async def test_who_shared_a_waiting_turn_ends_with_it_and_who_queued_behind_it_follows(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow, look = Probe("slow", gate.pass_through), Probe("look", asks=True)
    play = script(calling("slow"), calling("look"), Reply(text="Both."))
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(slow, look) as stage:
            host = await stage.prompt("One.")
            await stage.heard.state(host, "active")
            guest, behind = await stage.prompt("Two."), await stage.prompt("Three.", run_id="r-3")
            gate.release()
            ask = await request_in(stage.heard)
            image = Image(stage)
        async with lives.next(slow, look, image=image) as stage:
            before = {host: "waiting", guest: "folded", behind: "queued"}
            assert await outcomes(stage) == before
            assert [queued.run_id for queued in await stage.queue()] == [behind]
            assert await answer(stage, ask.id, "allow")
            for run_id, text in ((host, "Both."), (guest, "Both."), (behind, "Fine.")):
                assert (await stage.heard.complete(run_id)).text == text
            assert await ends(stage) == [(run_id, "good") for run_id in before]
            assert (len(slow.calls), len(look.calls)) == (1, 1)


async def test_runs_of_other_sessions_end_or_go_on_beside_one_that_waits(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    held = Reply(deltas=["Hello ", "there."], hold_after=1)
    play = script(rules=[when("Adam", calling("look")), when("Berta", held)])
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(tool) as stage:
            adam = await stage.prompt("I am Adam.")
            ask = await request_in(stage.heard)
            other = (await stage.remote.create_session("other")).id
            berta = await stage.prompt("I am Berta.", other)
            await stage.heard.text("Hello")
        async with lives.next(tool) as stage:
            assert await outcomes(stage) == {adam: "waiting", berta: "interrupted"}
            assert await answer(stage, ask.id, "allow")
            assert (await stage.heard.complete(adam)).text == "Fine."
            assert len(tool.calls) == 1


async def test_what_nobody_looks_after_is_interrupted_although_it_asks(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            run_id = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            await stage.remote.client.retire()
            stage.clock.advance(3600.0)
            await closed(stage.flow, stage.remote)
        async with lives.next(tool) as stage:
            assert await ends(stage) == [(run_id, "interrupted")]
            assert await asks(stage, "all") == {ask.id: "withdrawn"}
            assert await contents(stage) == [
                "Not run: the server ended before this call was started."
            ]

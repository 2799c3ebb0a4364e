"""Runs that wait for a person survive a restart, and their calls run once."""

from pathlib import Path

import pytest

from culm.testing.script import Reply
from culm.wire.asks import AskChanged
from tests.flow.asking import (
    ChangingProbe,
    QuestionProbe,
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
from tests.flow.probes import Gate, Probe, WaitableClock, calling, script
from tests.flow.reading import assert_answered, assert_paired, results_of
from tests.flow.restarts import AWAY_S, ends, open_restarts, outcomes
from tests.flow.runs import CrashImage, Harness, has_text, open_received
from tests.support import contract, model_config


async def contents(harness: Harness) -> list[str]:
    """The results of all calls in order; each call has one."""
    messages = await harness.messages()
    assert_answered(messages)
    return [result.content for result in results_of(messages)]


@pytest.mark.parametrize("killed", [True, False])
async def test_open_ask_survives_a_restart_and_its_call_runs_once(
    tmp_path: Path, *, killed: bool
) -> None:
    play = script(calling("done", "look", "later", path="a"))
    tools = done, look, later = Probe("done"), Probe("look", asks=True), Probe("later")
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(*tools) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            image = CrashImage(harness) if killed else None
        async with restarts.next(*tools, image=image, away_s=7200):
            pass  # No client attaches.
        async with restarts.next(*tools, away_s=7200) as harness:
            async with open_received(harness.remote, view="crush") as crush:
                assert await request_in(crush) == ask
            assert await asks(harness) == {ask.id: "open"}
            assert await outcomes(harness) == {run_id: "waiting"}
            assert await request_in(harness.received) == ask  # A new stream receives the open ask.
            assert await answer(harness, ask.id, "allow")
            complete = await harness.received.complete(run_id)
            assert complete.text == "Fine."
            assert [len(tool.calls) for tool in (done, look, later)] == [1, 1, 1]
            assert await contents(harness) == ["done 1", "look 1", "later 1"]
            assert [(m.role, m.content) for m in harness.sent(2)][-3:] == [
                ("tool", "done 1"), ("tool", "look 1"), ("tool", "later 1"),
            ]  # fmt: skip
            assert_paired(harness.sent(2))
            assert await ends(harness) == [(run_id, "good")]
            assert [c.state for c in harness.received.all("ask_changed", AskChanged)] == [
                "open", "open", "allowed",
            ]  # fmt: skip


async def test_open_question_survives_a_restart_with_its_ids(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script(asking("Who?", "Why?"))) as restarts:
        async with restarts.first(QuestionProbe()) as harness:
            run_id = await harness.prompt("Hi.")
            batch = await batch_in(harness.received)
            image = CrashImage(harness)
        async with restarts.next(QuestionProbe(), image=image) as harness:
            assert await questions(harness) == {batch.id: "open"}
            who, why = batch.questions
            responses = [{"request_id": q.id, "fill_in_text": q.question[:3]} for q in (who, why)]
            assert await answer_batch(harness, "", *responses)
            assert (await harness.received.complete(run_id)).text == "Fine."
            assert await contents(harness) == ["Who?\nWho\n\nWhy?\nWhy"]


async def test_changed_call_after_a_restart_asks_again_and_withdraws_the_old_ask(
    tmp_path: Path,
) -> None:
    tool = ChangingProbe("look", world="before")
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            old = await request_in(harness.received)
            image = CrashImage(harness)
        tool.world = "after"
        async with restarts.next(tool, image=image) as harness:
            await harness.received.event_with("permission_request", "after")
            [new_id] = await asks(harness)
            assert new_id != old.id
            assert not await answer(harness, old.id, "allow")
            assert not tool.calls
            assert await answer(harness, new_id, "allow")
            await harness.received.complete(run_id)
            assert await asks(harness, "all") == {new_id: "allowed", old.id: "withdrawn"}
            assert len(tool.calls) == 1
            changed = harness.received.all("ask_changed", AskChanged)
            assert ("withdrawn", old.id) in [(c.state, c.ask_id) for c in changed]
            assert notified(harness.received)[-1] == granted(old)  # It is the same call.


async def test_parallel_asks_survive_a_restart_and_are_answered_in_any_order(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    play = script(Reply(calls=[call("look", n=n) for n in range(3)]))
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            asked = [await request_in(harness.received, n) for n in (1, 2, 3)]
            assert await answer(harness, asked[1].id, "allow")
            await harness.received.event_with("message", "look 1")
            image = CrashImage(harness)
        async with restarts.next(tool, image=image) as harness:
            first, _, third = asked
            assert await asks(harness) == {third.id: "open", first.id: "open"}
            assert await outcomes(harness) == {run_id: "waiting"}
            for ask in (third, first):
                assert await answer(harness, ask.id, "allow")
            await harness.received.complete(run_id)
            assert sorted(str(c.arguments) for c in tool.calls) == [str({"n": n}) for n in range(3)]
            assert len(await contents(harness)) == 3
            assert_paired(harness.sent(2))


@contract("INV-77")
@pytest.mark.parametrize("killed", [True, False])
async def test_turn_with_a_denied_call_ends_denied_after_a_restart(
    tmp_path: Path, *, killed: bool
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    async with open_restarts(tmp_path, script(calling("look", "look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            first, second = [await request_in(harness.received, n) for n in (1, 2)]
            assert await answer(harness, first.id, "deny")
            await harness.received.event_with("message", "User denied permission")
            image = CrashImage(harness) if killed else None
        async with restarts.next(tool, image=image) as harness:
            assert await ends(harness) == [(run_id, "denied")]
            assert not await answer(harness, second.id, "allow")
            assert await asks(harness, "all") == {second.id: "withdrawn", first.id: "denied"}
            assert await contents(harness) == [
                "User denied permission",
                "Not run: the turn ended before this call.",
            ]
            assert (tool.calls, len(harness.seen())) == ([], 1)


@contract("INV-77")
@pytest.mark.parametrize(
    ("state", "outcome", "text"),
    [
        ("denied", "denied", "User denied permission"),
        ("expired", "denied", "Nobody answered the permission request in time"),
    ],
)
async def test_refusal_that_was_stored_before_a_kill_ends_the_run(
    tmp_path: Path, state: str, outcome: str, text: str
) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            image = CrashImage(harness)
        # The kill came between the commit of the answer and that of the call's result.
        image.execute("UPDATE asks SET state = ?", state)
        async with restarts.next(tool, image=image) as harness:
            assert await ends(harness) == [(run_id, outcome)]
            assert await asks(harness, "all") == {ask.id: state}
            assert await contents(harness) == [text]
            assert not tool.calls


async def test_declined_question_that_was_stored_before_a_kill_ends_the_turn(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, script(asking("Who?"))) as restarts:
        async with restarts.first(QuestionProbe()) as harness:
            run_id = await harness.prompt("Hi.")
            await batch_in(harness.received)
            image = CrashImage(harness)
        image.execute("UPDATE asks SET state = 'canceled'")
        async with restarts.next(QuestionProbe(), image=image) as harness:
            assert await outcomes(harness) == {run_id: "end_turn"}
            assert await contents(harness) == ["User cancelled this question"]


async def test_started_call_beside_an_open_ask_is_interrupted_by_a_restart(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow = Probe("slow", gate.pass_through, parallel=True, crash="never")
    look = Probe("look", asks=True, parallel=True)
    async with open_restarts(tmp_path, script(calling("slow", "look"))) as restarts:
        async with restarts.first(slow, look) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            assert (await harness.run(run_id)).state == "active"
            image = CrashImage(harness)
        async with restarts.next(slow, look, image=image) as harness:
            assert await ends(harness) == [(run_id, "interrupted")]
            assert await asks(harness, "all") == {ask.id: "withdrawn"}
            assert not await answer(harness, ask.id, "allow")
            started, waited = await contents(harness)
            assert "Do not repeat it" in started
            assert waited == "Not run: the server ended before this call was started."
            assert (len(slow.calls), look.calls) == (1, [])


async def test_allowed_but_unstarted_call_is_interrupted_and_reported_as_not_run(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            image = CrashImage(harness)
        image.execute("UPDATE asks SET state = 'allowed'")
        async with restarts.next(tool, image=image) as harness:
            assert await ends(harness) == [(run_id, "interrupted")]
            assert await asks(harness, "all") == {ask.id: "allowed"}
            assert await contents(harness) == [
                "Not run: the server ended before this call was started."
            ]
            assert not tool.calls


@pytest.mark.parametrize("change", ["rule", "gone"])
async def test_ask_no_longer_needed_after_a_restart_is_withdrawn(
    tmp_path: Path, change: str
) -> None:
    tool = Probe("look", asks=True)
    held = Reply(deltas=["Hello ", "there."], hold_after=1)
    async with open_restarts(tmp_path, script(calling("look"), held)) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
        rules = {"permission_rules": [{"decision": "deny", "tool": "look"}]}
        config = model_config(restarts.model.url) | (rules if change == "rule" else {})
        tools = [] if change == "gone" else [tool]
        async with restarts.next(*tools, config=config) as harness:
            # It may have streamed before the client attached; then the text is in a snapshot.
            await harness.received.until(
                lambda event: "message" in event.type and has_text(event, "Hello")
            )
            assert await asks(harness, "all") == {ask.id: "withdrawn"}
            assert not await answer(harness, ask.id, "allow")
            assert await outcomes(harness) == {run_id: "active"}
            restarts.model.release()
            assert (await harness.received.complete(run_id)).text == "Hello there."
            [content] = await contents(harness)
            assert ("denies it" if change == "rule" else "no tool 'look'") in content
            assert not tool.calls


async def test_waiting_run_without_its_model_ends_and_withdraws_its_ask(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
        async with restarts.next(tool, config={}) as harness:
            complete = await harness.received.complete(run_id)
            assert "demo" in complete.error
            assert await asks(harness, "all") == {ask.id: "withdrawn"}
            assert len(await contents(harness)) == 1
            assert not tool.calls


async def test_ask_survives_servers_that_exit_during_startup(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
        config = model_config(restarts.model.url)
        for _ in range(3):
            clock = WaitableClock(restarts.clock.now_s() + AWAY_S)
            async with open_flow(
                tmp_path, "unix", clock=clock, config=config, tools={"look": tool}
            ):
                pass
        async with restarts.next(tool) as harness:
            assert await asks(harness) == {ask.id: "open"}
            assert await answer(harness, ask.id, "allow")
            assert (await harness.received.complete(run_id)).text == "Fine."
            assert len(tool.calls) == 1


@contract("EXC-5")
@pytest.mark.parametrize("target", ["session", "run"])
async def test_resumed_waiting_run_can_be_cancelled(tmp_path: Path, target: str) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look", "look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            image = CrashImage(harness)
        async with restarts.next(tool, image=image) as harness:
            found = await harness.request("DELETE", f"/sessions/{harness.session_id}")
            assert (found.status, await asks(harness)) == (409, {ask.id: "open"})
            await (harness.cancel() if target == "session" else harness.cancel_run(run_id))
            assert (await harness.received.complete(run_id)).cancelled
            assert await asks(harness, "all") == {ask.id: "withdrawn"}
            assert notified(harness.received)[-1] == denied(ask)
            assert not await answer(harness, ask.id, "allow")
            assert set(await contents(harness)) == {"Error: user cancelled assistant tool calling"}
            assert not tool.calls
            await harness.talk("Again.")
            await harness.remote.delete_session(harness.session_id)
            assert await asks(harness, "all") == {}


async def test_folded_and_queued_runs_of_a_waiting_turn_survive_a_restart(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow, look = Probe("slow", gate.pass_through), Probe("look", asks=True)
    play = script(calling("slow"), calling("look"), Reply(text="Both."))
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(slow, look) as harness:
            host = await harness.prompt("One.")
            await harness.received.state(host, "active")
            guest, behind = (
                await harness.prompt("Two."),
                await harness.prompt("Three.", run_id="r-3"),
            )
            gate.release()
            ask = await request_in(harness.received)
            image = CrashImage(harness)
        async with restarts.next(slow, look, image=image) as harness:
            before = {host: "waiting", guest: "folded", behind: "queued"}
            assert await outcomes(harness) == before
            assert [queued.run_id for queued in await harness.queue()] == [behind]
            assert await answer(harness, ask.id, "allow")
            for run_id, text in ((host, "Both."), (guest, "Both."), (behind, "Fine.")):
                assert (await harness.received.complete(run_id)).text == text
            assert await ends(harness) == [(run_id, "good") for run_id in before]
            assert (len(slow.calls), len(look.calls)) == (1, 1)


async def test_runs_of_other_sessions_are_interrupted_beside_a_waiting_run(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    held = Reply(deltas=["Hello ", "there."], hold_after=1)
    play = script(rules=[when("Adam", calling("look")), when("Berta", held)])
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(tool) as harness:
            adam = await harness.prompt("I am Adam.")
            ask = await request_in(harness.received)
            other = (await harness.remote.create_session("other")).id
            berta = await harness.prompt("I am Berta.", other)
            await harness.received.text("Hello")
        async with restarts.next(tool) as harness:
            assert await outcomes(harness) == {adam: "waiting", berta: "interrupted"}
            assert await answer(harness, ask.id, "allow")
            assert (await harness.received.complete(adam)).text == "Fine."
            assert len(tool.calls) == 1


async def test_waiting_run_without_clients_is_interrupted(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            run_id = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            await harness.remote.client.retire()
            harness.clock.advance(3600.0)
            await closed(harness.flow, harness.remote)
        async with restarts.next(tool) as harness:
            assert await ends(harness) == [(run_id, "interrupted")]
            assert await asks(harness, "all") == {ask.id: "withdrawn"}
            assert await contents(harness) == [
                "Not run: the server ended before this call was started."
            ]

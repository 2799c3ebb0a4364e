"""How agents end: cancelled, killed, failed, late; with what it cost counted on every way out."""

from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall
from tests.flow.agents_stage import (
    COST,
    TOKENS,
    AgentStage,
    LoopWorker,
    calls,
    held,
    open_agents,
    start,
    talk,
)
from tests.flow.drive import until
from tests.flow.reading import assert_answered, calls_of
from tests.support import contract

# Ann has two steps: she lists her agents, and says something. Bob below her has two as well.
TALKS = (
    talk("@lead", start("@ann: go"), then="Over."),
    talk("@ann", start("@bob: go"), then="Ann is done."),
    talk("@bob", calls("agent_list"), held("Bob is done.")),
)


async def begun(stage: AgentStage) -> str:
    """Let everything come to where bob waits for his second answer; returns the top's run."""
    run_id = await stage.prompt("@lead: go")
    await stage.asked_by("@bob", 2)
    return run_id


async def assert_counted(stage: AgentStage, lead: int, ann: int, bob: int) -> None:
    """How many answers each was given that are paid for, and that they add up on the way up."""
    runs = {run.prompt.split(":")[0]: run for run in await stage.runs()}
    told = {
        who: (run.steps, round(run.cost, 6), round(run.tree_cost, 6)) for who, run in runs.items()
    }
    assert told == {
        "@lead": (lead, round(lead * COST, 6), round((lead + ann + bob) * COST, 6)),
        "@ann": (ann, round(ann * COST, 6), round((ann + bob) * COST, 6)),
        "@bob": (bob, round(bob * COST, 6), round(bob * COST, 6)),
    }
    agents = {who: await stage.agent(who) for who in ("@ann", "@bob")}
    assert {who: round(one.cost, 6) for who, one in agents.items()} == {
        "@ann": round((ann + bob) * COST, 6),
        "@bob": round(bob * COST, 6),
    }
    sessions = [
        (await stage.session()),
        *[await stage.remote.session(agents[who].session_id) for who in ("@ann", "@bob")],
    ]
    assert [round(session.cost, 6) for session in sessions] == [
        round(n * COST, 6) for n in (lead + ann + bob, ann + bob, bob)
    ]


async def assert_closed(stage: AgentStage) -> None:
    """Nobody works, and every conversation is truthful."""
    await stage.until_idle()  # A worker that ended well waits for the next one.
    assert await stage.ask("/processes", list[dict[str, object]]) == []
    for agent in await stage.agents():
        assert (agent.state, agent.pid, agent.waiting_for) == ("ended", 0, "")
        assert_answered(await stage.remote.messages(agent.session_id))
    assert_answered(await stage.messages())


@contract("EXC-22", "INV-79")
async def test_the_cost_of_a_tree_is_the_sum_of_its_answers(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        run_id = await begun(stage)
        stage.release(await stage.asked_by("@bob", 2))
        await stage.heard.complete(run_id)
        await stage.heard.saying("session", "A title")
        await assert_counted(stage, 2, 2, 2)
        assert (await stage.agent("@ann")).tokens == 4 * TOKENS


@contract("EXC-22")
@pytest.mark.parametrize("how", ["session", "run"])
async def test_a_cancel_ends_the_whole_tree_and_is_settled_when_the_last_is_gone(
    tmp_path: Path, how: str
) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        run_id = await begun(stage)
        pids = [
            process["pid"] for process in await stage.ask("/processes", list[dict[str, object]])
        ]
        assert pids == [worker.pid for worker in stage.launcher.alive]
        if how == "run":
            answer = await stage.cancel_run(run_id)
            assert answer.result == "canceled"
        else:
            await stage.cancel()
            await stage.heard.complete(run_id)
        await assert_closed(stage)
        assert stage.launcher.alive == []
        await stage.catch_up()
        ids = {run.prompt.split(":")[0]: run.id for run in await stage.runs()}
        cancels = stage.heard.cancels()
        assert len({cancel.cancel_id for cancel in cancels}) == 1
        assert {run.run_id: run.settled for run in cancels[-1].runs} == dict.fromkeys(
            ids.values(), "canceled"
        )
        assert stage.heard.completed()[-1] == run_id, "those below have ended before"
        assert await stage.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        for who in ("@ann", "@bob"):
            rows = await stage.rows_of(who)
            assert [row for row in rows if row[0] == "assistant"][-1][2] == "canceled"
        await stage.heard.saying("session", "A title")
        await assert_counted(stage, 1, 1, 1)
        await stage.talk("@lead: again")  # It goes on from there.


@contract("EXC-22")
async def test_an_agent_cancelled_alone_is_a_result_and_those_above_go_on(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        run_id = await begun(stage)
        bob = await stage.done((await stage.agent("@bob")).agent_id, "cancel")
        assert (bob.state, bob.outcome) == ("ended", "canceled")
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert await stage.outcomes() == {"@ann:": "completed", "@bob:": "canceled"}
        (result,) = await stage.results("@ann")
        assert (result.is_error, "canceled" in result.content) == (True, True)
        await stage.heard.saying("session", "A title")
        await assert_counted(stage, 2, 2, 1)
        again = await stage.done(bob.agent_id, "cancel")
        assert again == bob, "it had ended"
        await assert_closed(stage)


@contract("INV-79", "EXC-22")
@pytest.mark.parametrize("who", ["@ann", "@bob"])
async def test_a_worker_that_is_killed_is_an_error_result_and_those_below_it_end(
    tmp_path: Path, who: str
) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        run_id = await begun(stage)
        stage.worker_of((await stage.agent(who)).agent_id).strike()
        assert (await stage.heard.complete(run_id)).text == "Over."
        await assert_closed(stage)
        (result,) = await stage.results()
        outcomes = await stage.outcomes()
        if who == "@ann":
            assert outcomes == {"@ann:": "error", "@bob:": "canceled"}
            assert (await stage.agent("@bob")).reason.startswith("parent_ended")
            assert result.is_error
            await stage.heard.saying("session", "A title")
            await assert_counted(stage, 2, 1, 1)
        else:
            assert outcomes == {"@ann:": "completed", "@bob:": "error"}
            assert not result.is_error
            await stage.heard.saying("session", "A title")
            await assert_counted(stage, 2, 2, 1)


FRAMES = [b'"execution_started"', b'"usage_reported"', b'"reserve"', b'"sub_agent_request"']


@contract("EXC-22")
@pytest.mark.parametrize("marker", FRAMES, ids=lambda one: one.decode().strip('"'))
@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_whenever_a_worker_is_lost_its_rows_are_truthful_and_what_it_reported_is_paid(
    tmp_path: Path, marker: bytes, how: str
) -> None:
    """At the first such frame of ann's, which has just passed or never will."""
    hits: list[LoopWorker] = []

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if marker in frame and not hits and worker.provision.identity.depth == 1:
            hits.append(worker)
            if how == "killed":
                worker.strike()
            else:
                await stage.cancel()
        return True

    async with open_agents(tmp_path, *TALKS[:2], talk("@bob")) as stage:
        stage.launcher.on_frame = on_frame
        run_id = await stage.prompt("@lead: go")
        complete = await stage.heard.complete(run_id)
        assert hits
        await assert_closed(stage)
        agents = await stage.agents()
        if how == "killed":
            assert complete.text == "Over."
            # Who was never heard has done nothing, so that another one may.
            is_again = marker == b'"execution_started"'
            assert agents[0].outcome == ("completed" if is_again else "error")
            assert (await stage.results())[0].is_error != is_again
        else:
            assert complete.cancelled
            assert {agent.outcome for agent in agents} == {"canceled"}
            assert (await stage.results())[0].is_error


async def test_no_worker_can_be_started_is_an_error_result(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        stage.launcher.refuses = 2
        await stage.talk("@lead: go")
        (result,) = await stage.results()
        assert (result.is_error, "there are no more processes" in result.content) == (True, True)
        await assert_closed(stage)


async def test_a_detached_agent_outlives_its_run_and_a_cancel_of_the_idle_session_covers_it(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), then="Over."),
        *TALKS[1:],
    ) as stage:
        await stage.talk("@lead: go")
        await stage.asked_by("@bob", 2)
        assert (await stage.session()).is_busy is False
        await stage.cancel()
        await stage.when("@ann", lambda one: one.state == "ended")
        await assert_closed(stage)
        await stage.catch_up()
        assert await stage.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        assert [complete.cancelled for complete in stage.heard.completes()] == [False, True, True]


async def test_a_detached_agent_goes_on_when_the_run_that_started_it_is_cancelled(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), held("Over.")),
        talk("@ann", held("Ann is done.")),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await stage.asked_by("@lead", 2)
        seen = await stage.asked_by("@ann")
        await stage.cancel_run(run_id)
        assert (await stage.agent("@ann")).state == "running"
        stage.release(seen)
        await stage.when("@ann", lambda one: one.outcome == "completed")


async def test_a_tree_at_work_is_not_deleted(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as stage:
        run_id = await begun(stage)
        for session_id in (stage.session_id, (await stage.agent("@ann")).session_id):
            answer = await stage.request("DELETE", f"/sessions/{session_id}")
            assert answer.status == 409, answer
        stage.release(await stage.asked_by("@bob", 2))
        assert (await stage.heard.complete(run_id)).text == "Over."


async def test_what_rests_is_deleted_with_all_below_it(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS[:2], talk("@bob")) as stage:
        await stage.talk("@lead: go")
        sessions = [agent.session_id for agent in await stage.agents()]
        answer = await stage.request("DELETE", f"/sessions/{stage.session_id}")
        assert answer.status == 200, answer
        assert await stage.agents() == []
        for session_id in sessions:
            assert (await stage.request("GET", f"/sessions/{session_id}")).status == 404


async def test_a_cancel_does_not_wait_for_an_agent_that_only_heard_a_word(tmp_path: Path) -> None:
    """Ann works for an earlier run, and has what this one told her in her turn already."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", held("", calls=[ScriptedCall(name="agent_list")])),
    ) as stage:
        await stage.talk("@lead: go")
        first, ann = await stage.asked_by("@ann"), await stage.agent("@ann")
        word = calls("agent_send", agent=ann.agent_id, message="also this", wait=True)
        stage.play(talk("@lead", word), talk("@ann", held("Both.")))
        run_id = await stage.prompt("@lead: more")
        await until(lambda: len(stage.flow.workspace(stage.remote.id).runs.live()) == 3)
        stage.release(first)
        second = await stage.asked_by("@ann", 2)
        assert (await stage.cancel_run(run_id)).result == "canceled"
        await stage.catch_up()
        assert stage.heard.cancels()[-1].state == "settled"
        stage.release(second)
        await stage.when("@ann", lambda one: one.outcome == "completed")


async def test_a_detached_agent_of_an_agent_outlives_it_and_ends_with_the_session(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann is done."),
        talk("@bob", held()),
    ) as stage:
        await stage.talk("@lead: go")
        await stage.asked_by("@bob")
        assert await stage.outcomes() == {"@ann:": "completed", "@bob:": "running"}
        await stage.cancel()
        await stage.when("@bob", lambda one: one.outcome == "canceled")
        await assert_closed(stage)


async def test_two_calls_of_one_answer_start_agents_side_by_side(tmp_path: Path) -> None:
    both = [ScriptedCall(name="agent", input={"prompt": f"@{who}: go"}) for who in ("ann", "bob")]
    async with open_agents(
        tmp_path,
        talk("@lead", Reply(calls=both)),
        talk("@ann", held("A.")),
        talk("@bob", held("B.")),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        seen = [await stage.asked_by("@ann"), await stage.asked_by("@bob")]
        for one in seen:
            stage.release(one)
        await stage.heard.complete(run_id)
        called = calls_of(await stage.messages())
        said = {result.tool_call_id: result.content[:2] for result in await stage.results()}
        assert [said[call.id] for call in called] == ["A.", "B."]
        sessions = {agent.name: agent.session_id for agent in await stage.agents()}
        assert [sessions[f"@{who}: go"].partition("$$")[2] for who in ("ann", "bob")] == [
            call.id for call in called
        ]


@contract("EXC-22")
async def test_what_a_worker_reported_before_it_was_killed_is_paid(tmp_path: Path) -> None:
    """Its answer was never heard of, but that it was given was."""

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"tool_call"' in frame and b'"session_message_written"' in frame:
            await until(lambda: stage.live(run_id).account.spent.steps == 2)
            worker.strike()
        return True

    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go")), talk("@ann", calls("agent_list"))
    ) as stage:
        stage.launcher.on_frame = on_frame
        run_id = await stage.prompt("@lead: go")
        await stage.heard.complete(run_id)
        ann = await stage.agent("@ann")
        assert (ann.outcome, ann.tokens, round(ann.cost, 6)) == ("error", TOKENS, COST)
        assert_answered(await stage.messages_of("@ann"))


@pytest.mark.parametrize(
    "lost", [b'"type":"token"', b'"session_message_written"'], ids=["text", "a-message"]
)
async def test_what_is_lost_on_the_way_is_mended(tmp_path: Path, lost: bytes) -> None:
    """All text comes again with its message, and a message as often as it changes."""
    drops: list[bytes] = []

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if lost in frame and not drops:
            drops.append(frame)
            return False
        return True

    text = "One two three four five."
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", Reply(text=text))
    ) as stage:
        stage.launcher.on_frame = on_frame
        await stage.talk("@lead: go")
        assert drops
        assert await stage.rows_of("@ann") == [
            ("user", "@ann: go", "stop"),
            ("assistant", text, "end_turn"),
        ]

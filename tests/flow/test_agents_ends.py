"""Ends of agents: cancelled, killed, failed, detached; the cost is counted in every case."""

from pathlib import Path

import pytest

from culm.testing.script import Reply, ScriptedCall
from tests.flow.agents_harness import (
    COST,
    TOKENS,
    AgentHarness,
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

# Ann has two steps: she starts bob, then answers. Bob has two steps as well.
TALKS = (
    talk("@lead", start("@ann: go"), then="Over."),
    talk("@ann", start("@bob: go"), then="Ann is done."),
    talk("@bob", calls("agent_list"), held("Bob is done.")),
)


async def start_tree(harness: AgentHarness) -> str:
    """Start the tree and wait for bob's second model request; returns the top run."""
    run_id = await harness.prompt("@lead: go")
    await harness.until_asked_by("@bob", 2)
    return run_id


async def assert_costs(
    harness: AgentHarness, lead: int, ann: int, bob: int, *, is_lost: bool = False
) -> None:
    """Check the number of paid answers of each agent, and their sums up the tree.

    With `is_lost`, bob's worker died with another answer, which is charged by an estimate.
    """
    runs = {run.prompt.split(":")[0]: run for run in await harness.runs()}
    lost = runs["@bob"].cost / COST - bob if is_lost else 0
    assert (runs["@bob"].estimated, 0 < lost < 1) == (is_lost, is_lost)
    found = {
        who: (run.steps, round(run.cost, 6), round(run.tree_cost, 6)) for who, run in runs.items()
    }
    assert found == {
        "@lead": (lead, round(lead * COST, 6), round((lead + ann + bob + lost) * COST, 6)),
        "@ann": (ann, round(ann * COST, 6), round((ann + bob + lost) * COST, 6)),
        "@bob": (bob + is_lost, *[round((bob + lost) * COST, 6)] * 2),
    }
    agents = {who: await harness.agent(who) for who in ("@ann", "@bob")}
    assert {who: round(one.cost, 6) for who, one in agents.items()} == {
        "@ann": round((ann + bob + lost) * COST, 6),
        "@bob": round((bob + lost) * COST, 6),
    }
    sessions = [
        (await harness.session()),
        *[await harness.remote.session(agents[who].session_id) for who in ("@ann", "@bob")],
    ]
    assert [round(session.cost, 6) for session in sessions] == [
        round((n + lost) * COST, 6) for n in (lead + ann + bob, ann + bob, bob)
    ]


async def assert_all_ended(harness: AgentHarness) -> None:
    """No worker runs, and every call has a result."""
    await harness.until_idle()  # A worker that ended normally waits for its next run.
    assert await harness.ask("/processes", list[dict[str, object]]) == []
    for agent in await harness.agents():
        assert (agent.state, agent.pid, agent.waiting_for) == ("ended", 0, "")
        assert_answered(await harness.remote.messages(agent.session_id))
    assert_answered(await harness.messages())


@contract("EXC-22", "INV-79")
async def test_cost_of_a_tree_is_the_sum_of_its_answers(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        run_id = await start_tree(harness)
        harness.release(await harness.until_asked_by("@bob", 2))
        await harness.received.complete(run_id)
        await harness.received.event_with("session", "A title")
        await assert_costs(harness, 2, 2, 2)
        assert (await harness.agent("@ann")).tokens == 4 * TOKENS


@contract("EXC-22")
@pytest.mark.parametrize("how", ["session", "run"])
async def test_cancel_ends_the_whole_tree_and_settles_after_the_last_agent(
    tmp_path: Path, how: str
) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        run_id = await start_tree(harness)
        pids = [
            process["pid"] for process in await harness.ask("/processes", list[dict[str, object]])
        ]
        assert pids == [worker.pid for worker in harness.launcher.alive]
        if how == "run":
            answer = await harness.cancel_run(run_id)
            assert answer.result == "canceled"
        else:
            await harness.cancel()
            await harness.received.complete(run_id)
        await assert_all_ended(harness)
        assert harness.launcher.alive == []
        await harness.catch_up()
        ids = {run.prompt.split(":")[0]: run.id for run in await harness.runs()}
        cancels = harness.received.cancels()
        assert len({cancel.cancel_id for cancel in cancels}) == 1
        assert {run.run_id: run.settled for run in cancels[-1].runs} == dict.fromkeys(
            ids.values(), "canceled"
        )
        assert harness.received.completed()[-1] == run_id, "its agents have ended before"
        assert await harness.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        for who in ("@ann", "@bob"):
            rows = await harness.rows_of(who)
            assert [row for row in rows if row[0] == "assistant"][-1][2] == "canceled"
        await harness.received.event_with("session", "A title")
        await assert_costs(harness, 1, 1, 1)
        await harness.talk("@lead: again")  # The session can continue.


@contract("EXC-22")
async def test_cancel_of_one_agent_is_an_error_result_and_its_parents_continue(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        run_id = await start_tree(harness)
        bob = await harness.done((await harness.agent("@bob")).agent_id, "cancel")
        assert (bob.state, bob.outcome) == ("ended", "canceled")
        assert (await harness.received.complete(run_id)).text == "Over."
        assert await harness.outcomes() == {"@ann:": "completed", "@bob:": "canceled"}
        (result,) = await harness.results("@ann")
        assert (result.is_error, "canceled" in result.content) == (True, True)
        await harness.received.event_with("session", "A title")
        await assert_costs(harness, 2, 2, 1)
        again = await harness.done(bob.agent_id, "cancel")
        assert again == bob, "it had ended"
        await assert_all_ended(harness)


@contract("INV-79", "EXC-22")
@pytest.mark.parametrize("who", ["@ann", "@bob"])
async def test_killed_worker_is_an_error_result_and_its_children_end(
    tmp_path: Path, who: str
) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        run_id = await start_tree(harness)
        harness.worker_of((await harness.agent(who)).agent_id).crash()
        assert (await harness.received.complete(run_id)).text == "Over."
        await assert_all_ended(harness)
        (result,) = await harness.results()
        outcomes = await harness.outcomes()
        if who == "@ann":
            assert outcomes == {"@ann:": "error", "@bob:": "canceled"}
            assert (await harness.agent("@bob")).reason.startswith("parent_ended")
            assert result.is_error
            await harness.received.event_with("session", "A title")
            await assert_costs(harness, 2, 1, 1)
        else:
            assert outcomes == {"@ann:": "completed", "@bob:": "error"}
            assert not result.is_error
            await harness.received.event_with("session", "A title")
            await assert_costs(harness, 2, 2, 1, is_lost=True)


FRAMES = [b'"execution_started"', b'"usage_reported"', b'"reserve"', b'"sub_agent_request"']


@contract("EXC-22")
@pytest.mark.parametrize("marker", FRAMES, ids=lambda one: one.decode().strip('"'))
@pytest.mark.parametrize("how", ["killed", "cancelled"])
async def test_rows_and_cost_are_correct_whenever_a_worker_is_lost(
    tmp_path: Path, marker: bytes, how: str
) -> None:
    """At ann's first frame with `marker`."""
    hits: list[LoopWorker] = []

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if marker in frame and not hits and worker.provision.identity.depth == 1:
            hits.append(worker)
            if how == "killed":
                worker.crash()
            else:
                await harness.cancel()
        return True

    async with open_agents(tmp_path, *TALKS[:2], talk("@bob")) as harness:
        harness.launcher.on_frame = on_frame
        run_id = await harness.prompt("@lead: go")
        complete = await harness.received.complete(run_id)
        assert hits
        await assert_all_ended(harness)
        agents = await harness.agents()
        if how == "killed":
            assert complete.text == "Over."
            # A worker without any event has done nothing, so another one is started.
            is_again = marker == b'"execution_started"'
            assert agents[0].outcome == ("completed" if is_again else "error")
            assert (await harness.results())[0].is_error != is_again
        else:
            assert complete.cancelled
            assert {agent.outcome for agent in agents} == {"canceled"}
            assert (await harness.results())[0].is_error


async def test_failed_worker_launch_is_an_error_result(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        harness.launcher.failing_launches = 2
        await harness.talk("@lead: go")
        (result,) = await harness.results()
        assert (result.is_error, "there are no more processes" in result.content) == (True, True)
        await assert_all_ended(harness)


async def test_detached_agent_outlives_its_run_and_a_session_cancel_ends_it(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), then="Over."),
        *TALKS[1:],
    ) as harness:
        await harness.talk("@lead: go")
        await harness.until_asked_by("@bob", 2)
        assert (await harness.session()).is_busy is False
        await harness.cancel()
        await harness.until_agent("@ann", lambda one: one.state == "ended")
        await assert_all_ended(harness)
        await harness.catch_up()
        assert await harness.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        assert [complete.cancelled for complete in harness.received.completes()] == [
            False,
            True,
            True,
        ]


async def test_detached_agent_continues_when_its_starting_run_is_cancelled(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False), held("Over.")),
        talk("@ann", held("Ann is done.")),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await harness.until_asked_by("@lead", 2)
        seen = await harness.until_asked_by("@ann")
        await harness.cancel_run(run_id)
        assert (await harness.agent("@ann")).state == "running"
        harness.release(seen)
        await harness.until_agent("@ann", lambda one: one.outcome == "completed")


async def test_delete_of_a_session_with_running_agents_is_409(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS) as harness:
        run_id = await start_tree(harness)
        for session_id in (harness.session_id, (await harness.agent("@ann")).session_id):
            answer = await harness.request("DELETE", f"/sessions/{session_id}")
            assert answer.status == 409, answer
        harness.release(await harness.until_asked_by("@bob", 2))
        assert (await harness.received.complete(run_id)).text == "Over."


async def test_delete_of_an_idle_session_deletes_its_agent_sessions(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TALKS[:2], talk("@bob")) as harness:
        await harness.talk("@lead: go")
        sessions = [agent.session_id for agent in await harness.agents()]
        answer = await harness.request("DELETE", f"/sessions/{harness.session_id}")
        assert answer.status == 200, answer
        assert await harness.agents() == []
        for session_id in sessions:
            assert (await harness.request("GET", f"/sessions/{session_id}")).status == 404


async def test_cancel_does_not_wait_for_an_agent_that_only_got_a_message(tmp_path: Path) -> None:
    """Ann works for an earlier run; the message of this run is already part of her turn."""
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go", wait=False)),
        talk("@ann", held("", calls=[ScriptedCall(name="agent_list")])),
    ) as harness:
        await harness.talk("@lead: go")
        first, ann = await harness.until_asked_by("@ann"), await harness.agent("@ann")
        message = calls("agent_send", agent=ann.agent_id, message="also this", wait=True)
        harness.play(talk("@lead", message), talk("@ann", held("Both.")))
        run_id = await harness.prompt("@lead: more")
        await until(lambda: len(harness.flow.workspace(harness.remote.id).runs.live()) == 3)
        harness.release(first)
        second = await harness.until_asked_by("@ann", 2)
        assert (await harness.cancel_run(run_id)).result == "canceled"
        await harness.catch_up()
        assert harness.received.cancels()[-1].state == "settled"
        harness.release(second)
        await harness.until_agent("@ann", lambda one: one.outcome == "completed")


async def test_detached_child_outlives_its_agent_and_a_session_cancel_ends_it(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go", wait=False), then="Ann is done."),
        talk("@bob", held()),
    ) as harness:
        await harness.talk("@lead: go")
        await harness.until_asked_by("@bob")
        assert await harness.outcomes() == {"@ann:": "completed", "@bob:": "running"}
        await harness.cancel()
        await harness.until_agent("@bob", lambda one: one.outcome == "canceled")
        await assert_all_ended(harness)


async def test_two_calls_of_one_answer_start_parallel_agents(tmp_path: Path) -> None:
    both = [ScriptedCall(name="agent", input={"prompt": f"@{who}: go"}) for who in ("ann", "bob")]
    async with open_agents(
        tmp_path,
        talk("@lead", Reply(calls=both)),
        talk("@ann", held("A.")),
        talk("@bob", held("B.")),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        seen = [await harness.until_asked_by("@ann"), await harness.until_asked_by("@bob")]
        for one in seen:
            harness.release(one)
        await harness.received.complete(run_id)
        called = calls_of(await harness.messages())
        contents = {result.tool_call_id: result.content[:2] for result in await harness.results()}
        assert [contents[call.id] for call in called] == ["A.", "B."]
        sessions = {agent.name: agent.session_id for agent in await harness.agents()}
        assert [sessions[f"@{who}: go"].partition("$$")[2] for who in ("ann", "bob")] == [
            call.id for call in called
        ]


@contract("EXC-22")
async def test_usage_reported_before_a_worker_is_killed_is_charged(tmp_path: Path) -> None:
    """Its answer was never received, but its usage was."""

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"tool_call"' in frame and b'"session_message_written"' in frame:
            await until(lambda: harness.live(run_id).account.spent.steps == 2)
            worker.crash()
        return True

    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go")), talk("@ann", calls("agent_list"))
    ) as harness:
        harness.launcher.on_frame = on_frame
        run_id = await harness.prompt("@lead: go")
        await harness.received.complete(run_id)
        ann = await harness.agent("@ann")
        assert (ann.outcome, ann.tokens, round(ann.cost, 6)) == ("error", TOKENS, COST)
        assert_answered(await harness.messages_of("@ann"))


@pytest.mark.parametrize(
    "lost", [b'"type":"token"', b'"session_message_written"'], ids=["text", "a-message"]
)
async def test_lost_worker_event_is_repaired_by_a_later_one(tmp_path: Path, lost: bytes) -> None:
    """Text is sent again with its message, and a message with every change."""
    drops: list[bytes] = []

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if lost in frame and not drops:
            drops.append(frame)
            return False
        return True

    text = "One two three four five."
    async with open_agents(
        tmp_path, talk("@lead", start("@ann: go"), then="Over."), talk("@ann", Reply(text=text))
    ) as harness:
        harness.launcher.on_frame = on_frame
        await harness.talk("@lead: go")
        assert drops
        assert await harness.rows_of("@ann") == [
            ("user", "@ann: go", "stop"),
            ("assistant", text, "end_turn"),
        ]

"""Agents as people see and steer them: the tree, one of it, words to it, and events."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.settings import Settings
from culm.testing.request_log import SeenRequest
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.agents import Agent, SaidToAgent
from culm.wire.codec import decode
from culm.wire.processes import Process
from culm.wire.runs import Limits
from tests.flow.agents_stage import (
    COST,
    TOKENS,
    AgentStage,
    LoopWorker,
    held,
    one_after_the_other,
    open_agents,
    start,
    talk,
)
from tests.flow.drive import UNKNOWN, until
from tests.flow.runs import open_heard, says
from tests.support import WAIT_S

LISTS = [ScriptedCall(name="agent_list")]
TREE = (
    talk("@lead", start("@ann: go", role="reviewer"), then="Over."),
    talk("@ann", start("@bob: look at it\nall of it", name="Bob"), then="Ann is done."),
    talk("@bob", held("", calls=LISTS), then="Bob is done."),
)


async def begun(stage: AgentStage) -> str:
    """Everybody is where bob's answer is waited for, and that has been noted."""
    run_id = await stage.prompt("@lead: go")
    await stage.asked_by("@bob")
    await stage.when("Bob", lambda one: one.pid > 0)
    await stage.when("@ann", lambda one: one.waiting_for == "agents")
    return run_id


async def test_a_tree_is_shown_while_it_works_and_when_it_rests(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TREE) as stage:
        run_id = await begun(stage)
        stage.clock.advance(7)
        ann, bob = await stage.agents()
        lead = stage.session_id
        assert [ann.parent_id, bob.parent_id] == [lead, ann.agent_id]
        assert [ann.parent_session_id, bob.parent_session_id] == [lead, ann.session_id]
        assert [(one.depth, one.name, one.role) for one in (ann, bob)] == [
            (1, "@ann: go", "reviewer"),
            (2, "Bob", "worker"),
        ]
        assert [(one.state, one.waiting_for, one.children) for one in (ann, bob)] == [
            ("running", "agents", 1),
            ("running", "", 0),
        ]
        assert bob.is_read_only, "as the one above it"
        assert ann.started_at == int(stage.clock.now_s()) - 7
        pids = [worker.pid for worker in stage.launcher.workers]
        assert [ann.pid, bob.pid] == pids
        processes = await stage.ask("/processes", list[Process])
        assert [(one.pid, one.kind, one.session_id, one.run_id) for one in processes] == [
            (pids[0], "worker", ann.session_id, ann.run_id),
            (pids[1], "worker", bob.session_id, bob.run_id),
        ]
        assert processes[0].age_s == 7
        assert await stage.agents(below=ann.agent_id) == [bob]
        assert await stage.agents(below=bob.agent_id) == []
        stage.model.release()
        await stage.heard.complete(run_id)
        details = await stage.details(ann.agent_id)
        assert details == await stage.details(ann.session_id)
        assert (details.path, details.assignment, details.result) == (
            [lead, ann.agent_id],
            "@ann: go",
            "Ann is done.",
        )
        (bob,) = details.children
        assert (bob.state, bob.outcome, bob.pid, bob.tokens) == (
            "ended",
            "completed",
            0,
            2 * TOKENS,
        )
        assert (details.agent.tokens, round(details.agent.cost, 6)) == (4 * TOKENS, 4 * COST)
        assert (await stage.request("GET", f"/agents/{UNKNOWN}")).status == 404


async def test_an_agent_that_a_client_starts_has_a_session_of_its_own(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann")) as stage:
        ann = await stage.start_agent("@ann: go", role="explorer", limits={"steps": 5})
        assert (ann.parent_id, ann.parent_session_id, ann.depth) == ("", "", 1)
        assert (ann.is_detached, ann.is_read_only, ann.budget) == (True, True, Limits(steps=5))
        ended = await stage.when("@ann", lambda one: one.state == "ended")
        assert (ended.outcome, ended.tokens) == ("completed", TOKENS)
        assert await stage.rows_of("@ann") == [
            ("user", "@ann: go", "stop"),
            ("assistant", "Done.", "end_turn"),
        ]
        assert not [seen for seen in stage.model.requests if b"Write a title" in seen.raw]


BAD: list[tuple[dict[str, object], str]] = [
    ({}, "prompt"),
    ({"role": "boss"}, "roles are explorer, reviewer, worker"),
    ({"model": "nobody/x"}, "there are demo/demo-1"),
    ({"tools": ["fly"]}, "tools are agent, agent_list"),
    ({"limits": {"steps": -1}}, "at least 0"),
    ({"worktree": True}, "git"),
    ({"name": "x" * 101}, "name"),
]


async def test_what_a_client_cannot_start_is_refused_with_what_would_be_right(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path) as stage:
        for given, words in BAD:
            body = {"prompt": "@ann: go", **given} if given else {}
            answer = await stage.request("POST", "/agents", body)
            assert (answer.status, words in answer.body.decode()) == (400, True), answer
        assert await stage.agents() == []
        assert stage.launcher.workers == []


@pytest.mark.parametrize("door", ["message", "agent"])
async def test_a_word_of_a_client_steers_an_agent_at_work_and_is_more_work_for_one_that_rests(
    tmp_path: Path, door: str
) -> None:
    """By the agent's own route, and as a prompt to its session."""
    async with open_agents(tmp_path, *TREE) as stage:

        async def say(agent: Agent, text: str) -> str:
            if door == "agent":
                return await stage.prompt(text, agent.session_id)
            answer = await stage.do(agent.agent_id, "message", text=text)
            assert answer.status == 202, answer
            return decode(answer.body, SaidToAgent).run_id

        run_id = await begun(stage)
        bob = (await stage.agents())[1]
        steering = await say(bob, "and this")
        stage.model.release()
        await stage.heard.complete(run_id)
        assert (await stage.run(steering)).host_run_id == bob.run_id
        await stage.heard.complete(await say(bob, "@bob: and that"))
        assert [row[:2] for row in await stage.rows_of("Bob") if row[0] != "tool"] == [
            ("user", "@bob: look at it\nall of it"),
            ("assistant", ""),
            ("user", "and this"),
            ("assistant", "Bob is done."),
            ("user", "@bob: and that"),
            ("assistant", "Bob is done."),
        ]
        again = (await stage.agents())[1]
        assert (again.outcome, again.tokens) == ("completed", 3 * TOKENS)
        assert (await stage.agents())[0].tokens == 5 * TOKENS, "its tree's"


async def test_nothing_can_be_said_to_nobody_or_without_words(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann")) as stage:
        ann = await stage.start_agent("@ann: go")
        answers = [
            await stage.do(UNKNOWN, "message", text="hi"),
            await stage.do(stage.session_id, "message", text="hi"),
            await stage.do(ann.agent_id, "message", text=" "),
            await stage.do(ann.agent_id, "message"),
            await stage.do(UNKNOWN, "cancel"),
        ]
        assert [answer.status for answer in answers] == [404, 404, 400, 400, 404]


async def test_agents_are_events_of_our_own_view_and_none_of_crush_s(tmp_path: Path) -> None:
    async with (
        open_agents(tmp_path, *TREE[:2], talk("@bob")) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        await stage.talk("@lead: go")
        await stage.catch_up(crush)
        told = [one for one in stage.heard.told if one.type.startswith("agent_") and _is(one)]
        by_agent: dict[str, list[str]] = {}
        for one in told:
            by_agent.setdefault(one.read(Agent).agent_id, []).append(one.type)
        for agent in await stage.agents():
            types = by_agent[agent.agent_id]
            assert (types[0], types[-1]) == ("agent_started", "agent_ended")
            assert set(types[1:-1]) == {"agent_changed"}
        last = {one.read(Agent).agent_id: one.read(Agent) for one in told}
        assert list(last.values()) == await stage.agents()
        assert not [one for one in crush.told if _is(one)]
        sessions = [one for one in crush.told if one.type == "session" and says(one, "$$")]
        assert sessions, "a Crush client shows what children do below the call"


def _is(told: ServerEvent) -> bool:
    return told.type in ("agent_started", "agent_changed", "agent_ended")


async def test_whoever_begins_to_listen_is_shown_the_agents_at_work(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TREE) as stage:
        run_id = await begun(stage)
        at_work = await stage.agents()
        async with open_heard(stage.remote) as late:
            await late.until(lambda told: told.type == "agent_changed" and says(told, "Bob"))
            assert late.all("agent_changed", Agent) == at_work
        stage.model.release()
        await stage.heard.complete(run_id)
        async with open_heard(stage.remote) as later:
            await stage.catch_up(later)
            assert not [told for told in later.told if _is(told)]


async def test_agents_beyond_the_slots_of_a_tree_wait_and_none_waits_for_ever(
    tmp_path: Path,
) -> None:
    """Each of three has one below it, and only one of the tree works at once."""
    three = ("1", "2", "3")
    async with open_agents(
        tmp_path,
        talk("@lead", start(*(f"@a{n}: go" for n in three)), then="Over."),
        *(talk(f"@a{n}", start(f"@b{n}: go")) for n in three),
        *(talk(f"@b{n}", held()) for n in three),
        settings=Settings(agents_at_once=1),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        for count in (1, 2, 3):
            at_work = [seen async for seen in _held(stage, count)]
            assert len(at_work) == 1
            waiting = [one.waiting_for for one in await stage.agents() if one.state == "pending"]
            assert set(waiting) <= {"slot"}
            stage.release(at_work[0])
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert set((await stage.outcomes()).values()) == {"completed"}


async def _held(stage: AgentStage, count: int) -> AsyncGenerator[SeenRequest]:
    """Wait until so many of those at the bottom have been asked; those that are not answered."""

    def asked() -> list[SeenRequest]:
        return [seen for n in ("1", "2", "3") for seen in stage.heard_by(f"@b{n}")]

    await until(lambda: len(asked()) >= count)
    await stage.flow.settle()
    for seen in asked():
        if not seen.ended:
            yield seen


async def test_what_is_said_before_an_agent_begins_is_read_once(tmp_path: Path) -> None:
    """Bob waits for ann's slot while somebody tells him more; later he is given a file."""
    async with open_agents(
        tmp_path,
        talk("@lead", *one_after_the_other("@ann: go", "@bob: go")),
        talk("@ann", held()),
        talk("@bob"),
        settings=Settings(agents_at_once=1),
    ) as stage:
        await stage.prompt("@lead: go")
        seen = await stage.asked_by("@ann")
        stage.release(await stage.asked_by("@lead", 2))
        bob = await stage.when("@bob", lambda one: one.waiting_for == "slot")
        await stage.do(bob.agent_id, "message", text="and this")
        stage.release(seen)
        await stage.when("@bob", lambda one: one.state == "ended")
        assert [message.content for message in stage.read_by("@bob")] == ["@bob: go", "and this"]
        note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
        run_id = await stage.prompt("read it", bob.session_id, attachments=[note])
        await stage.heard.complete(run_id)
        (*_, answered, said) = stage.read_by("@bob")
        assert (answered.role, said.role) == ("assistant", "user")
        assert ("read it" in str(said.content), "hello file" in str(said.content)) == (True, True)


async def test_a_conversation_that_grows_too_long_is_summarized_in_its_own_session(
    tmp_path: Path,
) -> None:
    """By the worker while it goes on, and by whoever asks for it when it rests."""
    big = ScriptedUsage(input=2900, output=10)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("Summarize this conversation", then="In short."),
        talk("@ann", Reply(calls=LISTS, usage=big), then="At last."),
        window=3000,
    ) as stage:
        await stage.talk("@lead: go")
        ann = await stage.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", 2910 + 2 * TOKENS)
        path = f"/agent/sessions/{ann.session_id}/summarize"
        assert (await stage.request("POST", path)).status == 200
        assert (await stage.agent("@ann")).tokens == ann.tokens + TOKENS
        assert [row[:2] for row in await stage.rows_of("@ann") if row[0] == "assistant"] == [
            ("assistant", ""),
            ("assistant", "In short."),
            ("assistant", "At last."),
            ("assistant", "In short."),
        ]


async def test_whoever_is_cancelled_alone_takes_those_with_it_that_it_detached(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go", wait=False), held()),
        talk("@bob", held()),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        await stage.asked_by("@ann", 2)
        await stage.asked_by("@bob")
        await stage.done((await stage.agent("@ann")).agent_id, "cancel")
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert await stage.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        assert stage.launcher.alive == []


async def test_a_word_that_comes_before_the_worker_is_there_is_done_once(tmp_path: Path) -> None:
    arrived, may_go = asyncio.Event(), asyncio.Event()

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"kind":"run"' in frame:
            arrived.set()
            await may_go.wait()
        return True

    async with open_agents(tmp_path, talk("@ann", then="Yes.")) as stage:
        stage.launcher.on_frame = on_frame
        ann = await stage.start_agent("@ann: go")
        async with asyncio.timeout(WAIT_S):
            await arrived.wait()
        await stage.do(ann.agent_id, "message", text="and this")
        may_go.set()
        await stage.until_idle()
        rows = [text for _, text, _ in await stage.rows_of("@ann")]
        assert rows == ["@ann: go", "Yes.", "and this", "Yes."]
        read = [[one.content for one in stage.read_by("@ann", n)] for n in (0, 1)]
        assert read == [rows[:1], rows[:3]]
        assert len(stage.heard_by("@ann")) == 2
        assert [run.host_run_id for run in await stage.runs()] == [ann.run_id, ""]

"""The agents API: the tree, details, messages and events."""

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from culm.client.stream import ServerEvent
from culm.settings import Settings
from culm.testing.answering import SeenRequest
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.agents import Agent, SaidToAgent
from culm.wire.codec import decode
from culm.wire.runs import Limits
from culm.wire.workspaces import Process
from tests.flow.agents_harness import (
    COST,
    TOKENS,
    AgentHarness,
    LoopWorker,
    held,
    open_agents,
    start,
    start_one_by_one,
    talk,
)
from tests.flow.drive import UNKNOWN, until
from tests.flow.runs import has_text, open_received
from tests.support import WAIT_S

LISTS = [ScriptedCall(name="agent_list")]
TREE = (
    talk("@lead", start("@ann: go", role="reviewer"), then="Over."),
    talk("@ann", start("@bob: look at it\nall of it", name="Bob"), then="Ann is done."),
    talk("@bob", held("", calls=LISTS), then="Bob is done."),
)


async def start_tree(harness: AgentHarness) -> str:
    """Start the tree and wait until bob's model request is pending and stored."""
    run_id = await harness.prompt("@lead: go")
    await harness.until_asked_by("@bob")
    await harness.until_agent("Bob", lambda one: one.pid > 0)
    await harness.until_agent("@ann", lambda one: one.waiting_for == "agents")
    return run_id


async def test_agent_tree_is_listed_while_running_and_after_its_end(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TREE) as harness:
        run_id = await start_tree(harness)
        harness.clock.advance(7)
        ann, bob = await harness.agents()
        lead = harness.session_id
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
        assert bob.is_read_only, "like its parent"
        assert ann.started_at == int(harness.clock.now_s()) - 7
        pids = [worker.pid for worker in harness.launcher.workers]
        assert [ann.pid, bob.pid] == pids
        processes = await harness.ask("/processes", list[Process])
        assert [(one.pid, one.kind, one.session_id, one.run_id) for one in processes] == [
            (pids[0], "worker", ann.session_id, ann.run_id),
            (pids[1], "worker", bob.session_id, bob.run_id),
        ]
        assert processes[0].age_s == 7
        assert await harness.agents(below=ann.agent_id) == [bob]
        assert await harness.agents(below=bob.agent_id) == []
        harness.model.release()
        await harness.received.complete(run_id)
        details = await harness.details(ann.agent_id)
        assert details == await harness.details(ann.session_id)
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
        assert (await harness.request("GET", f"/agents/{UNKNOWN}")).status == 404


async def test_agent_started_by_a_client_has_its_own_session(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann")) as harness:
        ann = await harness.start_agent("@ann: go", role="explorer", limits={"steps": 5})
        assert (ann.parent_id, ann.parent_session_id, ann.depth) == ("", "", 1)
        assert (ann.is_detached, ann.is_read_only, ann.budget) == (True, True, Limits(steps=5))
        ended = await harness.until_agent("@ann", lambda one: one.state == "ended")
        assert (ended.outcome, ended.tokens) == ("completed", TOKENS)
        assert await harness.rows_of("@ann") == [
            ("user", "@ann: go", "stop"),
            ("assistant", "Done.", "end_turn"),
        ]
        assert not [seen for seen in harness.model.requests if b"Write a title" in seen.raw]


BAD: list[tuple[dict[str, object], str]] = [
    ({}, "prompt"),
    ({"role": "boss"}, "roles are explorer, reviewer, worker"),
    ({"model": "nobody/x"}, "there are demo/demo-1"),
    ({"tools": ["fly"]}, "tools are agent, agent_list"),
    ({"limits": {"steps": -1}}, "at least 0"),
    ({"worktree": True}, "git"),
    ({"name": "x" * 101}, "name"),
]


async def test_invalid_start_by_a_client_is_400_with_valid_values(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path) as harness:
        for given, text in BAD:
            body = {"prompt": "@ann: go", **given} if given else {}
            answer = await harness.request("POST", "/agents", body)
            assert (answer.status, text in answer.body.decode()) == (400, True), answer
        assert await harness.agents() == []
        assert harness.launcher.workers == []


@pytest.mark.parametrize("door", ["message", "agent"])
async def test_client_message_steers_a_running_agent_or_starts_another_run(
    tmp_path: Path, door: str
) -> None:
    """Over the message route of the agent, and as a prompt to its session."""
    async with open_agents(tmp_path, *TREE) as harness:

        async def send_message(agent: Agent, text: str) -> str:
            if door == "agent":
                return await harness.prompt(text, agent.session_id)
            answer = await harness.do(agent.agent_id, "message", text=text)
            assert answer.status == 202, answer
            return decode(answer.body, SaidToAgent).run_id

        run_id = await start_tree(harness)
        bob = (await harness.agents())[1]
        steering = await send_message(bob, "and this")
        harness.model.release()
        await harness.received.complete(run_id)
        assert (await harness.run(steering)).host_run_id == bob.run_id
        await harness.received.complete(await send_message(bob, "@bob: and that"))
        assert [row[:2] for row in await harness.rows_of("Bob") if row[0] != "tool"] == [
            ("user", "@bob: look at it\nall of it"),
            ("assistant", ""),
            ("user", "and this"),
            ("assistant", "Bob is done."),
            ("user", "@bob: and that"),
            ("assistant", "Bob is done."),
        ]
        again = (await harness.agents())[1]
        assert (again.outcome, again.tokens) == ("completed", 3 * TOKENS)
        assert (await harness.agents())[0].tokens == 5 * TOKENS, "of its tree"


async def test_message_to_an_unknown_agent_or_without_text_is_refused(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@ann")) as harness:
        ann = await harness.start_agent("@ann: go")
        answers = [
            await harness.do(UNKNOWN, "message", text="hi"),
            await harness.do(harness.session_id, "message", text="hi"),
            await harness.do(ann.agent_id, "message", text=" "),
            await harness.do(ann.agent_id, "message"),
            await harness.do(UNKNOWN, "cancel"),
        ]
        assert [answer.status for answer in answers] == [404, 404, 400, 400, 404]


async def test_agent_events_are_in_our_view_and_not_in_the_crush_view(tmp_path: Path) -> None:
    async with (
        open_agents(tmp_path, *TREE[:2], talk("@bob")) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        await harness.talk("@lead: go")
        await harness.catch_up(crush)
        published = [
            one
            for one in harness.received.events
            if one.type.startswith("agent_") and _is_agent_event(one)
        ]
        by_agent: dict[str, list[str]] = {}
        for one in published:
            by_agent.setdefault(one.read(Agent).agent_id, []).append(one.type)
        for agent in await harness.agents():
            types = by_agent[agent.agent_id]
            assert (types[0], types[-1]) == ("agent_started", "agent_ended")
            assert set(types[1:-1]) == {"agent_changed"}
        last = {one.read(Agent).agent_id: one.read(Agent) for one in published}
        assert list(last.values()) == await harness.agents()
        assert not [one for one in crush.events if _is_agent_event(one)]
        sessions = [one for one in crush.events if one.type == "session" and has_text(one, "$$")]
        assert sessions, "a Crush client shows the child session below the call"


def _is_agent_event(event: ServerEvent) -> bool:
    return event.type in ("agent_started", "agent_changed", "agent_ended")


async def test_new_stream_begins_with_the_running_agents(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *TREE) as harness:
        run_id = await start_tree(harness)
        at_work = await harness.agents()
        async with open_received(harness.remote) as late:
            await late.until(lambda event: event.type == "agent_changed" and has_text(event, "Bob"))
            assert late.all("agent_changed", Agent) == at_work
        harness.model.release()
        await harness.received.complete(run_id)
        async with open_received(harness.remote) as later:
            await harness.catch_up(later)
            assert not [event for event in later.events if _is_agent_event(event)]


async def test_agents_beyond_the_slots_of_a_tree_wait_without_deadlock(
    tmp_path: Path,
) -> None:
    """Three agents with one child each, in a tree with one slot."""
    three = ("1", "2", "3")
    async with open_agents(
        tmp_path,
        talk("@lead", start(*(f"@a{n}: go" for n in three)), then="Over."),
        *(talk(f"@a{n}", start(f"@b{n}: go")) for n in three),
        *(talk(f"@b{n}", held()) for n in three),
        settings=Settings(agents_at_once=1),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        for count in (1, 2, 3):
            at_work = [seen async for seen in _held(harness, count)]
            assert len(at_work) == 1
            waiting = [one.waiting_for for one in await harness.agents() if one.state == "pending"]
            assert set(waiting) <= {"slot"}
            harness.release(at_work[0])
        assert (await harness.received.complete(run_id)).text == "Over."
        assert set((await harness.outcomes()).values()) == {"completed"}


async def _held(harness: AgentHarness, count: int) -> AsyncGenerator[SeenRequest]:
    """Wait for this many model requests of the lowest agents; yields those without an answer."""

    def asked() -> list[SeenRequest]:
        return [seen for n in ("1", "2", "3") for seen in harness.requests_by(f"@b{n}")]

    await until(lambda: len(asked()) >= count)
    await harness.flow.run_ready()
    for seen in asked():
        if not seen.ended:
            yield seen


async def test_message_sent_before_an_agent_starts_is_read_once(tmp_path: Path) -> None:
    """Bob waits for ann's slot and gets a message meanwhile; later a prompt with a file."""
    async with open_agents(
        tmp_path,
        talk("@lead", *start_one_by_one("@ann: go", "@bob: go")),
        talk("@ann", held()),
        talk("@bob"),
        settings=Settings(agents_at_once=1),
    ) as harness:
        await harness.prompt("@lead: go")
        seen = await harness.until_asked_by("@ann")
        harness.release(await harness.until_asked_by("@lead", 2))
        bob = await harness.until_agent("@bob", lambda one: one.waiting_for == "slot")
        await harness.do(bob.agent_id, "message", text="and this")
        harness.release(seen)
        await harness.until_agent("@bob", lambda one: one.state == "ended")
        assert [message.content for message in harness.sent_by("@bob")] == ["@bob: go", "and this"]
        note = {"file_name": "n.txt", "mime_type": "text/plain", "content": "aGVsbG8gZmlsZQ=="}
        run_id = await harness.prompt("read it", bob.session_id, attachments=[note])
        await harness.received.complete(run_id)
        (*_, answered, prompt) = harness.sent_by("@bob")
        assert (answered.role, prompt.role) == ("assistant", "user")
        assert ("read it" in str(prompt.content), "hello file" in str(prompt.content)) == (
            True,
            True,
        )


async def test_long_agent_conversation_is_summarized_in_its_own_session(
    tmp_path: Path,
) -> None:
    """By the worker during the turn, and on request after its end."""
    big = ScriptedUsage(input=2900, output=10)
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("Summarize this conversation", then="In short."),
        talk("@ann", Reply(calls=LISTS, usage=big), then="At last."),
        window=3000,
    ) as harness:
        await harness.talk("@lead: go")
        ann = await harness.agent("@ann")
        assert (ann.outcome, ann.tokens) == ("completed", 2910 + 2 * TOKENS)
        path = f"/agent/sessions/{ann.session_id}/summarize"
        assert (await harness.request("POST", path)).status == 200
        assert (await harness.agent("@ann")).tokens == ann.tokens + TOKENS
        assert [row[:2] for row in await harness.rows_of("@ann") if row[0] == "assistant"] == [
            ("assistant", ""),
            ("assistant", "In short."),
            ("assistant", "At last."),
            ("assistant", "In short."),
        ]


async def test_cancelled_agent_ends_with_the_agents_it_detached(
    tmp_path: Path,
) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), then="Over."),
        talk("@ann", start("@bob: go", wait=False), held()),
        talk("@bob", held()),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        await harness.until_asked_by("@ann", 2)
        await harness.until_asked_by("@bob")
        await harness.done((await harness.agent("@ann")).agent_id, "cancel")
        assert (await harness.received.complete(run_id)).text == "Over."
        assert await harness.outcomes() == {"@ann:": "canceled", "@bob:": "canceled"}
        assert harness.launcher.alive == []


async def test_message_sent_before_the_worker_is_ready_is_processed_once(tmp_path: Path) -> None:
    arrived, may_go = asyncio.Event(), asyncio.Event()

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"kind":"run"' in frame:
            arrived.set()
            await may_go.wait()
        return True

    async with open_agents(tmp_path, talk("@ann", then="Yes.")) as harness:
        harness.launcher.on_frame = on_frame
        ann = await harness.start_agent("@ann: go")
        async with asyncio.timeout(WAIT_S):
            await arrived.wait()
        await harness.do(ann.agent_id, "message", text="and this")
        may_go.set()
        await harness.until_idle()
        rows = [text for _, text, _ in await harness.rows_of("@ann")]
        assert rows == ["@ann: go", "Yes.", "and this", "Yes."]
        read = [[one.content for one in harness.sent_by("@ann", n)] for n in (0, 1)]
        assert read == [rows[:1], rows[:3]]
        assert len(harness.requests_by("@ann")) == 2
        assert [run.host_run_id for run in await harness.runs()] == [ann.run_id, ""]

"""Asks and questions of agents at any depth: who receives and answers them, and grants."""

import asyncio
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

import culm.permission.asks
from culm.fleet.provision import Provision
from culm.subagents.provisioning import INTERACTIVE_WAIT_S
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ReplyRule
from culm.wire.asks import Ask, AskChanged, PermissionRequest, QuestionChanged
from culm.wire.codec import Json
from tests.flow.agents_harness import (
    AgentHarness,
    HybridClock,
    LoopWorker,
    calls,
    open_agent_harness,
    open_agents,
    script_of,
    start,
    talk,
)
from tests.flow.asking import (
    answer,
    answer_batch,
    batch_in,
    batches,
    notified,
    request_in,
    requests,
)
from tests.flow.reading import assert_answered
from tests.flow.runs import open_received
from tests.support import contract


def writes(name: str) -> Reply:
    return calls("write", file_path=name, content="A")


WRITES = writes("a.txt")
QUESTION: list[Json] = [{"question": "Why?", "description": "Why.", "type": "free_text"}]

NEAR = (talk("@lead", start("@bob: write"), then="Over."), talk("@bob", WRITES))
DEEP = (
    talk("@lead", start("@ann: go"), then="Over."),
    talk("@ann", start("@bob: write"), then="Ann is done."),
    talk("@bob", WRITES, then="Bob is done."),
)


async def path_of(harness: AgentHarness, *who: str) -> list[str]:
    return [harness.session_id, *[(await harness.agent(one)).agent_id for one in who]]


def changes(harness: AgentHarness) -> list[tuple[str, list[str]]]:
    return [(one.state, one.agent_path) for one in harness.received.all("ask_changed", AskChanged)]


@pytest.mark.parametrize(("talks", "who"), [(NEAR, ("@bob",)), (DEEP, ("@ann", "@bob"))])
async def test_ask_reaches_every_client_with_its_path_and_the_first_answer_wins(
    tmp_path: Path, talks: tuple[list[ReplyRule], ...], who: tuple[str, ...]
) -> None:
    async with open_agents(tmp_path, *talks) as harness:
        other = await (await harness.flow.client()).open_workspace(harness.flow.directory())
        async with open_received(other) as received, open_received(other, view="crush") as crush:
            run_id = await harness.prompt("@lead: go")
            shown = [await request_in(one) for one in (harness.received, received, crush)]
            bob = await harness.agent("@bob")
            (ask,) = await harness.ask("/permissions/asks", list[Ask[PermissionRequest]])
            path = await path_of(harness, *who)
            assert shown == [ask.request] * 3
            assert (ask.request.session_id, ask.agent_path) == (bob.session_id, path)
            assert (bob.state, bob.waiting_for) == ("running", "ask")
            assert await other.answer(ask, "allow")
            assert not await answer(harness, ask.request.id, "deny"), "the first answer wins"
            await harness.received.complete(run_id)
            assert changes(harness) == [("open", path), ("allowed", path)]
            assert (harness.flow.directory() / "a.txt").read_text() == "A"
            assert (await harness.agent("@bob")).outcome == "completed"
            (closed,) = await harness.ask(
                "/permissions/asks?state=all", list[Ask[PermissionRequest]]
            )
            assert (closed.state, closed.by) == ("allowed", other.client.id)


@contract("INV-79")
async def test_denied_ask_ends_the_agent_and_its_parent_gets_the_reason(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *DEEP) as harness:
        run_id = await harness.prompt("@lead: go")
        assert await answer(harness, (await request_in(harness.received)).id, "deny")
        assert (await harness.received.complete(run_id)).text == "Over."
        assert not (harness.flow.directory() / "a.txt").exists()
        bob = await harness.agent("@bob")
        assert (bob.outcome, bool(bob.reason)) == ("error", True)
        (result,) = await harness.results("@ann")
        assert result.is_error
        assert bob.reason in result.content
        assert_answered(await harness.messages_of("@bob"))


@contract("FLEET-P8")
@pytest.mark.parametrize("now_s", [1_800_000_000.0, 1_800_000_000.7])
async def test_unanswered_ask_is_refused_at_its_deadline_and_the_agent_continues(
    tmp_path: Path, now_s: float
) -> None:
    async with (
        open_model_server(script_of(*DEEP)) as model,
        open_agent_harness(tmp_path, model, clock=HybridClock(now_s)) as harness,
    ):
        run_id = await harness.prompt("@lead: go")
        request = await request_in(harness.received)
        (ask,) = await harness.ask("/permissions/asks", list[Ask[PermissionRequest]])
        assert ask.deadline == math.ceil(harness.clock.now_s()) + INTERACTIVE_WAIT_S
        harness.clock.advance(INTERACTIVE_WAIT_S - 0.5)
        assert [state for state, _ in changes(harness)] == ["open"]
        harness.clock.advance(1)
        assert (await harness.received.complete(run_id)).text == "Over."
        assert not await answer(harness, request.id, "allow"), "it is too late"
        path = await path_of(harness, "@ann", "@bob")
        assert changes(harness) == [("open", path), ("expired", path)]
        assert not (harness.flow.directory() / "a.txt").exists()
        (result,) = await harness.results("@bob")
        assert result.content == "Not allowed: nobody answered in time."
        assert (await harness.rows_of("@bob"))[-1] == ("assistant", "Bob is done.", "end_turn")
        assert await harness.outcomes() == {"@ann:": "completed", "@bob:": "completed"}


async def test_ask_beyond_the_limit_is_refused_and_the_agent_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(culm.permission.asks, "ASKS_MAX", 1)
    async with open_agents(
        tmp_path,
        talk("@ann", writes("1"), then="Ann went on."),
        talk("@bob", writes("2"), then="Bob went on."),
    ) as harness:
        ann = await harness.start_agent("@ann: go")
        request = await request_in(harness.received)
        bob = await harness.start_agent("@bob: go")
        await harness.until_agent("@bob", lambda one: one.state == "ended")
        assert await answer(harness, request.id, "allow")
        await harness.until_agent("@ann", lambda one: one.state == "ended")
        (ask,) = await harness.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
        assert (ask.request.id, ask.state) == (request.id, "allowed")
        (result,) = await harness.results("@bob")
        assert result.content == "Not allowed: too many open asks in this workspace: at most 1."
        results = [(await harness.details(one.agent_id)).result for one in (ann, bob)]
        assert results == ["Ann went on.", "Bob went on."]


@pytest.mark.parametrize("how", ["session", "workspace", "skip", "skip-below"])
async def test_grant_of_a_parent_session_covers_its_agents(tmp_path: Path, how: str) -> None:
    """The top session has a grant or skip mode; its agents then write without an ask."""
    async with open_agents(
        tmp_path,
        talk("@lead", writes("1"), start("@ann: go"), then="Over."),
        talk("@ann", writes("2"), start("@bob: go")),
        talk("@bob", writes("3")),
    ) as harness:
        run_id: str
        if how.startswith("skip"):
            where = harness.session_id if how == "skip" else ""
            path = "/permissions/skip"
            done = await harness.request("POST", path, {"skip": True, "session_id": where})
            assert done.status == 200, done
            run_id = await harness.prompt("@lead: go")
        else:
            run_id = await harness.prompt("@lead: go")
            assert await answer(harness, (await request_in(harness.received)).id, f"allow_{how}")
        await harness.received.complete(run_id)
        assert len(requests(harness.received)) == (0 if how.startswith("skip") else 1)
        for who in ("", "@ann", "@bob"):
            assert not (await harness.results(who))[0].is_error


async def test_grant_of_an_agent_does_not_cover_its_parent(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), writes("3"), then="Over."),
        talk("@ann", writes("1"), writes("2"), then="Ann is done."),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        assert await answer(harness, (await request_in(harness.received)).id, "allow_session")
        assert await answer(harness, (await request_in(harness.received, 2)).id, "allow")
        await harness.received.complete(run_id)
        shown = harness.received.all("permission_request", PermissionRequest)
        assert [one.session_id for one in shown] == [
            (await harness.agent("@ann")).session_id,
            harness.session_id,
        ]


async def test_question_of_an_agent_is_answered_by_a_person(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path, *DEEP[:2], talk("@bob", calls("question", questions=QUESTION))
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        batch = await batch_in(harness.received)
        bob = await harness.until_agent("@bob", lambda one: one.waiting_for == "question")
        assert batch.session_id == bob.session_id
        reply = {"request_id": batch.questions[0].id, "fill_in_text": "Because."}
        assert await answer_batch(harness, batch.id, reply)
        await harness.received.complete(run_id)
        path = await path_of(harness, "@ann", "@bob")
        published = harness.received.all("question_changed", QuestionChanged)
        assert [(one.state, one.agent_path) for one in published] == [
            ("open", path),
            ("answered", path),
        ]
        (result,) = await harness.results("@bob")
        assert (result.is_error, "Because." in result.content) == (False, True)


@pytest.mark.parametrize("how", ["without the tool", "headless"])
async def test_worker_cannot_ask_questions_that_its_agent_may_not_ask(
    tmp_path: Path, how: str
) -> None:
    """The worker offers the tool to its model anyway."""

    def allow_questions(given: Provision) -> Provision:
        return replace(given, disabled_tools=[], culm=replace(given.culm, questions=True))

    narrowed: dict[str, Json] = {"tools": ["view"]} if how == "without the tool" else {}
    async with open_agents(
        tmp_path,
        talk("@lead", start("@bob: ask", **narrowed), then="Over."),
        talk("@bob", calls("question", questions=QUESTION), then="Bob is done."),
    ) as harness:
        harness.launcher.change_provision = allow_questions
        await harness.remote.select_session(harness.session_id)
        more = {"run_id": "r-1"} if how == "headless" else {}
        await harness.received.complete(await harness.prompt("@lead: go", **more))
        assert batches(harness.received) == []
        (result,) = await harness.results("@bob")
        expected = "This cannot be asked: there is no tool 'question' for this agent"
        assert (result.is_error, result.content) == (True, expected)
        assert (await harness.agent("@bob")).outcome == "completed"


@pytest.mark.parametrize("how", ["cancel", "kill", "kill-above"])
async def test_ask_of_an_ended_agent_is_withdrawn_and_cannot_be_answered(
    tmp_path: Path, how: str
) -> None:
    async with open_agents(tmp_path, *DEEP) as harness:
        run_id = await harness.prompt("@lead: go")
        request = await request_in(harness.received)
        ann, bob = await harness.agent("@ann"), await harness.agent("@bob")
        if how == "cancel":
            await harness.done(bob.agent_id, "cancel")
        else:
            harness.worker_of((bob if how == "kill" else ann).agent_id).crash()
        assert (await harness.received.complete(run_id)).text == "Over."
        assert not await answer(harness, request.id, "allow")
        assert [state for state, _ in changes(harness)] == ["open", "withdrawn"]
        assert not (harness.flow.directory() / "a.txt").exists()


async def test_answer_that_arrives_while_the_worker_dies_approves_nothing(tmp_path: Path) -> None:
    """The worker dies before the answer arrives."""

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"approval_reply"' in frame:
            worker.crash()
        return True

    async with open_agents(tmp_path, *DEEP) as harness:
        harness.launcher.on_frame = on_frame
        run_id = await harness.prompt("@lead: go")
        assert await answer(harness, (await request_in(harness.received)).id, "allow")
        assert (await harness.received.complete(run_id)).text == "Over."
        assert (await harness.agent("@bob")).outcome == "error"
        assert not (harness.flow.directory() / "a.txt").exists()
        assert_answered(await harness.messages_of("@bob"))


@pytest.mark.parametrize("approve", ["allow", "deny", None])
async def test_approve_option_of_a_headless_run_applies_to_its_agents(
    tmp_path: Path, approve: str | None
) -> None:
    async with open_agents(tmp_path, *DEEP) as harness:
        more = {} if approve is None else {"approve": approve}
        run_id = await harness.prompt("@lead: go", run_id="r-1", **more)
        assert (await harness.received.complete(run_id)).text == "Over."
        assert requests(harness.received) == []
        (result,) = await harness.results("@bob")
        assert result.is_error == (approve != "allow")
        assert (harness.flow.directory() / "a.txt").exists() == (approve == "allow")
        # No person denied it: the agent gets the reason and continues.
        assert (await harness.rows_of("@bob"))[-1] == ("assistant", "Bob is done.", "end_turn")
        if approve == "allow":
            bob = (await harness.agent("@bob")).session_id
            assert [(n.granted, n.session_id) for n in notified(harness.received)][-1] == (
                True,
                bob,
            )


async def test_many_simultaneous_asks_are_all_answered(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@a1: go", "@a2: go", "@a3: go")),
        *(talk(f"@a{n}", calls("write", file_path=f"{n}", content="x")) for n in (1, 2, 3)),
    ) as harness:
        run_id = await harness.prompt("@lead: go")
        asked = [await request_in(harness.received, n) for n in (1, 2, 3)]
        async with asyncio.TaskGroup() as tasks:
            for request in asked:
                tasks.create_task(answer(harness, request.id, "allow"))
        await harness.received.complete(run_id)
        assert await harness.outcomes() == {f"@a{n}:": "completed" for n in (1, 2, 3)}
        assert {(harness.flow.directory() / f"{n}").read_text() for n in (1, 2, 3)} == {"x"}

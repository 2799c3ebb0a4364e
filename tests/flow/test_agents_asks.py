"""What agents ask of people, from any depth: who is shown it, who answers it, what holds below."""

import asyncio
import math
from pathlib import Path

import pytest
from msgspec.structs import replace

import culm.permission.asks
from culm.fleet.provision import Provision
from culm.subagents.provisioning import INTERACTIVE_WAIT_S
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, Rule
from culm.wire.asks import Ask, AskChanged, PermissionRequest, QuestionChanged
from culm.wire.codec import Json
from tests.flow.agents_stage import (
    AgentStage,
    HandClock,
    LoopWorker,
    calls,
    open_again,
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
from tests.flow.runs import open_heard
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


async def path_of(stage: AgentStage, *who: str) -> list[str]:
    return [stage.session_id, *[(await stage.agent(one)).agent_id for one in who]]


def changes(stage: AgentStage) -> list[tuple[str, list[str]]]:
    return [(one.state, one.agent_path) for one in stage.heard.all("ask_changed", AskChanged)]


@pytest.mark.parametrize(("talks", "who"), [(NEAR, ("@bob",)), (DEEP, ("@ann", "@bob"))])
async def test_an_ask_reaches_every_client_with_its_path_and_the_first_answer_counts(
    tmp_path: Path, talks: tuple[list[Rule], ...], who: tuple[str, ...]
) -> None:
    async with open_agents(tmp_path, *talks) as stage:
        other = await (await stage.flow.client()).open_workspace(stage.flow.directory())
        async with open_heard(other) as heard, open_heard(other, view="crush") as crush:
            run_id = await stage.prompt("@lead: go")
            shown = [await request_in(one) for one in (stage.heard, heard, crush)]
            bob = await stage.agent("@bob")
            (ask,) = await stage.ask("/permissions/asks", list[Ask[PermissionRequest]])
            path = await path_of(stage, *who)
            assert shown == [ask.request] * 3
            assert (ask.request.session_id, ask.agent_path) == (bob.session_id, path)
            assert (bob.state, bob.waiting_for) == ("running", "ask")
            assert await other.answer(ask, "allow")
            assert not await answer(stage, ask.request.id, "deny"), "the first one counts"
            await stage.heard.complete(run_id)
            assert changes(stage) == [("open", path), ("allowed", path)]
            assert (stage.flow.directory() / "a.txt").read_text() == "A"
            assert (await stage.agent("@bob")).outcome == "completed"
            (closed,) = await stage.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
            assert (closed.state, closed.by) == ("allowed", other.client.id)


@contract("INV-79")
async def test_a_denied_ask_ends_the_agent_and_its_parent_reads_why(tmp_path: Path) -> None:
    async with open_agents(tmp_path, *DEEP) as stage:
        run_id = await stage.prompt("@lead: go")
        assert await answer(stage, (await request_in(stage.heard)).id, "deny")
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert not (stage.flow.directory() / "a.txt").exists()
        bob = await stage.agent("@bob")
        assert (bob.outcome, bool(bob.reason)) == ("error", True)
        (result,) = await stage.results("@ann")
        assert result.is_error
        assert bob.reason in result.content
        assert_answered(await stage.messages_of("@bob"))


@contract("FLEET-P8")
@pytest.mark.parametrize("now_s", [1_800_000_000.0, 1_800_000_000.7])
async def test_an_ask_that_nobody_answers_is_refused_at_its_deadline_and_its_agent_goes_on(
    tmp_path: Path, now_s: float
) -> None:
    async with (
        open_model_server(script_of(*DEEP)) as model,
        open_again(tmp_path, model, clock=HandClock(now_s)) as stage,
    ):
        run_id = await stage.prompt("@lead: go")
        request = await request_in(stage.heard)
        (ask,) = await stage.ask("/permissions/asks", list[Ask[PermissionRequest]])
        assert ask.deadline == math.ceil(stage.clock.now_s()) + INTERACTIVE_WAIT_S
        stage.clock.advance(INTERACTIVE_WAIT_S - 0.5)
        assert [state for state, _ in changes(stage)] == ["open"]
        stage.clock.advance(1)
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert not await answer(stage, request.id, "allow"), "it is too late"
        path = await path_of(stage, "@ann", "@bob")
        assert changes(stage) == [("open", path), ("expired", path)]
        assert not (stage.flow.directory() / "a.txt").exists()
        (result,) = await stage.results("@bob")
        assert result.content == "Not allowed: nobody answered in time."
        assert (await stage.rows_of("@bob"))[-1] == ("assistant", "Bob is done.", "end_turn")
        assert await stage.outcomes() == {"@ann:": "completed", "@bob:": "completed"}


async def test_one_ask_too_many_is_refused_and_its_agent_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(culm.permission.asks, "ASKS_MAX", 1)
    async with open_agents(
        tmp_path,
        talk("@ann", writes("1"), then="Ann went on."),
        talk("@bob", writes("2"), then="Bob went on."),
    ) as stage:
        ann = await stage.start_agent("@ann: go")
        request = await request_in(stage.heard)
        bob = await stage.start_agent("@bob: go")
        await stage.when("@bob", lambda one: one.state == "ended")
        assert await answer(stage, request.id, "allow")
        await stage.when("@ann", lambda one: one.state == "ended")
        (ask,) = await stage.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
        assert (ask.request.id, ask.state) == (request.id, "allowed")
        (result,) = await stage.results("@bob")
        assert result.content == "Not allowed: too many open asks in this workspace: at most 1."
        said = [(await stage.details(one.agent_id)).result for one in (ann, bob)]
        assert said == ["Ann went on.", "Bob went on."]


@pytest.mark.parametrize("how", ["session", "workspace", "skip", "skip-below"])
async def test_what_was_allowed_in_a_session_above_holds_below(tmp_path: Path, how: str) -> None:
    """The top has it allowed once, or people skip asking there; then two below write unasked."""
    async with open_agents(
        tmp_path,
        talk("@lead", writes("1"), start("@ann: go"), then="Over."),
        talk("@ann", writes("2"), start("@bob: go")),
        talk("@bob", writes("3")),
    ) as stage:
        run_id: str
        if how.startswith("skip"):
            where = stage.session_id if how == "skip" else ""
            path = "/permissions/skip"
            done = await stage.request("POST", path, {"skip": True, "session_id": where})
            assert done.status == 200, done
            run_id = await stage.prompt("@lead: go")
        else:
            run_id = await stage.prompt("@lead: go")
            assert await answer(stage, (await request_in(stage.heard)).id, f"allow_{how}")
        await stage.heard.complete(run_id)
        assert len(requests(stage.heard)) == (0 if how.startswith("skip") else 1)
        for who in ("", "@ann", "@bob"):
            assert not (await stage.results(who))[0].is_error


async def test_what_was_allowed_below_does_not_hold_above(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@ann: go"), writes("3"), then="Over."),
        talk("@ann", writes("1"), writes("2"), then="Ann is done."),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        assert await answer(stage, (await request_in(stage.heard)).id, "allow_session")
        assert await answer(stage, (await request_in(stage.heard, 2)).id, "allow")
        await stage.heard.complete(run_id)
        shown = stage.heard.all("permission_request", PermissionRequest)
        assert [one.session_id for one in shown] == [
            (await stage.agent("@ann")).session_id,
            stage.session_id,
        ]


async def test_a_question_of_an_agent_is_answered_by_a_person(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path, *DEEP[:2], talk("@bob", calls("question", questions=QUESTION))
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        batch = await batch_in(stage.heard)
        bob = await stage.when("@bob", lambda one: one.waiting_for == "question")
        assert batch.session_id == bob.session_id
        reply = {"request_id": batch.questions[0].id, "fill_in_text": "Because."}
        assert await answer_batch(stage, batch.id, reply)
        await stage.heard.complete(run_id)
        path = await path_of(stage, "@ann", "@bob")
        told = stage.heard.all("question_changed", QuestionChanged)
        assert [(one.state, one.agent_path) for one in told] == [("open", path), ("answered", path)]
        (result,) = await stage.results("@bob")
        assert (result.is_error, "Because." in result.content) == (False, True)


@pytest.mark.parametrize("how", ["without the tool", "headless"])
async def test_a_worker_asks_people_nothing_that_its_agent_may_not_ask(
    tmp_path: Path, how: str
) -> None:
    """The worker offers its model the tool all the same."""

    def forge(told: Provision) -> Provision:
        return replace(told, disabled_tools=[], culm=replace(told.culm, questions=True))

    narrowed: dict[str, Json] = {"tools": ["view"]} if how == "without the tool" else {}
    async with open_agents(
        tmp_path,
        talk("@lead", start("@bob: ask", **narrowed), then="Over."),
        talk("@bob", calls("question", questions=QUESTION), then="Bob is done."),
    ) as stage:
        stage.launcher.forge = forge
        await stage.remote.select_session(stage.session_id)
        more = {"run_id": "r-1"} if how == "headless" else {}
        await stage.heard.complete(await stage.prompt("@lead: go", **more))
        assert batches(stage.heard) == []
        (result,) = await stage.results("@bob")
        said = "This cannot be asked: there is no tool 'question' for this agent"
        assert (result.is_error, result.content) == (True, said)
        assert (await stage.agent("@bob")).outcome == "completed"


@pytest.mark.parametrize("how", ["cancel", "kill", "kill-above"])
async def test_the_ask_of_an_agent_that_is_gone_is_withdrawn_and_no_answer_counts(
    tmp_path: Path, how: str
) -> None:
    async with open_agents(tmp_path, *DEEP) as stage:
        run_id = await stage.prompt("@lead: go")
        request = await request_in(stage.heard)
        ann, bob = await stage.agent("@ann"), await stage.agent("@bob")
        if how == "cancel":
            await stage.done(bob.agent_id, "cancel")
        else:
            stage.worker_of((bob if how == "kill" else ann).agent_id).strike()
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert not await answer(stage, request.id, "allow")
        assert [state for state, _ in changes(stage)] == ["open", "withdrawn"]
        assert not (stage.flow.directory() / "a.txt").exists()


async def test_an_answer_that_comes_while_its_worker_dies_approves_nothing(tmp_path: Path) -> None:
    """The answer is on its way to the worker, and never arrives."""

    async def on_frame(worker: LoopWorker, frame: bytes) -> bool:
        if b'"approval_reply"' in frame:
            worker.strike()
        return True

    async with open_agents(tmp_path, *DEEP) as stage:
        stage.launcher.on_frame = on_frame
        run_id = await stage.prompt("@lead: go")
        assert await answer(stage, (await request_in(stage.heard)).id, "allow")
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert (await stage.agent("@bob")).outcome == "error"
        assert not (stage.flow.directory() / "a.txt").exists()
        assert_answered(await stage.messages_of("@bob"))


@pytest.mark.parametrize("approve", ["allow", "deny", None])
async def test_what_the_caller_of_a_headless_run_lets_it_do_holds_for_its_agents(
    tmp_path: Path, approve: str | None
) -> None:
    async with open_agents(tmp_path, *DEEP) as stage:
        more = {} if approve is None else {"approve": approve}
        run_id = await stage.prompt("@lead: go", run_id="r-1", **more)
        assert (await stage.heard.complete(run_id)).text == "Over."
        assert requests(stage.heard) == []
        (result,) = await stage.results("@bob")
        assert result.is_error == (approve != "allow")
        assert (stage.flow.directory() / "a.txt").exists() == (approve == "allow")
        # Nobody denied it: it reads why, and goes on.
        assert (await stage.rows_of("@bob"))[-1] == ("assistant", "Bob is done.", "end_turn")
        if approve == "allow":
            bob = (await stage.agent("@bob")).session_id
            assert [(n.granted, n.session_id) for n in notified(stage.heard)][-1] == (True, bob)


async def test_many_asks_at_once_are_all_answered(tmp_path: Path) -> None:
    async with open_agents(
        tmp_path,
        talk("@lead", start("@a1: go", "@a2: go", "@a3: go")),
        *(talk(f"@a{n}", calls("write", file_path=f"{n}", content="x")) for n in (1, 2, 3)),
    ) as stage:
        run_id = await stage.prompt("@lead: go")
        asked = [await request_in(stage.heard, n) for n in (1, 2, 3)]
        async with asyncio.TaskGroup() as tasks:
            for request in asked:
                tasks.create_task(answer(stage, request.id, "allow"))
        await stage.heard.complete(run_id)
        assert await stage.outcomes() == {f"@a{n}:": "completed" for n in (1, 2, 3)}
        assert {(stage.flow.directory() / f"{n}").read_text() for n in (1, 2, 3)} == {"x"}

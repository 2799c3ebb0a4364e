"""Runs that nobody started by hand: who is asked for them, for how long, and what decides else."""

from pathlib import Path

import pytest

from culm.testing.script import Reply
from culm.wire.asks import Ask, PermissionRequest
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.asking import (
    Questioning,
    answer,
    asking,
    asks,
    denied,
    notified,
    open_asking,
    request_in,
    requests,
    waits,
)
from tests.flow.drive import until
from tests.flow.lives import open_lives, outcomes
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.runs import Image, Stage

WAIT_S = 300.0
NOBODY = "Not allowed: this needs a person's permission, and nobody can be asked."
RULES = [{"decision": "allow", "tool": "look"}, {"decision": "deny", "tool": "other"}]


async def contents(stage: Stage) -> list[str]:
    return [result.content for result in results_of(await stage.messages())]


async def deadline(stage: Stage, ask_id: str) -> int:
    found = await stage.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
    return next(ask.deadline for ask in found if ask.request.id == ask_id)


async def test_with_nobody_there_what_must_be_asked_is_refused_at_once_and_the_turn_goes_on(
    tmp_path: Path,
) -> None:
    tools = look, free = Probe("look", asks=True), Probe("free")
    play = script(calling("look", "free"), asking("Who?"))
    async with open_asking(tmp_path, play, *tools, Questioning()) as stage:
        complete = await stage.heard.complete(await stage.prompt("Hi.", run_id="r-1"))
        assert (complete.text, complete.culm_reason) == ("Fine.", "")
        refused, done, no_tool = await contents(stage)
        assert (refused, done) == (NOBODY, "free 1")
        assert no_tool.startswith("There is no tool 'question'.")
        assert (look.calls, len(free.calls)) == ([], 1)
        assert requests(stage.heard) == []
        assert await asks(stage, "all") == {}


@pytest.mark.parametrize("how", ["looks", "says"])
async def test_whoever_sits_there_has_five_minutes_and_then_the_run_ends_denied(
    tmp_path: Path, how: str
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        query = f"client_id={stage.remote.client.id}&interactive={int(how == 'says')}"
        async with stage.remote.client.stream(stage.remote.path(f"/events?{query}")):
            if how == "looks":
                await stage.remote.select_session(stage.session_id)
            run_id = await stage.prompt("Hi.", run_id="r-1")
            ask = await request_in(stage.heard)
            assert await deadline(stage, ask.id) == int(stage.clock.now_s() + WAIT_S)
        stage.clock.advance(WAIT_S - 1)
        assert await asks(stage) == {ask.id: "open"}  # Whoever left may come back.
        stage.clock.advance(1)
        assert (await stage.heard.complete(run_id)).culm_reason == "denied"
        assert await contents(stage) == ["Nobody answered the permission request in time"]
        assert notified(stage.heard) == [waits(ask), denied(ask)]
        assert await asks(stage, "all") == {ask.id: "expired"}
        assert not await answer(stage, ask.id, "allow")
        assert not tool.calls


@pytest.mark.parametrize("who", ["same", "other"])
async def test_whoever_has_left_is_not_waited_for(tmp_path: Path, who: str) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        visitor = stage.remote.client if who == "same" else await stage.flow.client()
        target = stage.remote.path(f"/events?client_id={visitor.id}&interactive=1")
        workspace = stage.flow.workspace(stage.remote.id)

        def streams() -> int:
            return sum(claim.streams for claim in workspace.claims.by_client.values())

        async with visitor.stream(target):
            assert streams() == 2
        await until(lambda: streams() == 1)
        await stage.heard.complete(await stage.prompt("Hi.", run_id="r-1"))
        assert await contents(stage) == [NOBODY]


async def test_a_run_that_says_it_is_interactive_is_asked_about_without_a_deadline(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.", run_id="r-1", interactive=True)
        ask = await request_in(stage.heard)
        assert await deadline(stage, ask.id) == 0
        assert await answer(stage, ask.id, "allow")
        assert (await stage.heard.complete(run_id)).text == "Fine."
        assert len(tool.calls) == 1


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("approve", "look", "other"),
    [
        ("allow", "look 1", "other 1"),
        (
            "deny",
            "Not allowed: whoever started this run denies what would be asked.",
            "Not allowed: whoever started this run denies what would be asked.",
        ),
        (RULES, "look 1", "Not allowed: whoever started this run denies it: deny tool other."),
    ],
    ids=["allow", "deny", "rules"],
)
async def test_what_a_caller_approves_decides_at_once_and_never_against_a_rule_that_denies(
    tmp_path: Path, approve: object, look: str, other: str, *, given: bool
) -> None:
    tools = [Probe(name, asks=True) for name in ("look", "other", "never")]
    rules = {"permission_rules": [{"decision": "deny", "tool": "never"}]}
    play = script(calling("look", "other", "never"))
    async with open_asking(tmp_path, play, *tools, config=rules) as stage:
        more = {"run_id": "r-1"} if given else {}
        run_id = await stage.prompt("Hi.", approve=approve, **more)
        assert (await stage.heard.complete(run_id)).text == "Fine."
        never = "Not allowed: a rule denies it: deny tool never."
        assert await contents(stage) == [look, other, never]
        assert requests(stage.heard) == []


async def test_what_a_caller_wants_asked_is_refused_if_nobody_is_there(tmp_path: Path) -> None:
    tools = [Probe(name, asks=True) for name in ("look", "other")]
    async with open_asking(tmp_path, script(calling("look"), calling("other")), *tools) as stage:
        for number, approve in enumerate(("ask", [])):
            run_id = await stage.prompt("Hi.", run_id=f"r-{number}", approve=approve)
            await stage.heard.complete(run_id)
        assert await contents(stage) == [NOBODY, NOBODY]


async def test_an_approve_that_means_nothing_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    bad: list[object] = [
        "Allow", "yes", 5, True, {"decision": "allow"}, [5], [{}], [{"decision": "perhaps"}],
        [{"decision": "allow", "comand": "ls"}], [{"decision": "deny", "tool": "x" * 1001}],
        [{"decision": "deny"}] * 501,
    ]  # fmt: skip
    async with open_asking(tmp_path, script()) as stage:
        for approve in bad:
            found = await stage.post("Hi.", run_id="r-1", approve=approve)
            assert (found.status, await stage.runs()) == (400, []), approve


async def test_the_same_id_with_another_approve_is_another_prompt_and_refused(
    tmp_path: Path,
) -> None:
    async with open_asking(tmp_path, script()) as stage:
        run_id = await stage.prompt("Hi.", run_id="r-1", approve="deny")
        await stage.heard.complete(run_id)
        assert await stage.prompt("Hi.", run_id="r-1", approve="deny") == run_id
        assert (await stage.post("Hi.", run_id="r-1", approve="allow")).status == 409
        assert (await stage.post("Hi.", run_id="r-1")).status == 409


async def test_what_was_approved_and_that_nobody_is_there_is_known_after_a_restart(
    tmp_path: Path,
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    play = script(
        calling("look"), Reply(text="One."),
        calling("look", "other"), Reply(text="Two."), calling("look"),
    )  # fmt: skip
    async with open_lives(tmp_path, play) as lives:
        async with lives.first(*tools) as stage:
            first = await stage.prompt("Hi.")
            ask = await request_in(stage.heard)
            second = await stage.prompt("Ho.", run_id="r-2", approve=RULES)
            third = await stage.prompt("Hu.", run_id="r-3")
            image = Image(stage)
        async with lives.next(*tools, image=image) as stage:
            assert await answer(stage, ask.id, "allow")
            for run_id, text in ((first, "One."), (second, "Two."), (third, "Fine.")):
                assert (await stage.heard.complete(run_id)).text == text
            refused = "Not allowed: whoever started this run denies it: deny tool other."
            assert await contents(stage) == ["look 1", "look 2", refused, NOBODY]
            assert (len(look.calls), other.calls) == (2, [])


async def test_an_ask_of_a_headless_run_waits_on_after_a_restart_until_its_deadline(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_lives(tmp_path, script(calling("look"))) as lives:
        async with lives.first(tool) as stage:
            await stage.remote.select_session(stage.session_id)
            run_id = await stage.prompt("Hi.", run_id="r-1")
            ask = await request_in(stage.heard)
            image = Image(stage)
        async with lives.next(tool, image=image, away_s=100) as stage:
            assert await asks(stage) == {ask.id: "open"}
            assert await outcomes(stage) == {run_id: "waiting"}
            stage.clock.advance(WAIT_S - 100)
            assert (await stage.heard.complete(run_id)).culm_reason == "denied"
            assert await asks(stage, "all") == {ask.id: "expired"}
            assert await contents(stage) == ["Nobody answered the permission request in time"]
            assert not tool.calls


async def test_a_prompt_with_permissions_of_its_own_has_a_turn_of_its_own_and_a_steer_joins(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow, look = Probe("slow", gate.pass_through), Probe("look", asks=True)
    play = script(calling("slow"), calling("look"), Reply(text="One."), calling("look"))
    async with open_asking(tmp_path, play, slow, look) as stage:
        host = await stage.prompt("One.", run_id="r-1", approve="allow")
        await until(lambda: gate.inside == 1)
        own = await stage.prompt("Two.", approve="deny")
        found = await stage.of_session("steer", prompt="Quick.")
        assert found.status in (200, 202), found
        steer = decode(found.body, Run).id
        gate.release()
        for run_id, text in ((host, "One."), (steer, "One."), (own, "Fine.")):
            assert (await stage.heard.complete(run_id)).text == text
        assert len(look.calls) == 1

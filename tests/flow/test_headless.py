"""Headless runs: who is asked, for how long, and the approve option."""

from pathlib import Path

import pytest

from culm.testing.script import Reply
from culm.wire.asks import Ask, PermissionRequest
from culm.wire.codec import decode
from culm.wire.runs import Run
from tests.flow.asking import (
    QuestionProbe,
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
from tests.flow.probes import Gate, Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.restarts import open_restarts, outcomes
from tests.flow.runs import CrashImage, Harness

WAIT_S = 300.0
NOBODY = "Not allowed: this needs a person's permission, and nobody can be asked."
RULES = [{"decision": "allow", "tool": "look"}, {"decision": "deny", "tool": "other"}]


async def contents(harness: Harness) -> list[str]:
    return [result.content for result in results_of(await harness.messages())]


async def deadline(harness: Harness, ask_id: str) -> int:
    found = await harness.ask("/permissions/asks?state=all", list[Ask[PermissionRequest]])
    return next(ask.deadline for ask in found if ask.request.id == ask_id)


async def test_headless_call_that_needs_an_ask_is_refused_and_the_turn_continues(
    tmp_path: Path,
) -> None:
    tools = look, free = Probe("look", asks=True), Probe("free")
    play = script(calling("look", "free"), asking("Who?"))
    async with open_asking(tmp_path, play, *tools, QuestionProbe()) as harness:
        complete = await harness.received.complete(await harness.prompt("Hi.", run_id="r-1"))
        assert (complete.text, complete.culm_reason) == ("Fine.", "")
        refused, done, no_tool = await contents(harness)
        assert (refused, done) == (NOBODY, "free 1")
        assert no_tool.startswith("There is no tool 'question'.")
        assert (look.calls, len(free.calls)) == ([], 1)
        assert requests(harness.received) == []
        assert await asks(harness, "all") == {}


@pytest.mark.parametrize("how", ["looks", "says"])
async def test_ask_with_an_interactive_client_expires_after_five_minutes(
    tmp_path: Path, how: str
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        query = f"client_id={harness.remote.client.id}&interactive={int(how == 'says')}"
        async with harness.remote.client.stream(harness.remote.path(f"/events?{query}")):
            if how == "looks":
                await harness.remote.select_session(harness.session_id)
            run_id = await harness.prompt("Hi.", run_id="r-1")
            ask = await request_in(harness.received)
            assert await deadline(harness, ask.id) == int(harness.clock.now_s() + WAIT_S)
        harness.clock.advance(WAIT_S - 1)
        assert await asks(harness) == {ask.id: "open"}  # The client may reconnect.
        harness.clock.advance(1)
        assert (await harness.received.complete(run_id)).culm_reason == "denied"
        assert await contents(harness) == ["Nobody answered the permission request in time"]
        assert notified(harness.received) == [waits(ask), denied(ask)]
        assert await asks(harness, "all") == {ask.id: "expired"}
        assert not await answer(harness, ask.id, "allow")
        assert not tool.calls


@pytest.mark.parametrize("who", ["same", "other"])
async def test_disconnected_interactive_client_is_not_waited_for(tmp_path: Path, who: str) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        client = harness.remote.client if who == "same" else await harness.flow.client()
        target = harness.remote.path(f"/events?client_id={client.id}&interactive=1")
        workspace = harness.flow.workspace(harness.remote.id)

        def streams() -> int:
            return sum(claim.streams for claim in workspace.lifetime.claims.by_client.values())

        async with client.stream(target):
            assert streams() == 2
        await until(lambda: streams() == 1)
        await harness.received.complete(await harness.prompt("Hi.", run_id="r-1"))
        assert await contents(harness) == [NOBODY]


async def test_interactive_run_asks_without_a_deadline(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.", run_id="r-1", interactive=True)
        ask = await request_in(harness.received)
        assert await deadline(harness, ask.id) == 0
        assert await answer(harness, ask.id, "allow")
        assert (await harness.received.complete(run_id)).text == "Fine."
        assert len(tool.calls) == 1


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(
    ("approve", "look", "other"),
    [
        ("allow", "look 1", "other 1"),
        (
            "deny",
            "Not allowed: the caller of this run denies calls that need approval.",
            "Not allowed: the caller of this run denies calls that need approval.",
        ),
        (RULES, "look 1", "Not allowed: the caller of this run denies it: deny tool other."),
    ],
    ids=["allow", "deny", "rules"],
)
async def test_approve_option_decides_at_once_but_never_against_a_deny_rule(
    tmp_path: Path, approve: object, look: str, other: str, *, given: bool
) -> None:
    tools = [Probe(name, asks=True) for name in ("look", "other", "never")]
    rules = {"permission_rules": [{"decision": "deny", "tool": "never"}]}
    play = script(calling("look", "other", "never"))
    async with open_asking(tmp_path, play, *tools, config=rules) as harness:
        more = {"run_id": "r-1"} if given else {}
        run_id = await harness.prompt("Hi.", approve=approve, **more)
        assert (await harness.received.complete(run_id)).text == "Fine."
        never = "Not allowed: a rule denies it: deny tool never."
        assert await contents(harness) == [look, other, never]
        assert requests(harness.received) == []


async def test_approve_ask_is_refused_without_an_interactive_client(tmp_path: Path) -> None:
    tools = [Probe(name, asks=True) for name in ("look", "other")]
    async with open_asking(tmp_path, script(calling("look"), calling("other")), *tools) as harness:
        for number, approve in enumerate(("ask", [])):
            run_id = await harness.prompt("Hi.", run_id=f"r-{number}", approve=approve)
            await harness.received.complete(run_id)
        assert await contents(harness) == [NOBODY, NOBODY]


async def test_invalid_approve_option_is_400_and_nothing_runs(tmp_path: Path) -> None:
    bad: list[object] = [
        "Allow", "yes", 5, True, {"decision": "allow"}, [5], [{}], [{"decision": "perhaps"}],
        [{"decision": "allow", "comand": "ls"}], [{"decision": "deny", "tool": "x" * 1001}],
        [{"decision": "deny"}] * 501,
    ]  # fmt: skip
    async with open_asking(tmp_path, script()) as harness:
        for approve in bad:
            found = await harness.post("Hi.", run_id="r-1", approve=approve)
            assert (found.status, await harness.runs()) == (400, []), approve


async def test_same_run_id_with_another_approve_option_is_409(
    tmp_path: Path,
) -> None:
    async with open_asking(tmp_path, script()) as harness:
        run_id = await harness.prompt("Hi.", run_id="r-1", approve="deny")
        await harness.received.complete(run_id)
        assert await harness.prompt("Hi.", run_id="r-1", approve="deny") == run_id
        assert (await harness.post("Hi.", run_id="r-1", approve="allow")).status == 409
        assert (await harness.post("Hi.", run_id="r-1")).status == 409


async def test_approve_option_and_headless_mode_survive_a_restart(
    tmp_path: Path,
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    play = script(
        calling("look"), Reply(text="One."),
        calling("look", "other"), Reply(text="Two."), calling("look"),
    )  # fmt: skip
    async with open_restarts(tmp_path, play) as restarts:
        async with restarts.first(*tools) as harness:
            first = await harness.prompt("Hi.")
            ask = await request_in(harness.received)
            second = await harness.prompt("Ho.", run_id="r-2", approve=RULES)
            third = await harness.prompt("Hu.", run_id="r-3")
            image = CrashImage(harness)
        async with restarts.next(*tools, image=image) as harness:
            assert await answer(harness, ask.id, "allow")
            for run_id, text in ((first, "One."), (second, "Two."), (third, "Fine.")):
                assert (await harness.received.complete(run_id)).text == text
            refused = "Not allowed: the caller of this run denies it: deny tool other."
            assert await contents(harness) == ["look 1", "look 2", refused, NOBODY]
            assert (len(look.calls), other.calls) == (2, [])


async def test_ask_of_a_headless_run_keeps_its_deadline_after_a_restart(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_restarts(tmp_path, script(calling("look"))) as restarts:
        async with restarts.first(tool) as harness:
            await harness.remote.select_session(harness.session_id)
            run_id = await harness.prompt("Hi.", run_id="r-1")
            ask = await request_in(harness.received)
            image = CrashImage(harness)
        async with restarts.next(tool, image=image, away_s=100) as harness:
            assert await asks(harness) == {ask.id: "open"}
            assert await outcomes(harness) == {run_id: "waiting"}
            harness.clock.advance(WAIT_S - 100)
            assert (await harness.received.complete(run_id)).culm_reason == "denied"
            assert await asks(harness, "all") == {ask.id: "expired"}
            assert await contents(harness) == ["Nobody answered the permission request in time"]
            assert not tool.calls


async def test_prompt_with_its_own_approve_option_gets_its_own_turn(
    tmp_path: Path,
) -> None:
    gate = Gate()
    slow, look = Probe("slow", gate.pass_through), Probe("look", asks=True)
    play = script(calling("slow"), calling("look"), Reply(text="One."), calling("look"))
    async with open_asking(tmp_path, play, slow, look) as harness:
        host = await harness.prompt("One.", run_id="r-1", approve="allow")
        await until(lambda: gate.inside == 1)
        own = await harness.prompt("Two.", approve="deny")
        found = await harness.of_session("steer", prompt="Quick.")
        assert found.status in (200, 202), found
        steer = decode(found.body, Run).id
        gate.release()
        for run_id, text in ((host, "One."), (steer, "One."), (own, "Fine.")):
            assert (await harness.received.complete(run_id)).text == text
        assert len(look.calls) == 1

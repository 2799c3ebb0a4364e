"""What people allow for more than one call, what the configuration allows, and skip mode."""

from pathlib import Path

import msgspec
import pytest

from culm.client.stream import ServerEvent
from culm.ids import AskId, SessionId
from culm.testing.script import Script
from culm.wire.agent import RunComplete
from culm.wire.asks import Grant, Skip, SkipChanged
from culm.wire.codec import decode
from tests.flow.asking import (
    answer,
    asks,
    granted,
    grants,
    notified,
    open_asking,
    request_in,
    requests,
    waits,
    when,
)
from tests.flow.drive import UNKNOWN, open_events
from tests.flow.lives import open_lives
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.runs import Image, Stage, open_heard
from tests.support import contract


def calling_at(*names: str) -> Script:
    """A model that calls each of these, one for every prompt: `#1`, `#2` and so on."""
    return script(rules=[when(f"#{n}", calling(name)) for n, name in enumerate(names, 1)])


async def is_asked(stage: Stage, prompt: str, session_id: SessionId | None = None) -> bool:
    """Whether somebody is asked because of a prompt; if so, they say no."""
    before = len(requests(stage.heard))
    run_id = await stage.prompt(prompt, session_id)

    def is_known(told: ServerEvent) -> bool:
        ended = told.type == "run_complete" and told.read(RunComplete).run_id == run_id
        return ended or len(requests(stage.heard)) > before

    await stage.heard.until(is_known)
    asked = requests(stage.heard)[before:]
    for ask_id in asked:
        assert await answer(stage, ask_id, "deny")
    await stage.heard.complete(run_id)
    return bool(asked)


@contract("INV-73")
@pytest.mark.parametrize(
    ("action", "here", "elsewhere"),
    [("allow", False, False), ("allow_session", True, False), ("allow_workspace", True, True)],
)
async def test_an_answer_covers_what_it_says_and_no_more_until_it_is_taken_back(
    tmp_path: Path, action: str, *, here: bool, elsewhere: bool
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    play = calling_at("look", "look", "look", "other", "look", "look")
    async with open_asking(tmp_path, play, *tools) as stage:
        run_id = await stage.prompt("#1")
        ask = await request_in(stage.heard)
        by = stage.remote.client.id
        body = {"permission": {"id": ask.id}, "action": action}
        await stage.request("POST", f"/permissions/grant?client_id={by}", body)
        await stage.heard.complete(run_id)
        assert await is_asked(stage, "#2") is not here
        there = (await stage.remote.create_session("there")).id
        assert await is_asked(stage, "#3", there) is not elsewhere
        assert await is_asked(stage, "#4")  # Another tool.
        assert (len(look.calls), other.calls) == (1 + here + elsewhere, [])

        kept = await grants(stage)
        if not here:
            assert kept == []
            return
        [grant] = kept
        assert grant == Grant(
            id=grant.id,
            scope="workspace" if elsewhere else "session",
            session_id=stage.session_id,
            tool_name="look",
            action="execute",
            grains=["look grain"],
            ask_id=AskId(ask.id),
            by=by,
            created_at=int(stage.clock.now_s()),
        )
        assert (await stage.request("DELETE", f"/permissions/grants/{grant.id}")).status == 200
        assert (await stage.request("DELETE", f"/permissions/grants/{grant.id}")).status == 404
        assert await grants(stage) == []
        assert await is_asked(stage, "#5")
        await stage.catch_up()
        told = [(t.op, t.read(Grant)) for t in stage.heard.told if t.type == "grant_changed"]
        assert told == [("created", grant), ("deleted", grant)]


@contract("INV-73")
async def test_a_covered_call_is_told_to_wait_and_to_be_granted_and_shown_to_nobody(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with (
        open_asking(tmp_path, calling_at("look", "look"), tool) as stage,
        open_heard(stage.remote, view="crush") as crush,
    ):
        run_id = await stage.prompt("#1")
        ask = await request_in(stage.heard)
        assert await answer(stage, ask.id, "allow_session")
        await stage.heard.complete(run_id)
        assert not await is_asked(stage, "#2")
        call_id = [n.tool_call_id for n in notified(stage.heard)][-1]
        again = msgspec.structs.replace(ask, tool_call_id=call_id)
        assert notified(stage.heard) == [waits(ask), granted(ask), waits(again), granted(again)]
        await stage.catch_up(crush)
        assert notified(crush) == notified(stage.heard)
        assert requests(stage.heard) == requests(crush) == [ask.id]
        assert await asks(stage, "all") == {ask.id: "allowed"}


@contract("INV-73")
async def test_grants_outlive_the_server_and_end_with_their_session(tmp_path: Path) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    async with open_lives(tmp_path, calling_at("look", "other", "look", "other")) as lives:
        async with lives.first(*tools) as stage:
            for number, action in ((1, "allow_session"), (2, "allow_workspace")):
                run_id = await stage.prompt(f"#{number}")
                assert await answer(stage, (await request_in(stage.heard, number)).id, action)
                await stage.heard.complete(run_id)
            kept = await grants(stage)
            image = Image(stage)
        async with lives.next(*tools, image=image) as stage:
            assert await grants(stage) == kept
            before = (len(look.calls), len(other.calls))
            assert not await is_asked(stage, "#3")
            await stage.remote.delete_session(stage.session_id)
            assert await grants(stage) == kept[1:]
            stage.session_id = (await stage.remote.create_session("new")).id
            assert not await is_asked(stage, "#4")
            assert before == (1, 1)
            assert (len(look.calls), len(other.calls)) == (2, 2)
        async with lives.next(*tools) as stage:
            assert await grants(stage) == kept[1:]


@contract("INV-74")
@pytest.mark.parametrize(
    ("allowed", "goes"),
    [
        (["look"], True),
        (["look:execute"], True),
        (["other", "look:execute"], True),
        (["look:write"], False),
        (["loo", "look*", "Look", "look:", ":execute", "look :execute", "*"], False),
    ],
)
async def test_allowed_tools_are_the_tool_or_the_tool_and_its_action_and_nothing_like_them(
    tmp_path: Path, allowed: list[str], *, goes: bool
) -> None:
    tool = Probe("look", asks=True)
    config = {"permissions": {"allowed_tools": allowed}}
    async with open_asking(tmp_path, calling_at("look"), tool, config=config) as stage:
        assert await is_asked(stage, "#1") is not goes
        assert len(tool.calls) == goes
        if goes:
            assert notified(stage.heard) == []


async def test_skip_mode_is_announced_and_leaves_an_open_ask_open_and_ends_when_it_is_said(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, calling_at(*["look"] * 6), tool) as stage:
        there = (await stage.remote.create_session("there")).id

        async def skips(session_id: str = "") -> Skip:
            query = f"?session_id={session_id}" if session_id else ""
            found = await stage.request("GET", f"/permissions/skip{query}")
            return decode(found.body, Skip)

        async def set_skip(*, on: bool, session_id: str = "") -> int:
            body = {"skip": on, "session_id": session_id}
            by = stage.remote.client.id
            return (await stage.request("POST", f"/permissions/skip?client_id={by}", body)).status

        run_id = await stage.prompt("#1")
        ask = await request_in(stage.heard)
        assert await set_skip(on=True, session_id=stage.session_id) == 200
        assert await asks(stage) == {ask.id: "open"}
        assert await answer(stage, ask.id, "allow")
        await stage.heard.complete(run_id)
        assert not await is_asked(stage, "#2")
        assert await is_asked(stage, "#3", there)
        assert (await skips(), await skips(stage.session_id), await skips(there)) == (
            Skip(), Skip(skip=True), Skip(),
        )  # fmt: skip
        assert await set_skip(on=True) == 200
        assert not await is_asked(stage, "#4", there)
        async with open_events(stage.flow, stage.remote) as late:
            await late.until(b'"skip_changed"')
            told = [t.read(SkipChanged) for t in late.events() if t.type == "skip_changed"]
        by = stage.remote.client.id
        here = SkipChanged("session", stage.session_id, on=True)
        everywhere = SkipChanged("workspace", "", on=True)
        assert told == [everywhere, here]
        assert await set_skip(on=False) == await set_skip(on=False, session_id=here.session_id)
        assert await is_asked(stage, "#5")
        assert await set_skip(on=True, session_id=UNKNOWN) == 404
        await stage.catch_up()
        assert [c for c in stage.heard.all("skip_changed", SkipChanged) if c.by] == [
            SkipChanged("session", stage.session_id, on=True, by=by),
            SkipChanged("workspace", "", on=True, by=by),
            SkipChanged("workspace", "", on=False, by=by),
            SkipChanged("session", stage.session_id, on=False, by=by),
        ]
        assert len(tool.calls) == 3


async def test_a_rule_that_denies_beats_skip_mode_and_grants_and_one_that_asks_beats_the_list(
    tmp_path: Path,
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    rules = [{"decision": "deny", "tool": "look"}, {"decision": "ask", "tool": "other"}]
    config = {"permission_rules": rules, "permissions": {"allowed_tools": ["look", "other"]}}
    async with open_asking(tmp_path, calling_at("other", "look"), *tools, config=config) as stage:
        assert await is_asked(stage, "#1")
        assert (await stage.request("POST", "/permissions/skip", {"skip": True})).status == 200
        assert not await is_asked(stage, "#2")
        _, refused = results_of(await stage.messages())
        assert refused.content == "Not allowed: a rule denies it: deny tool look."
        assert refused.is_error
        assert (await stage.rows())[-1][1] == "Fine."  # The turn went on.
        assert not look.calls + other.calls

"""Grants for more than one call, allowed tools of the configuration, and skip mode."""

from pathlib import Path

import msgspec
import pytest

from culm.client.stream import ServerEvent
from culm.ids import AskId, SessionId
from culm.testing.script import Script
from culm.wire.asks import Grant, Skip, SkipChanged
from culm.wire.codec import decode
from culm.wire.runs import RunComplete
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
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.restarts import open_restarts
from tests.flow.runs import CrashImage, Harness, open_received
from tests.support import contract


def calling_at(*names: str) -> Script:
    """A model that calls one of these tools for each prompt: `#1`, `#2` and so on."""
    return script(rules=[when(f"#{n}", calling(name)) for n, name in enumerate(names, 1)])


async def is_asked(harness: Harness, prompt: str, session_id: SessionId | None = None) -> bool:
    """Return True if a prompt leads to an ask; the ask is denied."""
    before = len(requests(harness.received))
    run_id = await harness.prompt(prompt, session_id)

    def is_known(event: ServerEvent) -> bool:
        ended = event.type == "run_complete" and event.read(RunComplete).run_id == run_id
        return ended or len(requests(harness.received)) > before

    await harness.received.until(is_known)
    asked = requests(harness.received)[before:]
    for ask_id in asked:
        assert await answer(harness, ask_id, "deny")
    await harness.received.complete(run_id)
    return bool(asked)


@contract("INV-73")
@pytest.mark.parametrize(
    ("action", "here", "elsewhere"),
    [("allow", False, False), ("allow_session", True, False), ("allow_workspace", True, True)],
)
async def test_answer_covers_exactly_its_scope_until_revoked(
    tmp_path: Path, action: str, *, here: bool, elsewhere: bool
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    play = calling_at("look", "look", "look", "other", "look", "look")
    async with open_asking(tmp_path, play, *tools) as harness:
        run_id = await harness.prompt("#1")
        ask = await request_in(harness.received)
        by = harness.remote.client.id
        body = {"permission": {"id": ask.id}, "action": action}
        await harness.request("POST", f"/permissions/grant?client_id={by}", body)
        await harness.received.complete(run_id)
        assert await is_asked(harness, "#2") is not here
        there = (await harness.remote.create_session("there")).id
        assert await is_asked(harness, "#3", there) is not elsewhere
        assert await is_asked(harness, "#4")  # Another tool.
        assert (len(look.calls), other.calls) == (1 + here + elsewhere, [])

        kept = await grants(harness)
        if not here:
            assert kept == []
            return
        [grant] = kept
        assert grant == Grant(
            id=grant.id,
            scope="workspace" if elsewhere else "session",
            session_id=harness.session_id,
            tool_name="look",
            action="execute",
            grains=["look grain"],
            ask_id=AskId(ask.id),
            by=by,
            created_at=int(harness.clock.now_s()),
        )
        assert (await harness.request("DELETE", f"/permissions/grants/{grant.id}")).status == 200
        assert (await harness.request("DELETE", f"/permissions/grants/{grant.id}")).status == 404
        assert await grants(harness) == []
        assert await is_asked(harness, "#5")
        await harness.catch_up()
        published = [
            (t.op, t.read(Grant)) for t in harness.received.events if t.type == "grant_changed"
        ]
        assert published == [("created", grant), ("deleted", grant)]


@contract("INV-73")
async def test_covered_call_is_notified_as_granted_without_a_request(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with (
        open_asking(tmp_path, calling_at("look", "look"), tool) as harness,
        open_received(harness.remote, view="crush") as crush,
    ):
        run_id = await harness.prompt("#1")
        ask = await request_in(harness.received)
        assert await answer(harness, ask.id, "allow_session")
        await harness.received.complete(run_id)
        assert not await is_asked(harness, "#2")
        call_id = [n.tool_call_id for n in notified(harness.received)][-1]
        again = msgspec.structs.replace(ask, tool_call_id=call_id)
        assert notified(harness.received) == [
            waits(ask),
            granted(ask),
            waits(again),
            granted(again),
        ]
        await harness.catch_up(crush)
        assert notified(crush) == notified(harness.received)
        assert requests(harness.received) == requests(crush) == [ask.id]
        assert await asks(harness, "all") == {ask.id: "allowed"}


@contract("INV-73")
async def test_grants_survive_a_restart_and_end_with_their_session(tmp_path: Path) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    async with open_restarts(tmp_path, calling_at("look", "other", "look", "other")) as restarts:
        async with restarts.first(*tools) as harness:
            for number, action in ((1, "allow_session"), (2, "allow_workspace")):
                run_id = await harness.prompt(f"#{number}")
                assert await answer(
                    harness, (await request_in(harness.received, number)).id, action
                )
                await harness.received.complete(run_id)
            kept = await grants(harness)
            image = CrashImage(harness)
        async with restarts.next(*tools, image=image) as harness:
            assert await grants(harness) == kept
            before = (len(look.calls), len(other.calls))
            assert not await is_asked(harness, "#3")
            await harness.remote.delete_session(harness.session_id)
            assert await grants(harness) == kept[1:]
            harness.session_id = (await harness.remote.create_session("new")).id
            assert not await is_asked(harness, "#4")
            assert before == (1, 1)
            assert (len(look.calls), len(other.calls)) == (2, 2)
        async with restarts.next(*tools) as harness:
            assert await grants(harness) == kept[1:]


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
async def test_allowed_tools_match_the_exact_tool_or_tool_and_action(
    tmp_path: Path, allowed: list[str], *, goes: bool
) -> None:
    tool = Probe("look", asks=True)
    config = {"permissions": {"allowed_tools": allowed}}
    async with open_asking(tmp_path, calling_at("look"), tool, config=config) as harness:
        assert await is_asked(harness, "#1") is not goes
        assert len(tool.calls) == goes
        if goes:
            assert notified(harness.received) == []


async def test_skip_mode_is_published_leaves_open_asks_open_and_can_be_ended(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, calling_at(*["look"] * 6), tool) as harness:
        there = (await harness.remote.create_session("there")).id

        async def skips(session_id: str = "") -> Skip:
            query = f"?session_id={session_id}" if session_id else ""
            found = await harness.request("GET", f"/permissions/skip{query}")
            return decode(found.body, Skip)

        async def set_skip(*, on: bool, session_id: str = "") -> int:
            body = {"skip": on, "session_id": session_id}
            by = harness.remote.client.id
            return (await harness.request("POST", f"/permissions/skip?client_id={by}", body)).status

        run_id = await harness.prompt("#1")
        ask = await request_in(harness.received)
        assert await set_skip(on=True, session_id=harness.session_id) == 200
        assert await asks(harness) == {ask.id: "open"}
        assert await answer(harness, ask.id, "allow")
        await harness.received.complete(run_id)
        assert not await is_asked(harness, "#2")
        assert await is_asked(harness, "#3", there)
        assert (await skips(), await skips(harness.session_id), await skips(there)) == (
            Skip(), Skip(skip=True), Skip(),
        )  # fmt: skip
        assert await set_skip(on=True) == 200
        assert not await is_asked(harness, "#4", there)
        async with open_events(harness.flow, harness.remote) as late:
            await late.until(b'"skip_changed"')
            published = [t.read(SkipChanged) for t in late.events() if t.type == "skip_changed"]
        by = harness.remote.client.id
        here = SkipChanged("session", harness.session_id, on=True)
        everywhere = SkipChanged("workspace", "", on=True)
        assert published == [everywhere, here]
        assert await set_skip(on=False) == await set_skip(on=False, session_id=here.session_id)
        assert await is_asked(harness, "#5")
        assert await set_skip(on=True, session_id=UNKNOWN) == 404
        await harness.catch_up()
        assert [c for c in harness.received.all("skip_changed", SkipChanged) if c.by] == [
            SkipChanged("session", harness.session_id, on=True, by=by),
            SkipChanged("workspace", "", on=True, by=by),
            SkipChanged("workspace", "", on=False, by=by),
            SkipChanged("session", harness.session_id, on=False, by=by),
        ]
        assert len(tool.calls) == 3


async def test_deny_rule_overrides_skip_mode_and_ask_rule_overrides_allowed_tools(
    tmp_path: Path,
) -> None:
    tools = look, other = Probe("look", asks=True), Probe("other", asks=True)
    rules = [{"decision": "deny", "tool": "look"}, {"decision": "ask", "tool": "other"}]
    config = {"permission_rules": rules, "permissions": {"allowed_tools": ["look", "other"]}}
    async with open_asking(tmp_path, calling_at("other", "look"), *tools, config=config) as harness:
        assert await is_asked(harness, "#1")
        assert (await harness.request("POST", "/permissions/skip", {"skip": True})).status == 200
        assert not await is_asked(harness, "#2")
        _, refused = results_of(await harness.messages())
        assert refused.content == "Not allowed: a rule denies it: deny tool look."
        assert refused.is_error
        assert (await harness.rows())[-1][1] == "Fine."  # The turn continued.
        assert not look.calls + other.calls

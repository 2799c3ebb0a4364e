"""Permission asks over HTTP and events: every client receives them, the first answer wins."""

import asyncio
from pathlib import Path

import pytest

from culm.ids import SessionId
from culm.permission.asks import ASKS_MAX
from culm.run.loop import PARALLEL_MAX
from culm.store import writer
from culm.testing.script import ReplyRule
from culm.wire.asks import Ask, AskChanged, PermissionRequest, Skip
from culm.wire.codec import decode
from tests.flow.asking import (
    ChangingProbe,
    answer,
    asks,
    denied,
    granted,
    grants,
    notified,
    open_asking,
    request_in,
    requests,
    resolved,
    waits,
    when,
)
from tests.flow.drive import UNKNOWN, until
from tests.flow.probes import Probe, calling, script
from tests.flow.reading import results_of
from tests.flow.runs import held_writer, open_received, open_runs
from tests.flow.test_store_failures import writer_of
from tests.support import WAIT_S, contract


@contract("INV-70")
async def test_request_reaches_every_client_and_the_first_answer_wins(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("look", asks=True)
    play = script(calling("look", path="a"))
    async with (
        open_runs(tmp_path, kind, play, tools=[tool]) as harness,
        open_received(harness.remote, view="crush") as other,
    ):
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        assert await request_in(other) == ask
        assert ask == PermissionRequest(
            id=ask.id,
            session_id=harness.session_id,
            tool_call_id=ask.tool_call_id,
            tool_name="look",
            description="Do look",
            action="execute",
            params={"path": "a"},
            path="/",
        )
        assert await asks(harness) == {ask.id: "open"}
        assert not tool.calls
        assert await answer(harness, ask.id, "allow")
        assert not await answer(harness, ask.id, "deny")
        await harness.received.complete(run_id)
        await other.complete(run_id)
        assert notified(harness.received) == notified(other) == [waits(ask), granted(ask)]
        assert len(tool.calls) == 1
        assert await asks(harness) == {}


@contract("INV-71", "INV-72")
async def test_of_many_simultaneous_answers_exactly_one_wins_and_is_stored(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        actions = ["allow_session", "deny", "allow", "allow_workspace"] * 6
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(harness, ask.id, action), name=action)
                for action in actions
            ]
        [won] = [task.get_name() for task in tasks if task.result()]
        complete = await harness.received.complete(run_id)
        is_allowed = won != "deny"
        assert notified(harness.received) == [
            waits(ask),
            granted(ask) if is_allowed else denied(ask),
        ]
        assert [c.state for c in harness.received.all("ask_changed", AskChanged)] == [
            "open", "allowed" if is_allowed else "denied",
        ]  # fmt: skip
        assert (len(tool.calls), complete.culm_reason) == ((1, "") if is_allowed else (0, "denied"))
        assert [grant.scope for grant in await grants(harness)] == {
            "allow_session": ["session"], "allow_workspace": ["workspace"]
        }.get(won, [])  # fmt: skip
        assert await asks(harness) == {}


@contract("INV-72", "INV-77")
async def test_denied_call_ends_the_turn_and_later_answers_are_ignored(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look", "look")), tool) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        assert await answer(harness, ask.id, "deny")
        for action in ("allow", "allow_session", "allow_workspace"):
            assert not await answer(harness, ask.id, action)
        complete = await harness.received.complete(run_id)
        assert (complete.error, complete.culm_reason) == ("", "denied")
        first, second = results_of(await harness.messages())
        assert (first.content, first.is_error) == ("User denied permission", True)
        assert second.content == "Not run: the turn ended before this call."
        assert (await harness.rows())[1][2] == "end_turn"
        assert not tool.calls
        assert await grants(harness) == []
        assert await asks(harness, "all") == {ask.id: "denied"}
        assert notified(harness.received) == [waits(ask), denied(ask)]


@contract("INV-78", "EXC-5", "EXC-8")
@pytest.mark.parametrize("parallel", [False, True])
async def test_cancel_withdraws_open_asks_and_starts_no_other_call(
    tmp_path: Path, *, parallel: bool
) -> None:
    look, later = (Probe(name, asks=True, parallel=parallel) for name in ("look", "later"))
    async with open_asking(tmp_path, script(calling("look", "later")), look, later) as harness:
        run_id = await harness.prompt("Hi.")
        asked = [await request_in(harness.received, n) for n in ((1, 2) if parallel else (1,))]
        await harness.cancel()
        assert (await harness.received.complete(run_id)).cancelled
        closings = sorted(notified(harness.received)[len(asked) :], key=lambda n: n.tool_call_id)
        assert closings == [denied(ask) for ask in asked]
        assert set((await asks(harness, "all")).values()) == {"withdrawn"}
        published = [(c.ask_id, c.state) for c in harness.received.all("ask_changed", AskChanged)]
        assert published == [(a.id, s) for s in ("open", "withdrawn") for a in asked]
        for ask in asked:
            assert not await answer(harness, ask.id, "allow")
        assert not look.calls + later.calls
        await harness.talk("Again.")  # The session is free.


@contract("EXC-5", "EXC-7")
async def test_asks_of_sessions_are_open_together_and_crush_shows_one_at_a_time(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    names = ("Adam", "Berta", "Carl")
    play = script(rules=[when(name, calling("look", who=name)) for name in names])
    async with open_asking(tmp_path, play, tool) as harness:
        runs, asked = list[str](), list[PermissionRequest]()
        for number, name in enumerate(names, 1):
            session = await harness.remote.create_session(name)
            runs.append(await harness.prompt(f"I am {name}.", session.id))
            asked.append(await request_in(harness.received, number))
        first, second, third = asked
        ids = [ask.id for ask in asked]
        async with (
            open_received(harness.remote, view="crush") as crush,
            open_received(harness.remote) as late,
        ):
            assert await request_in(crush) == first
            assert await request_in(late, 3) == third
            assert (requests(crush), requests(late)) == (ids[:1], ids)
            only = await harness.ask(
                f"/permissions/asks?session={second.session_id}", list[Ask[PermissionRequest]]
            )
            assert [ask.request for ask in only] == [second]
            changed = late.all("ask_changed", AskChanged)
            assert [(c.ask_id, c.state) for c in changed] == [(i, "open") for i in ids]
            assert notified(crush) == [waits(ask) for ask in asked]

            await harness.remote.cancel(SessionId(second.session_id))
            assert (await crush.complete(runs[1])).cancelled
            assert requests(crush) == ids[:1]  # The ask that Crush shows is still open.
            assert await answer(harness, first.id, "allow")
            assert await request_in(crush, 2) == third
            assert (await crush.complete(runs[0])).error == ""
            assert await asks(harness) == {third.id: "open"}
            assert await answer(harness, third.id, "deny")
            assert (await crush.complete(runs[2])).culm_reason == "denied"
            assert not await answer(harness, third.id, "allow")
            assert requests(crush) == [first.id, third.id]
            assert notified(crush)[3:] == [denied(second), granted(first), denied(third)]
        assert [call.arguments for call in tool.calls] == [{"who": "Adam"}]
        assert requests(harness.received) == ids  # Our own view receives each request once.


@contract("EXC-6")
async def test_extra_fields_in_an_answer_do_not_widen_the_grant(tmp_path: Path) -> None:
    tool, other = Probe("look", asks=True), Probe("other", asks=True)
    play = script(calling("look", path="a"), calling("other"))
    async with open_asking(tmp_path, play, tool, other) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        [kept] = await harness.ask("/permissions/asks", list[Ask[PermissionRequest]])
        body = {"permission": {"id": ask.id}, "action": "allow_session"}
        assert not await resolved(harness, "/permissions/grant", {**body, "digest": "0" * 64})
        assert await asks(harness) == {ask.id: "open"}
        forged = {
            "session_id": UNKNOWN, "tool_call_id": "x", "tool_name": "other", "action": "write",
            "path": "/", "params": {"path": "/etc"}, "grains": ["other grain"],
        }  # fmt: skip
        asked = {"permission": {"id": ask.id, **forged}, "digest": kept.digest}
        wrong = {"action": "allow_session", "scope": "workspace", "tool_name": "other"}
        assert await resolved(harness, "/permissions/grant", asked | wrong)
        [grant] = await grants(harness)
        assert (grant.scope, grant.session_id) == ("session", harness.session_id)
        assert (grant.tool_name, grant.action, grant.grains) == ("look", "execute", ["look grain"])
        second = await request_in(harness.received, 2)
        assert (second.tool_name, [c.arguments for c in tool.calls]) == ("other", [{"path": "a"}])
        await harness.cancel()
        await harness.received.complete(run_id)


async def test_invalid_answer_changes_nothing_and_a_large_request_is_answerable(
    tmp_path: Path,
) -> None:
    huge = "ä" * (1 << 20)
    tool = ChangingProbe("look", world=huge)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        assert ask.params == {"world": huge}
        for unknown in ("", UNKNOWN, "x" * 100_000, "é\0", "'; --"):
            assert not await answer(harness, unknown, "allow")
        assert not await resolved(harness, "/permissions/grant", {"action": "allow"})
        for action in ("", "Allow", "open", "withdrawn", "expired", "allow_forever"):
            body = {"permission": {"id": ask.id}, "action": action}
            found = await harness.request("POST", "/permissions/grant", body)
            assert (found.status, b"invalid permission action" in found.body) == (400, True)
        for odd in (5, "x", [ask.id]):
            body = {"permission": odd, "action": "allow"}
            assert (await harness.request("POST", "/permissions/grant", body)).status == 400
        for state in ("odd", "running"):
            assert (await harness.request("GET", f"/permissions/asks?state={state}")).status == 400
        assert await asks(harness) == {ask.id: "open"}
        assert await answer(harness, ask.id, "allow", params={"world": huge}, tool_name="look")
        assert (await harness.received.complete(run_id)).text == "Fine."
        assert len(tool.calls) == 1


@contract("EXC-8")
async def test_cancel_before_the_answer_is_durable_runs_no_call(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            with held_writer(harness):
                answering = group.create_task(
                    answer(harness, ask.id, "allow_session"), name="answer"
                )
                group.create_task(harness.cancel(), name="cancel")
                await until(lambda: harness.live(run_id).stop is not None)
        assert (await harness.received.complete(run_id)).cancelled
        resolution = granted(ask) if answering.result() else denied(ask)
        assert notified(harness.received) == [waits(ask), resolution]
        assert await asks(harness) == {}
        assert not tool.calls


async def test_ask_of_a_run_at_its_wall_limit_is_withdrawn(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.", limits={"wall_s": 60})
        ask = await request_in(harness.received)
        harness.clock.advance(60)
        assert (await harness.received.complete(run_id)).culm_reason == "budget"
        assert notified(harness.received) == [waits(ask), denied(ask)]
        assert await asks(harness, "all") == {ask.id: "withdrawn"}


async def test_ask_beyond_the_limit_is_refused_and_the_others_stay_open(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    together = PARALLEL_MAX
    runs = ASKS_MAX // together + 1
    play = script(rules=[ReplyRule(when="Go", reply=calling(*["look"] * together), times=runs)])
    async with open_asking(tmp_path, play, tool) as harness:
        for _ in range(runs):
            await harness.prompt("Go", (await harness.remote.create_session("s")).id)
        await request_in(harness.received, ASKS_MAX)
        await harness.received.event_with(
            "message", f"open asks in this workspace: at most {ASKS_MAX}"
        )
        assert set((await asks(harness)).values()) == {"open"}
        assert len(requests(harness.received)) == len(await asks(harness)) == ASKS_MAX


@pytest.mark.parametrize("trouble", ["read-only", "overload"])
async def test_answer_that_cannot_be_stored_is_503_and_the_ask_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as harness:
        run_id = await harness.prompt("Hi.")
        ask = await request_in(harness.received)
        await harness.received.event_with("session", "A title")  # Nothing is written from here on.
        connection = await writer_of(harness.flow, harness.remote)
        if trouble == "overload":
            monkeypatch.setattr(writer, "JOBS_MAX", 0)
        else:
            connection.execute("PRAGMA query_only = ON")
        body = {"permission": {"id": ask.id}, "action": "allow_session"}
        for _ in range(3):
            assert (await harness.request("POST", "/permissions/grant", body)).status == 503
        assert (await harness.request("POST", "/permissions/skip", {"skip": True})).status == 503
        monkeypatch.undo()
        connection.execute("PRAGMA query_only = OFF")
        assert decode((await harness.request("GET", "/permissions/skip")).body, Skip) == Skip()
        assert await asks(harness) == {ask.id: "open"}
        assert not tool.calls
        assert await answer(harness, ask.id, "allow")
        assert (await harness.received.complete(run_id)).text == "Fine."
        assert notified(harness.received) == [waits(ask), granted(ask)]
        assert (len(tool.calls), await grants(harness)) == (1, [])

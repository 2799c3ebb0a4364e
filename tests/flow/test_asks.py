"""Asks over HTTP and events: everybody is shown them, the first answer counts, none is lost."""

import asyncio
from pathlib import Path

import pytest

from culm.ids import SessionId
from culm.permission.asks import ASKS_MAX
from culm.run.loop import PARALLEL_MAX
from culm.store import writer
from culm.testing.script import Rule
from culm.wire.asks import Ask, AskChanged, PermissionRequest, Skip
from culm.wire.codec import decode
from tests.flow.asking import (
    Shifting,
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
from tests.flow.runs import held_writer, open_heard, open_runs
from tests.flow.test_store_trouble import writer_of
from tests.support import WAIT_S, contract


@contract("INV-70")
async def test_a_request_reaches_both_and_the_first_answer_decides(
    tmp_path: Path, kind: str
) -> None:
    tool = Probe("look", asks=True)
    play = script(calling("look", path="a"))
    async with (
        open_runs(tmp_path, kind, play, tools=[tool]) as stage,
        open_heard(stage.remote, view="crush") as other,
    ):
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        assert await request_in(other) == ask
        assert ask == PermissionRequest(
            id=ask.id,
            session_id=stage.session_id,
            tool_call_id=ask.tool_call_id,
            tool_name="look",
            description="Do look",
            action="execute",
            params={"path": "a"},
            path="/",
        )
        assert await asks(stage) == {ask.id: "open"}
        assert not tool.calls
        assert await answer(stage, ask.id, "allow")
        assert not await answer(stage, ask.id, "deny")
        await stage.heard.complete(run_id)
        await other.complete(run_id)
        assert notified(stage.heard) == notified(other) == [waits(ask), granted(ask)]
        assert len(tool.calls) == 1
        assert await asks(stage) == {}


@contract("INV-71", "INV-72")
async def test_of_many_answers_at_once_exactly_one_wins_and_only_that_is_remembered(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        actions = ["allow_session", "deny", "allow", "allow_workspace"] * 6
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(answer(stage, ask.id, action), name=action) for action in actions
            ]
        [won] = [task.get_name() for task in tasks if task.result()]
        complete = await stage.heard.complete(run_id)
        is_allowed = won != "deny"
        assert notified(stage.heard) == [waits(ask), granted(ask) if is_allowed else denied(ask)]
        assert [c.state for c in stage.heard.all("ask_changed", AskChanged)] == [
            "open", "allowed" if is_allowed else "denied",
        ]  # fmt: skip
        assert (len(tool.calls), complete.culm_reason) == ((1, "") if is_allowed else (0, "denied"))
        assert [grant.scope for grant in await grants(stage)] == {
            "allow_session": ["session"], "allow_workspace": ["workspace"]
        }.get(won, [])  # fmt: skip
        assert await asks(stage) == {}


@contract("INV-72", "INV-77")
async def test_a_denied_call_ends_the_turn_and_no_later_answer_turns_that(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look", "look")), tool) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        assert await answer(stage, ask.id, "deny")
        for action in ("allow", "allow_session", "allow_workspace"):
            assert not await answer(stage, ask.id, action)
        complete = await stage.heard.complete(run_id)
        assert (complete.error, complete.culm_reason) == ("", "denied")
        first, second = results_of(await stage.messages())
        assert (first.content, first.is_error) == ("User denied permission", True)
        assert second.content == "Not run: the turn ended before this call."
        assert (await stage.rows())[1][2] == "end_turn"
        assert not tool.calls
        assert await grants(stage) == []
        assert await asks(stage, "all") == {ask.id: "denied"}
        assert notified(stage.heard) == [waits(ask), denied(ask)]


@contract("INV-78", "EXC-5", "EXC-8")
@pytest.mark.parametrize("parallel", [False, True])
async def test_a_cancel_withdraws_what_is_asked_and_nothing_more_of_the_batch_starts(
    tmp_path: Path, *, parallel: bool
) -> None:
    look, later = (Probe(name, asks=True, parallel=parallel) for name in ("look", "later"))
    async with open_asking(tmp_path, script(calling("look", "later")), look, later) as stage:
        run_id = await stage.prompt("Hi.")
        asked = [await request_in(stage.heard, n) for n in ((1, 2) if parallel else (1,))]
        await stage.cancel()
        assert (await stage.heard.complete(run_id)).cancelled
        closings = sorted(notified(stage.heard)[len(asked) :], key=lambda n: n.tool_call_id)
        assert closings == [denied(ask) for ask in asked]
        assert set((await asks(stage, "all")).values()) == {"withdrawn"}
        told = [(c.ask_id, c.state) for c in stage.heard.all("ask_changed", AskChanged)]
        assert told == [(a.id, s) for s in ("open", "withdrawn") for a in asked]
        for ask in asked:
            assert not await answer(stage, ask.id, "allow")
        assert not look.calls + later.calls
        await stage.talk("Again.")  # The session is free.


@contract("EXC-5", "EXC-7")
async def test_asks_of_several_sessions_wait_side_by_side_and_crush_is_shown_one_at_a_time(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    words = ("Adam", "Berta", "Carl")
    play = script(rules=[when(word, calling("look", who=word)) for word in words])
    async with open_asking(tmp_path, play, tool) as stage:
        runs, asked = list[str](), list[PermissionRequest]()
        for number, word in enumerate(words, 1):
            session = await stage.remote.create_session(word)
            runs.append(await stage.prompt(f"I am {word}.", session.id))
            asked.append(await request_in(stage.heard, number))
        first, second, third = asked
        ids = [ask.id for ask in asked]
        async with (
            open_heard(stage.remote, view="crush") as crush,
            open_heard(stage.remote) as late,
        ):
            assert await request_in(crush) == first
            assert await request_in(late, 3) == third
            assert (requests(crush), requests(late)) == (ids[:1], ids)
            only = await stage.ask(
                f"/permissions/asks?session={second.session_id}", list[Ask[PermissionRequest]]
            )
            assert [ask.request for ask in only] == [second]
            changed = late.all("ask_changed", AskChanged)
            assert [(c.ask_id, c.state) for c in changed] == [(i, "open") for i in ids]
            assert notified(crush) == [waits(ask) for ask in asked]

            await stage.remote.cancel(SessionId(second.session_id))
            assert (await crush.complete(runs[1])).cancelled
            assert requests(crush) == ids[:1]  # The one that is shown is still open.
            assert await answer(stage, first.id, "allow")
            assert await request_in(crush, 2) == third
            assert (await crush.complete(runs[0])).error == ""
            assert await asks(stage) == {third.id: "open"}
            assert await answer(stage, third.id, "deny")
            assert (await crush.complete(runs[2])).culm_reason == "denied"
            assert not await answer(stage, third.id, "allow")
            assert requests(crush) == [first.id, third.id]
            assert notified(crush)[3:] == [denied(second), granted(first), denied(third)]
        assert [call.arguments for call in tool.calls] == [{"who": "Adam"}]
        assert requests(stage.heard) == ids  # To our own view nothing is said twice.


@contract("EXC-6")
async def test_what_a_client_says_beside_the_id_widens_nothing(tmp_path: Path) -> None:
    tool, other = Probe("look", asks=True), Probe("other", asks=True)
    play = script(calling("look", path="a"), calling("other"))
    async with open_asking(tmp_path, play, tool, other) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        [kept] = await stage.ask("/permissions/asks", list[Ask[PermissionRequest]])
        body = {"permission": {"id": ask.id}, "action": "allow_session"}
        assert not await resolved(stage, "/permissions/grant", {**body, "digest": "0" * 64})
        assert await asks(stage) == {ask.id: "open"}
        forged = {
            "session_id": UNKNOWN, "tool_call_id": "x", "tool_name": "other", "action": "write",
            "path": "/", "params": {"path": "/etc"}, "grains": ["other grain"],
        }  # fmt: skip
        asked = {"permission": {"id": ask.id, **forged}, "digest": kept.digest}
        wrong = {"action": "allow_session", "scope": "workspace", "tool_name": "other"}
        assert await resolved(stage, "/permissions/grant", asked | wrong)
        [grant] = await grants(stage)
        assert (grant.scope, grant.session_id) == ("session", stage.session_id)
        assert (grant.tool_name, grant.action, grant.grains) == ("look", "execute", ["look grain"])
        second = await request_in(stage.heard, 2)
        assert (second.tool_name, [c.arguments for c in tool.calls]) == ("other", [{"path": "a"}])
        await stage.cancel()
        await stage.heard.complete(run_id)


async def test_a_bad_answer_is_refused_or_changes_nothing_and_a_huge_one_is_read(
    tmp_path: Path,
) -> None:
    huge = "ä" * (1 << 20)
    tool = Shifting("look", world=huge)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        assert ask.params == {"world": huge}
        for unknown in ("", UNKNOWN, "x" * 100_000, "é\0", "'; --"):
            assert not await answer(stage, unknown, "allow")
        assert not await resolved(stage, "/permissions/grant", {"action": "allow"})
        for action in ("", "Allow", "open", "withdrawn", "expired", "allow_forever"):
            body = {"permission": {"id": ask.id}, "action": action}
            found = await stage.request("POST", "/permissions/grant", body)
            assert (found.status, b"invalid permission action" in found.body) == (400, True)
        for odd in (5, "x", [ask.id]):
            body = {"permission": odd, "action": "allow"}
            assert (await stage.request("POST", "/permissions/grant", body)).status == 400
        for state in ("odd", "running"):
            assert (await stage.request("GET", f"/permissions/asks?state={state}")).status == 400
        assert await asks(stage) == {ask.id: "open"}
        assert await answer(stage, ask.id, "allow", params={"world": huge}, tool_name="look")
        assert (await stage.heard.complete(run_id)).text == "Fine."
        assert len(tool.calls) == 1


@contract("EXC-8")
async def test_a_cancel_before_the_answer_is_durable_means_that_nothing_is_called(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as group:
            with held_writer(stage):
                said = group.create_task(answer(stage, ask.id, "allow_session"), name="answer")
                group.create_task(stage.cancel(), name="cancel")
                await until(lambda: stage.live(run_id).stop is not None)
        assert (await stage.heard.complete(run_id)).cancelled
        resolution = granted(ask) if said.result() else denied(ask)
        assert notified(stage.heard) == [waits(ask), resolution]
        assert await asks(stage) == {}
        assert not tool.calls


async def test_a_run_whose_time_is_up_asks_no_longer(tmp_path: Path) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.", limits={"wall_s": 60})
        ask = await request_in(stage.heard)
        stage.clock.advance(60)
        assert (await stage.heard.complete(run_id)).culm_reason == "budget"
        assert notified(stage.heard) == [waits(ask), denied(ask)]
        assert await asks(stage, "all") == {ask.id: "withdrawn"}


async def test_one_ask_more_than_can_be_open_is_refused_and_the_others_wait_on(
    tmp_path: Path,
) -> None:
    tool = Probe("look", asks=True, parallel=True)
    together = PARALLEL_MAX
    runs = ASKS_MAX // together + 1
    play = script(rules=[Rule(when="Go", reply=calling(*["look"] * together), times=runs)])
    async with open_asking(tmp_path, play, tool) as stage:
        for _ in range(runs):
            await stage.prompt("Go", (await stage.remote.create_session("s")).id)
        await request_in(stage.heard, ASKS_MAX)
        await stage.heard.saying("message", f"open asks in this workspace: at most {ASKS_MAX}")
        assert set((await asks(stage)).values()) == {"open"}
        assert len(requests(stage.heard)) == len(await asks(stage)) == ASKS_MAX


@pytest.mark.parametrize("trouble", ["read-only", "overload"])
async def test_what_cannot_be_stored_is_not_answered_and_stays_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    tool = Probe("look", asks=True)
    async with open_asking(tmp_path, script(calling("look")), tool) as stage:
        run_id = await stage.prompt("Hi.")
        ask = await request_in(stage.heard)
        await stage.heard.saying("session", "A title")  # From here on nothing is written.
        connection = await writer_of(stage.flow, stage.remote)
        if trouble == "overload":
            monkeypatch.setattr(writer, "JOBS_MAX", 0)
        else:
            connection.execute("PRAGMA query_only = ON")
        body = {"permission": {"id": ask.id}, "action": "allow_session"}
        for _ in range(3):
            assert (await stage.request("POST", "/permissions/grant", body)).status == 503
        assert (await stage.request("POST", "/permissions/skip", {"skip": True})).status == 503
        monkeypatch.undo()
        connection.execute("PRAGMA query_only = OFF")
        assert decode((await stage.request("GET", "/permissions/skip")).body, Skip) == Skip()
        assert await asks(stage) == {ask.id: "open"}
        assert not tool.calls
        assert await answer(stage, ask.id, "allow")
        assert (await stage.heard.complete(run_id)).text == "Fine."
        assert notified(stage.heard) == [waits(ask), granted(ask)]
        assert (len(tool.calls), await grants(stage)) == (1, [])

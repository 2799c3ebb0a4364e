"""Runs after `kill -9`: nothing accepted is lost or done twice, and every end is published."""

import asyncio
import random
import sqlite3
from collections.abc import Iterator
from itertools import count, cycle
from pathlib import Path

from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.run.rules import BEHIND_INTERRUPTED, interrupted_call_text
from culm.testing.model_server import open_model_server
from culm.testing.script import Reply, ScriptedCall, ScriptedUsage
from culm.wire.messages import ToolCallPart, ToolResultPart, full_text
from culm.wire.runs import Limits, Prompt
from tests.live.harness import RESUME_S, find_database, make_directory
from tests.live.run_harness import (
    HELD,
    HELD_PREFIX,
    act_on,
    open_agent,
    open_watch,
    outcomes,
    questions,
    rows,
    script,
    until_asked,
)
from tests.live.run_server import EFFECTS, PROGRAM
from tests.support import WAIT_S, contract

INTERRUPTED = ("error", "interrupted")
LITTLE = ScriptedUsage(input=10, output=10)
# A conversation that takes longer to read than a kill takes; the provider reports few tokens.
LONG = Reply(deltas=["All of it. " * 5000] * 150, usage=LITTLE)


def stored_states(folder: Path) -> dict[str, str]:
    """Return the stored state of every run while no server runs."""
    connection = sqlite3.connect(f"file:{find_database(folder)}?mode=ro", uri=True)
    try:
        return dict(connection.execute("SELECT id, state FROM runs").fetchall())
    finally:
        connection.close()


@contract("EXC-16", "INV-49")
async def test_canceled_runs_stay_canceled_after_a_kill(
    folder: Path,
) -> None:
    async with open_model_server(script(HELD, Reply(text="Later."))) as model:
        async with open_agent(folder, model) as (killed, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            await remote.prompt(session.id, "first", run_id="active")
            await until_asked(model, 1)
            start = (await remote.snapshot()).cursor
            await remote.prompt(session.id, "second", run_id="queued")
            await remote.prompt(session.id, "third")
            await remote.cancel(session.id)
            assert (await killed.kill()).status == -9

        async with open_agent(folder, model) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            assert (await remote.snapshot()).runs == []
            assert await outcomes(remote, ["active", "queued"]) == ["canceled", "canceled"]
            assert [(role, reason) for role, _, reason, _ in await rows(remote, session.id)] == [
                ("user", "stop"),
                ("assistant", "canceled"),
            ]
            async with open_watch(remote, start) as watch:
                await remote.prompt(session.id, "fourth", run_id="later")
                await watch.until_complete("later")
            ended = {complete.run_id: complete.cancelled for complete in watch.completes()}
            assert len(watch.completed()) == len(ended) == 4
            assert (ended["active"], ended["queued"], ended["later"]) == (True, True, False)
        assert [question.conversation[-1] for question in questions(model)] == [
            ("user", "first"),
            ("user", "fourth"),
        ]


@contract("EXC-16", "INV-36")
async def test_prompt_accepted_before_a_kill_is_resumed_or_interrupted(
    folder: Path,
) -> None:
    """Its progress decides which; the run with the long conversation is posted last."""
    answer = Reply(text="Done.", delay_s=0.3, usage=LITTLE)
    async with open_model_server(script(LONG, otherwise=answer)) as model:
        async with open_agent(folder, model) as (killed, client):
            remote = await client.open_workspace(make_directory(folder))
            short = await remote.create_session("short")
            long = await remote.create_session("long")
            async with open_watch(remote) as watch:
                await remote.prompt(long.id, "tell", run_id="before")
                await watch.until_complete("before", wait_s=RESUME_S)
            start = (await remote.snapshot()).cursor
            await remote.prompt(short.id, "begin", run_id="short")
            await until_asked(model, 2)
            await remote.prompt(long.id, "go on", run_id="long")
            await killed.kill()
        left = stored_states(folder)
        assert (left["before"], left["short"]) == ("ended", "active")
        assert left["long"] in ("accepted", "active")
        resumes = left["long"] == "accepted"

        async with open_agent(folder, model) as (_, client):
            # No client has joined: the run resumes by itself.
            await until_asked(model, 3 if resumes else 2)
            remote = await client.open_workspace(make_directory(folder))
            async with open_watch(remote, start) as watch:
                await watch.until_complete("short", "long")
            assert watch.completed() == ["long", "short"]
            last = "end_turn" if resumes else "interrupted"
            assert await outcomes(remote, ["short", "long"]) == ["interrupted", last]
            finish = ("end_turn", "") if resumes else INTERRUPTED
            assert (await rows(remote, long.id))[2:] == [
                ("user", "go on", "stop", ""),
                ("assistant", "Done." if resumes else "", *finish),
            ]
        asked = [question.conversation[-1][1] for question in questions(model)]
        assert len(asked) == len(set(asked)), "no request was sent twice"


@contract("EXC-16", "INV-36", "INV-82")
async def test_kill_in_mid_stream_keeps_a_prefix_and_a_usable_session(
    folder: Path,
) -> None:
    paced = Reply(tokens=4000, rate=400)
    whole = "".join(f"tok{n} " for n in range(paced.tokens))
    async with open_model_server(script(paced, Reply(text="Well."))) as model:
        async with open_agent(folder, model) as (killed, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "count", run_id="cut")
                await watch.until(
                    lambda: [t.type for t in watch.events].count("message_delta") > 80
                )
                seen = full_text((await remote.messages(session.id))[-1].parts)
                assert whole.startswith(seen)
                assert seen.count(" ") > 50
                await killed.kill()

                async with open_agent(folder, model) as (_, again):
                    await watch.until_complete("cut", wait_s=RESUME_S)
                    await again.open_workspace(make_directory(folder))
                    (asked, cut) = await rows(remote, session.id)
                    assert asked == ("user", "count", "stop", "")
                    assert (cut[0], *cut[2:]) == ("assistant", *INTERRUPTED)
                    assert whole.startswith(cut[1])
                    assert len(cut[1]) > 100
                    run = await remote.run("cut")
                    assert (run.state, run.outcome) == ("ended", "interrupted")

                    await remote.prompt(session.id, "and now?", run_id="next")
                    await watch.until_complete("next")
                    assert watch.completed() == ["cut", "next"]
                    (complete, _) = watch.completes()
                    assert (complete.culm_reason, complete.cancelled) == ("interrupted", False)
                    assert watch.text_of(complete) == cut[1]
        assert [question.conversation for question in questions(model)] == [
            [("user", "count")],
            [("user", "count"), ("assistant", cut[1]), ("user", "and now?")],
        ]


@contract("EXC-9", "EXC-16", "INV-82")
async def test_kill_during_calls_repeats_no_effect_and_reports_the_crash_policy(
    folder: Path,
) -> None:
    names = ["mark", "hang_again", "hang_ask", "hang_never", "mark"]
    calls = [ScriptedCall(name=name, id=f"c{n}") for n, name in enumerate(names)]
    effects = folder / EFFECTS
    async with open_model_server(
        script(Reply(text="I act.", calls=calls), Reply(text="I see."))
    ) as model:
        async with open_agent(folder, model, program=PROGRAM) as (killed, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            await remote.prompt(session.id, "act", run_id="acting")
            async with asyncio.timeout(WAIT_S):
                while not effects.exists() or len(effects.read_text().split()) < 4:
                    await asyncio.sleep(0.01)
            await killed.kill()

        async with open_agent(folder, model, program=PROGRAM) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            assert await outcomes(remote, ["acting"]) == ["interrupted"]
            async with open_watch(remote) as watch:
                await remote.prompt(session.id, "what happened?", run_id="asking")
                await watch.until_complete("asking")
            messages = await remote.messages(session.id)
        assert sorted(effects.read_text().split()) == sorted(names[:4])

        made = [p.data for m in messages for p in m.parts if isinstance(p, ToolCallPart)]
        results = [p.data for m in messages for p in m.parts if isinstance(p, ToolResultPart)]
        assert [(call.id, call.name) for call in made] == [(c.id, c.name) for c in calls]
        expected = {
            "c0": "marked",
            "c1": interrupted_call_text("started", "again"),
            "c2": interrupted_call_text("started", "ask"),
            "c3": interrupted_call_text("started", "never"),
            "c4": interrupted_call_text("known", "ask"),
        }
        assert len(results) == len(expected)
        assert {result.tool_call_id: result.content for result in results} == expected
        assert [result.is_error for result in results] == [False, True, True, True, True]
        read = questions(model)[-1].messages[1:]
        assert [m.role for m in read] == ["user", "assistant", *["tool"] * 5, "user"]
        assert [call["id"] for call in read[1].tool_calls] == list(expected)
        assert {m.tool_call_id: m.content for m in read[2:7]} == expected


@contract("EXC-16", "EXC-20")
async def test_runs_queued_behind_a_killed_run_are_held_until_started_or_dropped(
    folder: Path,
) -> None:
    async with open_model_server(script(HELD, otherwise=Reply(text="Done."))) as model:
        async with open_agent(folder, model) as (killed, client):
            remote = await client.open_workspace(make_directory(folder))
            session = await remote.create_session("s")
            await remote.prompt(session.id, "first", run_id="active")
            await until_asked(model, 1)
            start = (await remote.snapshot()).cursor
            for name in ("started", "dropped", "left"):
                await remote.prompt(session.id, name, run_id=name)
            await killed.kill()

        async with open_agent(folder, model) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            async with open_watch(remote, start) as watch:
                await watch.until_complete("active")
                held = [(r.id, r.state, r.title) for r in (await remote.snapshot()).runs]
                assert held == [
                    (name, "held", BEHIND_INTERRUPTED) for name in ("started", "dropped", "left")
                ]
                assert not (await remote.session(session.id)).is_busy
                assert len(questions(model)) == 1

                await remote.prompt(session.id, "passes them", run_id="new")
                await watch.until_complete("new")
                assert (await act_on(remote, "started", "start")).state != "held"
                dropped = await act_on(remote, "dropped", "drop")
                assert (dropped.state, dropped.outcome) == ("ended", "canceled")
                await watch.until_complete("started", "dropped")
            assert watch.completed() == ["active", "dropped", "new", "started"]
            prompt, cut, *after = await rows(remote, session.id)
            assert (prompt[:2], HELD_PREFIX.startswith(cut[1])) == (("user", "first"), True)
            assert (cut[0], *cut[2:]) == ("assistant", *INTERRUPTED)
            assert [(role, text) for role, text, *_ in after] == [
                ("user", "passes them"),
                ("assistant", "Done."),
                ("user", "started"),
                ("assistant", "Done."),
            ]
            assert (await remote.run("left")).state == "held"


async def post_until_cut(
    remote: RemoteWorkspace, sessions: list[SessionId], names: Iterator[str]
) -> list[str]:
    """Post prompts until the server is gone; return the acknowledged runs."""
    acknowledged: list[str] = []
    for session_id, name in zip(cycle(sessions), names, strict=False):
        body = Prompt(session_id, name, name, limits=Limits(steps=1))
        try:
            await remote.client.request("POST", remote.path("/agent"), body)
        except OSError:
            break
        acknowledged.append(name)
        await asyncio.sleep(0.005)
    return acknowledged


@contract("EXC-9", "EXC-16", "INV-36")
async def test_runs_end_once_and_act_at_most_once_across_repeated_kills(
    folder: Path,
) -> None:
    moments, names = random.Random(4), (f"run-{n}" for n in count())
    sessions: list[SessionId] = []
    accepted: list[str] = []
    start = ""
    act = Reply(text="So.", calls=[ScriptedCall(name="mark")], usage=LITTLE)
    async with open_model_server(script(otherwise=act)) as model:
        for _ in range(5):
            async with open_agent(folder, model, program=PROGRAM) as (killed, client):
                remote = await client.open_workspace(make_directory(folder))
                while len(sessions) < 3:
                    sessions.append((await remote.create_session("s")).id)
                start = start or (await remote.snapshot()).cursor
                async with asyncio.TaskGroup() as tasks:
                    posting = tasks.create_task(post_until_cut(remote, sessions, names))
                    await asyncio.sleep(moments.uniform(0.1, 0.6))
                    await killed.kill()
                accepted += posting.result()

        async with open_agent(folder, model, program=PROGRAM) as (_, client):
            remote = await client.open_workspace(make_directory(folder))
            async with open_watch(remote, start) as watch:
                for run in (await remote.snapshot()).runs:
                    if run.state == "held":
                        await act_on(remote, run.id, "drop")
                await watch.until_complete(*accepted, wait_s=RESUME_S)
                async with asyncio.timeout(WAIT_S):  # A run whose 202 was cut off may be left.
                    while (await remote.snapshot()).runs:
                        await asyncio.sleep(0.02)
            messages = (await remote.snapshot("*")).messages

    assert len(accepted) > 5
    completed = watch.completed()
    assert len(completed) == len(set(completed)), "each end was published once"
    prompts = [full_text(m.parts) for m in messages if m.role == "user"]
    assert len(prompts) == len(set(prompts)), "each was stored once"
    asked_for = [question.conversation[-1] for question in questions(model)]
    assert len(asked_for) == len(set(asked_for)), "each was asked once"
    assert {("user", text) for text in prompts} >= set(asked_for)

    made = [p.data for m in messages for p in m.parts if isinstance(p, ToolCallPart)]
    contents = [p.data.content for m in messages for p in m.parts if isinstance(p, ToolResultPart)]
    assert len(contents) == len(made), "each call has its result"
    known, unsure = (
        contents.count("marked"),
        contents.count(interrupted_call_text("started", "ask")),
    )
    assert known <= len((folder / EFFECTS).read_text().split()) <= known + unsure

"""Letters and a server: what is brought to whom, in which order, and what becomes of the rest."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from culm.mail.base import LetterState
from culm.mail.letters import encode_letter
from culm.mail.order import name_of
from culm.settings import Settings
from culm.store.base import WriteJob, run_group, together
from culm.store.letters import add_letter
from culm.store.runs import accept_run, end_run, start_run
from culm.store.writer import connect
from culm.subagents.mail_room import ASKS_AT_ONCE, CLAIMS_MAX
from culm.wire.agents import LetterShown
from culm.wire.codec import decode
from culm.wire.endings import INTERRUPTED
from tests.flow.agents_lives import AWAY_S, open_lives
from tests.flow.agents_stage import AgentStage, held, open_agents, talk
from tests.flow.drive import until
from tests.flow.mail_stage import (
    OUTSIDE,
    deliver,
    letter,
    letters_of,
    post_of,
    project_of,
    read_in,
    replies_in,
    ring,
    until_state,
)
from tests.store.trees import new_run
from tests.support import WAIT_S, contract


def leave_ask(stage: AgentStage, ask_id: str, asker: str) -> None:
    """As a server does that is killed while the agent works on it, and the next finds it."""
    run = new_run(ask_id, stage.session_id)
    shown = LetterShown(ask_id, from_=asker, to=stage.session_id, kind="ask")
    unit = together(
        accept_run(run),
        add_letter(shown, run_id=ask_id),
        start_run(run.id, was_queued=False),
        end_run(run.id, INTERRUPTED),
    )
    with closing(connect(project_of(stage) / "culm.db")) as connection:
        job = WriteJob(unit, finish=lambda _: None)
        run_group(connection, [job], now=int(stage.clock.now_s()))
        assert job.error is None, job.error


@contract("FLEET-72")
async def test_a_letter_that_is_nested_too_deeply_keeps_no_other_from_being_read(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        to = stage.session_id
        box = post_of(stage).make(to)
        folder = next((tmp_path / "data").glob(f"projects/*/mailboxes/{to}/new"))
        handoff = encode_letter(letter(stage, "deep", kind="handoff"))
        deep = handoff.replace(b'"@deep"', b'null, "a": ' + b"[" * 950 + b"]" * 950)
        (folder / name_of(1, "deep")).write_bytes(deep)
        deliver(stage, to, letter(stage, "good"))
        await ring(stage, to)
        await until_state(stage, "good", "admitted")
        await stage.until_idle()
        assert await read_in(stage) == ["good"]
        assert box.find("deep") is LetterState.CORRUPT


async def test_what_a_killed_server_was_asked_is_answered_by_the_next_before_anybody_comes(
    tmp_path: Path,
) -> None:
    """All of it, and whoever is gone keeps nobody from being answered."""
    asks = [f"ask{n:03}" for n in range(ASKS_AT_ONCE + 2)]
    async with open_lives(tmp_path) as lives:
        async with lives.next() as stage:
            pass
        for n in range(ASKS_AT_ONCE):
            leave_ask(stage, f"lost{n:03}", "cli-gone")
        for ask_id in asks:
            leave_ask(stage, ask_id, OUTSIDE)
        box = post_of(stage).make(OUTSIDE)
        async with lives.alone():
            await until(lambda: box.pending_count() == len(asks))
        replies = replies_in(box)
        assert [reply.correlation_id for reply in replies] == asks
        assert all(reply.body["failed"] for reply in replies)
        async with lives.alone() as flow:
            await flow.settle()
            assert flow.server.registry.list() == [], "nothing is left to be done"
        assert box.is_empty()


async def test_a_letter_that_is_rung_for_while_its_workspace_closes_is_read(tmp_path: Path) -> None:
    async with open_lives(tmp_path, talk("@")) as lives:
        async with lives.next() as stage:
            pass
        async with lives.alone() as flow:
            client = await flow.client()
            await client.open_workspace(flow.directory())
            deliver(stage, stage.session_id, letter(stage, "late"))
            flow.server.registry.retire(client.id)
            async with asyncio.timeout(WAIT_S):
                await flow.server.registry.ring(str(flow.directory()), stage.session_id)
            box = post_of(stage).open(stage.session_id)
            await until(box.is_fully_empty)
        async with lives.next() as stage:
            assert await read_in(stage) == ["late"]


async def test_a_reply_of_a_program_outside_answers_the_ask(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        for one in (OUTSIDE, "cli-other"):
            post_of(stage).make(one)
        body = {"to": OUTSIDE, "kind": "ask", "text": "why?", "from": stage.session_id}
        sent = await stage.request("POST", "/mail", body)
        assert sent.status == 202
        (ask_id,) = await letters_of(stage)
        wrong = letter(stage, "wrong", kind="reply", from_="cli-other", answers=ask_id)
        right = letter(stage, "right", kind="reply", from_=OUTSIDE, answers=ask_id)
        deliver(stage, stage.session_id, wrong, right)
        await ring(stage)
        assert (await until_state(stage, ask_id, "answered")).answer_id == "right"


async def test_a_reply_that_a_killed_server_delivered_and_did_not_note_is_the_only_one(
    tmp_path: Path,
) -> None:
    async with open_lives(tmp_path, talk("@")) as lives:
        async with lives.next() as stage:
            asker = (await stage.remote.create_session("asks")).id
        leave_ask(stage, "ask", asker)
        answer = letter(stage, "reply", kind="reply", from_=stage.session_id, answers="ask")
        deliver(stage, asker, answer)
        async with lives.next() as stage:
            assert (await until_state(stage, "ask", "answered")).answer_id == "reply"
            await until_state(stage, "reply", "admitted")
            await stage.until_idle()
            assert await read_in(stage, asker) == ["reply"]


@contract("FLEET-P3")
async def test_letters_are_read_in_their_order_though_there_is_not_room_for_all(
    tmp_path: Path,
) -> None:
    names = [f"l{n:02}" for n in range(20)]
    settings = Settings(queue_max=3)
    async with open_agents(tmp_path, talk("@work", held()), talk("@"), settings=settings) as stage:
        await stage.prompt("@work")
        first = await stage.asked_by("@work")
        deliver(stage, stage.session_id, *(letter(stage, name) for name in names))
        for _ in range(3):
            await ring(stage, stage.session_id)
            await stage.flow.settle()
        stage.release(first)
        await until_state(stage, names[-1], "admitted")
        assert await read_in(stage) == names


@pytest.mark.parametrize("how", ["time passes", "the server is killed"])
async def test_a_letter_whose_time_is_over_while_its_agent_works_is_not_read(
    tmp_path: Path, how: str
) -> None:
    async with open_lives(tmp_path, talk("@work", held()), talk("@")) as lives:
        async with lives.next() as stage:
            box = post_of(stage).make(OUTSIDE)
            await stage.prompt("@work")
            first = await stage.asked_by("@work")
            ask = letter(stage, "late", kind="ask", from_=OUTSIDE, expires_s=AWAY_S / 2)
            mailbox = deliver(stage, stage.session_id, ask, letter(stage, "good"))
            await ring(stage, stage.session_id)
            await until(lambda: len(stage.flow.workspace(stage.remote.id).runs.live()) == 3)
            await until_state(stage, "good", "delivered")
            if how == "time passes":
                stage.clock.advance(AWAY_S)
                # Whoever asks is told before; a server killed in between would tell it again.
                await until(lambda: mailbox.find("late") is LetterState.DEAD)
                stage.release(first)
                await until_state(stage, "good", "admitted")
            lives.kill()
        async with lives.next() as stage:
            await until_state(stage, "good", "admitted")
            await until_state(stage, "late", "expired")
            await stage.until_idle()
            assert await read_in(stage) == ["good"]
        assert mailbox.find("late") is LetterState.DEAD
        (reply,) = replies_in(box)
        assert "its time was over" in str(reply.body["answer"])


async def test_an_agent_has_one_mailbox_whether_it_is_named_by_its_id_or_its_sessions(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        agent = await stage.start_agent("@kid: go")
        body = {"to": agent.session_id, "text": "@more"}
        sent = decode((await stage.request("POST", "/mail", body)).body, LetterShown)
        assert sent.to == agent.agent_id
        await until_state(stage, sent.letter_id, "admitted")
        deliver(stage, agent.session_id, letter(stage, "by-hand"))
        await ring(stage)
        assert (await until_state(stage, "by-hand", "admitted")).to == agent.agent_id
        await stage.until_idle()


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ({"from": "../evil"}, 400, "a mailbox's id has 1 to 200 letters"),
        ({"from": "nobody"}, 404, "nobody of this project has the id nobody"),
        ({"from": "cli-nobody"}, 404, "nobody of this project has the id cli-nobody"),
        ({"kind": "reply"}, 400, "a reply answers a letter, and none is named"),
    ],
)
async def test_a_letter_of_nobody_or_a_reply_to_nothing_is_refused(
    tmp_path: Path, more: dict[str, str], status: int, words: str
) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        body = {"to": stage.session_id, "text": "hi", **more}
        answer = await stage.request("POST", "/mail", body)
        assert (answer.status, words in answer.body.decode()) == (status, True)
        assert await letters_of(stage) == {}


async def test_whoever_asks_what_nobody_will_read_is_told(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@")) as stage:
        box = post_of(stage).make(OUTSIDE)
        gone = (await stage.remote.create_session("to be deleted")).id
        deliver(stage, gone, letter(stage, "unread", kind="ask", from_=OUTSIDE))
        assert (await stage.request("DELETE", f"/sessions/{gone}")).status == 200
        (reply,) = replies_in(box)
        assert reply.correlation_id == "unread"
        assert "its agent was deleted" in str(reply.body["answer"])
        run_id = await stage.prompt("@go")
        other = (await stage.remote.create_session("another")).id
        deliver(stage, other, letter(stage, run_id, kind="ask", from_=OUTSIDE))
        await ring(stage, other)
        await until(lambda: not box.is_empty())
        (reply,) = replies_in(box)
        assert "its id is another's" in str(reply.body["answer"])
        await stage.until_idle()


async def test_letters_that_rest_take_no_room_from_those_that_come(tmp_path: Path) -> None:
    async with open_lives(tmp_path, talk("@work", held()), talk("@")) as lives:
        async with lives.next(Settings(queue_max=2 * CLAIMS_MAX)) as stage:
            await stage.prompt("@work")
            await stage.asked_by("@work")
            rest = [letter(stage, f"l{n:02}") for n in range(CLAIMS_MAX)]
            deliver(stage, stage.session_id, *rest)
            await ring(stage)
            live = stage.flow.workspace(stage.remote.id).runs.live
            await until(lambda: len(live()) == CLAIMS_MAX + 1)
            await until_state(stage, rest[-1].id, "delivered")
            await stage.flow.settle()
            lives.kill()
        lives.change_database("UPDATE runs SET provider = 'gone' WHERE state = 'queued'")
        async with lives.next() as stage:
            deliver(stage, stage.session_id, letter(stage, "new"))
            await ring(stage, stage.session_id)
            await until_state(stage, "new", "admitted")
            await stage.until_idle()
            assert await read_in(stage) == ["new"]

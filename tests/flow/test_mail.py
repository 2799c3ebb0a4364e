"""Letters and the server: delivery, order, replies and expiry."""

import asyncio
from contextlib import closing
from pathlib import Path

import pytest

from culm.ids import SessionId
from culm.mail.base import LetterState, MailboxBusy, has_mailbox
from culm.mail.letters import encode_letter, name_of
from culm.mail.maildir import MaildirPostOffice
from culm.settings import Settings
from culm.store.base import WriteJob, run_group, together
from culm.store.letters import add_letter
from culm.store.runs import accept_run, end_run, start_run
from culm.store.writer import connect
from culm.subagents.mail_room import ASKS_AT_ONCE, CLAIMS_MAX, SCAN_S
from culm.wire.agents import LetterShown
from culm.wire.codec import decode
from culm.wire.runs import INTERRUPTED
from tests.flow.agents_harness import AgentHarness, held, open_agents, talk
from tests.flow.agents_restarts import AWAY_S, open_restarts
from tests.flow.drive import until
from tests.flow.mail_harness import (
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


def store_interrupted_ask(harness: AgentHarness, ask_id: str, asker: str) -> None:
    """Store an ask as a server leaves it that is killed while the agent works on it."""
    run = new_run(ask_id, harness.session_id)
    shown = LetterShown(ask_id, from_=asker, to=harness.session_id, kind="ask")
    unit = together(
        accept_run(run),
        add_letter(shown, run_id=ask_id),
        start_run(run.id, was_queued=False),
        end_run(run.id, INTERRUPTED),
    )
    with closing(connect(project_of(harness) / "culm.db")) as connection:
        job = WriteJob(unit, finish=lambda _: None)
        run_group(connection, [job], now=int(harness.clock.now_s()))
        assert job.error is None, job.error


@contract("FLEET-72")
async def test_deeply_nested_letter_is_corrupt_and_does_not_block_others(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        to = harness.session_id
        box = post_of(harness).make(to)
        folder = next((tmp_path / "data").glob(f"projects/*/mailboxes/{to}/new"))
        handoff = encode_letter(letter(harness, "deep", kind="handoff"))
        deep = handoff.replace(b'"@deep"', b'null, "a": ' + b"[" * 950 + b"]" * 950)
        (folder / name_of(1, "deep")).write_bytes(deep)
        deliver(harness, to, letter(harness, "good"))
        await ring(harness, to)
        await until_state(harness, "good", "admitted")
        await harness.until_idle()
        assert await read_in(harness) == ["good"]
        assert box.find("deep") is LetterState.CORRUPT


async def test_asks_to_a_killed_server_are_answered_by_the_next_without_clients(
    tmp_path: Path,
) -> None:
    """All asks are answered, and missing senders do not block the others."""
    asks = [f"ask{n:03}" for n in range(ASKS_AT_ONCE + 2)]
    async with open_restarts(tmp_path) as restarts:
        async with restarts.next() as harness:
            pass
        for n in range(ASKS_AT_ONCE):
            store_interrupted_ask(harness, f"lost{n:03}", "cli-gone")
        for ask_id in asks:
            store_interrupted_ask(harness, ask_id, OUTSIDE)
        box = post_of(harness).make(OUTSIDE)
        async with restarts.server_only():
            await until(lambda: box.pending_count() == len(asks))
        replies = replies_in(box)
        assert [reply.correlation_id for reply in replies] == asks
        assert all(reply.body["failed"] for reply in replies)
        async with restarts.server_only() as flow:
            await flow.run_ready()
            assert flow.server.registry.list() == [], "no work is left"
        assert box.claim(1) == []


async def test_letter_rung_for_while_its_workspace_closes_is_read(tmp_path: Path) -> None:
    async with open_restarts(tmp_path, talk("@")) as restarts:
        async with restarts.next() as harness:
            pass
        async with restarts.server_only() as flow:
            client = await flow.client()
            await client.open_workspace(flow.directory())
            deliver(harness, harness.session_id, letter(harness, "late"))
            flow.server.registry.retire(client.id)
            async with asyncio.timeout(WAIT_S):
                await flow.server.registry.ring(str(flow.directory()), harness.session_id)
            box = post_of(harness).open(harness.session_id)
            await until(lambda: box.pending_count() == 0)
        async with restarts.next() as harness:
            assert await read_in(harness) == ["late"]


async def test_reply_of_an_outside_program_answers_the_ask(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        for one in (OUTSIDE, "cli-other"):
            post_of(harness).make(one)
        body = {"to": OUTSIDE, "kind": "ask", "text": "why?", "from": harness.session_id}
        sent = await harness.request("POST", "/mail", body)
        assert sent.status == 202
        (ask_id,) = await letters_of(harness)
        wrong = letter(harness, "wrong", kind="reply", from_="cli-other", answers=ask_id)
        right = letter(harness, "right", kind="reply", from_=OUTSIDE, answers=ask_id)
        deliver(harness, harness.session_id, wrong, right)
        await ring(harness)
        assert (await until_state(harness, ask_id, "answered")).answer_id == "right"


async def test_reply_delivered_but_not_recorded_by_a_killed_server_is_sent_once(
    tmp_path: Path,
) -> None:
    async with open_restarts(tmp_path, talk("@")) as restarts:
        async with restarts.next() as harness:
            asker = (await harness.remote.create_session("asks")).id
        store_interrupted_ask(harness, "ask", asker)
        answer = letter(harness, "reply", kind="reply", from_=harness.session_id, answers="ask")
        deliver(harness, asker, answer)
        async with restarts.next() as harness:
            assert (await until_state(harness, "ask", "answered")).answer_id == "reply"
            await until_state(harness, "reply", "admitted")
            await harness.until_idle()
            assert await read_in(harness, asker) == ["reply"]


@contract("FLEET-P3")
async def test_letters_are_read_in_order_when_the_queue_is_full(
    tmp_path: Path,
) -> None:
    names = [f"l{n:02}" for n in range(20)]
    settings = Settings(queue_max=3)
    async with open_agents(
        tmp_path, talk("@work", held()), talk("@"), settings=settings
    ) as harness:
        await harness.prompt("@work")
        first = await harness.until_asked_by("@work")
        deliver(harness, harness.session_id, *(letter(harness, name) for name in names))
        for _ in range(3):
            await ring(harness, harness.session_id)
            await harness.flow.run_ready()
        harness.release(first)
        await until_state(harness, names[-1], "admitted")
        assert await read_in(harness) == names


@pytest.mark.parametrize("how", ["time passes", "the server is killed"])
async def test_letter_that_expires_while_its_agent_works_is_not_read(
    tmp_path: Path, how: str
) -> None:
    async with open_restarts(tmp_path, talk("@work", held()), talk("@")) as restarts:
        async with restarts.next() as harness:
            box = post_of(harness).make(OUTSIDE)
            await harness.prompt("@work")
            first = await harness.until_asked_by("@work")
            ask = letter(harness, "late", kind="ask", from_=OUTSIDE, expires_s=AWAY_S / 2)
            mailbox = deliver(harness, harness.session_id, ask, letter(harness, "good"))
            await ring(harness, harness.session_id)
            await until(lambda: len(harness.flow.workspace(harness.remote.id).runs.live()) == 3)
            await until_state(harness, "good", "delivered")
            if how == "time passes":
                harness.clock.advance(AWAY_S)
                # The sender gets its reply first; a server killed before that would reply again.
                await until(lambda: mailbox.find("late") is LetterState.DEAD)
                harness.release(first)
                await until_state(harness, "good", "admitted")
            restarts.kill()
        async with restarts.next() as harness:
            await until_state(harness, "good", "admitted")
            await until_state(harness, "late", "expired")
            await harness.until_idle()
            assert await read_in(harness) == ["good"]
        assert mailbox.find("late") is LetterState.DEAD
        (reply,) = replies_in(box)
        assert "its time was over" in str(reply.body["answer"])


async def test_agent_has_one_mailbox_for_its_agent_id_and_session_id(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        agent = await harness.start_agent("@kid: go")
        body = {"to": agent.session_id, "text": "@more"}
        sent = decode((await harness.request("POST", "/mail", body)).body, LetterShown)
        assert sent.to == agent.agent_id
        await until_state(harness, sent.letter_id, "admitted")
        deliver(harness, agent.session_id, letter(harness, "by-hand"))
        await ring(harness)
        assert (await until_state(harness, "by-hand", "admitted")).to == agent.agent_id
        await harness.until_idle()


@pytest.mark.parametrize(
    ("more", "status", "text"),
    [
        ({"from": "../evil"}, 400, "a mailbox's id has 1 to 200 letters"),
        ({"from": "nobody"}, 404, "no agent or session with the id nobody in this project"),
        ({"from": "cli-nobody"}, 404, "no agent or session with the id cli-nobody in this project"),
        ({"kind": "reply"}, 400, "a reply needs the id of the letter it answers"),
    ],
)
async def test_letter_from_an_unknown_sender_or_reply_without_a_target_is_refused(
    tmp_path: Path, more: dict[str, str], status: int, text: str
) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        body = {"to": harness.session_id, "text": "hi", **more}
        answer = await harness.request("POST", "/mail", body)
        assert (answer.status, text in answer.body.decode()) == (status, True)
        assert await letters_of(harness) == {}


async def session_with_letter(harness: AgentHarness) -> SessionId:
    """Create a session with an unread letter in its mailbox."""
    gone = (await harness.remote.create_session("to be deleted")).id
    deliver(harness, gone, letter(harness, "unread"))
    return gone


@contract("EXC-27")
async def test_mailbox_of_a_deleted_session_is_removed_although_its_client_left(
    tmp_path: Path,
) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        gone = await session_with_letter(harness)
        sessions = harness.flow.workspace(harness.remote.id).sessions
        request = asyncio.get_running_loop().create_task(sessions.delete(gone))
        await asyncio.sleep(0)
        request.cancel()
        await until(lambda: not has_mailbox(post_of(harness), gone))


@contract("EXC-27")
async def test_locked_mailbox_of_a_deleted_session_is_removed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_post: MaildirPostOffice, address: str) -> bool:
        raise MailboxBusy(address)

    async with open_restarts(tmp_path, talk("@")) as restarts:
        async with restarts.next() as harness:
            gone = await session_with_letter(harness)
            with monkeypatch.context() as patch:
                patch.setattr(MaildirPostOffice, "remove", refuse)
                assert (await harness.request("DELETE", f"/sessions/{gone}")).status == 200
                await ring(harness)
                assert has_mailbox(post_of(harness), gone)
                restarts.kill()
            harness.clock.advance(SCAN_S)
            await until(lambda: not has_mailbox(post_of(harness), gone))
        async with restarts.next() as harness:  # From the moment of the kill.
            await until(lambda: not has_mailbox(post_of(harness), gone))


async def test_sender_of_an_ask_that_cannot_be_read_gets_a_reply(tmp_path: Path) -> None:
    async with open_agents(tmp_path, talk("@")) as harness:
        box = post_of(harness).make(OUTSIDE)
        gone = (await harness.remote.create_session("to be deleted")).id
        deliver(harness, gone, letter(harness, "unread", kind="ask", from_=OUTSIDE))
        assert (await harness.request("DELETE", f"/sessions/{gone}")).status == 200
        (reply,) = replies_in(box)
        assert reply.correlation_id == "unread"
        assert "its agent was deleted" in str(reply.body["answer"])
        run_id = await harness.prompt("@go")
        other = (await harness.remote.create_session("another")).id
        deliver(harness, other, letter(harness, run_id, kind="ask", from_=OUTSIDE))
        await ring(harness, other)
        await until(lambda: box.pending_count() > 0)
        (reply,) = replies_in(box)
        assert "its id is already in use" in str(reply.body["answer"])
        await harness.until_idle()


async def test_held_letters_do_not_block_new_ones(tmp_path: Path) -> None:
    async with open_restarts(tmp_path, talk("@work", held()), talk("@")) as restarts:
        async with restarts.next(Settings(queue_max=2 * CLAIMS_MAX)) as harness:
            await harness.prompt("@work")
            await harness.until_asked_by("@work")
            rest = [letter(harness, f"l{n:02}") for n in range(CLAIMS_MAX)]
            deliver(harness, harness.session_id, *rest)
            await ring(harness)
            live = harness.flow.workspace(harness.remote.id).runs.live
            await until(lambda: len(live()) == CLAIMS_MAX + 1)
            await until_state(harness, rest[-1].id, "delivered")
            await harness.flow.run_ready()
            restarts.kill()
        restarts.change_database("UPDATE runs SET provider = 'gone' WHERE state = 'queued'")
        async with restarts.next() as harness:
            deliver(harness, harness.session_id, letter(harness, "new"))
            await ring(harness, harness.session_id)
            await until_state(harness, "new", "admitted")
            await harness.until_idle()
            assert await read_in(harness) == ["new"]

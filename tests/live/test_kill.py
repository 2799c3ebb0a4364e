"""After `kill -9` all acknowledged data is there, and clients resync."""

import asyncio
import random
import sqlite3
from collections.abc import Mapping
from pathlib import Path

import pytest

from culm.client.follower import Follower, open_mirror
from culm.client.http import open_client
from culm.client.mirror import Mirror
from culm.wire.messages import FinishPart, Message, TextPart, is_finished
from culm.wire.workspaces import Snapshot
from tests.live.harness import (
    PUBLISHER,
    RESUME_S,
    ProcessServer,
    assert_same,
    caught_up,
    find_database,
    make_directory,
    open_client_of,
    open_process_server,
    open_proxy,
)
from tests.live.plan import DRIP_WORD, FLUSHED_FIRST, find_difference, state_after
from tests.live.publisher import Order
from tests.support import WAIT_S, contract

BUSY = 200  # So many messages that a plan never completes before the kill.


def done_by(server: ProcessServer) -> dict[str, int]:
    """Return the number of acknowledged steps of each session's plan."""
    done: dict[str, int] = {}
    for line in server.lines:
        if line.startswith("did "):
            _, _, title, number = line.split(" ")
            done[title] = int(number)
    return done


def messages_by_title(snapshot: Snapshot[Message]) -> dict[str, list[Message]]:
    """Return the messages of every session by its title."""
    return {
        session.title: [m for m in snapshot.messages if m.session_id == session.id]
        for session in snapshot.sessions
    }


def assert_survived(order: Order, done: Mapping[str, int], snapshot: Snapshot[Message]) -> None:
    """Assert that each session has its acknowledged steps, or also the step in progress."""
    found = messages_by_title(snapshot)
    for title, plan in order.plans().items():
        if title not in done:
            continue  # Its creation was not acknowledged.
        count = done[title]
        reasons = [
            find_difference(state_after(plan[:n]), found.get(title))
            for n in (count, min(count + 1, len(plan)))
        ]
        assert "" in reasons, f"session {title} after {count} steps: {reasons}"


def text_of_drip(mirror: Mirror) -> str:
    texts = [
        part.data.text
        for message in mirror.messages.values()
        if message.model == "drip"
        for part in message.parts
        if isinstance(part, TextPart)
    ]
    return texts[0] if texts else ""


async def write_until_killed(
    server: ProcessServer, order: Order, workspace_id: str, follower: Follower
) -> None:
    """Let the publisher write; kill it at a seeded moment, in the middle of a text."""
    steps = random.Random(order.seed).randint(100, 400)
    server.send_line(order.line())
    await server.until(lambda: len(server.lines) >= steps, RESUME_S)
    await server.until_line(f"did {workspace_id} {order.seed}/drip 3", RESUME_S)
    async with asyncio.timeout(RESUME_S):
        await follower.until(lambda mirror: bool(text_of_drip(mirror)))
    ended = await server.kill()
    assert ended.status == -9


@contract("EXC-13")
@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_follower_of_a_killed_server_resumes_and_equals_a_fresh_snapshot(
    folder: Path, kind: str
) -> None:
    host = f"unix://{folder}/s" if kind == "unix" else "tcp://127.0.0.1:0"
    first = Order(seed=11 if kind == "unix" else 12, messages=BUSY, drip=True)
    later = Order(seed=first.seed + 10, sessions=3, messages=5)
    async with open_process_server(folder, "--host", host, program=PUBLISHER) as killed:
        url = killed.url
        async with open_client_of(killed) as client:
            remote = await client.open_workspace(make_directory(folder))
            async with open_mirror(remote) as follower:
                await write_until_killed(killed, first, remote.id, follower)
                before = follower.stream.connections
                async with open_process_server(folder, "--host", url, program=PUBLISHER) as again:
                    async with asyncio.timeout(RESUME_S):
                        await follower.until(lambda _: follower.stream.connections > before)
                    survived = await remote.snapshot("*")
                    assert_survived(first, done_by(killed), survived)
                    await caught_up(follower, survived)
                    assert_same(follower.mirror, survived)

                    again.send_line(later.line())
                    await again.until_line(f"end {remote.id} {later.seed}", RESUME_S)
                    final = await remote.snapshot("*")
                    await caught_up(follower, final)
                    assert_same(follower.mirror, final)
                    assert_survived(first, done_by(killed), final)
                    assert_survived(later, done_by(again), final)


@contract("EXC-13")
async def test_kill_keeps_stored_open_text_and_marks_its_message_interrupted(
    folder: Path,
) -> None:
    order = Order(seed=7, sessions=0, drip=True)
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, program=PUBLISHER) as killed,
        open_client_of(killed) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        killed.send_line(order.line())
        await killed.until_line(f"did {remote.id} 7/drip 3")
        # No flush is requested from here on: the chunks must reach the disk by themselves.
        stored = await stored_text_beyond(find_database(folder), len("".join(FLUSHED_FIRST)) + 50)
        await killed.kill()
    async with (
        open_process_server(folder, *host) as server,
        open_client_of(server) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        (message,) = (await remote.snapshot("*")).messages
        text, finish = message.parts
        assert isinstance(text, TextPart)
        assert text.data.text.startswith(stored)
        assert isinstance(finish, FinishPart)
        assert (finish.data.reason, finish.data.culm_reason) == ("error", "interrupted")


@contract("EXC-13")
async def test_signal_keeps_all_published_text_and_marks_the_message_interrupted(
    folder: Path,
) -> None:
    host = ("--host", f"unix://{folder}/s")
    async with (
        open_process_server(folder, *host, program=PUBLISHER) as first,
        open_client_of(first) as client,
    ):
        remote = await client.open_workspace(make_directory(folder))
        async with open_mirror(remote) as follower:
            first.send_line(Order(seed=8, sessions=0, drip=True).line())
            async with asyncio.timeout(WAIT_S):
                await follower.until(lambda m: text_of_drip(m).count(DRIP_WORD) > 3)
            assert (await first.end()).status == 0
            async with asyncio.timeout(WAIT_S):
                await follower.until(
                    lambda m: all(is_finished(x.parts) for x in m.messages.values())
                )
            published = list(follower.mirror.messages.values())
            async with open_process_server(folder, *host):
                await client.open_workspace(make_directory(folder))
                after = (await remote.snapshot("*")).messages
    assert after == published
    (finish,) = [part for part in after[0].parts if isinstance(part, FinishPart)]
    assert finish.data.culm_reason == "interrupted"


async def stored_text_beyond(database: Path, length: int) -> str:
    """Wait until the open message's text on disk is longer than `length`."""
    connection = sqlite3.connect(f"file:{database}?mode=ro", uri=True)
    try:
        async with asyncio.timeout(WAIT_S):
            while True:
                rows = connection.execute("SELECT text FROM chunks ORDER BY part, pos").fetchall()
                text = "".join(row[0] for row in rows)
                if len(text) > length:
                    return text
                await asyncio.sleep(0.02)
    finally:
        connection.close()


@contract("EXC-13")
async def test_follower_cut_off_repeatedly_equals_one_that_stayed_connected(
    folder: Path,
) -> None:
    order = Order(seed=31, sessions=4, messages=25)
    async with (
        open_process_server(folder, "--host", f"unix://{folder}/s", program=PUBLISHER) as server,
        open_proxy(folder, server.url) as proxy,
        open_client_of(server) as steady,
    ):
        here = await steady.open_workspace(make_directory(folder))
        async with open_client(proxy.url) as shaky, open_mirror(here) as stayed:
            there = await shaky.open_workspace(make_directory(folder))
            async with open_mirror(there) as left:
                async with asyncio.timeout(WAIT_S):
                    await stayed.connected()
                    await left.connected()
                server.send_line(order.line())
                for times in (1, 2, 3):
                    async with asyncio.timeout(RESUME_S):
                        await left.until(lambda _, n=times: left.stream.connections >= n)
                    proxy.cut()
                await server.until_line(f"end {here.id} 31", RESUME_S)
                final = await here.snapshot("*")
                for follower in (stayed, left):
                    await caught_up(follower, final)
                    assert_same(follower.mirror, final)
                assert stayed.stream.connections == 1
                assert left.stream.connections >= 3
                assert_survived(order, done_by(server), final)

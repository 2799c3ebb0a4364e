"""The log under many seeds: crashes, cuts and slow readers, and one state at the end."""

import asyncio
import contextlib

import pytest

from culm.errors import Rejected, StoreBusy
from culm.events import stream
from culm.events.stream import StartFresh
from culm.ids import Ids, MessageId, SessionId
from culm.run.draft import Draft
from culm.run.messages import Messages
from culm.store.sql import QUERIES
from culm.store.store import trim
from culm.wire.messages import Finish, Message, Text, TextPart, ToolCall, ToolCallPart
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SEEDS_MAX, SimLoop, simulate
from tests.sim.world import SimClient, SimServer
from tests.support import contract

OPERATIONS = 60
SETTLE_S = 300.0  # Virtual seconds; the longest back-off and stall are well inside.


class Writer:
    """Changes messages and sessions at random, in place of runs."""

    def __init__(self, server: SimServer) -> None:
        self.server = server
        self.random = server.loop.random
        self.sessions: list[SessionId] = []  # Acknowledged and not deleted since.
        self.deleting: set[SessionId] = set()
        self.drafts: list[tuple[LiveWorkspace, Draft]] = []
        self.messages: list[MessageId] = []

    async def run(self) -> None:
        for _ in range(OPERATIONS):
            await self.server.up.wait()
            workspace = self.server.workspace
            assert workspace is not None
            self.server.file.busy = self.random.random() < 0.1
            try:
                async with asyncio.timeout(0.5):  # A crashed server answers nobody.
                    await self._operate(workspace)
            except (TimeoutError, Rejected, StoreBusy):
                pass
            self.server.file.busy = False
            await asyncio.sleep(self.random.choice([0, 0, 0.001, 0.05, 0.2]))

    async def _operate(self, workspace: LiveWorkspace) -> None:
        drafts = [draft for owner, draft in self.drafts if owner is workspace and not draft.ended]
        roll = self.random.random()
        if not self.sessions or roll < 0.08:
            session = await workspace.sessions.create(f"session {len(self.sessions)}")
            self.sessions.append(session.id)
        elif roll < 0.12:
            session_id = self.random.choice(self.sessions)
            self.deleting.add(session_id)
            await workspace.sessions.delete(session_id)
        elif roll < 0.2:
            parts = [TextPart(Text("prompt " * self.random.choice([1, 3, 2_000])))]
            message, written = workspace.messages.add(self._session(), "user", list(parts))
            self.messages.append(message.id)
            await self._maybe(written)
        elif roll < 0.3 or not drafts:
            draft, written = workspace.messages.open(self._session(), model="m")
            self.drafts.append((workspace, draft))
            self.messages.append(draft.message.id)
            await self._maybe(written)
        elif roll < 0.33:
            await self._maybe(workspace.messages.delete(self.random.choice(self.messages)))
        else:
            await self._grow(workspace, self.random.choice(drafts))

    async def _grow(self, workspace: LiveWorkspace, draft: Draft) -> None:
        messages, parts, roll = workspace.messages, draft.message.parts, self.random.random()
        texts = [n for n, part in enumerate(parts) if isinstance(part, TextPart)]
        calls = [n for n, part in enumerate(parts) if isinstance(part, ToolCallPart)]
        if roll < 0.7:
            part = self.random.choice([*texts, len(parts)])
            for _ in range(self.random.randint(1, 5)):
                word = self.random.choice(["wörd ", "🌱", "x" * 300])
                messages.append(draft, part, "text", word)
                if self.random.random() < 0.5:
                    await asyncio.sleep(0)
        elif roll < 0.8:
            call = ToolCall(id=f"call_{len(parts)}", name="bash")
            await self._maybe(messages.put(draft, len(parts), ToolCallPart(call)))
        elif roll < 0.86 and calls:
            messages.append(draft, self.random.choice(calls), "input", '{"command":')
        elif roll < 0.92:
            await self._maybe(messages.clear(draft))
        else:
            await self._maybe(messages.finish(draft, Finish("end_turn", 1)))

    def _session(self) -> SessionId:
        return self.random.choice(self.sessions)

    async def _maybe(self, written: asyncio.Future[None]) -> None:
        """Some wait for their writes, some do not."""
        if self.random.random() < 0.6:
            await asyncio.shield(written)


async def chaos(server: SimServer, clients: list[SimClient]) -> None:
    while True:
        await asyncio.sleep(server.loop.random.random() * 2)
        server.file.group_max = server.loop.random.choice([1, 2, 1024])
        victim = server.loop.random.choice(clients)
        roll = server.loop.random.random()
        if roll < 0.2:
            for client in clients:
                client.cut()
                # Received events survive: nothing is published before its commit.
                seen = int(client.mirror.cursor.rpartition(".")[2] or 0)
                assert seen <= server.last_seq()
            server.crash.set()
        elif roll < 0.3:
            server.file.full = True
            await asyncio.sleep(server.loop.random.choice([0.0001, 0.0003, 0.5]))
            server.file.full = False
        elif roll < 0.45 and server.workspace is not None:
            server.workspace.store.write(trim(keep_s=1e9, keep=server.loop.random.randint(0, 20)))
        elif roll < 0.65:
            victim.cut()
        else:
            victim.sleepy = server.loop.random.choice([0.0, 0.5, 3.0])


async def one_world(loop: SimLoop) -> None:
    server = SimServer(loop)
    with contextlib.closing(server.file):
        await live_through(server)


async def live_through(server: SimServer) -> None:
    loop = server.loop
    ids = Ids(loop.random.randrange(1 << 30))
    clients = [SimClient(server, ids), SimClient(server, ids), SimClient(server, ids, "crush")]
    writer = Writer(server)
    async with asyncio.TaskGroup() as tasks:
        background = [tasks.create_task(server.run())]
        background += [tasks.create_task(client.run()) for client in clients]
        trouble = tasks.create_task(chaos(server, clients))
        await writer.run()
        trouble.cancel()
        server.file.full = False
        for client in clients:
            client.sleepy = 0.0
        await asyncio.sleep(2)  # The last crash is over.
        await agree(server, clients)
        check_order(clients)
        final = await server.snapshot()
        check_drafts(server)
        kept = {session.id for session in final.sessions}
        assert set(writer.sessions) - writer.deleting <= kept, "an acknowledged session is lost"
        for task in background:
            task.cancel()


async def agree(server: SimServer, clients: list[SimClient]) -> None:
    """All clients end in the state that is stored, within a bound."""
    deadline_s = server.loop.time() + SETTLE_S
    while True:
        final = await server.snapshot()
        stored = {message.id: message for message in final.messages}
        sessions = {session.id: session for session in final.sessions}
        if all(c.mirror.messages == stored and c.mirror.sessions == sessions for c in clients):
            return
        if server.loop.time() > deadline_s:
            break
        await asyncio.sleep(0.5)
    for n, client in enumerate(clients):
        assert client.mirror.sessions == sessions, f"client {n}: sessions differ"
        assert _texts(client.mirror.messages) == _texts(stored), f"client {n}: messages differ"
        assert client.mirror.messages == stored, f"client {n}: messages differ"


def check_drafts(server: SimServer) -> None:
    """Check that the open messages in the store are exactly the open drafts."""
    assert server.workspace is not None
    rows = server.file.connection.execute(QUERIES["open_messages"])
    drafts = {message_id for message_id, _ in server.workspace.messages.open_ids()}
    assert drafts == {row["id"] for row in rows}


def _texts(messages: dict[MessageId, Message]) -> dict[MessageId, tuple[int, int]]:
    return {k: (m.rev, len(m.parts)) for k, m in messages.items()}


def check_order(clients: list[SimClient]) -> None:
    for client in clients:
        numbers = [int(cursor.rpartition(".")[2]) for cursor in client.seen]
        assert numbers == sorted(set(numbers)), "an event came twice or out of order"


@contract("EXC-13", "INV-65", "INV-66", "INV-62", "INV-64")
@pytest.mark.parametrize("seed", range(SEEDS_MAX))
def test_reconnected_clients_end_in_the_stored_state(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "PAGE", 3)  # So that a short history takes several pages.
    simulate(seed, one_world)


# --- ablations: each disabled safeguard must be detected


def fails_somewhere(seeds: range = range(40)) -> bool:
    for seed in seeds:
        try:
            simulate(seed, one_world)
        except (AssertionError, BaseExceptionGroup):
            return True
    return False


def test_simulation_detects_a_missing_replay_cursor(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin_at_now(*_: object, **__: object) -> StartFresh:
        return StartFresh()

    monkeypatch.setattr(stream, "where_to_start", begin_at_now)
    assert fails_somewhere()


def test_simulation_detects_deltas_sent_before_their_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Draft, "is_pending", property(lambda _: False))
    assert fails_somewhere()


def test_simulation_detects_a_hidden_later_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    after_write = Messages._after_write  # pyright: ignore[reportPrivateUsage]

    def forgetful(self: Messages, draft: Draft) -> None:
        draft.last_failed = 0
        after_write(self, draft)

    monkeypatch.setattr(Messages, "_after_write", forgetful)
    assert fails_somewhere(range(300))


def test_simulation_detects_missing_snapshots_on_attach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def none_open(_: Messages) -> tuple[()]:
        return ()

    monkeypatch.setattr(Messages, "open_ids", none_open)
    assert fails_somewhere()

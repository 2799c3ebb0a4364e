"""One event stream that outlives its connections, and the state that its events make.

`Stream` resumes by cursor through restarts and lost networks. `Mirror` applies events and deltas;
after any interruption it ends in exactly the state of one that never left.
"""

import asyncio
import builtins
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import NamedTuple, TypeVar
from urllib.parse import urlencode

import msgspec
from msgspec.structs import replace

from culm.client.http import Refused
from culm.client.workspace import RemoteWorkspace
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, PermissionNotification, QuestionChanged
from culm.wire.codec import decode
from culm.wire.events import CURSOR_HEADER, CallOutput, Envelope, MessageDelta, Resync
from culm.wire.messages import GoneMessage, Message, append_text
from culm.wire.runs import QueueChanged, QueuedPrompt, RunChanged, RunRetry, changed_of
from culm.wire.sessions import Session
from culm.wire.state import Present, Snapshot, StoreHealth

T = TypeVar("T")

# Three heartbeats of the server: a connection that is silent for longer is dead.
IDLE_TIMEOUT_S = 45.0
BACKOFF_FIRST_S = 0.25
BACKOFF_MAX_S = 10.0
REJOINED_S = 0.05  # It is there again; only a server that drops it at once makes this a loop.
EVENT_BYTES_MAX = 64 << 20
# What passes by is kept for whoever looks only now and then: of so many asks or calls ...
KEPT_MAX = 256
OUTPUT_CHARS_MAX = 64_000  # ... and so much of what one call puts out; its result has the rest.


class Told(NamedTuple):
    """One event as it arrived. Numbered ones have a cursor."""

    type: str
    op: str
    payload: msgspec.Raw
    cursor: str = ""

    def read(self, kind: builtins.type[T]) -> T:
        return decode(self.payload, kind)


class TooMuch(Exception):
    """The server sent an event larger than any it should."""


class Lines:
    """Server-sent events out of bytes, however they were cut on the way."""

    def __init__(self) -> None:
        self._rest: list[bytes] = []  # Of an event that has not arrived whole.
        self._size = 0

    def feed(self, data: bytes) -> list[Told]:
        """The events that `data` completes."""
        last = self._rest[-1][-1:] if self._rest else b""
        self._rest.append(data)
        self._size += len(data)
        if b"\n\n" not in last + data:
            if self._size > EVENT_BYTES_MAX:
                raise TooMuch(f"an event may have at most {EVENT_BYTES_MAX} bytes")
            return []
        *events, rest = b"".join(self._rest).split(b"\n\n")
        self._rest, self._size = [rest] if rest else [], len(rest)
        return [told for event in events if (told := _parse_event(event)) is not None]


def _parse_event(text: bytes) -> Told | None:
    cursor = data = b""
    for line in text.split(b"\n"):
        if line.startswith(b"data: "):
            data = line[6:]
        elif line.startswith(b"id: "):
            cursor = line[4:]
    if not data:
        return None  # A heartbeat.
    envelope = decode(data, Envelope)
    inner = envelope.payload
    return Told(envelope.type, inner.type, inner.payload, cursor.decode() or envelope.cursor)


class Backoff:
    """Pauses that double up to a bound, until something works again."""

    def __init__(self) -> None:
        self._next_s = BACKOFF_FIRST_S

    def reset(self, first_s: float = BACKOFF_FIRST_S) -> None:
        self._next_s = first_s

    async def pause(self) -> None:
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, BACKOFF_MAX_S)
        await asyncio.sleep(pause_s)


class Stream:
    """Events of one workspace, from a cursor on, for as long as they are read."""

    def __init__(
        self,
        workspace: RemoteWorkspace,
        *,
        cursor: str = "",
        view: str = "delta",
        sessions: frozenset[str] = frozenset(),
        types: frozenset[str] = frozenset(),
        interactive: bool = False,
        on_connected: Callable[[], None] | None = None,
    ) -> None:
        self.cursor = cursor
        self.connections = 0  # How often it has been connected so far.
        self.workspace = workspace
        self.on_connected = on_connected
        self._view = view
        self._sessions = sessions
        self._types = types
        self._interactive = interactive

    async def events(self) -> AsyncGenerator[Told]:
        """Yield events for ever; reconnect and rejoin as needed.

        Raises `Refused` for what coming back cannot mend: a wrong token, a retired client.
        """
        backoff = Backoff()
        while True:
            try:
                async with aclosing(self._connection()) as connection:
                    async for told in connection:
                        backoff.reset()
                        yield told
            except Refused as exc:
                if exc.status == 404:
                    if await self.rejoin():
                        backoff.reset(REJOINED_S)
                elif not exc.may_pass:
                    raise
            except OSError:
                await self.workspace.client.revive()
            await backoff.pause()

    async def rejoin(self) -> bool:
        """Whether it is there again; if not, the next round tries."""
        try:
            await self.workspace.rejoin()
            return True
        except OSError:
            return False
        except Refused as exc:
            if not exc.may_pass:
                raise
            return False

    async def _connection(self) -> AsyncGenerator[Told]:
        query = {"client_id": self.workspace.client.id, "view": self._view}
        if self.cursor:
            query["cursor"] = self.cursor
        if self._sessions:
            query["sessions"] = ",".join(sorted(self._sessions))
        if self._types:
            query["types"] = ",".join(sorted(self._types))
        if self._interactive:
            query["interactive"] = "1"
        path = self.workspace.path(f"/events?{urlencode(query)}")
        async with self.workspace.client.stream(path) as answer:
            self.connections += 1
            self.cursor = self.cursor or answer.headers.get(CURSOR_HEADER.lower(), "")
            if self.on_connected is not None:
                self.on_connected()
            lines = Lines()
            while data := await answer.piece(IDLE_TIMEOUT_S):
                for told in lines.feed(data):
                    if told.cursor:
                        self.cursor = told.cursor
                    elif told.type == "resync":
                        self.cursor = told.read(Resync).cursor
                    yield told


class Gap(NamedTuple):
    """A delta did not fit: read this message again."""

    session_id: SessionId
    message_id: MessageId


class Mirror:
    """The state of a workspace as its events tell it."""

    def __init__(self) -> None:
        self.cursor = ""
        self.sessions: dict[SessionId, Session] = {}
        self.messages: dict[MessageId, Message] = {}
        self.runs: dict[RunId, RunChanged] = {}  # Those that have not ended.
        self.retries: dict[RunId, RunRetry] = {}  # The latest of each run that goes on.
        # Those that wait in a session, in their order, each with the beginning of its prompt.
        self.queue: dict[SessionId, list[QueuedPrompt]] = {}
        self.agents: dict[AgentId, Agent] = {}  # Those that have not ended.
        self.presence: dict[str, str] = {}
        self.store = StoreHealth("ok")
        # What people are asked: all that is open, and what was closed lately.
        self.asks: dict[AskId, AskChanged] = {}
        self.questions: dict[AskId, QuestionChanged] = {}
        self.granted: dict[str, None] = {}  # Calls that were let through lately, by their id ...
        self.outputs: dict[str, str] = {}  # ... and what calls have put out.

    def load(self, snapshot: Snapshot[Message]) -> None:
        """Begin again from a snapshot."""
        self.cursor = snapshot.cursor
        self.sessions = {session.id: session for session in snapshot.sessions}
        self.messages = {message.id: message for message in snapshot.messages}
        self.runs = {run.id: changed_of(run) for run in snapshot.runs}
        self.retries = {}
        self.queue = {}
        for run in snapshot.runs:
            if run.state == "queued":
                waiting = self.queue.setdefault(run.session_id, [])
                waiting.append(QueuedPrompt(run.id, run.prompt))
        self.agents = {agent.agent_id: agent for agent in snapshot.agents}
        self.presence = {p.client_id: p.session_id for p in snapshot.presence}
        self.store = snapshot.store
        self.asks, self.questions = {}, {}  # What is open is told when a stream begins.

    def apply(self, told: Told) -> Gap | None:
        """Take one event in. Events up to the cursor are known; a lower rev is ignored."""
        if not self.pass_by(told):
            return None
        match told.type, told.op:
            case "session", "deleted":
                self._forget_session(told.read(Session).id)
            case "session", _:
                session = told.read(Session)
                self.sessions[session.id] = session
            case "message", "deleted":
                self.messages.pop(told.read(GoneMessage).id, None)
            case (("message" | "message_snapshot"), _):
                self.put_message(told.read(Message))
            case "message_delta", _:
                return self._append(told.read(MessageDelta))
            case "run_changed", _:
                run = told.read(RunChanged)
                self.runs[run.run_id] = run
                if run.state == "ended":
                    del self.runs[run.run_id]
                    self.retries.pop(run.run_id, None)
            case "queue_changed", _:
                queue = told.read(QueueChanged)
                self.queue[queue.session_id] = queue.items
                if not queue.items:
                    del self.queue[queue.session_id]
            case (("agent_started" | "agent_changed" | "agent_ended"), _):
                self.put_agent(told.read(Agent), gone=told.op == "deleted")
            case "run_retry", _:
                retry = told.read(RunRetry)
                self.retries[retry.run_id] = retry
            case "ask_changed", _:
                ask = told.read(AskChanged)
                _keep(self.asks, ask.ask_id, ask)
            case "question_changed", _:
                batch = told.read(QuestionChanged)
                _keep(self.questions, batch.batch_id, batch)
            case "permission_notification", _:
                notified = told.read(PermissionNotification)
                if notified.granted:
                    self.granted[notified.tool_call_id] = None
                    _drop_first(self.granted)
            case "call_output", _:
                self._put_out(told.read(CallOutput))
            case "presence_changed", "deleted":
                self.presence.clear()  # An attach begins: who is there follows.
            case "presence_changed", _:
                present = told.read(Present)
                if present.attached:
                    self.presence[present.client_id] = present.session_id
                else:
                    self.presence.pop(present.client_id, None)
            case "store_health", _:
                self.store = told.read(StoreHealth)
            case _:
                pass  # A newer server's event; it is none of this state.
        return None

    def pass_by(self, told: Told) -> bool:
        """Move the cursor to an event; False if that has passed it already."""
        if told.cursor:
            if _seq(told.cursor) <= _seq(self.cursor):
                return False
            self.cursor = told.cursor
        return True

    def _put_out(self, output: CallOutput) -> None:
        """Of what was missed only the end is known; so much is for watching."""
        before = self.outputs.pop(output.tool_call_id, "")[: output.offset]
        self.outputs[output.tool_call_id] = (before + output.text)[:OUTPUT_CHARS_MAX]
        _drop_first(self.outputs)

    def _forget_session(self, session_id: SessionId) -> None:
        """With a session goes all that is about it; of the rest of it nothing is told."""
        self.sessions.pop(session_id, None)
        self.queue.pop(session_id, None)
        self.messages = _without(session_id, self.messages)
        self.runs = _without(session_id, self.runs)
        self.retries = _without(session_id, self.retries)
        self.asks = _without(session_id, self.asks)
        self.questions = _without(session_id, self.questions)
        self.agents = _without(session_id, self.agents)

    def put_agent(self, agent: Agent, *, gone: bool) -> None:
        """Take in how an agent stands; one that is gone went with its session."""
        if gone or agent.state == "ended":
            self.agents.pop(agent.agent_id, None)
        else:
            self.agents[agent.agent_id] = agent

    def put_message(self, message: Message) -> None:
        known = self.messages.get(message.id)
        if known is None or message.rev >= known.rev:
            self.messages[message.id] = message

    def _append(self, delta: MessageDelta) -> Gap | None:
        message = self.messages.get(delta.message_id)
        if message is not None and delta.rev < message.rev:
            return None
        if message is None or delta.rev > message.rev:
            return Gap(delta.session_id, delta.message_id)
        if not append_text(message.parts, delta.part, delta.kind, delta.offset, delta.text):
            return Gap(delta.session_id, delta.message_id)
        return None


K = TypeVar("K")
S = TypeVar("S", Message, RunChanged, RunRetry, AskChanged, QuestionChanged, Agent)


def _without(session_id: SessionId, known: dict[K, S]) -> dict[K, S]:
    return {key: one for key, one in known.items() if one.session_id != session_id}


def _drop_first(kept: dict[str, None] | dict[str, str]) -> None:
    if len(kept) > KEPT_MAX:
        del kept[next(iter(kept))]


A = TypeVar("A", AskChanged, QuestionChanged)


def _keep(known: dict[AskId, A], ask_id: AskId, ask: A) -> None:
    """Take in how an ask stands; of those that are closed the oldest are forgotten."""
    known[ask_id] = ask
    if len(known) > KEPT_MAX:
        closed = (one for one, ask in known.items() if ask.state != "open")
        if (oldest := next(closed, None)) is not None:
            del known[oldest]


def _seq(cursor: str) -> int:
    return int(cursor.rpartition(".")[2] or 0)


class Follower:
    """A mirror that keeps itself up to date. Made by `open_mirror`, or by `open_tree`."""

    def __init__(self, mirror: Mirror, stream: Stream, load: Callable[[], Awaitable[None]]) -> None:
        self.mirror = mirror
        self.stream = stream
        self._load = load  # Begins the mirror again, from what is stored.
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        stream.on_connected = self._connected.set

    async def until(self, condition: Callable[[Mirror], bool]) -> None:
        """Wait for a state; the caller bounds the wait."""
        while not condition(self.mirror):
            self._changed.clear()
            await self._changed.wait()

    async def connected(self) -> None:
        await self._connected.wait()

    async def run(self) -> None:
        while True:
            await self._keep_trying(self._begin)
            await self._follow()

    async def _follow(self) -> None:
        """Apply events until a resync: what else is on that connection may be older than a load."""
        async with aclosing(self.stream.events()) as events:
            async for told in events:
                if told.type == "resync":
                    return
                if (gap := self.mirror.apply(told)) is not None:
                    await self._keep_trying(partial(self._fill, gap))
                self._changed.set()

    async def _keep_trying(self, read: Callable[[], Awaitable[None]]) -> None:
        """Read in spite of a server that is just now restarting."""
        backoff = Backoff()
        while True:
            try:
                return await read()
            except OSError:
                await self.stream.workspace.client.revive()
            except Refused as exc:
                if exc.status == 404:
                    await self.stream.rejoin()
                elif not exc.may_pass:
                    raise
            await backoff.pause()

    async def _begin(self) -> None:
        await self._load()
        self.stream.cursor = self.mirror.cursor
        self._changed.set()

    async def _fill(self, gap: Gap) -> None:
        message = await self.stream.workspace.find_message(gap.session_id, gap.message_id)
        if message is not None:
            self.mirror.put_message(message)


def only_of(snapshot: Snapshot[Message], sessions: Collection[str]) -> Snapshot[Message]:
    """Without runs and agents of other sessions: a stream of these tells nothing of those."""
    return replace(
        snapshot,
        runs=[run for run in snapshot.runs if run.session_id in sessions],
        agents=[agent for agent in snapshot.agents if agent.session_id in sessions],
    )


@asynccontextmanager
async def open_mirror(
    workspace: RemoteWorkspace, *sessions: str, interactive: bool = False
) -> AsyncGenerator[Follower]:
    """Follow a workspace while in the block: the sessions named, or all of them.

    `interactive` says that a person is here who can be asked for permission.
    """
    mirror = Mirror()
    stream = Stream(workspace, sessions=frozenset(sessions), interactive=interactive)

    async def load() -> None:
        snapshot = await workspace.snapshot(*(sessions or "*"))
        mirror.load(only_of(snapshot, sessions) if sessions else snapshot)

    async with open_follower(Follower(mirror, stream, load)) as follower:
        yield follower


@asynccontextmanager
async def open_follower(follower: Follower) -> AsyncGenerator[Follower]:
    """Keep its mirror up to date while in the block."""
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(follower.run(), name="mirror")
        try:
            yield follower
        finally:
            task.cancel()

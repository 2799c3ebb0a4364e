"""The state of a workspace, derived from its events.

After any interruption it equals the state of a mirror that was never interrupted.
"""

from typing import NamedTuple, TypeVar

from culm.client.stream import ServerEvent
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, PermissionNotification, QuestionChanged
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import GoneMessage, Message, Session, append_text
from culm.wire.runs import QueueChanged, QueuedPrompt, RunChanged, RunRetry, changed_of
from culm.wire.workspaces import Present, Snapshot, StoreHealth

# Past state is kept for clients that look only now and then: of this many asks, runs or calls ...
RECENT_MAX = 256
OUTPUT_CHARS_MAX = 64_000  # ... and this much of the output of one call; its result has the rest.


class DeltaGap(NamedTuple):
    """A message to read again, because a delta did not fit."""

    session_id: SessionId
    message_id: MessageId


class Mirror:
    """The state of a workspace, derived from its events."""

    def __init__(self) -> None:
        self.cursor = ""
        self.sessions: dict[SessionId, Session] = {}
        self.messages: dict[MessageId, Message] = {}
        self.runs: dict[RunId, RunChanged] = {}  # Runs that have not ended ...
        self.ended: dict[str, None] = {}  # ... and the ids of those that ended recently.
        self.retries: dict[RunId, RunRetry] = {}  # The latest retry of each live run.
        # The queue of each session, in order, with the beginning of each prompt.
        self.queue: dict[SessionId, list[QueuedPrompt]] = {}
        self.agents: dict[AgentId, Agent] = {}  # Agents that have not ended.
        self.presence: dict[str, str] = {}
        self.store = StoreHealth("ok")
        # Asks and questions: all open ones, and those closed recently.
        self.asks: dict[AskId, AskChanged] = {}
        self.questions: dict[AskId, QuestionChanged] = {}
        self.granted: dict[str, None] = {}  # Ids of calls allowed recently ...
        self.outputs: dict[str, str] = {}  # ... and the output of calls.

    def load(self, snapshot: Snapshot[Message]) -> None:
        """Replace the state by a snapshot."""
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
        self.asks, self.questions = {}, {}  # The stream sends the open ones when it starts.

    def apply(self, event: ServerEvent) -> DeltaGap | None:
        """Apply one event. Events up to the cursor and messages with a lower rev are ignored."""
        if not self.advance_cursor(event):
            return None
        match event.type, event.op:
            case "session", "deleted":
                self._forget_session(event.read(Session).id)
            case "session", _:
                session = event.read(Session)
                self.sessions[session.id] = session
            case "message", "deleted":
                self.messages.pop(event.read(GoneMessage).id, None)
            case (("message" | "message_snapshot"), _):
                self.put_message(event.read(Message))
            case "message_delta", _:
                return self._append(event.read(MessageDelta))
            case "run_changed", _:
                run = event.read(RunChanged)
                self.runs[run.run_id] = run
                if run.state == "ended":
                    del self.runs[run.run_id]
                    self.retries.pop(run.run_id, None)
                    self.ended[run.run_id] = None
                    _evict_oldest(self.ended)
            case "queue_changed", _:
                queue = event.read(QueueChanged)
                self.queue[queue.session_id] = queue.items
                if not queue.items:
                    del self.queue[queue.session_id]
            case (("agent_started" | "agent_changed" | "agent_ended"), _):
                self.put_agent(event.read(Agent), gone=event.op == "deleted")
            case "run_retry", _:
                retry = event.read(RunRetry)
                self.retries[retry.run_id] = retry
            case "ask_changed", _:
                ask = event.read(AskChanged)
                _put_ask(self.asks, ask.ask_id, ask)
            case "question_changed", _:
                batch = event.read(QuestionChanged)
                _put_ask(self.questions, batch.batch_id, batch)
            case "permission_notification", _:
                notified = event.read(PermissionNotification)
                if notified.granted:
                    self.granted[notified.tool_call_id] = None
                    _evict_oldest(self.granted)
            case "call_output", _:
                self._append_output(event.read(CallOutput))
            case "presence_changed", "deleted":
                self.presence.clear()  # A stream attaches: the present clients follow.
            case "presence_changed", _:
                present = event.read(Present)
                if present.attached:
                    self.presence[present.client_id] = present.session_id
                else:
                    self.presence.pop(present.client_id, None)
            case "store_health", _:
                self.store = event.read(StoreHealth)
            case _:
                pass  # An event of a newer server, which this state does not include.
        return None

    def advance_cursor(self, event: ServerEvent) -> bool:
        """Move the cursor to an event; return False if the event is not new."""
        if event.cursor:
            if _seq(event.cursor) <= _seq(self.cursor):
                return False
            self.cursor = event.cursor
        return True

    def _append_output(self, output: CallOutput) -> None:
        """Add output of a call. A gap is not filled, because output is for display only."""
        before = self.outputs.pop(output.tool_call_id, "")[: output.offset]
        self.outputs[output.tool_call_id] = (before + output.text)[:OUTPUT_CHARS_MAX]
        _evict_oldest(self.outputs)

    def _forget_session(self, session_id: SessionId) -> None:
        """Remove a session and everything about it; no events are published for the parts."""
        self.sessions.pop(session_id, None)
        self.queue.pop(session_id, None)
        self.messages = _without(session_id, self.messages)
        self.runs = _without(session_id, self.runs)
        self.retries = _without(session_id, self.retries)
        self.asks = _without(session_id, self.asks)
        self.questions = _without(session_id, self.questions)
        self.agents = _without(session_id, self.agents)

    def put_agent(self, agent: Agent, *, gone: bool) -> None:
        """Store the state of an agent; `gone` means that it was deleted with its session."""
        if gone or agent.state == "ended":
            self.agents.pop(agent.agent_id, None)
        else:
            self.agents[agent.agent_id] = agent

    def put_message(self, message: Message) -> None:
        known = self.messages.get(message.id)
        if known is None or message.rev >= known.rev:
            self.messages[message.id] = message

    def _append(self, delta: MessageDelta) -> DeltaGap | None:
        message = self.messages.get(delta.message_id)
        if message is not None and delta.rev < message.rev:
            return None
        if message is None or delta.rev > message.rev:
            return DeltaGap(delta.session_id, delta.message_id)
        if not append_text(message.parts, delta.part, delta.kind, delta.offset, delta.text):
            return DeltaGap(delta.session_id, delta.message_id)
        return None


K = TypeVar("K")
S = TypeVar("S", Message, RunChanged, RunRetry, AskChanged, QuestionChanged, Agent)


def _without(session_id: SessionId, known: dict[K, S]) -> dict[K, S]:
    return {key: one for key, one in known.items() if one.session_id != session_id}


def _evict_oldest(entries: dict[str, None] | dict[str, str]) -> None:
    if len(entries) > RECENT_MAX:
        del entries[next(iter(entries))]


A = TypeVar("A", AskChanged, QuestionChanged)


def _put_ask(known: dict[AskId, A], ask_id: AskId, ask: A) -> None:
    """Store the state of an ask, and evict the oldest closed one if there are too many."""
    known[ask_id] = ask
    if len(known) > RECENT_MAX:
        closed = (one for one, ask in known.items() if ask.state != "open")
        if (oldest := next(closed, None)) is not None:
            del known[oldest]


def _seq(cursor: str) -> int:
    return int(cursor.rpartition(".")[2] or 0)

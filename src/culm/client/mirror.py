"""The state of a workspace as its events tell it.

After any interruption it is exactly the state of a mirror that never left.
"""

from typing import NamedTuple, TypeVar

from culm.client.stream import ServerEvent
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, PermissionNotification, QuestionChanged
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import GoneMessage, Message, append_text
from culm.wire.runs import QueueChanged, QueuedPrompt, RunChanged, RunRetry, changed_of
from culm.wire.sessions import Session
from culm.wire.state import Present, Snapshot, StoreHealth

# What passes by is kept for whoever looks only now and then: of so many asks or calls ...
KEPT_MAX = 256
OUTPUT_CHARS_MAX = 64_000  # ... and so much of what one call puts out; its result has the rest.


class DeltaGap(NamedTuple):
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

    def apply(self, told: ServerEvent) -> DeltaGap | None:
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

    def pass_by(self, told: ServerEvent) -> bool:
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

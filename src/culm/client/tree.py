"""A session and all that work for one run of it, at any depth: each has a mirror of its own.

Which sessions these are is not known beforehand, so the stream is that of the whole workspace, and
what belongs to others is passed over unread. Ids of calls are unique in a session only, which is
why one mirror for all of them would mix them up.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from msgspec import Struct
from msgspec.structs import replace

from culm.client.follower import Follower, only_of, open_follower
from culm.client.mirror import DeltaGap, Mirror
from culm.client.stream import EventStream, ServerEvent
from culm.client.workspace import RemoteWorkspace
from culm.ids import AskId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, QuestionChanged
from culm.wire.messages import Message
from culm.wire.state import Snapshot

AGENT_TYPES = frozenset({"agent_started", "agent_changed", "agent_ended"})
# What a tree is made of. The rest of a workspace's events need not be sent.
TYPES = AGENT_TYPES | {
    *("session", "message", "message_snapshot", "message_delta", "call_output", "queue_changed"),
    *("run_changed", "run_retry", "ask_changed", "question_changed", "permission_notification"),
}
NAMED_MAX = 50  # Sessions in one address, which is bounded.
LOADS_MAX = 3  # Agents may start while it is read who there are; what comes later is told.


class _Whose(Struct):
    """Of any payload: the session it is about."""

    session_id: str = ""
    id: str = ""


@dataclass(slots=True)
class AgentBranch:
    """An agent, and what its session has come to since it was given its work."""

    agent: Agent
    mirror: Mirror = field(default_factory=Mirror)


class SessionTree(Mirror):
    """The mirror of a session, with a branch for each agent that works for one run of it, or any.

    A branch stays until it is dropped, also when the agent has ended.
    """

    def __init__(self, top: SessionId, run_id: RunId | None) -> None:
        super().__init__()
        self.top = top
        self.branches: dict[SessionId, AgentBranch] = {}
        self.touched: dict[SessionId, None] = {}  # Branches that changed and were not looked at.
        self._run_id = run_id

    def load(self, snapshot: Snapshot[Message]) -> None:
        """Begin again from a snapshot of the sessions in `names`."""
        super().load(only_of(replace(snapshot, messages=[]), [self.top]))
        self.agents = {agent.agent_id: agent for agent in snapshot.agents}  # All are told of.
        for branch in self.branches.values():
            branch.mirror = Mirror()
        for message in snapshot.messages:
            self.put_message(message)
        self.touched = dict.fromkeys(self.branches)

    def apply(self, told: ServerEvent) -> DeltaGap | None:
        if told.type in AGENT_TYPES:
            if self.pass_by(told):
                agent = told.read(Agent)
                self.put_agent(agent, gone=told.op == "deleted")
                if told.op == "deleted":
                    agent.state = "ended"  # With its session.
                self._on_agent(agent, is_new=told.type == "agent_started")
            return None
        whose = told.read(_Whose)
        # A notification of a permission need not say whose it is; then it is the top's.
        session_id = SessionId(whose.id if told.type == "session" else whose.session_id)
        if session_id in ("", self.top):
            return super().apply(told)
        branch = self.branches.get(session_id)
        if not self.pass_by(told) or branch is None:
            return None
        self.touched[session_id] = None
        return branch.mirror.apply(told)

    def put_message(self, message: Message) -> None:
        branch = self.branches.get(message.session_id)
        if branch is not None:
            self.touched[message.session_id] = None
            branch.mirror.put_message(message)
        elif message.session_id == self.top:
            super().put_message(message)

    def adopt(self, agents: Iterable[Agent]) -> bool:
        """Take in how all agents stand; True if there are some that were not known."""
        before = len(self.branches)
        for agent in agents:  # Those started first come first, so parents come before children.
            # Who works for nobody that waits for it may have been there before the run.
            self._on_agent(agent, is_new=not agent.is_detached)
        return len(self.branches) > before

    def drop(self, session_id: SessionId) -> None:
        """Forget an agent that was shown to its end; with more to do it comes again."""
        self.branches.pop(session_id, None)
        self.touched.pop(session_id, None)

    def names(self) -> list[str]:
        """The sessions to read anew; of others each message is read when it grows."""
        return [self.top, *list(self.branches)[-NAMED_MAX:]]

    def asked(self) -> Iterator[AskChanged | QuestionChanged]:
        """What this run and its agents ask of people."""
        for mirror in (self, *(branch.mirror for branch in self.branches.values())):
            for ask in (*mirror.asks.values(), *mirror.questions.values()):
                if mirror is not self or self._run_id in (None, ask.run_id):
                    yield ask

    def is_closed(self, ask: AskChanged | QuestionChanged) -> bool:
        """Whether it was answered; or forgotten, with an agent that has ended."""
        mirror: Mirror | None = self
        if ask.session_id != self.top:
            branch = self.branches.get(ask.session_id)
            mirror = None if branch is None else branch.mirror
        if mirror is None:
            return True
        now = mirror.asks.get(id_of(ask)) or mirror.questions.get(id_of(ask))
        return now is not None and now.state != "open"

    def titles(self, path: Sequence[str]) -> list[str]:
        """What the agents of a path are called; without the one that people talk to."""
        agents = [branch.agent for branch in self.branches.values()]
        names: dict[str, str] = {agent.agent_id: agent.name for agent in agents}
        return [names.get(agent_id) or agent_id[:8] for agent_id in path if agent_id != self.top]

    def _on_agent(self, agent: Agent, *, is_new: bool) -> None:
        branch = self.branches.get(agent.session_id)
        if branch is not None:
            branch.agent = agent
        elif agent.state != "ended" and self._is_ours(agent, is_new=is_new):
            self.branches[agent.session_id] = AgentBranch(agent)
        else:
            return
        self.touched[agent.session_id] = None

    def _is_ours(self, agent: Agent, *, is_new: bool) -> bool:
        if agent.parent_session_id in self.branches:
            return True
        runs = [run for run in self.runs.values() if self._run_id in (None, run.run_id)]
        begun = any(run.state not in ("accepted", "queued") for run in runs)
        # Runs of a session follow each other, so what is started while this one goes on is its own.
        return (
            agent.parent_session_id == self.top and begun and (is_new or agent.state == "pending")
        )


def id_of(ask: AskChanged | QuestionChanged) -> AskId:
    return ask.ask_id if isinstance(ask, AskChanged) else ask.batch_id


@asynccontextmanager
async def open_tree(
    workspace: RemoteWorkspace,
    top: SessionId,
    run_id: RunId | None,
    *,
    interactive: bool = False,
    cursor: str = "",
) -> AsyncGenerator[tuple[Follower, SessionTree]]:
    """Follow a run and all who work for it while in the block. The run may still be to come.

    Without a run it is all runs of the session. With a `cursor` there is at first only what has
    changed since; if the server does not know that any more, all there is.
    """
    tree = SessionTree(top, run_id)
    stream = EventStream(workspace, types=TYPES, interactive=interactive)
    since = [cursor] if cursor else []

    async def load() -> None:
        if since:
            tree.cursor = since.pop()
        else:
            await load_tree(workspace, tree)

    async with open_follower(Follower(tree, stream, load)) as follower:
        yield follower, tree


async def load_tree(workspace: RemoteWorkspace, tree: SessionTree) -> None:
    """Begin a tree, or begin it again: with all who work for the run by now."""
    for _ in range(LOADS_MAX):
        tree.load(await workspace.snapshot(*tree.names()))
        if not tree.adopt(await workspace.agents(tree.top)):
            break

"""A session and all sub-agents of one of its runs, at any depth, each with a mirror of its own.

The sessions of sub-agents are not known in advance, so the stream covers the whole workspace and
events of other sessions are skipped. A single mirror would mix up calls, because the ids of calls
are unique only within a session.
"""

from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager

from msgspec import Struct, field
from msgspec.structs import replace

from culm.client.follower import Follower, open_follower, restrict_to_sessions
from culm.client.mirror import DeltaGap, Mirror
from culm.client.stream import EventStream, ServerEvent
from culm.client.workspace import RemoteWorkspace
from culm.ids import AskId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, QuestionChanged
from culm.wire.events import PAYLOADS, SESSION_EVENTS
from culm.wire.messages import Message
from culm.wire.workspaces import Snapshot

AGENT_TYPES = frozenset(name for name in SESSION_EVENTS if PAYLOADS[name] is Agent)
# The events of a tree: those of sessions, and the Crush events that the mirror reads.
TYPES = frozenset({*SESSION_EVENTS, "session", "message", "permission_notification"})
SESSIONS_MAX = 50  # Sessions in one request, because the length of a URL is limited.
LOADS_MAX = 3  # Agents may start during a load; events report those that start later.


class _SessionRef(Struct):
    """The session of any payload."""

    session_id: str = ""
    id: str = ""


class AgentBranch(Struct):
    """An agent, and the state of its session since the start of its assignment."""

    agent: Agent
    mirror: Mirror = field(default_factory=Mirror)


class SessionTree(Mirror):
    """The mirror of a session, with a branch for each sub-agent of one run, or of all runs.

    A branch stays until it is dropped, even if the agent has ended.
    """

    def __init__(self, top: SessionId, run_id: RunId | None) -> None:
        super().__init__()
        self.top = top
        self.branches: dict[SessionId, AgentBranch] = {}
        self.touched: dict[SessionId, None] = {}  # Branches with changes that were not shown yet.
        self._run_id = run_id

    def load(self, snapshot: Snapshot[Message]) -> None:
        """Replace the state by a snapshot of the sessions in `session_ids`."""
        super().load(restrict_to_sessions(replace(snapshot, messages=[]), [self.top]))
        # The stream includes the agents of all sessions.
        self.agents = {agent.agent_id: agent for agent in snapshot.agents}
        for branch in self.branches.values():
            branch.mirror = Mirror()
        for message in snapshot.messages:
            self.put_message(message)
        self.touched = dict.fromkeys(self.branches)

    def apply(self, event: ServerEvent) -> DeltaGap | None:
        if event.type in AGENT_TYPES:
            if self.advance_cursor(event):
                agent = event.read(Agent)
                self.put_agent(agent, gone=event.op == "deleted")
                if event.op == "deleted":
                    agent.state = "ended"  # It was deleted with its session.
                self._on_agent(agent, is_new=event.type == "agent_started")
            return None
        ref = event.read(_SessionRef)
        # A permission notification may lack the session, and then belongs to the top one.
        session_id = SessionId(ref.id if event.type == "session" else ref.session_id)
        if session_id in ("", self.top):
            return super().apply(event)
        branch = self.branches.get(session_id)
        if not self.advance_cursor(event) or branch is None:
            return None
        self.touched[session_id] = None
        return branch.mirror.apply(event)

    def put_message(self, message: Message) -> None:
        branch = self.branches.get(message.session_id)
        if branch is not None:
            self.touched[message.session_id] = None
            branch.mirror.put_message(message)
        elif message.session_id == self.top:
            super().put_message(message)

    def add_agents(self, agents: Iterable[Agent]) -> bool:
        """Store the state of all agents; return True if some of them are new."""
        before = len(self.branches)
        for agent in agents:  # In order of their start, so parents come before children.
            # A detached agent may have been started before the run.
            self._on_agent(agent, is_new=not agent.is_detached)
        return len(self.branches) > before

    def drop(self, session_id: SessionId) -> None:
        """Remove an agent that was shown completely; a new assignment adds it again."""
        self.branches.pop(session_id, None)
        self.touched.pop(session_id, None)

    def session_ids(self) -> list[str]:
        """The sessions to load; messages of others are loaded when they grow."""
        return [self.top, *list(self.branches)[-SESSIONS_MAX:]]

    def all_asks(self) -> Iterator[AskChanged | QuestionChanged]:
        """The asks and questions of this run and its agents."""
        for mirror in (self, *(branch.mirror for branch in self.branches.values())):
            for ask in (*mirror.asks.values(), *mirror.questions.values()):
                if mirror is not self or self._run_id in (None, ask.run_id):
                    yield ask

    def is_closed(self, ask: AskChanged | QuestionChanged) -> bool:
        """Return True if an ask is closed, or was removed with its agent."""
        mirror: Mirror | None = self
        if ask.session_id != self.top:
            branch = self.branches.get(ask.session_id)
            mirror = None if branch is None else branch.mirror
        if mirror is None:
            return True
        now = mirror.asks.get(id_of(ask)) or mirror.questions.get(id_of(ask))
        return now is not None and now.state != "open"

    def agent_names(self, path: Sequence[str]) -> list[str]:
        """The names of the agents of a path, without the top one."""
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
        # A session has one live run at a time, so agents started meanwhile belong to it.
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
    """Follow a run, which may not exist yet, and its sub-agents while in the block.

    Without a `run_id` follow all runs of the session. With a `cursor` the tree starts with the
    changes since then, or with the whole state if the server no longer has that cursor.
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
    """Load or reload a tree, with all current sub-agents of the run."""
    for _ in range(LOADS_MAX):
        tree.load(await workspace.snapshot(*tree.session_ids()))
        if not tree.add_agents(await workspace.agents(tree.top)):
            break

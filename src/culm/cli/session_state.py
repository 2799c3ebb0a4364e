"""The state of a session as the server has it: the output of `culm sessions show --json`."""

from msgspec import Struct

from culm.cli.names import NamedItem, all_named, find_named
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.wire.agents import Agent
from culm.wire.asks import Ask, PermissionRequest, QuestionRequest
from culm.wire.messages import Message, Session
from culm.wire.runs import QueuedPrompt, Run

AnyAsk = Ask[PermissionRequest] | Ask[QuestionRequest]


class SessionState(Struct):
    """The parts as on the wire, read one after another: consistent while the session is idle."""

    session: Session
    messages: list[Message]  # The oldest first.
    runs: list[Run]  # The latest first, as many as the server lists.
    agents: list[Agent]  # All below it, in the order they were started.
    queue: list[QueuedPrompt]
    asks: list[AnyAsk]  # Its own open ones: permissions, then questions.


class SessionTreeState(SessionState, omit_defaults=True):
    """A session with the sessions of its agents, if requested."""

    below: list[SessionState] = []


async def get_state(workspace: RemoteWorkspace, session_id: SessionId) -> SessionTreeState:
    """Read a session; raises `RequestRefused` if it does not exist."""
    return SessionTreeState(
        session=await workspace.session(session_id),
        messages=await workspace.messages(session_id),
        runs=await workspace.runs(session_id),
        agents=await workspace.agents(session_id),
        queue=await workspace.queue(session_id),
        asks=await open_asks(workspace, session_id),
    )


async def open_asks(workspace: RemoteWorkspace, session_id: str = "") -> list[AnyAsk]:
    """Open permissions, then open questions, the latest of each first; of one session or all."""
    return [*await workspace.asks(session_id), *await workspace.questions(session_id)]


async def known_sessions(workspace: RemoteWorkspace) -> list[NamedItem]:
    """All sessions that can be named, including those of agents."""
    agents = [
        NamedItem("session", one.session_id, one.name) for one in reversed(await workspace.agents())
    ]
    own = {one.id for one in agents}  # An agent that a client started may be in both lists.
    return [one for one in await all_named(workspace, "session") if one.id not in own] + agents


async def find_session(workspace: RemoteWorkspace, text: str) -> SessionId:
    """The session with this name; raises `NotFound`, `InvalidRequest`."""
    return SessionId(find_named(await known_sessions(workspace), text).id)

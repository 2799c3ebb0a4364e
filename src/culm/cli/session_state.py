"""All that a server knows of one session: what `culm sessions show --json` prints."""

from msgspec import Struct

from culm.cli.names import NamedItem, all_named, find_named
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.wire.agents import Agent
from culm.wire.asks import Ask, PermissionRequest, QuestionRequest
from culm.wire.messages import Message
from culm.wire.runs import QueuedPrompt, Run
from culm.wire.sessions import Session

AnyAsk = Ask[PermissionRequest] | Ask[QuestionRequest]


class SessionState(Struct):
    """As the wire has each of them. Not one moment's, unless the session is at rest."""

    session: Session
    messages: list[Message]  # The oldest first.
    runs: list[Run]  # The latest first, as many as the server lists.
    agents: list[Agent]  # All below it, in the order they were started.
    queue: list[QueuedPrompt]
    asks: list[AnyAsk]  # Its own that are open: permissions, then questions.


class SessionTreeState(SessionState, omit_defaults=True):
    """With the sessions of its agents, where those are asked for."""

    below: list[SessionState] = []


async def get_state(workspace: RemoteWorkspace, session_id: SessionId) -> SessionTreeState:
    """Raises `Refused` if there is no such session."""
    return SessionTreeState(
        session=await workspace.session(session_id),
        messages=await workspace.messages(session_id),
        runs=await workspace.runs(session_id),
        agents=await workspace.agents(session_id),
        queue=await workspace.queue(session_id),
        asks=[*await workspace.asks(session_id), *await workspace.questions(session_id)],
    )


async def known_sessions(workspace: RemoteWorkspace) -> list[NamedItem]:
    """Every session that can be named: those that people began, and those of agents."""
    agents = [
        NamedItem("session", one.session_id, one.name) for one in reversed(await workspace.agents())
    ]
    own = {one.id for one in agents}  # An agent that a client started may be listed as both.
    return [one for one in await all_named(workspace, "session") if one.id not in own] + agents


async def find_session(workspace: RemoteWorkspace, text: str) -> SessionId:
    """The one that is meant; raises `NotFound`, `InvalidRequest`."""
    return SessionId(find_named(await known_sessions(workspace), text).id)

"""Sessions and their messages."""

from culm.ids import SessionId
from culm.server.api import Route
from culm.store.messages import messages_of_session, user_messages, user_messages_of_session
from culm.wire.messages import RawMessage
from culm.wire.sessions import SaveSession, Session
from culm.workspace.workspace import LiveWorkspace


async def list_sessions(workspace: LiveWorkspace) -> list[Session]:
    """List the sessions that no other session began, the last changed first."""
    return await workspace.list_sessions()


async def create_session(workspace: LiveWorkspace, body: SaveSession) -> Session:
    """Begin a session."""
    return await workspace.create_session(body.title)


async def get_session(workspace: LiveWorkspace, session_id: SessionId) -> Session:
    """Show one session."""
    return await workspace.get_session(session_id)


async def rename_session(
    workspace: LiveWorkspace, session_id: SessionId, body: SaveSession
) -> Session:
    """Change a session's title; the rest of what a client sends back is what it was told."""
    return await workspace.rename_session(session_id, body.title)


async def delete_session(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Remove a session with its messages and files."""
    await workspace.delete_session(session_id)


async def list_messages(workspace: LiveWorkspace, session_id: SessionId) -> list[RawMessage]:
    """List a session's messages, oldest first; none if there is no such session."""
    messages, _ = await workspace.messages.read(messages_of_session(session_id))
    return messages


async def list_prompts_of_session(
    workspace: LiveWorkspace, session_id: SessionId
) -> list[RawMessage]:
    """List what users said in a session, newest first."""
    messages, _ = await workspace.messages.read(user_messages_of_session(session_id))
    return messages


async def list_prompts(workspace: LiveWorkspace) -> list[RawMessage]:
    """List what users said in all sessions, newest first."""
    messages, _ = await workspace.messages.read(user_messages)
    return messages


_W = "/v1/workspaces/{workspace_id}"

ROUTES = [
    Route("GET", f"{_W}/sessions", list_sessions),
    Route("POST", f"{_W}/sessions", create_session),
    Route("GET", f"{_W}/sessions/{{session_id}}", get_session),
    Route("PUT", f"{_W}/sessions/{{session_id}}", rename_session),
    Route("DELETE", f"{_W}/sessions/{{session_id}}", delete_session),
    Route("GET", f"{_W}/sessions/{{session_id}}/messages", list_messages),
    Route("GET", f"{_W}/sessions/{{session_id}}/messages/user", list_prompts_of_session),
    Route("GET", f"{_W}/messages/user", list_prompts),
]

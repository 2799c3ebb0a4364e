"""Sessions, their messages, and the files that they read and wrote."""

from datetime import datetime

from culm.ids import SessionId
from culm.server.api import WORKSPACE, Route
from culm.store.messages import messages_of_session, user_messages, user_messages_of_session
from culm.wire.messages import File, RawMessage, ReadFile, SaveSession, Session
from culm.wire.queries import LastReadQuery, MessagesQuery
from culm.workspace.workspace import LiveWorkspace


async def list_sessions(workspace: LiveWorkspace) -> list[Session]:
    """List the sessions that were not started by another session, the last changed first."""
    return await workspace.sessions.list()


async def create_session(workspace: LiveWorkspace, body: SaveSession) -> Session:
    """Create a session."""
    return await workspace.sessions.create(body.title)


async def get_session(workspace: LiveWorkspace, session_id: SessionId) -> Session:
    """Show one session."""
    return await workspace.sessions.get(session_id)


async def rename_session(
    workspace: LiveWorkspace, session_id: SessionId, body: SaveSession
) -> Session:
    """Change the title of a session. All other fields of the body are ignored."""
    return await workspace.sessions.rename(session_id, body.title)


async def delete_session(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Delete a session with its messages and files."""
    await workspace.sessions.delete(session_id)


async def list_messages(
    workspace: LiveWorkspace, session_id: SessionId, query: MessagesQuery
) -> list[RawMessage]:
    """List the messages of a session, or a page of them, the oldest first.

    An unknown session has none. A `before` that is not a message of the session is 404.
    """
    page = messages_of_session(session_id, query.limit, query.before)
    messages, _ = await workspace.messages.read(page)
    return messages


async def list_prompts_of_session(
    workspace: LiveWorkspace, session_id: SessionId
) -> list[RawMessage]:
    """List the user messages of a session, the newest first."""
    messages, _ = await workspace.messages.read(user_messages_of_session(session_id))
    return messages


async def list_prompts(workspace: LiveWorkspace) -> list[RawMessage]:
    """List the user messages of all sessions, the newest first."""
    messages, _ = await workspace.messages.read(user_messages)
    return messages


async def list_history(workspace: LiveWorkspace, session_id: SessionId) -> list[File]:
    """List every version of every file that a session wrote, by version and then by age."""
    return await workspace.sessions.history(session_id)


async def list_read_files(workspace: LiveWorkspace, session_id: SessionId) -> list[str]:
    """List the files that a session has read, the last read first."""
    return await workspace.sessions.all_read(session_id)


async def mark_read(workspace: LiveWorkspace, body: ReadFile) -> None:
    """Record that a session has read a file now."""
    await workspace.sessions.mark_read(body.session_id, body.path)


async def last_read(workspace: LiveWorkspace, query: LastReadQuery) -> datetime:
    """Get the time at which a session last read a file; the year 1 if it never did."""
    return await workspace.sessions.last_read(query.session_id, query.path)


ROUTES = [
    Route("GET", f"{WORKSPACE}/sessions", list_sessions),
    Route("POST", f"{WORKSPACE}/sessions", create_session),
    Route("GET", f"{WORKSPACE}/sessions/{{session_id}}", get_session),
    Route("PUT", f"{WORKSPACE}/sessions/{{session_id}}", rename_session),
    Route("DELETE", f"{WORKSPACE}/sessions/{{session_id}}", delete_session),
    Route("GET", f"{WORKSPACE}/sessions/{{session_id}}/messages", list_messages),
    Route("GET", f"{WORKSPACE}/sessions/{{session_id}}/messages/user", list_prompts_of_session),
    Route("GET", f"{WORKSPACE}/messages/user", list_prompts),
]
FILE_ROUTES = [
    Route("GET", f"{WORKSPACE}/sessions/{{session_id}}/history", list_history),
    Route("GET", f"{WORKSPACE}/sessions/{{session_id}}/filetracker/files", list_read_files),
    Route("POST", f"{WORKSPACE}/filetracker/read", mark_read),
    Route("GET", f"{WORKSPACE}/filetracker/lastread", last_read),
]

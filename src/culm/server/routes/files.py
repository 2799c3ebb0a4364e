"""Files of a session: the versions it wrote, and what it read when."""

from datetime import datetime

from culm.ids import SessionId
from culm.server.api import Route
from culm.wire.files import File, ReadFile
from culm.wire.queries import LastReadQuery
from culm.workspace.workspace import LiveWorkspace


async def list_history(workspace: LiveWorkspace, session_id: SessionId) -> list[File]:
    """List every version of every file a session wrote, by version and then by age."""
    return await workspace.files.history(session_id)


async def list_read_files(workspace: LiveWorkspace, session_id: SessionId) -> list[str]:
    """List the files a session has read, the last read first."""
    return await workspace.files.all_read(session_id)


async def mark_read(workspace: LiveWorkspace, body: ReadFile) -> None:
    """Note that a session has read a file now."""
    await workspace.files.mark_read(body.session_id, body.path)


async def last_read(workspace: LiveWorkspace, query: LastReadQuery) -> datetime:
    """Say when a session last read a file; the year 1 if it never did."""
    return await workspace.files.last_read(query.session_id, query.path)


_W = "/v1/workspaces/{workspace_id}"

ROUTES = [
    Route("GET", f"{_W}/sessions/{{session_id}}/history", list_history),
    Route("GET", f"{_W}/sessions/{{session_id}}/filetracker/files", list_read_files),
    Route("POST", f"{_W}/filetracker/read", mark_read),
    Route("GET", f"{_W}/filetracker/lastread", last_read),
]

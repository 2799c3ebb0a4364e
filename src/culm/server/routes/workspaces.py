"""Workspaces: create or join, look, leave; who looks at what; the state to begin from."""

from culm import __version__
from culm.errors import InvalidRequest
from culm.ids import find_client_id
from culm.server.api import Route
from culm.server.sse import stream_events
from culm.wire import workspaces as wire
from culm.wire.codec import clean
from culm.wire.messages import RawMessage
from culm.wire.queries import ClientQuery, SnapshotQuery, split_names
from culm.wire.state import Snapshot
from culm.wire.workspaces import CreateWorkspace, CurrentSession
from culm.workspace.registry import Registry
from culm.workspace.workspace import LiveWorkspace


async def list_workspaces(registry: Registry) -> list[wire.Workspace]:
    """List the open workspaces."""
    return [_shown(workspace) for workspace in registry.list()]


async def create_workspace(registry: Registry, body: CreateWorkspace) -> wire.Workspace:
    """Open the workspace of a directory, or join it; the client then holds it for a while."""
    if not body.path:
        raise InvalidRequest("path is required")
    client_id = find_client_id(body.client_id)
    if client_id is None:
        raise InvalidRequest("invalid client_id")
    return _shown(await registry.create(body, client_id))


async def get_workspace(workspace: LiveWorkspace) -> wire.Workspace:
    """Show one workspace with its configuration."""
    return _shown(workspace)


async def release_workspace(registry: Registry, workspace_id: str, query: ClientQuery) -> None:
    """Let go of a workspace; what is not held is released already."""
    registry.release(workspace_id, query.client)


async def select_session(
    workspace: LiveWorkspace, query: ClientQuery, body: CurrentSession
) -> None:
    """Say which session a client looks at; it needs a live event stream."""
    workspace.select(query.client, body.session_id)


async def snapshot(workspace: LiveWorkspace, query: SnapshotQuery) -> Snapshot[RawMessage]:
    """Read the stored state at one cursor, to go on from there with events."""
    sessions = split_names(query.sessions, "sessions")
    return await workspace.snapshot(None if "*" in sessions else sessions)


def _shown(workspace: LiveWorkspace) -> wire.Workspace:
    about = workspace.about
    return wire.Workspace(
        id=about.id,
        path=about.given_path,
        config=workspace.config,
        data_dir=clean(str(about.root)),
        version=__version__,
        yolo=about.yolo,
        debug=about.debug,
        channels=list(about.channels),
        notices=[clean(notice) for notice in workspace.configuration.notices],
    )


ROUTES = [
    Route("GET", "/v1/workspaces", list_workspaces),
    Route("POST", "/v1/workspaces", create_workspace),
    Route("GET", "/v1/workspaces/{workspace_id}", get_workspace),
    Route("DELETE", "/v1/workspaces/{workspace_id}", release_workspace),
    Route("GET", "/v1/workspaces/{workspace_id}/events", stream_events),
    Route("GET", "/v1/workspaces/{workspace_id}/snapshot", snapshot),
    Route("POST", "/v1/workspaces/{workspace_id}/current-session", select_session),
]

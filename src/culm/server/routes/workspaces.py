"""Workspaces: opening, state, events, presence of clients, processes, usage, project setup."""

from culm import __version__
from culm.errors import InvalidRequest
from culm.ids import find_client_id
from culm.server.api import Route
from culm.server.sse import stream_events
from culm.store.runs import since_of, stats_since
from culm.wire import workspaces as wire
from culm.wire.codec import clean
from culm.wire.messages import RawMessage
from culm.wire.queries import ClientQuery, SnapshotQuery, StatsQuery, split_names
from culm.wire.runs import Stats
from culm.wire.workspaces import (
    CreateWorkspace,
    CurrentSession,
    InitPrompt,
    NeedsInit,
    Process,
    Snapshot,
)
from culm.workspace.registry import Registry
from culm.workspace.workspace import LiveWorkspace


async def list_workspaces(registry: Registry) -> list[wire.Workspace]:
    """List the open workspaces."""
    return [_shown(workspace) for workspace in registry.list()]


async def create_workspace(registry: Registry, body: CreateWorkspace) -> wire.Workspace:
    """Open or join the workspace of a directory. The client then has a claim for a limited time."""
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
    """Release the client's claim on a workspace. Without a claim this does nothing."""
    registry.release(workspace_id, query.client)


async def select_session(
    workspace: LiveWorkspace, query: ClientQuery, body: CurrentSession
) -> None:
    """Set the session that a client displays. The client needs a live event stream."""
    workspace.select(query.client, body.session_id)


async def snapshot(workspace: LiveWorkspace, query: SnapshotQuery) -> Snapshot[RawMessage]:
    """Read the stored state at one cursor, to continue from there with events."""
    sessions = split_names(query.sessions, "sessions")
    return await workspace.snapshot(None if "*" in sessions else sessions)


async def get_stats(workspace: LiveWorkspace, query: StatsQuery) -> Stats:
    """Add up the usage of runs: in total, by model, by day, and for the most expensive sessions."""
    since = since_of(query.days, workspace.clock.now_s(), query.utc_offset_s)
    return await workspace.store.read(stats_since(since, query.utc_offset_s))


async def list_processes(workspace: LiveWorkspace) -> list[Process]:
    """List the processes of a workspace with their purpose, age and memory."""
    return await workspace.processes()


async def needs_init(workspace: LiveWorkspace) -> NeedsInit:
    """Check if clients should offer to write instructions for agents. The answer is always no."""
    return NeedsInit()


async def init_project(workspace: LiveWorkspace) -> None:
    """Record that the offer was accepted or declined."""
    workspace.configuration.publish_changed()


async def init_prompt(workspace: LiveWorkspace) -> InitPrompt:
    """Get the prompt with which an agent writes the instructions."""
    file = workspace.config.options.initialize_as
    return InitPrompt(
        f"Look through this project and write {file} for the coding agents that will work here. "
        "Say how to build it, run it and run its tests (one test, too), how the code is laid out, "
        "which conventions it follows, and what surprised you. Only what you saw, with the exact "
        f"commands; no more than a page. If {file} is there already, correct and extend it."
    )


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


_W = "/v1/workspaces/{workspace_id}"

ROUTES = [
    Route("GET", "/v1/workspaces", list_workspaces),
    Route("POST", "/v1/workspaces", create_workspace),
    Route("GET", _W, get_workspace),
    Route("DELETE", _W, release_workspace),
    Route("GET", f"{_W}/events", stream_events),
    Route("GET", f"{_W}/snapshot", snapshot),
    Route("POST", f"{_W}/current-session", select_session),
]
STATS_ROUTES = [Route("GET", f"{_W}/stats", get_stats)]
PROCESS_ROUTES = [Route("GET", f"{_W}/processes", list_processes)]
PROJECT_ROUTES = [
    Route("GET", f"{_W}/project/needs-init", needs_init),
    Route("POST", f"{_W}/project/init", init_project),
    Route("GET", f"{_W}/project/init-prompt", init_prompt),
]

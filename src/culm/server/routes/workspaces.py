"""Workspaces: opening, state, events, presence of clients, processes, usage, project setup."""

from aiohttp.abc import AbstractStreamWriter
from aiohttp.web_request import BaseRequest
from aiohttp.web_response import StreamResponse

from culm import __version__
from culm.errors import InvalidRequest
from culm.events.stream import feed
from culm.events.views import Cursor, Filter, parse_cursor
from culm.ids import find_client_id
from culm.server.api import WORKSPACE, Route
from culm.store.runs import since_of, stats_since
from culm.wire import workspaces as wire
from culm.wire.codec import clean
from culm.wire.events import CURSOR_HEADER, PAYLOADS
from culm.wire.messages import RawMessage
from culm.wire.queries import ClientQuery, EventsQuery, SnapshotQuery, StatsQuery, split_names
from culm.wire.runs import Stats
from culm.wire.tools import ToolInfo
from culm.workspace.registry import Registry
from culm.workspace.workspace import LiveWorkspace


async def list_workspaces(registry: Registry) -> list[wire.Workspace]:
    """List the open workspaces."""
    return [_shown(workspace) for workspace in registry.list()]


async def create_workspace(registry: Registry, body: wire.CreateWorkspace) -> wire.Workspace:
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
    workspace: LiveWorkspace, query: ClientQuery, body: wire.CurrentSession
) -> None:
    """Set the session that a client displays. The client needs a live event stream."""
    workspace.lifetime.select(query.client, body.session_id)


class EventResponse(StreamResponse):
    """A response that ends with its connection: no length, no chunks.

    A truncated chunked body makes Crush clients hang for ever; a closed connection makes them
    reconnect. aiohttp has no public option for that, so this class uses two of its private names.
    The dependency is pinned, and tests/server/test_sse.py checks them.
    """

    _length_check = False

    def __init__(self, start: Cursor | None = None) -> None:
        super().__init__(headers={"Cache-Control": "no-cache"})
        if start is not None:  # The client has a cursor even if no event follows.
            self.headers[CURSOR_HEADER] = str(start)
        self.content_type = "text/event-stream"
        self.force_close()

    async def drained(self) -> None:
        """Wait until the socket can take more data."""
        writer: AbstractStreamWriter | None = self._payload_writer
        if writer is not None:
            await writer.drain()


async def stream_events(
    request: BaseRequest, workspace: LiveWorkspace, query: EventsQuery
) -> EventResponse:
    """Stream the events of a workspace, from now on or from a cursor."""
    filter_ = _filter(query)
    text = query.cursor or request.headers.get("Last-Event-ID", "")
    cursor = parse_cursor(text) if text else None
    hub, transport = workspace.hub, request.transport
    if request.method == "HEAD" or transport is None:
        return EventResponse(hub.cursor if cursor is None else None)
    request.protocol.close()  # No request can follow a stream, so stop reading.
    # Subscribe before the stream is registered, so that no event is missed in between.
    subscriber = hub.join(transport, query.view, filter_)
    response = EventResponse(hub.cursor if cursor is None else None)
    try:
        interactive = query.interactive == 1
        claim_number = workspace.lifetime.open_stream(query.client, interactive=interactive)
        try:
            await response.prepare(request)
            await feed(hub, workspace.store, subscriber, cursor, response.drained)
        finally:
            workspace.lifetime.close_stream(query.client, claim_number, interactive=interactive)
    finally:
        hub.leave(subscriber)
    return response


def _filter(query: EventsQuery) -> Filter:
    types = split_names(query.types, "types")
    if unknown := types - PAYLOADS.keys():
        raise InvalidRequest(f"unknown event type in types: {min(unknown)}")
    return Filter(types, split_names(query.sessions, "sessions"))


async def snapshot(workspace: LiveWorkspace, query: SnapshotQuery) -> wire.Snapshot[RawMessage]:
    """Read the stored state at one cursor, to continue from there with events."""
    sessions = split_names(query.sessions, "sessions")
    return await workspace.snapshot(None if "*" in sessions else sessions)


async def get_stats(workspace: LiveWorkspace, query: StatsQuery) -> Stats:
    """Add up the usage of runs: in total, by model, by day, and for the most expensive sessions."""
    since = since_of(query.days, workspace.clock.now_s(), query.utc_offset_s)
    return await workspace.store.read(stats_since(since, query.utc_offset_s))


async def list_processes(workspace: LiveWorkspace) -> list[wire.Process]:
    """List the processes of a workspace with their purpose, age and memory."""
    return await workspace.processes()


async def list_tools(workspace: LiveWorkspace) -> list[ToolInfo]:
    """List the tools of a workspace: their arguments that rules match and clients display."""
    return list(workspace.toolbox.tool_infos().values())


async def needs_init(workspace: LiveWorkspace) -> wire.NeedsInit:
    """Check if clients should offer to write instructions for agents. The answer is always no."""
    return wire.NeedsInit()


async def init_project(workspace: LiveWorkspace) -> None:
    """Record that the offer was accepted or declined."""
    workspace.configuration.publish_changed()


async def init_prompt(workspace: LiveWorkspace) -> wire.InitPrompt:
    """Get the prompt with which an agent writes the instructions."""
    file = workspace.configuration.shown.options.initialize_as
    return wire.InitPrompt(
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
        config=workspace.configuration.shown,
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
    Route("GET", WORKSPACE, get_workspace),
    Route("DELETE", WORKSPACE, release_workspace),
    Route("GET", f"{WORKSPACE}/events", stream_events),
    Route("GET", f"{WORKSPACE}/snapshot", snapshot),
    Route("POST", f"{WORKSPACE}/current-session", select_session),
]
STATS_ROUTES = [Route("GET", f"{WORKSPACE}/stats", get_stats)]
PROCESS_ROUTES = [Route("GET", f"{WORKSPACE}/processes", list_processes)]
TOOL_ROUTES = [Route("GET", f"{WORKSPACE}/tools", list_tools)]
PROJECT_ROUTES = [
    Route("GET", f"{WORKSPACE}/project/needs-init", needs_init),
    Route("POST", f"{WORKSPACE}/project/init", init_project),
    Route("GET", f"{WORKSPACE}/project/init-prompt", init_prompt),
]

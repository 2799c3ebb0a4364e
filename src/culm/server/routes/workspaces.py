"""Workspaces: create or join, look, leave; who looks at what; the state to begin from."""

from aiohttp import web

from culm import __version__
from culm.errors import InvalidRequest
from culm.ids import find_client_id
from culm.server.problems import answer, done, parse_request, query_client_id, query_names
from culm.server.routes.base import REGISTRY, workspace_of
from culm.server.sse import stream_events
from culm.wire import workspaces as wire
from culm.wire.codec import clean
from culm.wire.requests import CreateWorkspace, CurrentSession
from culm.workspace.workspace import Workspace


async def list_workspaces(request: web.Request) -> web.Response:
    return answer([_shown(workspace) for workspace in request.app[REGISTRY].list()])


async def create_workspace(request: web.Request) -> web.Response:
    body = await parse_request(request, CreateWorkspace)
    if not body.path:
        raise InvalidRequest("path is required")
    client_id = find_client_id(body.client_id)
    if client_id is None:
        raise InvalidRequest("invalid client_id")
    return answer(_shown(await request.app[REGISTRY].create(body, client_id)))


async def get_workspace(request: web.Request) -> web.Response:
    return answer(_shown(workspace_of(request)))


async def release_workspace(request: web.Request) -> web.Response:
    request.app[REGISTRY].release(request.match_info["id"], query_client_id(request))
    return done()


async def get_config(request: web.Request) -> web.Response:
    return answer(_config(workspace_of(request)))


async def select_session(request: web.Request) -> web.Response:
    client_id = query_client_id(request)
    body = await parse_request(request, CurrentSession)
    workspace_of(request).select(client_id, body.session_id)
    return done()


async def snapshot(request: web.Request) -> web.Response:
    """`?sessions=a,b` adds their messages, `?sessions=*` those of all."""
    workspace = workspace_of(request)
    sessions = query_names(request, "sessions")
    return answer(await workspace.snapshot(None if "*" in sessions else sessions))


def _shown(workspace: Workspace) -> wire.Workspace:
    about = workspace.about
    return wire.Workspace(
        id=about.id,
        path=about.given_path,
        config=_config(workspace),
        data_dir=clean(str(about.root)),
        version=__version__,
        yolo=about.yolo,
        debug=about.debug,
        channels=list(about.channels),
    )


def _config(workspace: Workspace) -> wire.Config:
    about = workspace.about
    return wire.Config(wire.Options(data_directory=clean(str(about.root)), debug=about.debug))


ROUTES = [
    web.get("/v1/workspaces", list_workspaces),
    web.post("/v1/workspaces", create_workspace),
    web.get("/v1/workspaces/{id}", get_workspace),
    web.delete("/v1/workspaces/{id}", release_workspace),
    web.get("/v1/workspaces/{id}/config", get_config),
    web.get("/v1/workspaces/{id}/snapshot", snapshot),
    web.get("/v1/workspaces/{id}/events", stream_events),
    web.post("/v1/workspaces/{id}/current-session", select_session),
]

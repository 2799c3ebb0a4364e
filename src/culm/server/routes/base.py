"""What every route needs: the workspace it is about."""

from aiohttp import web

from culm.workspace.registry import Registry
from culm.workspace.workspace import Workspace

REGISTRY = web.AppKey("registry", Registry)


def workspace_of(request: web.Request) -> Workspace:
    return request.app[REGISTRY].get(request.match_info["id"])

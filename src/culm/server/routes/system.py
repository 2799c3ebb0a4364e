"""The server itself: is it there, what is it, may it leave."""

import platform
import sys

from aiohttp import web

from culm import __version__
from culm.errors import InvalidRequest, ServerInUse
from culm.ids import find_client_id
from culm.server.problems import answer, done, parse_request
from culm.server.routes.base import REGISTRY
from culm.wire.requests import Control
from culm.wire.workspaces import VersionInfo

SERVER_NAME = "culm"


async def health(request: web.Request) -> web.Response:
    return done()


async def version(request: web.Request) -> web.Response:
    info = VersionInfo(
        version=__version__,
        commit="",
        build_id=f"culm-{__version__}",
        go_version=f"python{platform.python_version()}",
        platform=f"{sys.platform}/{platform.machine()}",
    )
    return answer(info)


async def config(request: web.Request) -> web.Response:
    return answer({})


async def control(request: web.Request) -> web.Response:
    body = await parse_request(request, Control)
    if body.command not in ("shutdown", "shutdown_if_idle"):
        raise InvalidRequest("unknown command")
    if body.server != SERVER_NAME:
        # A Crush client asks any server of another version to leave, and takes its socket.
        raise ServerInUse
    request.app[REGISTRY].request_leave()
    return done()


async def retire_client(request: web.Request) -> web.Response:
    client_id = find_client_id(request.match_info["client_id"])
    if client_id is None:
        raise InvalidRequest("invalid client_id")
    request.app[REGISTRY].retire(client_id)
    return done()


ROUTES = [
    web.get("/v1/health", health),
    web.get("/v1/version", version),
    web.get("/v1/config", config),
    web.post("/v1/control", control),
    web.delete("/v1/clients/{client_id}", retire_client),
]

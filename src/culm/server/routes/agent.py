"""The agent's routes while there is no agent: each answers its correct empty form."""

from aiohttp import web

from culm.errors import InvalidRequest
from culm.server.problems import (
    ATTACHMENT_BYTES_MAX,
    answer,
    done,
    parse_request,
    read_body,
)
from culm.server.routes.base import workspace_of
from culm.wire.codec import parse_body
from culm.wire.requests import NeedsInit, PermissionGrant, Resolved, Skip
from culm.wire.workspaces import AgentInfo

_ACTIONS = ("allow", "allow_session", "deny")


async def agent_info(request: web.Request) -> web.Response:
    workspace_of(request)
    return answer(AgentInfo())


async def prompt(request: web.Request) -> web.Response:
    workspace_of(request)
    raise InvalidRequest(
        "agent coordinator not initialized", hint="this version of culm has no agent yet"
    )


async def nothing_to_do(request: web.Request) -> web.Response:
    """Initialise, update, cancel, clear, start and stop: with nothing there, they succeed."""
    workspace_of(request)
    return done()


async def empty_list(request: web.Request) -> web.Response:
    workspace_of(request)
    return answer([])


async def empty_map(request: web.Request) -> web.Response:
    workspace_of(request)
    return answer({})


async def grant(request: web.Request) -> web.Response:
    """Nothing is ever asked yet, so every answer comes too late."""
    body = parse_body(await read_body(request, ATTACHMENT_BYTES_MAX), PermissionGrant)
    workspace_of(request)
    if body.action not in _ACTIONS:
        raise InvalidRequest("invalid permission action")
    return answer(Resolved(resolved=False))


async def get_skip(request: web.Request) -> web.Response:
    return answer(Skip(workspace_of(request).skip))


async def set_skip(request: web.Request) -> web.Response:
    body = await parse_request(request, Skip)
    workspace_of(request).skip = body.skip
    return done()


async def needs_init(request: web.Request) -> web.Response:
    workspace_of(request)
    return answer(NeedsInit())


_W = "/v1/workspaces/{id}"
_S = f"{_W}/agent/sessions/{{sid}}"

ROUTES = [
    web.get(f"{_W}/agent", agent_info),
    web.post(f"{_W}/agent", prompt),
    web.post(f"{_W}/agent/init", nothing_to_do),
    web.post(f"{_W}/agent/update", nothing_to_do),
    web.post(f"{_S}/cancel", nothing_to_do),
    web.get(f"{_S}/prompts/list", empty_list),
    web.post(f"{_S}/prompts/clear", nothing_to_do),
    web.post(f"{_W}/permissions/grant", grant),
    web.get(f"{_W}/permissions/skip", get_skip),
    web.post(f"{_W}/permissions/skip", set_skip),
    web.get(f"{_W}/lsps", empty_map),
    web.post(f"{_W}/lsps/start", nothing_to_do),
    web.post(f"{_W}/lsps/stop", nothing_to_do),
    web.get(f"{_W}/project/needs-init", needs_init),
    web.get(f"{_W}/skills", empty_list),
    web.get(f"{_W}/mcp/prompts", empty_list),
    web.get(f"{_W}/mcp/states", empty_map),
    web.get(f"{_W}/mcp/pending-auth", empty_list),
]

"""MCP servers. This version talks to none, so every name is unknown."""

from culm.errors import McpNotFound, NotBuilt
from culm.server.api import Route
from culm.wire.mcp import (
    AuthUrl,
    GetPrompt,
    McpInfo,
    McpName,
    McpPrompt,
    PendingAuth,
    PromptText,
    ReadResource,
    Resource,
)
from culm.wire.queries import McpNameQuery
from culm.workspace.workspace import LiveWorkspace


async def list_states(workspace: LiveWorkspace) -> dict[str, McpInfo]:
    """Show the MCP servers by name."""
    return {}


async def list_pending_auth(workspace: LiveWorkspace) -> list[PendingAuth]:
    """List the servers that wait for a person to log in."""
    return []


async def get_auth_url(workspace: LiveWorkspace, query: McpNameQuery) -> AuthUrl:
    """Say where to log in to a server, if it waits for that."""
    return AuthUrl()


async def authenticate(workspace: LiveWorkspace, body: McpName) -> dict[str, str]:
    """Log in to a server; answers when that is done."""
    raise McpNotFound(body.name)


async def refresh(workspace: LiveWorkspace, body: McpName) -> None:
    """Ask a server again for what it offers."""


async def read_resource(workspace: LiveWorkspace, body: ReadResource) -> list[Resource]:
    """Read a resource of a server."""
    raise McpNotFound(body.name)


async def list_mcp_prompts(workspace: LiveWorkspace) -> list[McpPrompt]:
    """List the prompts all servers offer."""
    return []


async def get_mcp_prompt(workspace: LiveWorkspace, body: GetPrompt) -> PromptText:
    """Fill in a prompt of a server."""
    raise McpNotFound(body.client_id)


async def switch_docker(workspace: LiveWorkspace) -> None:
    """Turn the MCP server of Docker on or off."""
    raise NotBuilt("MCP")


_W = "/v1/workspaces/{workspace_id}/mcp"

ROUTES = [
    Route("GET", f"{_W}/states", list_states),
    Route("GET", f"{_W}/pending-auth", list_pending_auth),
    Route("GET", f"{_W}/auth-url", get_auth_url),
    Route("POST", f"{_W}/auth", authenticate),
    Route("POST", f"{_W}/refresh-tools", refresh),
    Route("POST", f"{_W}/refresh-prompts", refresh),
    Route("POST", f"{_W}/refresh-resources", refresh),
    Route("POST", f"{_W}/read-resource", read_resource),
    Route("GET", f"{_W}/prompts", list_mcp_prompts),
    Route("POST", f"{_W}/get-prompt", get_mcp_prompt),
    Route("POST", f"{_W}/docker/enable", switch_docker),
    Route("POST", f"{_W}/docker/disable", switch_docker),
]

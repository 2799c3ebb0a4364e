"""Skills, language servers and MCP servers, as Crush clients ask for them.

This version has none of them: lists are empty and every name is unknown.
"""

from culm.errors import LspNotFound, McpNotFound, NotBuilt, SkillNotFound
from culm.server.api import WORKSPACE, Route
from culm.wire import extensions as wire
from culm.wire.queries import McpNameQuery
from culm.workspace.workspace import LiveWorkspace


async def list_skills(workspace: LiveWorkspace) -> list[wire.SkillInfo]:
    """List the skills of a workspace."""
    return []


async def read_skill(workspace: LiveWorkspace, body: wire.ReadSkill) -> wire.SkillContent:
    """Read one skill."""
    raise SkillNotFound(body.skill_id)


async def list_lsps(workspace: LiveWorkspace) -> dict[str, wire.LspInfo]:
    """Show the language servers by name."""
    return {}


async def list_diagnostics(workspace: LiveWorkspace, lsp: str) -> dict[str, list[wire.Diagnostic]]:
    """Show the diagnostics of a language server by file URI."""
    raise LspNotFound


async def start_lsps(workspace: LiveWorkspace, body: wire.StartLsp) -> None:
    """Start the language servers for a file."""


async def stop_lsps(workspace: LiveWorkspace) -> None:
    """Stop all language servers."""


async def list_states(workspace: LiveWorkspace) -> dict[str, wire.McpInfo]:
    """Show the MCP servers by name."""
    return {}


async def list_pending_auth(workspace: LiveWorkspace) -> list[wire.PendingAuth]:
    """List the MCP servers that wait for a login."""
    return []


async def get_auth_url(workspace: LiveWorkspace, query: McpNameQuery) -> wire.AuthUrl:
    """Get the login URL of an MCP server, if it waits for a login."""
    return wire.AuthUrl()


async def authenticate(workspace: LiveWorkspace, body: wire.McpName) -> dict[str, str]:
    """Log in to an MCP server and wait until that is done."""
    raise McpNotFound(body.name)


async def refresh(workspace: LiveWorkspace, body: wire.McpName) -> None:
    """Refresh the list of items that an MCP server offers."""


async def read_resource(workspace: LiveWorkspace, body: wire.ReadResource) -> list[wire.Resource]:
    """Read a resource of an MCP server."""
    raise McpNotFound(body.name)


async def list_mcp_prompts(workspace: LiveWorkspace) -> list[wire.McpPrompt]:
    """List the prompts of all MCP servers."""
    return []


async def get_mcp_prompt(workspace: LiveWorkspace, body: wire.GetPrompt) -> wire.PromptText:
    """Get a prompt of an MCP server, with its arguments filled in."""
    raise McpNotFound(body.client_id)


async def switch_docker(workspace: LiveWorkspace) -> None:
    """Turn Docker's MCP server on or off."""
    raise NotBuilt("MCP")


_SKILLS = f"{WORKSPACE}/skills"
_LSPS = f"{WORKSPACE}/lsps"
_MCP = f"{WORKSPACE}/mcp"

SKILL_ROUTES = [
    Route("GET", _SKILLS, list_skills),
    Route("POST", f"{_SKILLS}/read", read_skill),
]
LSP_ROUTES = [
    Route("GET", _LSPS, list_lsps),
    Route("GET", f"{_LSPS}/{{lsp}}/diagnostics", list_diagnostics),
    Route("POST", f"{_LSPS}/start", start_lsps),
    Route("POST", f"{_LSPS}/stop", stop_lsps),
]
MCP_ROUTES = [
    Route("GET", f"{_MCP}/states", list_states),
    Route("GET", f"{_MCP}/pending-auth", list_pending_auth),
    Route("GET", f"{_MCP}/auth-url", get_auth_url),
    Route("POST", f"{_MCP}/auth", authenticate),
    Route("POST", f"{_MCP}/refresh-tools", refresh),
    Route("POST", f"{_MCP}/refresh-prompts", refresh),
    Route("POST", f"{_MCP}/refresh-resources", refresh),
    Route("POST", f"{_MCP}/read-resource", read_resource),
    Route("GET", f"{_MCP}/prompts", list_mcp_prompts),
    Route("POST", f"{_MCP}/get-prompt", get_mcp_prompt),
    Route("POST", f"{_MCP}/docker/enable", switch_docker),
    Route("POST", f"{_MCP}/docker/disable", switch_docker),
]

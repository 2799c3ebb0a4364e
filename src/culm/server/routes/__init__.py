"""All routes, grouped by the tags of the OpenAPI document and in its order."""

from collections.abc import Mapping

from culm.server.api import Route
from culm.server.routes import (
    agent,
    agents,
    asks,
    config,
    extensions,
    sessions,
    system,
    workspaces,
)

BY_NOUN: Mapping[str, list[Route]] = {
    "system": system.ROUTES,
    "workspaces": workspaces.ROUTES,
    "sessions": sessions.ROUTES,
    "files": sessions.FILE_ROUTES,
    "agent": agent.ROUTES,
    "runs": agent.RUN_ROUTES,
    "stats": workspaces.STATS_ROUTES,
    "asks": asks.ROUTES,
    "agents": agents.ROUTES,
    "mail": agents.MAIL_ROUTES,
    "processes": workspaces.PROCESS_ROUTES,
    "tools": workspaces.TOOL_ROUTES,
    "config": config.ROUTES,
    "project": workspaces.PROJECT_ROUTES,
    "skills": extensions.SKILL_ROUTES,
    "lsp": extensions.LSP_ROUTES,
    "mcp": extensions.MCP_ROUTES,
    "documents": system.DOCUMENT_ROUTES,
}
ROUTES: tuple[Route, ...] = tuple(route for routes in BY_NOUN.values() for route in routes)

"""Every route there is: one module a noun."""

from types import ModuleType

from culm.server.api import Route
from culm.server.routes import (
    agent,
    agents,
    asks,
    config,
    documents,
    files,
    lsp,
    mail,
    mcp,
    processes,
    project,
    runs,
    sessions,
    skills,
    stats,
    system,
    workspaces,
)

_NOUNS: tuple[ModuleType, ...] = (
    system, workspaces, sessions, files, agent, runs, stats, asks, agents, mail, processes, config,
    project, skills, lsp, mcp, documents,
)  # fmt: skip

BY_NOUN: dict[str, list[Route]] = {n.__name__.rpartition(".")[2]: n.ROUTES for n in _NOUNS}
ROUTES: tuple[Route, ...] = tuple(route for routes in BY_NOUN.values() for route in routes)

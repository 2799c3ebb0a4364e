"""Language servers. This version starts none."""

from culm.errors import LspNotFound
from culm.server.api import Route
from culm.wire.lsp import Diagnostic, LspInfo, StartLsp
from culm.workspace.workspace import LiveWorkspace


async def list_lsps(workspace: LiveWorkspace) -> dict[str, LspInfo]:
    """Show the language servers by name."""
    return {}


async def list_diagnostics(workspace: LiveWorkspace, lsp: str) -> dict[str, list[Diagnostic]]:
    """Show what a language server found, by the URI of the file."""
    raise LspNotFound


async def start_lsps(workspace: LiveWorkspace, body: StartLsp) -> None:
    """Start the language servers that know about a file."""


async def stop_lsps(workspace: LiveWorkspace) -> None:
    """Stop all language servers."""


_W = "/v1/workspaces/{workspace_id}/lsps"

ROUTES = [
    Route("GET", _W, list_lsps),
    Route("GET", f"{_W}/{{lsp}}/diagnostics", list_diagnostics),
    Route("POST", f"{_W}/start", start_lsps),
    Route("POST", f"{_W}/stop", stop_lsps),
]

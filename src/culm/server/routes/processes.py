"""Processes that were started for a workspace."""

from culm.server.api import Route
from culm.wire.processes import Process
from culm.workspace.workspace import LiveWorkspace


async def list_processes(workspace: LiveWorkspace) -> list[Process]:
    """List what runs for a workspace: for whom, for how long, with how much memory."""
    return await workspace.processes()


ROUTES = [Route("GET", "/v1/workspaces/{workspace_id}/processes", list_processes)]

"""Runs by id: list, show, edit, start, cancel."""

from culm.server.api import Route
from culm.wire.queries import RunsQuery
from culm.wire.runs import CancelAnswer, EditPrompt, Run
from culm.workspace.workspace import LiveWorkspace


async def list_runs(workspace: LiveWorkspace, query: RunsQuery) -> list[Run]:
    """List runs, the latest first, optionally only those of a session or in a state."""
    return await workspace.agent.list_runs(query.session, query.state or None)


async def get_run(workspace: LiveWorkspace, run_id: str) -> Run:
    """Show one run."""
    return await workspace.agent.get_run(run_id)


async def cancel_run(workspace: LiveWorkspace, run_id: str) -> CancelAnswer:
    """Stop one run. The result: it stopped, had already finished, or did not stop in time."""
    return await workspace.agent.cancel_run(run_id)


async def start_run(workspace: LiveWorkspace, run_id: str) -> Run:
    """Start a held run."""
    return await workspace.agent.start(run_id)


async def drop_run(workspace: LiveWorkspace, run_id: str) -> Run:
    """End a held or queued run before it starts."""
    return await workspace.agent.drop(run_id)


async def edit_run(workspace: LiveWorkspace, run_id: str, body: EditPrompt) -> Run:
    """Change the prompt of a queued run."""
    return await workspace.agent.edit(run_id, body.prompt)


_W = "/v1/workspaces/{workspace_id}/runs"
_R = f"{_W}/{{run_id}}"

ROUTES = [
    Route("GET", _W, list_runs),
    Route("GET", _R, get_run),
    Route("PUT", _R, edit_run),
    Route("POST", f"{_R}/cancel", cancel_run),
    Route("POST", f"{_R}/start", start_run),
    Route("POST", f"{_R}/drop", drop_run),
]

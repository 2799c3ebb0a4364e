"""The project in a workspace: whether it wants an introduction for agents, and how to write one."""

from culm.server.api import Route
from culm.wire.workspaces import InitPrompt, NeedsInit
from culm.workspace.workspace import LiveWorkspace


async def needs_init(workspace: LiveWorkspace) -> NeedsInit:
    """Say whether to offer an introduction; never unasked."""
    return NeedsInit()


async def init_project(workspace: LiveWorkspace) -> None:
    """Note that the offer was taken or declined."""
    workspace.configuration.publish_changed()


async def init_prompt(workspace: LiveWorkspace) -> InitPrompt:
    """Give the prompt that lets an agent write the introduction."""
    file = workspace.config.options.initialize_as
    return InitPrompt(
        f"Look through this project and write {file} for the coding agents that will work here. "
        "Say how to build it, run it and run its tests (one test, too), how the code is laid out, "
        "which conventions it follows, and what surprised you. Only what you saw, with the exact "
        f"commands; no more than a page. If {file} is there already, correct and extend it."
    )


_W = "/v1/workspaces/{workspace_id}/project"

ROUTES = [
    Route("GET", f"{_W}/needs-init", needs_init),
    Route("POST", f"{_W}/init", init_project),
    Route("GET", f"{_W}/init-prompt", init_prompt),
]

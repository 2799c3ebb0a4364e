"""The agent's routes. While there is no agent each answers its correct empty form."""

from culm.errors import AgentNotReady, NotBuilt
from culm.ids import SessionId
from culm.server.api import Route
from culm.server.problems import ATTACHMENT_BYTES_MAX
from culm.wire.agent import AgentInfo, InitAgent, Prompt, ShellCommand, ShellOutput
from culm.wire.config import SelectedModel
from culm.wire.queries import ProviderQuery
from culm.wire.sessions import Session
from culm.workspace.workspace import Workspace


async def agent_info(workspace: Workspace) -> AgentInfo:
    """Say whether the agent is ready and busy, and which model it uses."""
    return AgentInfo(model_cfg=workspace.config.models.get("large", SelectedModel()))


async def prompt(workspace: Workspace, body: Prompt) -> None:
    """Give the agent something to do; accepted at once, done in its own time."""
    raise AgentNotReady


async def init_agent(workspace: Workspace, body: InitAgent | None) -> None:
    """Make the agent ready; to do it again changes nothing."""


async def update_agent(workspace: Workspace) -> None:
    """Let the agent take up changed models and tools."""


async def get_agent_session(workspace: Workspace, session_id: SessionId) -> Session:
    """Show a session, and whether the agent is busy with it."""
    return await workspace.get_session(session_id)


async def cancel(workspace: Workspace, session_id: SessionId) -> None:
    """Stop what the agent does for a session, and forget what waits there."""


async def count_queued(workspace: Workspace, session_id: SessionId) -> int:
    """Say how many prompts of a session wait."""
    return 0


async def list_queued(workspace: Workspace, session_id: SessionId) -> list[str]:
    """List the prompts of a session that wait, in their order."""
    return []


async def clear_queued(workspace: Workspace, session_id: SessionId) -> None:
    """Forget the prompts of a session that wait."""


async def summarize(workspace: Workspace, session_id: SessionId) -> None:
    """Replace what the model reads of a session by a summary."""
    raise AgentNotReady


async def run_shell(workspace: Workspace, session_id: SessionId, body: ShellCommand) -> ShellOutput:
    """Run a user's own command in the workspace."""
    raise NotBuilt("shell")


async def default_small_model(workspace: Workspace, query: ProviderQuery) -> SelectedModel:
    """Propose a small model of a provider; while there is no catalogue, the large one in use."""
    return workspace.config.models.get("large", SelectedModel())


_W = "/v1/workspaces/{workspace_id}"
_S = f"{_W}/agent/sessions/{{session_id}}"

ROUTES = [
    Route("GET", f"{_W}/agent", agent_info),
    Route("POST", f"{_W}/agent", prompt, status=202, body_bytes_max=ATTACHMENT_BYTES_MAX),
    Route("POST", f"{_W}/agent/init", init_agent),
    Route("POST", f"{_W}/agent/update", update_agent),
    Route("GET", f"{_W}/agent/default-small-model", default_small_model),
    Route("GET", _S, get_agent_session),
    Route("POST", f"{_S}/cancel", cancel),
    Route("GET", f"{_S}/prompts/queued", count_queued),
    Route("GET", f"{_S}/prompts/list", list_queued),
    Route("POST", f"{_S}/prompts/clear", clear_queued),
    Route("POST", f"{_S}/summarize", summarize),
    Route("POST", f"{_S}/shell", run_shell),
]

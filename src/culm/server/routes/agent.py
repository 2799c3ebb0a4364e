"""The agent's routes: prompts and their queue, and what a Crush client asks of it."""

from culm.ids import SessionId
from culm.server.api import HeadersOnly, Route
from culm.server.problems import ATTACHMENT_BYTES_MAX
from culm.wire.agent import RUN_HEADER, AgentInfo, InitAgent, Prompt, ShellCommand, ShellOutput
from culm.wire.config import SelectedModel
from culm.wire.queries import ProviderQuery
from culm.wire.runs import EditPrompt, OrderQueue, QueuedPrompt, Run
from culm.wire.sessions import Session
from culm.workspace.workspace import LiveWorkspace


async def agent_info(workspace: LiveWorkspace) -> AgentInfo:
    """Say whether the agent is ready and busy, and which model it uses."""
    return workspace.agent.info()


async def prompt(workspace: LiveWorkspace, body: Prompt) -> HeadersOnly:
    """Give the agent something to do; when this is answered it is never lost."""
    return HeadersOnly({RUN_HEADER: await workspace.agent.prompt(body)})


async def init_agent(workspace: LiveWorkspace, body: InitAgent | None) -> None:
    """Make the agent ready; it always is, and to do it again disturbs no run."""


async def update_agent(workspace: LiveWorkspace) -> None:
    """Let the agent take up changed models and tools, which it does by itself."""


async def get_agent_session(workspace: LiveWorkspace, session_id: SessionId) -> Session:
    """Show a session, and whether the agent is busy with it."""
    return await workspace.get_session(session_id)


async def cancel(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Stop every run of a session that is live now; one accepted later is not touched."""
    await workspace.agent.cancel(session_id)


async def count_queued(workspace: LiveWorkspace, session_id: SessionId) -> int:
    """Say how many prompts of a session wait."""
    return len(workspace.agent.queue(session_id))


async def list_queued(workspace: LiveWorkspace, session_id: SessionId) -> list[str]:
    """List the prompts of a session that wait, in their order."""
    return [item.prompt for item in workspace.agent.queue(session_id)]


async def clear_queued(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Forget the prompts of a session that wait."""
    await workspace.agent.clear(session_id)


async def summarize(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Replace what the model reads of a session by a summary, and wait until that is done."""
    await workspace.agent.summarize(session_id)


async def compact(workspace: LiveWorkspace, session_id: SessionId) -> HeadersOnly:
    """As summarize, without waiting: a run like any other."""
    run = await workspace.agent.accept_summary(session_id)
    return HeadersOnly({} if run is None else {RUN_HEADER: run.id})


async def steer(workspace: LiveWorkspace, session_id: SessionId, body: EditPrompt) -> Run:
    """Say something to a session's live run; it reads it before its next step."""
    return await workspace.agent.steer(session_id, body.prompt)


async def get_queue(workspace: LiveWorkspace, session_id: SessionId) -> list[QueuedPrompt]:
    """List the runs of a session that wait, in their order, each with its whole prompt."""
    return workspace.agent.queue(session_id)


async def order_queue(
    workspace: LiveWorkspace, session_id: SessionId, body: OrderQueue
) -> list[QueuedPrompt]:
    """Put those that wait into another order."""
    return await workspace.agent.order(session_id, body.run_ids)


async def run_shell(
    workspace: LiveWorkspace, session_id: SessionId, body: ShellCommand
) -> ShellOutput:
    """Run a user's own command in the workspace; if the client leaves, it ends."""
    return await workspace.toolbox.run_shell(session_id, body.command, body.term_width)


async def default_small_model(workspace: LiveWorkspace, query: ProviderQuery) -> SelectedModel:
    """Propose a small model of a provider: the one selected if it is its own, else the large."""
    return workspace.agent.small_model(query.provider_id)


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
    Route("POST", f"{_S}/compact", compact, status=202),
    Route("POST", f"{_S}/steer", steer, status=202),
    Route("GET", f"{_S}/queue", get_queue),
    Route("PUT", f"{_S}/queue", order_queue),
    Route("POST", f"{_S}/shell", run_shell),
]

"""The main agent of a workspace: prompts, their runs and queue, summaries and shell commands."""

from culm.ids import SessionId
from culm.server.api import ATTACHMENT_BYTES_MAX, WORKSPACE, HeadersOnly, Route
from culm.wire.config import SelectedModel
from culm.wire.messages import Session
from culm.wire.queries import ProviderQuery, RunsQuery
from culm.wire.runs import (
    RUN_HEADER,
    AgentInfo,
    CancelAnswer,
    EditPrompt,
    InitAgent,
    OrderQueue,
    Prompt,
    QueuedPrompt,
    Run,
    ShellOutput,
    ShellRequest,
)
from culm.workspace.workspace import LiveWorkspace


async def agent_info(workspace: LiveWorkspace) -> AgentInfo:
    """Show if the agent is ready and busy, and the model that it uses."""
    return workspace.agent.info()


async def prompt(workspace: LiveWorkspace, body: Prompt) -> HeadersOnly:
    """Send a prompt. Once this request is answered, the prompt is durable."""
    return HeadersOnly({RUN_HEADER: await workspace.agent.prompt(body)})


async def init_agent(workspace: LiveWorkspace, body: InitAgent | None) -> None:
    """Initialize the agent. It is always ready, so this does nothing."""


async def update_agent(workspace: LiveWorkspace) -> None:
    """Reload models and tools. The agent does so by itself, so this does nothing."""


async def get_agent_session(workspace: LiveWorkspace, session_id: SessionId) -> Session:
    """Show a session, including if the agent is busy with it."""
    return await workspace.sessions.get(session_id)


async def cancel(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Stop every live run of a session. Runs that are accepted later are not affected."""
    await workspace.agent.cancel(session_id)


async def count_queued(workspace: LiveWorkspace, session_id: SessionId) -> int:
    """Count the queued prompts of a session."""
    return len(workspace.agent.queue(session_id))


async def list_queued(workspace: LiveWorkspace, session_id: SessionId) -> list[str]:
    """List the queued prompts of a session in order."""
    return [item.prompt for item in workspace.agent.queue(session_id)]


async def clear_queued(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Remove all queued prompts of a session."""
    await workspace.agent.clear(session_id)


async def summarize(workspace: LiveWorkspace, session_id: SessionId) -> None:
    """Replace a session's history, as the model reads it, by a summary; wait for the result."""
    await workspace.agent.summarize(session_id)


async def compact(workspace: LiveWorkspace, session_id: SessionId) -> HeadersOnly:
    """Summarize a session as an ordinary run, without waiting for it."""
    run = await workspace.agent.accept_summary(session_id)
    return HeadersOnly({} if run is None else {RUN_HEADER: run.id})


async def steer(workspace: LiveWorkspace, session_id: SessionId, body: EditPrompt) -> Run:
    """Send text to the live run of a session, which reads it before its next step."""
    return await workspace.agent.steer(session_id, body.prompt)


async def get_queue(workspace: LiveWorkspace, session_id: SessionId) -> list[QueuedPrompt]:
    """List the queued runs of a session in order, with their full prompts."""
    return workspace.agent.queue(session_id)


async def order_queue(
    workspace: LiveWorkspace, session_id: SessionId, body: OrderQueue
) -> list[QueuedPrompt]:
    """Change the order of the queued runs of a session."""
    return await workspace.agent.order(session_id, body.run_ids)


async def run_shell(
    workspace: LiveWorkspace, session_id: SessionId, body: ShellRequest
) -> ShellOutput:
    """Run a shell command of the user in the workspace. It is stopped if the client disconnects."""
    return await workspace.toolbox.run_shell(session_id, body.command, body.term_width)


async def default_small_model(workspace: LiveWorkspace, query: ProviderQuery) -> SelectedModel:
    """Propose a small model: the selected one if it belongs to the provider, else the large one."""
    return workspace.agent.small_model(query.provider_id)


async def list_runs(workspace: LiveWorkspace, query: RunsQuery) -> list[Run]:
    """List the latest 500 runs, optionally only those of a session or in a state."""
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


_S = f"{WORKSPACE}/agent/sessions/{{session_id}}"
_RUNS = f"{WORKSPACE}/runs"
_RUN = f"{_RUNS}/{{run_id}}"

ROUTES = [
    Route("GET", f"{WORKSPACE}/agent", agent_info),
    Route("POST", f"{WORKSPACE}/agent", prompt, status=202, body_bytes_max=ATTACHMENT_BYTES_MAX),
    Route("POST", f"{WORKSPACE}/agent/init", init_agent),
    Route("POST", f"{WORKSPACE}/agent/update", update_agent),
    Route("GET", f"{WORKSPACE}/agent/default-small-model", default_small_model),
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
RUN_ROUTES = [
    Route("GET", _RUNS, list_runs),
    Route("GET", _RUN, get_run),
    Route("PUT", _RUN, edit_run),
    Route("POST", f"{_RUN}/cancel", cancel_run),
    Route("POST", f"{_RUN}/start", start_run),
    Route("POST", f"{_RUN}/drop", drop_run),
]

"""Sub-agents of a workspace, and letters between agents and people."""

from culm.server.api import WORKSPACE, Route
from culm.wire import agents as wire
from culm.wire.queries import AgentsQuery, MailQuery
from culm.workspace.registry import Registry
from culm.workspace.workspace import LiveWorkspace


async def list_agents(workspace: LiveWorkspace, query: AgentsQuery) -> list[wire.RawAgent]:
    """List all agents, or those below one agent, in the order in which they were started."""
    return await workspace.agents.list_below(query.below)


async def start_agent(workspace: LiveWorkspace, body: wire.StartAgent) -> wire.Agent:
    """Start an agent outside a conversation, with a session of its own."""
    return await workspace.agents.start_agent(body)


async def get_agent(workspace: LiveWorkspace, agent_id: str) -> wire.AgentDetails:
    """Show an agent with the agents above it, its children and its last answer."""
    return await workspace.agents.agents.details(agent_id)


async def steer_agent(
    workspace: LiveWorkspace, agent_id: str, body: wire.SayToAgent
) -> wire.SaidToAgent:
    """Send text to an agent: it steers a running agent, or is a new assignment for an ended one."""
    return await workspace.agents.steer(agent_id, body.text)


async def cancel_agent(workspace: LiveWorkspace, agent_id: str) -> wire.Agent:
    """Stop an agent and all agents below it. A waiting parent receives a result."""
    return await workspace.agents.cancel(agent_id)


async def set_agent_budget(
    workspace: LiveWorkspace, agent_id: str, body: wire.ChangeBudget
) -> wire.Agent:
    """Change the limits of an agent, also while it runs. 0 removes a limit."""
    return await workspace.agents.set_budget(agent_id, body)


async def list_letters(workspace: LiveWorkspace, query: MailQuery) -> list[wire.LetterShown]:
    """List all letters, or those to and from one agent, the latest first."""
    return await workspace.agents.outbox.list(query.agent)


async def send_letter(workspace: LiveWorkspace, body: wire.SendLetter) -> wire.LetterShown:
    """Send a letter to an agent. An agent that is idle starts a run for it."""
    return await workspace.agents.send_letter(body)


async def get_letter(workspace: LiveWorkspace, letter_id: str) -> wire.LetterShown:
    """Show the delivery state of a letter."""
    return await workspace.agents.outbox.get(letter_id)


async def reply_to_letter(
    workspace: LiveWorkspace, letter_id: str, body: wire.ReplyToLetter
) -> wire.LetterShown:
    """Reply to a letter. The first reply counts as its answer."""
    return await workspace.agents.reply_to_letter(letter_id, body)


async def ring(workspace: LiveWorkspace, body: wire.Ring) -> None:
    """Check one mailbox, or all, for letters that were delivered without the server."""
    await workspace.agents.ring(body.agent)


async def ring_project(registry: Registry, body: wire.RingProject) -> None:
    """Check the mailboxes of a project. A known project that is not open is opened."""
    await registry.ring(body.path, body.agent)


_A = f"{WORKSPACE}/agents"
_M = f"{WORKSPACE}/mail"

ROUTES = [
    Route("GET", _A, list_agents),
    Route("POST", _A, start_agent, status=202),
    Route("GET", f"{_A}/{{agent_id}}", get_agent),
    Route("POST", f"{_A}/{{agent_id}}/message", steer_agent, status=202),
    Route("POST", f"{_A}/{{agent_id}}/cancel", cancel_agent),
    Route("POST", f"{_A}/{{agent_id}}/budget", set_agent_budget),
]
MAIL_ROUTES = [
    Route("GET", _M, list_letters),
    Route("POST", _M, send_letter, status=202),
    Route("POST", f"{_M}/ring", ring),
    Route("GET", f"{_M}/letters/{{letter_id}}", get_letter),
    Route("POST", f"{_M}/letters/{{letter_id}}/reply", reply_to_letter, status=202),
    Route("POST", "/v1/mail/ring", ring_project),
]

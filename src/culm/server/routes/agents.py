"""Agents that work for others: the tree of them, and what people do with one."""

from culm.server.api import Route
from culm.wire.agents import (
    Agent,
    AgentDetails,
    ChangeBudget,
    RawAgent,
    SaidToAgent,
    SayToAgent,
    StartAgent,
)
from culm.wire.queries import AgentsQuery
from culm.workspace.workspace import LiveWorkspace


async def list_agents(workspace: LiveWorkspace, query: AgentsQuery) -> list[RawAgent]:
    """List all agents, or those below one, in the order they were started."""
    return await workspace.agents.list_below(query.below)


async def start_agent(workspace: LiveWorkspace, body: StartAgent) -> Agent:
    """Start an agent outside a conversation; it has a session of its own."""
    return await workspace.agents.start_agent(body)


async def get_agent(workspace: LiveWorkspace, agent_id: str) -> AgentDetails:
    """Show an agent, whom it works for, who works for it, and what it said last."""
    return await workspace.agents.agents.details(agent_id)


async def steer_agent(workspace: LiveWorkspace, agent_id: str, body: SayToAgent) -> SaidToAgent:
    """Steer an agent that works, or give one that has ended more to do."""
    return await workspace.agents.steer(agent_id, body.text)


async def cancel_agent(workspace: LiveWorkspace, agent_id: str) -> Agent:
    """Stop an agent and all below it; whoever waits for it is told by a result."""
    return await workspace.agents.cancel(agent_id)


async def set_agent_budget(workspace: LiveWorkspace, agent_id: str, body: ChangeBudget) -> Agent:
    """Change the limits that are named, also while it works; 0 is no limit."""
    return await workspace.agents.set_budget(agent_id, body)


_A = "/v1/workspaces/{workspace_id}/agents"

ROUTES = [
    Route("GET", _A, list_agents),
    Route("POST", _A, start_agent, status=202),
    Route("GET", f"{_A}/{{agent_id}}", get_agent),
    Route("POST", f"{_A}/{{agent_id}}/message", steer_agent, status=202),
    Route("POST", f"{_A}/{{agent_id}}/cancel", cancel_agent),
    Route("POST", f"{_A}/{{agent_id}}/budget", set_agent_budget),
]

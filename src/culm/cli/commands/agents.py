"""`culm agents`: the agents of a project, read from its database, with or without a server."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from culm.cli.names import short_ids
from culm.cli.options import json_option, project_options
from culm.cli.projects import data_dir_of, get_project
from culm.cli.render.text import in_tree_order, table
from culm.cli.terminal.process import output_width, print_json
from culm.ids import AgentId
from culm.store.agents import agents_below
from culm.store.base import Connection
from culm.store.runs import list_runs
from culm.store.sessions import top_sessions
from culm.wire.agents import Agent, outcome_of_run
from culm.wire.messages import Session
from culm.workspace.roots import is_in_use

SESSIONS_SHOWN = 20  # The latest, and all that have agents.
RUNS_READ = 100  # Per session: the limit of its queue.


@click.command()
@json_option
@project_options
def agents(as_json: bool, directory: Path, data_dir: Path | None) -> None:
    """List the agents of a project as a tree.

    Agents of the latest sessions come first. Of the sessions without agents, only the latest 20 are
    shown; `culm sessions` lists all.

    A session that a person started has an agent of its own, with the id of the session. Its state
    is that of the active run, or else of the latest run, or "-" if there was no run. The cost of an
    agent includes all agents below it.

    The data is read from files. If no server has them open, the states are those that the last
    server stored, and a note on stderr says so.

    \b
    Example:
      culm agents
      culm agents --json
    """
    project = get_project(directory, data_dir_of(data_dir, os.environ))
    by_id: dict[str, Agent] = {one.agent_id: one for one in project.read(_all_in)}
    parents = {agent_id: agent.parent_id for agent_id, agent in by_id.items()}
    found = [(depth, by_id[agent_id]) for depth, agent_id in in_tree_order(parents)]
    if as_json:
        shown = [agent for _, agent in found]
        print_json(shown)
    elif found:
        head = ("agent", "role", "state", "cost", "name")
        short = short_ids(list(parents))
        rows = [_row(depth, short[agent.agent_id], agent) for depth, agent in found]
        click.echo("\n".join(table(head, rows, output_width())))
    else:
        click.echo("no agents here yet", err=True)
    is_open = any(agent.state != "ended" for _, agent in found)
    if is_open and not is_in_use(project.root):
        click.echo("(no server is running: states are those that the last one stored)", err=True)


def _all_in(connection: Connection) -> list[Agent]:
    """The agents of sessions, which have no rows of their own, and then the stored agents."""
    started = agents_below("")(connection)
    above = {agent.parent_id for agent in started}
    own = {agent.session_id for agent in started}
    tops = [
        _own_agent(connection, session)
        for number, session in enumerate(top_sessions(connection))
        if (number < SESSIONS_SHOWN or session.id in above) and session.id not in own
    ]
    return [*tops, *started]


def _own_agent(connection: Connection, session: Session) -> Agent:
    """The agent of a session: active if a run of it is, otherwise as its latest run ended."""
    agent = Agent(
        agent_id=AgentId(session.id),
        parent_id="",
        session_id=session.id,
        depth=0,
        name=session.title,
        role="session",
        state="ended",
        cost=session.cost,
        created_at=session.created_at,
    )
    runs = list_runs(session.id, "", RUNS_READ)(connection)
    if runs:
        open_ = [run for run in runs if run.state != "ended"]
        run = open_[-1] if open_ else runs[0]  # The latest is the first.
        agent.run_id = run.id
        if not open_:
            agent.outcome = outcome_of_run(run.outcome)
        else:
            is_begun = run.state not in ("accepted", "queued", "held")
            agent.state = "running" if is_begun else "pending"
    return agent


def _row(depth: int, short: str, agent: Agent) -> Sequence[str]:
    state = agent.outcome or agent.state
    if not agent.run_id and state == "ended":
        state = "-"
    elif agent.waiting_for:
        state += f", waits for {agent.waiting_for}"
    return f"{'  ' * depth}{short}", agent.role or "-", state, f"${agent.cost:.4f}", agent.name

"""`culm agents`: who there is in a project, read from its database, with or without a server."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from culm.cli.mail_command import data_dir_option
from culm.cli.options import directory_option, json_option

if TYPE_CHECKING:  # Only `click` is needed to print a help.
    from culm.store.base import Connection
    from culm.wire.agents import Agent
    from culm.wire.sessions import Session

SESSIONS_SHOWN = 20  # The latest ones; and all that have agents.
RUNS_LOOKED_AT = 100  # Of a session: as many as may wait in its queue.


@click.command()
@json_option
@directory_option
@data_dir_option
def agents(
    as_json: bool,  # noqa: FBT001 - click passes by name
    directory: Path,
    data_dir: Path | None,
) -> None:
    """List the agents of a project as a tree, those of the latest sessions first.

    Of sessions without agents there are the latest 20; `culm sessions` has all.

    A session that people began has an agent of its own, with the session's id; its state is that of
    the run at work there, or of the latest one, and "-" if there was none. The cost
    is that of an agent and all below it.

    All of it is read from files. Where no server has them open, states are as the last one left
    them, which is told on stderr.

    \b
    Example:
      culm agents
      culm agents --json
    """
    import os

    import msgspec

    from culm.cli.mail_place import data_dir_of, get_project
    from culm.cli.names import short_ids
    from culm.cli.render.text import table
    from culm.cli.render.trees import in_tree_order
    from culm.cli.terminal.streams import output_width
    from culm.workspace.roots import is_in_use

    project = get_project(directory, data_dir_of(data_dir, os.environ))
    everybody: dict[str, Agent] = {one.agent_id: one for one in project.read(_all_in)}
    parents = {agent_id: agent.parent_id for agent_id, agent in everybody.items()}
    found = [(depth, everybody[agent_id]) for depth, agent_id in in_tree_order(parents)]
    if as_json:
        shown = [agent for _, agent in found]
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    elif found:
        head = ("agent", "role", "state", "cost", "name")
        short = short_ids(list(parents))
        rows = [_row(depth, short[agent.agent_id], agent) for depth, agent in found]
        click.echo("\n".join(table(head, rows, output_width())))
    else:
        click.echo("nobody has been asked anything here", err=True)
    is_open = any(agent.state != "ended" for _, agent in found)
    if is_open and not is_in_use(project.root):
        click.echo("(no server runs: states are as the last one left them)", err=True)


def _all_in(connection: "Connection") -> "list[Agent]":
    """The agents, and before them those of sessions, which are no rows."""
    from culm.store.agents import agents_below
    from culm.store.sessions import top_sessions

    started = agents_below("")(connection)
    above = {agent.parent_id for agent in started}
    own = {agent.session_id for agent in started}
    tops = [
        _own_agent(connection, session)
        for number, session in enumerate(top_sessions(connection))
        if (number < SESSIONS_SHOWN or session.id in above) and session.id not in own
    ]
    return [*tops, *started]


def _own_agent(connection: "Connection", session: "Session") -> "Agent":
    """That of a session that people began: at work if a run of it is, else as the latest ended."""
    from culm.ids import AgentId
    from culm.store.runs import list_runs
    from culm.wire.agents import Agent, outcome_of_run

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
    runs = list_runs(session.id, "", RUNS_LOOKED_AT)(connection)
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


def _row(depth: int, short: str, agent: "Agent") -> "Sequence[str]":
    state = agent.outcome or agent.state
    if not agent.run_id and state == "ended":
        state = "-"
    elif agent.waiting_for:
        state += f", waits for {agent.waiting_for}"
    return f"{'  ' * depth}{short}", agent.role or "-", state, f"${agent.cost:.4f}", agent.name

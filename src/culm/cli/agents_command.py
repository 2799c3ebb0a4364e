"""`culm agents`: who there is in a project, read from its database, with or without a server."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from culm.cli.mail_command import data_dir_option, json_option
from culm.cli.options import directory_option

if TYPE_CHECKING:  # Only `click` is needed to print a help.
    from culm.store.base import Connection
    from culm.wire.agents import Agent

SESSIONS_SHOWN = 20  # The latest ones; and all that have agents.


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

    A session that people began has an agent of its own, with the session's id. The cost is that of
    an agent and all below it.

    \b
    Example:
      culm agents
    """
    import os

    import msgspec

    from culm.cli.lines import columns
    from culm.cli.mail_place import data_dir_of, get_project

    project = get_project(directory, data_dir_of(data_dir, os.environ))
    found = list(in_tree_order(project.read(_all_in)))
    if as_json:
        shown = [agent for _, agent in found]
        click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2))
    elif found:
        head = ("agent", "role", "state", "cost", "name")
        click.echo("\n".join(columns([head, *(_row(*one) for one in found)])))
    else:
        click.echo("nobody has been asked anything here", err=True)


def _all_in(connection: "Connection") -> "list[Agent]":
    """The agents, and before them those of sessions, which are no rows."""
    from culm.ids import AgentId
    from culm.store.agents import agents_below
    from culm.store.sessions import top_sessions
    from culm.wire.agents import Agent

    started = agents_below("")(connection)
    above = {agent.parent_id for agent in started}
    own = {agent.session_id for agent in started}
    tops = [
        Agent(
            agent_id=AgentId(session.id),
            parent_id="",
            session_id=session.id,
            depth=0,
            name=session.title,
            role="session",
            cost=session.cost,
        )
        for number, session in enumerate(top_sessions(connection))
        if (number < SESSIONS_SHOWN or session.id in above) and session.id not in own
    ]
    return [*tops, *started]


def in_tree_order(found: "Sequence[Agent]") -> "Iterator[tuple[int, Agent]]":
    """Each below the one above it, with how deep it stands. Everybody comes once."""
    there = {agent.agent_id for agent in found}
    below: dict[str, list[Agent]] = {}
    for agent in found:
        below.setdefault(agent.parent_id if agent.parent_id in there else "", []).append(agent)
    shown: set[str] = set()
    for start in (*below.get("", ()), *found):  # Those that lead in a circle come last.
        ways = [(0, start)]
        while ways:
            depth, agent = ways.pop()
            if agent.agent_id not in shown:
                shown.add(agent.agent_id)
                yield depth, agent
                ways += [(depth + 1, one) for one in reversed(below.get(agent.agent_id, ()))]


def _row(depth: int, agent: "Agent") -> "Sequence[str]":
    state = agent.outcome or agent.state
    if agent.agent_id == agent.session_id and not agent.parent_id:
        # A session's; its runs say how far it is.
        state = "-"
    elif agent.waiting_for:
        state += f", waits for {agent.waiting_for}"
    name = f"{'  ' * depth}{agent.agent_id}"
    return name, agent.role or "-", state, f"${agent.cost:.4f}", agent.name

"""The options of `culm asks`, `culm answer`, `culm ps` and `culm stop`.

They look at a server that runs. What they need is imported when they run.
"""

from typing import TYPE_CHECKING

import click

from culm.cli.options import at_server, json_option

if TYPE_CHECKING:
    from culm.cli.place import Where


@click.command()
@json_option
@at_server
def asks(
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "Where",
) -> None:
    """List what the agents of this directory wait for permission for, the latest first.

    Below that are their questions, with the choices there are. What an agent asks that works for
    another is listed with all agents that lead to it.

    \b
    Example:
      culm asks
      culm answer 68263f22 allow
    """
    from culm.cli.asks import show_asks

    show_asks(where, as_json=as_json)


@click.command()
@click.argument("ask_id", metavar="ID")
@click.argument("answers", nargs=-1, required=True, metavar="ANSWER...")
@at_server
def answer(
    ask_id: str,
    answers: tuple[str, ...],
    where: "Where",
) -> None:
    """Answer what `culm asks` lists; the first answer counts, here or in another client.

    ID is an id or its beginning. To a wish for permission ANSWER is allow (once), session or
    workspace (and the like of it from now on, there), or deny, which ends the run. To a question it
    is yes or no, the numbers of choices, or your own words; where several have one id, one ANSWER
    for each, quoted.

    \b
    Example:
      culm answer 68263f22 allow
      culm answer 5b1f03aa 2
      culm answer 5b1f03aa use the one in docs
    """
    from culm.cli.asks import answer_ask

    answer_ask(where, ask_id, answers)


@click.command()
@json_option
@at_server
def ps(
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "Where",
) -> None:
    """List the processes that run for this directory: commands, jobs, hooks, agents' workers.

    Each with its age, the memory of all its descendants, and what it was started for.

    \b
    Example:
      culm ps
      culm ps --json
    """
    from culm.cli.asks import show_processes

    show_processes(where, as_json=as_json)


@click.command()
@click.argument("agent_id", metavar="AGENT")
@at_server
def stop(agent_id: str, where: "Where") -> None:
    """Stop an agent that was started by another or by a client, and all below it.

    AGENT is an id that `culm agents` lists. What it has done stays done.

    \b
    Example:
      culm stop 1d9c6a52-6b0e-4f3e-9a3b-5f1d2c7e8a90
    """
    from culm.cli.asks import stop_agent

    stop_agent(where, agent_id)

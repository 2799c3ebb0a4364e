"""The options of `culm ps`, `culm stop` and `culm steer`: what is going on, and a word to it.

They look at a server that runs. What they need is imported when they run.
"""

import sys
from typing import TYPE_CHECKING

import click

from culm.cli.options import at_server, json_option

if TYPE_CHECKING:
    from culm.cli.server_target import ServerTarget


@click.command()
@click.option("--all", "is_all", is_flag=True, help="In every directory that the server has open.")
@json_option
@at_server
def ps(
    is_all: bool,  # noqa: FBT001 - click passes by name
    as_json: bool,  # noqa: FBT001
    where: "ServerTarget",
) -> None:
    """Show what is going on in this directory: runs, agents, processes.

    Runs that have not ended come first, each with how far it is, what it and all below it have
    used, and the agents that work for it. Their ids are for `culm stop` and `culm steer`. Below
    are the processes: commands, jobs, hooks and agents' workers, each with its age and the memory
    of all its descendants. As JSON that is one object, with --all one for each directory.

    \b
    Example:
      culm ps
      culm ps --all
      culm ps --json
    """
    from culm.cli.ps import show_work

    show_work(where, is_all=is_all, as_json=as_json)


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="RUN|SESSION|AGENT...")
@at_server
def stop(names: tuple[str, ...], where: "ServerTarget") -> None:
    """Stop a run, everything in a session, or an agent with all below it.

    Each is named by an id, its beginning or its title: `culm ps` shows them. What was done stays
    done. The command ends when all has ended, and says what became of it; the exit status is 1 if
    something did not stop.

    \b
    Example:
      culm stop 1d9c6a52
      culm stop 1d9c6a52 68263f22
    """
    from culm.cli.stop import stop_all

    sys.exit(stop_all(where, names))


@click.command()
@click.argument("name", metavar="RUN|SESSION|AGENT")
@click.argument("words", nargs=-1, metavar="[TEXT...]")
@at_server
def steer(name: str, words: tuple[str, ...], where: "ServerTarget") -> None:
    """Say something to what works, which it reads before its next step.

    It is named by an id, its beginning or its title: `culm ps` shows them. TEXT that is - or not
    given is read from stdin. What ends before it could read it does it as a prompt of its own.
    Where nothing works, nothing is said, and the exit status is 1.

    \b
    Example:
      culm steer 1d9c6a52 leave the tests alone
      git diff | culm steer 1d9c6a52 -
    """
    if not words and (sys.stdin is None or sys.stdin.isatty()):
        raise click.UsageError("there is nothing to say", click.get_current_context())
    from culm.cli.steer import steer as say

    say(where, name, words)

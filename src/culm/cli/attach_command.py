"""The options of `culm attach`. What it needs is imported when it runs."""

import sys
from typing import TYPE_CHECKING

import click

from culm.cli.completing import complete_session
from culm.cli.options import at_own_server
from culm.cli.terminal.streams import is_terminal, need_output

if TYPE_CHECKING:
    from culm.cli.server_target import ServerTarget


@click.command("attach")
@click.argument("name", metavar="RUN|SESSION|AGENT", shell_complete=complete_session)
@click.option(
    "--cursor",
    default="",
    metavar="CURSOR",
    help="Show only what has changed since then. Default: from the start.",
)
@click.option(
    "--until-idle", is_flag=True, help="Of a session: end when nothing goes on there any more."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object per event on stdout.")
@at_own_server
def attach(
    name: str,
    cursor: str,
    until_idle: bool,  # noqa: FBT001 - click passes by name
    as_json: bool,  # noqa: FBT001
    where: "ServerTarget",
) -> None:
    """Follow a run, or a session with all its runs, live and from its start.

    It is shown as `culm run` shows it, with the prompts; any number of clients can follow at once.
    What is asked can be answered here, if this is a terminal. Of a run it ends with the run, and
    with its exit status. Ctrl-C leaves, says the cursor to go on from, and stops nothing. Agents
    that had ended before are known by what they answered.

    The lines of --json are those of `culm run --json`, with "said" for the prompts.

    \b
    Exit status:
      as of `culm run`; 130 if you left a run before its end

    \b
    Example:
      culm attach 2f978a27
      culm attach 2f978a27 --cursor 9a1d817e48b1.17
      culm attach "List the files" --until-idle --json
    """
    need_output()
    starter = where.starter()
    starter.begin()
    from culm.cli.attach import AttachOptions
    from culm.cli.attach import attach as follow

    options = AttachOptions(
        name, where, cursor, until_idle, as_json, interactive=not as_json and is_terminal()
    )
    sys.exit(follow(options, starter))

"""The options of `culm sessions`. What its commands need is imported when they run."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from culm.cli.commands import CommandGroup
from culm.cli.completing import session_argument, sessions_argument
from culm.cli.options import at_own_server, json_option

if TYPE_CHECKING:
    from culm.cli.server_target import ServerTarget

HELP_OPTIONS = ("-h", "--help")


class DefaultListGroup(CommandGroup):
    """Without the name of a command it is `list`, with its options."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in HELP_OPTIONS):
            args = ["list", *args]
        return super().parse_args(ctx, args)


@click.group(cls=DefaultListGroup)
def sessions() -> None:
    """List, show, rename, delete and export the sessions of this directory.

    SESSION is an id, its beginning, or a title. Without a command they are listed.

    \b
    Example:
      culm sessions
      culm sessions show 68263f22
      culm sessions export 68263f22 -o talk.md
    """


@sessions.command("list")
@json_option
@at_own_server
def list_(
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """List the sessions that people began, the last changed first; "*" marks a busy one.

    A session costs what its agents cost, too. Where a terminal is narrow, titles are cut.

    \b
    Example:
      culm sessions list
      culm sessions list --json
    """
    from culm.cli.sessions import list_sessions

    list_sessions(where, as_json=as_json)


@sessions.command()
@session_argument
@json_option
@at_own_server
def show(
    session: str,
    as_json: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Show a conversation: who said what, and a line for each call and its result.

    With --json it is one object: session, messages, runs, agents, queue, and the asks that are
    open, each as the server has it.

    \b
    Example:
      culm sessions show 68263f22
      culm sessions show 68263f22 --json
    """
    from culm.cli.sessions import show_session

    show_session(where, session, as_json=as_json)


@sessions.command()
@session_argument
@click.argument("title", nargs=-1, required=True, metavar="TITLE...")
@at_own_server
def rename(session: str, title: tuple[str, ...], where: "ServerTarget") -> None:
    """Give a session another title.

    \b
    Example:
      culm sessions rename 68263f22 the flaky test
    """
    from culm.cli.sessions import rename_session

    rename_session(where, session, title)


@sessions.command()
@sessions_argument
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
@at_own_server
@click.pass_context
def delete(
    ctx: click.Context,
    sessions: tuple[str, ...],
    yes: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Remove sessions for good, each with its messages, its runs and its agents.

    You are asked first; where nobody can be asked, say --yes. A session that is at work, or has an
    agent that is, stays: cancel it first. The others are removed, and the exit status is 1.

    \b
    Example:
      culm sessions delete 68263f22
      culm sessions delete --yes 68263f22 5b1f03aa
    """
    from culm.cli.sessions import delete_sessions

    ctx.exit(delete_sessions(where, sessions, yes=yes))


@sessions.command()
@session_argument
@click.option(
    "--format",
    "format_",
    type=click.Choice(["markdown", "json"]),
    default="markdown",
    show_default=True,
    help="A page for people, or what `culm sessions show --json` prints.",
)
@click.option(
    "--output",
    "-o",
    "file",
    type=click.Path(path_type=Path),
    help="Write there, whole or not at all. Default: stdout.",
)
@click.option("--agents", is_flag=True, help="With the sessions of its agents, below.")
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@at_own_server
def export(
    session: str,
    format_: Literal["markdown", "json"],
    file: Path | None,
    agents: bool,  # noqa: FBT001 - click passes by name
    force: bool,  # noqa: FBT001 - click passes by name
    where: "ServerTarget",
) -> None:
    """Write a conversation as a Markdown page, with every call and its result; or as JSON.

    \b
    Example:
      culm sessions export 68263f22 > talk.md
      culm sessions export 68263f22 --agents -o talk.md
      culm sessions export 68263f22 --format json -o talk.json
    """
    from culm.cli.export import export_session

    export_session(where, session, format_, file, agents=agents, force=force)

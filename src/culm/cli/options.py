"""Options and arguments that several commands share."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

P = ParamSpec("P")
R = TypeVar("R")

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    help="Workspace directory. Default: the current directory.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def _with_data_dir(command: Callable[P, R], text: str) -> Callable[P, R]:
    option = click.option("--data-dir", type=click.Path(path_type=Path, file_okay=False), help=text)
    return option(command)


def project_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select a project by its directory, read without a server."""
    text = "Data directory, as for `culm serve`."
    return directory_option(_with_data_dir(command, text))


def discovery_option(command: Callable[P, R]) -> Callable[P, R]:
    """Add the option that selects the directory in which agents announce themselves."""
    text = "Data directory, as for `culm serve`; its folder `fabric` is the discovery directory."
    return _with_data_dir(command, text)


def config_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select the configuration of a directory."""
    return directory_option(user_config_options(command))


def user_config_options(command: Callable[P, R]) -> Callable[P, R]:
    """Add the options that select the user's own configuration."""
    config_file = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Your configuration file, as for `culm serve`.",
    )
    return config_file(_with_data_dir(command, "Data directory, as for `culm serve`."))


# --- sessions


def complete_session(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> "list[CompletionItem]":
    """Complete the id of a session that a running server knows; no server, no completions."""
    # Only a shell's Tab needs these, and no other command should wait for them.
    from click.shell_completion import CompletionItem

    from culm.cli.commands.completion import ids_for

    host, directory = ctx.params.get("host"), ctx.params.get("directory")
    token_file = ctx.params.get("token_file")
    found = ids_for(
        directory if isinstance(directory, Path) else Path(),
        host if isinstance(host, str) else None,
        token_file if isinstance(token_file, Path) else None,
        incomplete,
    )
    return [CompletionItem(short, help=title) for short, title in found]


session_argument = click.argument("session", metavar="SESSION", shell_complete=complete_session)
sessions_argument = click.argument(
    "sessions", metavar="SESSION...", nargs=-1, required=True, shell_complete=complete_session
)

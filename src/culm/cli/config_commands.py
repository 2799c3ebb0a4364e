"""The options of `culm models`, `culm config` and `culm trust`, which read files without a server.

What they need is imported when they run.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import click

from culm.cli.commands import CommandGroup
from culm.cli.options import directory_option

if TYPE_CHECKING:  # Only `click` is needed to print a help.
    from culm.cli.reading import ConfigLocation, ConfigReport

P = ParamSpec("P")
R = TypeVar("R")


def _in_directory(command: Callable[P, R]) -> Callable[P, R]:
    """The options that say whose configuration is meant."""
    return directory_option(_of_user(command))


def _of_user(command: Callable[P, R]) -> Callable[P, R]:
    config_file = click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path, dir_okay=False),
        help="Your own file, as for `culm serve`.",
    )
    data_dir = click.option(
        "--data-dir",
        type=click.Path(path_type=Path, file_okay=False),
        help="As for `culm serve`.",
    )
    return config_file(data_dir(command))


def _place(directory: Path, config_file: Path | None, data_dir: Path | None) -> "ConfigLocation":
    import os

    from culm.cli.reading import location_of

    return location_of(directory, config_file, data_dir, dict(os.environ))


def _read(directory: Path, config_file: Path | None, data_dir: Path | None) -> "ConfigReport":
    import asyncio

    from culm.cli.reading import read_location

    return asyncio.run(read_location(_place(directory, config_file, data_dir)))


@click.command()
@click.argument("provider", default="")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@_in_directory
def models(
    provider: str,
    as_json: bool,  # noqa: FBT001 - click passes by name
    directory: Path,
    config_file: Path | None,
    data_dir: Path | None,
) -> None:
    """Show which models can be used here, and why.

    First who does large and small work, with who is asked when that one fails. Then all providers,
    the most preferred first: those of your configuration, then keys in the environment, then model
    servers on this machine, at last `offline`, which is built in. If no model is selected, the
    first provider that can be used does the work. With PROVIDER: its models, with their context
    window in tokens, their price and what they can do.

    Servers on this machine have 0.3 s to answer. CULM_NO_DISCOVERY=1 looks for nothing.

    \b
    Example:
      culm models
      culm models openai
    """
    from culm.cli.models import show_models

    show_models(_read(directory, config_file, data_dir), provider, as_json=as_json)


@click.group(cls=CommandGroup)
def config() -> None:
    """Look at the files that configure culm.

    \b
    Example:
      culm config check
    """


@config.command("path")
@_in_directory
def config_path(directory: Path, config_file: Path | None, data_dir: Path | None) -> None:
    """List the files, the lowest first: each goes over those above it.

    Each is there, not there, trusted, not trusted (then it may only choose among your models and
    name context files) or bad (then nothing in it counts).

    \b
    Example:
      culm config path --dir ~/project
    """
    from culm.cli.config import show_paths

    show_paths(_read(directory, config_file, data_dir))


@config.command("check")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True)
)
@_in_directory
def config_check(
    file: Path | None, directory: Path, config_file: Path | None, data_dir: Path | None
) -> None:
    """Say what is wrong in the files, or in FILE alone.

    A problem is a line `FILE:LINE: KEY: what is wrong` on stdout, with a hint below it where there
    is one. What is only worth knowing goes to stderr. No command in the files is run.

    \b
    Exit status:
      0  nothing is to be mended
      1  something is
      2  wrong usage

    \b
    Example:
      culm config check
      culm config check culm.json
    """
    import asyncio

    from culm.cli.config import show_findings
    from culm.cli.reading import read_alone

    if file is None:
        reading = _read(directory, config_file, data_dir)
    else:
        place = _place(directory, config_file, data_dir)
        reading = asyncio.run(read_alone(place, file.parent.resolve() / file.name))
    sys.exit(show_findings(reading))


@config.command("show")
@click.option("--origin", is_flag=True, help="One line for each value, with its file.")
@_in_directory
def config_show(
    origin: bool,  # noqa: FBT001
    directory: Path,
    config_file: Path | None,
    data_dir: Path | None,
) -> None:
    """Print all files together, with what was found, as JSON.

    References such as $NAME are shown as they are written. Keys that are written out, headers and
    the like are shown as [secret].

    \b
    Example:
      culm config show --origin
    """
    from culm.cli.config import show_config

    show_config(_read(directory, config_file, data_dir), with_origin=origin)


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of culm.json, for your editor.

    \b
    Example:
      culm config schema > culm.schema.json
    """
    from culm.cli.config import show_schema

    show_schema()


@click.command()
@click.argument(
    "directory",
    metavar="[DIR]",
    default=".",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--list", "list_all", is_flag=True, help="Show all files that were trusted.")
@click.option("--revoke", is_flag=True, help="Trust the files of DIR no more.")
@_of_user
def trust(
    directory: Path,
    yes: bool,  # noqa: FBT001
    list_all: bool,  # noqa: FBT001
    revoke: bool,  # noqa: FBT001
    config_file: Path | None,
    data_dir: Path | None,
) -> None:
    """Let a project's files set more than a stranger may.

    Without trust they may choose among your models, name context files inside the project and
    say how things look. With it they may also name providers, addresses, headers, commands, tools,
    roles and permissions. What they want is shown first; then you are asked. Trust ends when a file
    changes. A server that runs takes notice within a second or two.

    \b
    Exit status:
      0  trusted, or nothing needs trust
      1  not trusted
      2  wrong usage

    \b
    Example:
      culm trust                    the files of this directory
      culm trust --revoke ~/project
    """
    from culm.cli.trust import ask_trust, revoke_trust, show_trusted

    if list_all + revoke + yes > 1:
        raise click.UsageError("--yes, --list and --revoke exclude each other")
    if list_all:
        show_trusted(_place(directory, config_file, data_dir))
    elif revoke:
        revoke_trust(_place(directory, config_file, data_dir))
    else:
        sys.exit(ask_trust(_read(directory, config_file, data_dir), yes=yes))

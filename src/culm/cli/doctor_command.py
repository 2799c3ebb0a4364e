"""The options of `culm doctor`. What it needs is imported when it runs."""

import sys
from pathlib import Path

import click

from culm.cli.mail_command import data_dir_option, json_option
from culm.cli.options import directory_option


@click.command()
@click.option(
    "--rebuild", "rebuilds", is_flag=True, help="Make anew what can be. Beside no server."
)
@click.option("--all", "is_all", is_flag=True, help="Every project that was ever opened.")
@json_option
@directory_option
@data_dir_option
def doctor(
    rebuilds: bool,  # noqa: FBT001 - click passes by name
    is_all: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Say whether what culm keeps of a project is sound.

    It looks at the database, at what is derived in it, at mailboxes and at leftover worktrees, and
    changes nothing. With --rebuild indices and derived columns are made anew from the rows that
    count, and an agent that is its own ancestor works for nobody from then on; no server may have
    the data directory open. The exit status is 1 if anything is wrong.

    \b
    Example:
      culm doctor
      culm doctor --all --json
      culm doctor --rebuild
    """
    import os

    from culm.cli.doctor import examine_all
    from culm.cli.mail_place import all_projects, data_dir_of, get_project

    root = data_dir_of(data_dir, os.environ)
    projects = all_projects(root) if is_all else [get_project(directory, root)]
    if not projects:
        click.echo("culm has never been used here", err=True)
    sys.exit(examine_all(projects, rebuilds=rebuilds, as_json=as_json))

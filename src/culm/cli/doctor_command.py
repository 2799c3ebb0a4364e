"""The options of `culm doctor`. What it needs is imported when it runs."""

import sys
from pathlib import Path

import click

from culm.cli.mail_command import data_dir_option
from culm.cli.options import directory_option, json_option


@click.command()
@click.option(
    "--rebuild", "rebuilds", is_flag=True, help="Make anew what can be. Beside no server."
)
@click.option("--all", "is_all", is_flag=True, help="Every project that was ever opened.")
@json_option
@click.option(
    "--host",
    envvar="CULM_HOST",
    metavar="URL",
    help="The server to look at, as for `culm run`. None is started.",
)
@directory_option
@data_dir_option
def doctor(
    rebuilds: bool,  # noqa: FBT001 - click passes by name
    is_all: bool,  # noqa: FBT001
    as_json: bool,  # noqa: FBT001
    host: str | None,
    directory: Path,
    data_dir: Path | None,
) -> None:
    """Say whether culm can work here, and whether what it keeps of a project is sound.

    First comes the machine: versions, programs, directories, the disk, and the server if one runs.
    Then the project's database, what is derived in it, mailboxes and leftover worktrees; where culm
    was never used, that is said. Nothing is changed. With --rebuild indices and derived columns are
    made anew from the rows that count, and an agent that is its own ancestor works for nobody from
    then on; no server may have the data directory open. The exit status is 1 if anything is wrong.

    \b
    Example:
      culm doctor
      culm doctor --all --json
      culm doctor --rebuild
    """
    import os

    from culm.cli.doctor import examine_all, find_projects, show
    from culm.cli.doctor_machine import examine_machine
    from culm.cli.mail_place import data_dir_of
    from culm.cli.terminal.progress import progress
    from culm.client.launch import ServerRequest
    from culm.settings import default_host

    root = data_dir_of(data_dir, os.environ)
    server = ServerRequest(host or default_host(os.environ), data_dir)
    projects, findings = find_projects(directory, root, is_all=is_all)
    words = "rebuilding" if rebuilds else "checking"
    with progress(words, len(projects)) as step:
        findings += examine_all(projects, rebuilds=rebuilds, on_step=step)
    sys.exit(show([*examine_machine(server, root, os.environ), *findings], as_json=as_json))

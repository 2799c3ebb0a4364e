"""Options that several commands have in common."""

from pathlib import Path

import click

directory_option = click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    default=".",
    help="The workspace. Default: the current directory.",
)

"""`culm trust`: show what a project's files set, and trust them.

Trust applies to the content that was shown, even if the file changes before the answer.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click

from culm.cli.config_report import (
    KEY_FIELDS,
    SECRET,
    ConfigLocation,
    ConfigReport,
    current_location,
    read_report,
    untrusted_parts,
)
from culm.cli.options import user_config_options
from culm.cli.render.text import columns, cut
from culm.cli.terminal.process import EXIT_FAILED
from culm.config import jsonc
from culm.config.checking import Document, key_of
from culm.config.sources import FILE_BYTES_MAX, PROJECT_FILES, ReadSource, TrustedFiles
from culm.errors import DataUnusable, Failed
from culm.files import UnreadableFile, read_file
from culm.wire.codec import Json, printable, strings_in

VALUE_CHARS = 400  # A longer command has to be read in its file.
LINES_MAX = 200  # Per file.


@click.command()
@click.argument(
    "directory",
    metavar="[DIR]",
    default=".",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--list", "list_all", is_flag=True, help="List all files that were trusted.")
@click.option("--revoke", is_flag=True, help="Revoke the trust in the files of DIR.")
@user_config_options
def trust(
    directory: Path,
    yes: bool,
    list_all: bool,
    revoke: bool,
    config_file: Path | None,
    data_dir: Path | None,
) -> None:
    """Trust the configuration files of a project.

    Without trust, they can select among your models, name context files inside the project and
    change how things look. With trust, they can also set providers, addresses, headers, commands,
    tools, roles and permissions. These values are shown before you are asked for confirmation.
    Trust ends when a file changes. A running server notices within a second or two.

    \b
    Exit status:
      0  trusted, or nothing needs trust
      1  not trusted
      2  usage error

    \b
    Example:
      culm trust                    the files of this directory
      culm trust --revoke ~/project
    """
    if list_all + revoke + yes > 1:
        raise click.UsageError("--yes, --list and --revoke cannot be used together")
    if list_all:
        show_trusted(current_location(directory, config_file, data_dir))
    elif revoke:
        revoke_trust(current_location(directory, config_file, data_dir))
    else:
        sys.exit(ask_trust(read_report(directory, config_file, data_dir), yes=yes))


def ask_trust(report: ConfigReport, *, yes: bool) -> int:
    """Show the values that need trust, ask, and record the answer; returns the exit status."""
    directory = printable(str(report.location.directory))
    bad = [read for read in report.reads if read.source.owner == "project" and read.is_bad]
    if bad:
        files = ", ".join(str(read.source.file) for read in bad)
        message = f"cannot trust an invalid file: {printable(files)}"
        raise Failed(message, hint="use `culm config check` to see what is wrong")
    wanting = list(untrusted_parts(report))
    if not wanting:
        known = [read for read in report.reads if read.source.owner == "project" and read.trusted]
        for read in known:
            click.echo(f"already trusted: {printable(str(read.source.file))}")
        if not known:
            click.echo(f"nothing in {directory} needs trust")
        return 0
    for read, ignored in wanting:
        click.echo("\n".join(wish_lines(read, ignored)))
    if not yes and not _is_confirmed(len(wanting)):
        click.echo("not trusted; these values stay ignored", err=True)
        return EXIT_FAILED
    contents = {read.source.file: read.content for read, _ in wanting}
    try:
        TrustedFiles(report.location.data_dir).add(contents)
    except OSError as exc:
        raise DataUnusable(str(report.location.data_dir), exc.strerror or str(exc)) from exc
    for file in contents:
        click.echo(f"trusted: {printable(str(file))}")
    return 0


def _is_confirmed(files: int) -> bool:
    if not sys.stdin.isatty():
        raise Failed(
            "cannot ask for confirmation without a terminal", hint="read it, then use --yes"
        )
    what = "this file" if files == 1 else f"these {files} files"
    return click.confirm(f"Trust {what}, exactly as shown?", err=True)


def wish_lines(read: ReadSource, ignored: Sequence[tuple[jsonc.Path, Json]]) -> list[str]:
    """The values that a file sets, one line each."""
    wishes = [leaf for path, value in ignored for leaf in _leaves(path, value)]
    rows = [(key_of(path), _shown(path, value)) for path, value in wishes[:LINES_MAX]]
    lines = [f"{printable(str(read.source.file))} wants to set:", *columns(rows, "  ")]
    if len(wishes) > LINES_MAX:
        lines.append(f"  … and {len(wishes) - LINES_MAX} more; read the file")
    if unknown := [problem.key for problem in read.checked.problems]:
        # A later version may use them, and the trust in this content extends to it.
        lines.append(f"  not used by this version: {printable(cut(', '.join(unknown), 400))}")
    return [*lines, ""]


def _leaves(path: jsonc.Path, value: Json) -> Iterator[tuple[jsonc.Path, Json]]:
    """The single values in a value; a list of simple items, such as a command line, is one."""
    if isinstance(value, dict) and value:
        for name, inner in cast("Document", value).items():
            yield from _leaves((*path, name), inner)
        return
    items = cast("list[Json]", value) if isinstance(value, list) else []
    if any(isinstance(item, dict | list) for item in items):
        for n, inner in enumerate(items):
            yield from _leaves((*path, n), inner)
    else:
        yield path, value


def _shown(path: jsonc.Path, value: Json) -> str:
    """A value on one line. Only literal keys are hidden: a reference has to be reviewed as well."""
    is_key = not KEY_FIELDS.isdisjoint(path)
    refers = any("$" in text for _, text in strings_in(value, path))
    shown = SECRET if is_key and value and not refers else value
    return cut(printable(json.dumps(shown, ensure_ascii=False)), VALUE_CHARS)


# --- trusted files


def show_trusted(location: ConfigLocation) -> None:
    """Print every file that was trusted, and whether it still is."""
    trusted = TrustedFiles(location.data_dir)
    rows = [(file, _standing(trusted, Path(file))) for file in sorted(trusted.known())]
    click.echo("\n".join(columns(rows)) if rows else "no files are trusted")


def _standing(trusted: TrustedFiles, file: Path) -> str:
    try:
        content = read_file(file, FILE_BYTES_MAX)
    except FileNotFoundError:
        return "not there"
    except UnreadableFile as exc:
        return f"cannot be read: {exc}"
    return "trusted" if trusted.is_trusted(file, content) else "changed since, so not trusted"


def revoke_trust(location: ConfigLocation) -> None:
    """Revoke the trust in all files of the directory."""
    trusted = TrustedFiles(location.data_dir)
    before = trusted.known()
    try:
        if before:
            trusted.remove([location.directory / name for name in PROJECT_FILES])
    except OSError as exc:
        raise DataUnusable(str(location.data_dir), exc.strerror or str(exc)) from exc
    gone = sorted(before.keys() - trusted.known().keys())
    for file in gone:
        click.echo(f"no longer trusted: {printable(file)}")
    if not gone:
        click.echo(f"nothing in {printable(str(location.directory))} was trusted")

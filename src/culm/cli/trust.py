"""`culm trust`: what a project's files want to set, and whether they may.

What is trusted is the content that was shown, not what the file holds by the time of the answer.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import cast

import click

from culm.cli.exits import EXIT_FAILED
from culm.cli.reading import ConfigLocation, ConfigReport, untrusted_parts
from culm.cli.render.text import columns, cut
from culm.cli.secrets import KEY_FIELDS, SECRET
from culm.config import jsonc
from culm.config.checking import Document, key_of
from culm.config.sources import FILE_BYTES_MAX, PROJECT_FILES, ReadSource
from culm.config.trust import TrustedFiles
from culm.errors import DataUnusable, Failed
from culm.files import UnreadableFile, read_file
from culm.wire.codec import Json, printable, strings_in

VALUE_CHARS = 400  # A command that is longer is to be read in its file.
LINES_MAX = 200  # Of one file.


def ask_trust(reading: ConfigReport, *, yes: bool) -> int:
    """Show what needs trust, ask, and note it; returns the exit status."""
    directory = printable(str(reading.location.directory))
    bad = [read for read in reading.reads if read.source.owner == "project" and read.is_bad]
    if bad:
        files = ", ".join(str(read.source.file) for read in bad)
        message = f"to be mended before it can be trusted: {printable(files)}"
        raise Failed(message, hint="culm config check says what is wrong")
    wanting = list(untrusted_parts(reading))
    if not wanting:
        known = [read for read in reading.reads if read.source.owner == "project" and read.trusted]
        for read in known:
            click.echo(f"trusted already: {printable(str(read.source.file))}")
        if not known:
            click.echo(f"nothing in {directory} needs trust")
        return 0
    for read, ignored in wanting:
        click.echo("\n".join(wish_lines(read, ignored)))
    if not yes and not _is_confirmed(len(wanting)):
        click.echo("not trusted; this part of it stays ignored", err=True)
        return EXIT_FAILED
    contents = {read.source.file: read.content for read, _ in wanting}
    try:
        TrustedFiles(reading.location.data_dir).add(contents)
    except OSError as exc:
        raise DataUnusable(str(reading.location.data_dir), exc.strerror or str(exc)) from exc
    for file in contents:
        click.echo(f"trusted: {printable(str(file))}")
    return 0


def _is_confirmed(files: int) -> bool:
    if not sys.stdin.isatty():
        raise Failed("there is nobody to ask", hint="say --yes if you have read what is above")
    what = "this file" if files == 1 else f"these {files} files"
    return click.confirm(f"Trust {what}, exactly as shown?", err=True)


def wish_lines(read: ReadSource, ignored: Sequence[tuple[jsonc.Path, Json]]) -> list[str]:
    """What a file wants to set, one line each."""
    wishes = [leaf for path, value in ignored for leaf in _leaves(path, value)]
    rows = [(key_of(path), _shown(path, value)) for path, value in wishes[:LINES_MAX]]
    lines = [f"{printable(str(read.source.file))} wants to set:", *columns(rows, "  ")]
    if len(wishes) > LINES_MAX:
        lines.append(f"  … and {len(wishes) - LINES_MAX} more; read the file")
    if unknown := [problem.key for problem in read.checked.problems]:
        # A later version may know them, and the content is trusted for that one, too.
        lines.append(f"  not used by this version: {printable(cut(', '.join(unknown), 400))}")
    return [*lines, ""]


def _leaves(path: jsonc.Path, value: Json) -> Iterator[tuple[jsonc.Path, Json]]:
    """The single values in a value; a list of simple things, such as a command line, is one."""
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
    """A value on one line. Hidden is only a key that is written out: a reference is a wish, too."""
    is_key = not KEY_FIELDS.isdisjoint(path)
    refers = any("$" in text for _, text in strings_in(value, path))
    shown = SECRET if is_key and value and not refers else value
    return cut(printable(json.dumps(shown, ensure_ascii=False)), VALUE_CHARS)


# --- what has been trusted


def show_trusted(place: ConfigLocation) -> None:
    """Print every file that was trusted, and whether it still is."""
    trusted = TrustedFiles(place.data_dir)
    rows = [(file, _standing(trusted, Path(file))) for file in sorted(trusted.known())]
    click.echo("\n".join(columns(rows)) if rows else "nothing is trusted")


def _standing(trusted: TrustedFiles, file: Path) -> str:
    try:
        content = read_file(file, FILE_BYTES_MAX)
    except FileNotFoundError:
        return "not there"
    except UnreadableFile as exc:
        return f"cannot be read: {exc}"
    return "trusted" if trusted.is_trusted(file, content) else "changed since, so not trusted"


def revoke_trust(place: ConfigLocation) -> None:
    """Take it back for all files of the directory."""
    trusted = TrustedFiles(place.data_dir)
    before = trusted.known()
    try:
        if before:
            trusted.remove([place.directory / name for name in PROJECT_FILES])
    except OSError as exc:
        raise DataUnusable(str(place.data_dir), exc.strerror or str(exc)) from exc
    gone = sorted(before.keys() - trusted.known().keys())
    for file in gone:
        click.echo(f"not trusted any more: {printable(file)}")
    if not gone:
        click.echo(f"nothing in {printable(str(place.directory))} was trusted")

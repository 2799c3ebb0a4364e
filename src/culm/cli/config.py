"""`culm config`: the files that configure a directory, what is wrong in them, what they say."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import click

from culm.cli.config_check import ConfigFinding, findings_of
from culm.cli.exits import EXIT_FAILED
from culm.cli.reading import ConfigLocation, ConfigReport, found_origin, untrusted_parts, value_at
from culm.cli.render.text import columns
from culm.cli.secrets import without_secrets
from culm.config import jsonc
from culm.config.checking import Document, key_of
from culm.config.schema import json_schema
from culm.config.sources import ReadSource, sources_of
from culm.wire.codec import Json, printable


def show_notices(reading: ConfigReport) -> None:
    for notice in reading.notices:
        click.echo(f"note: {printable(notice)}", err=True)


# --- path


def show_paths(reading: ConfigReport) -> None:
    """Print every file that may say something, the lowest first, and how it stands."""
    states = {read.source.file: _state(read) for read in reading.reads}
    states |= {read.source.file: "not trusted" for read, _ in untrusted_parts(reading)}
    for read in reading.documents:
        states[read.source.file] = "there" if read.checked.is_json else "bad"
    rows = [
        (str(file), states.get(file, "not there"), whose)
        for file, whose in _files(reading.location)
    ]
    click.echo("\n".join(columns(rows)))


def _files(place: ConfigLocation) -> Iterator[tuple[Path, str]]:
    user, *project = sources_of(place.config_file, place.directory)
    yield user.file, "yours"
    yield place.user_document, "set by clients, for all directories"
    for source in project:
        yield source.file, "the project's"
    yield place.own_document, "set by clients, for this directory"


def _state(read: ReadSource) -> str:
    if read.is_bad:
        return "bad"
    return "trusted" if read.trusted and read.source.owner == "project" else "there"


# --- check


def show_findings(reading: ConfigReport) -> int:
    """Print what is wrong, and return the exit status."""
    findings = findings_of(reading)
    for finding in findings:
        _show_finding(finding)
    if any(not finding.is_note for finding in findings):
        return EXIT_FAILED
    count = len(reading.reads) + len(reading.documents)
    click.echo(f"ok: {count} file{'s' * (count != 1)}")
    return 0


def _show_finding(finding: ConfigFinding) -> None:
    """Problems are what was asked for; notes go beside them."""
    problem, is_note = finding
    words = printable(str(problem))
    click.echo(f"note: {words}" if is_note else words, err=is_note)
    if problem.hint:
        click.echo(f"  hint: {printable(problem.hint)}", err=is_note)


# --- show


def show_config(reading: ConfigReport, *, with_origin: bool) -> None:
    """Print what counts, without secrets."""
    show_notices(reading)
    if not with_origin:
        click.echo(json.dumps(without_secrets(cast("Json", reading.whole)), indent=2))
        return
    rows = [
        (
            _origin(reading, path),
            f"{key_of(path)} = {json.dumps(without_secrets(value, path))}",
        )
        for path, value in _leaves(reading.whole)
    ]
    click.echo("\n".join(columns(rows)))


def _leaves(document: Document, path: jsonc.Path = ()) -> Iterator[tuple[jsonc.Path, Json]]:
    """All that is set, one by one. A list is one thing: the layers do not mix lists."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("Document", value), (*path, name))
        else:
            yield (*path, name), value


def _origin(reading: ConfigReport, path: jsonc.Path) -> str:
    """The highest layer that says something there."""
    found, *others = reading.layers
    for layer in reversed(others):
        if value_at(layer.document, path) is not None:
            return layer.name
    if path[0] == "providers" and value_at(found.document, path) is not None:
        return found_origin(str(path[1]), reading.found)
    return "default"


# --- schema


def show_schema() -> None:
    click.echo(json.dumps(json_schema(), indent=2))

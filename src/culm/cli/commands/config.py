"""`culm config`: the files that configure a directory, their problems and their merged values."""

import asyncio
import difflib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, cast

import click

from culm.cli.config_report import (
    ANY,
    ROLES,
    ConfigLayer,
    ConfigLocation,
    ConfigReport,
    current_location,
    found_origin,
    models_of,
    read_alone,
    read_report,
    show_notices,
    untrusted_parts,
    value_at,
    without_secrets,
)
from culm.cli.groups import CommandGroup
from culm.cli.options import config_options
from culm.cli.render.text import columns
from culm.cli.terminal.process import EXIT_FAILED
from culm.config import jsonc
from culm.config.checking import ConfigProblem, Document, key_of
from culm.config.references import why_unresolved
from culm.config.schema import json_schema
from culm.config.sources import ReadSource, sources_of
from culm.model.catalog import known_providers
from culm.model.choice import ModelConfig
from culm.model.local_servers import LOCAL_SERVERS, OFF, is_off
from culm.wire.codec import Json, printable, strings_in

UNSET_HINT = "set the variable, write `${NAME:-default}`, or set the key to something else"


class ConfigFinding(NamedTuple):
    """A problem, or a note that needs no fix."""

    problem: ConfigProblem
    is_note: bool = False


@click.group(cls=CommandGroup)
def config() -> None:
    """Check and show the configuration files.

    \b
    Example:
      culm config check
    """


@config.command("path")
@config_options
def config_path(directory: Path, config_file: Path | None, data_dir: Path | None) -> None:
    """List the configuration files, the lowest priority first.

    A file is there, not there, trusted, not trusted (it can only select among your models and name
    context files) or bad (it is ignored).

    \b
    Example:
      culm config path --dir ~/project
    """
    report = read_report(directory, config_file, data_dir)
    states = {read.source.file: _state(read) for read in report.reads}
    states |= {read.source.file: "not trusted" for read, _ in untrusted_parts(report)}
    for read in report.documents:
        states[read.source.file] = "there" if read.checked.is_json else "bad"
    rows = [
        (str(file), states.get(file, "not there"), owner) for file, owner in _files(report.location)
    ]
    click.echo("\n".join(columns(rows)))


@config.command("check")
@click.argument(
    "file", required=False, type=click.Path(path_type=Path, dir_okay=False, exists=True)
)
@config_options
def config_check(
    file: Path | None, directory: Path, config_file: Path | None, data_dir: Path | None
) -> None:
    """Check all configuration files, or only FILE.

    Each problem is a line `FILE:LINE: KEY: problem` on stdout, with a hint below it if there is
    one. Notes that need no fix go to stderr. Commands in the files are not run.

    \b
    Exit status:
      0  no problems
      1  problems found
      2  usage error

    \b
    Example:
      culm config check
      culm config check culm.json
    """
    if file is None:
        report = read_report(directory, config_file, data_dir)
    else:
        location = current_location(directory, config_file, data_dir)
        report = asyncio.run(read_alone(location, file.parent.resolve() / file.name))
    sys.exit(show_findings(report))


@config.command("show")
@click.option("--origin", is_flag=True, help="Print one line per value, with its file.")
@config_options
def config_show(
    origin: bool, directory: Path, config_file: Path | None, data_dir: Path | None
) -> None:
    """Print the merged configuration as JSON.

    It includes discovered providers. References such as $NAME are shown as written. Literal keys,
    headers and similar values are shown as [secret].

    \b
    Example:
      culm config show --origin
    """
    report = read_report(directory, config_file, data_dir)
    show_notices(report)
    if not origin:
        click.echo(json.dumps(without_secrets(cast("Json", report.whole)), indent=2))
        return
    rows = [
        (
            _origin(report, path),
            f"{key_of(path)} = {json.dumps(without_secrets(value, path))}",
        )
        for path, value in _leaves(report.whole)
    ]
    click.echo("\n".join(columns(rows)))


@config.command("schema")
def config_schema() -> None:
    """Print the JSON schema of culm.json, for your editor.

    \b
    Example:
      culm config schema > culm.schema.json
    """
    click.echo(json.dumps(json_schema(), indent=2))


# --- path


def _files(location: ConfigLocation) -> Iterator[tuple[Path, str]]:
    user, *project = sources_of(location.config_file, location.directory)
    yield user.file, "yours"
    yield location.user_document, "set by clients, for all directories"
    for source in project:
        yield source.file, "the project's"
    yield location.own_document, "set by clients, for this directory"


def _state(read: ReadSource) -> str:
    if read.is_bad:
        return "bad"
    return "trusted" if read.trusted and read.source.owner == "project" else "there"


# --- check


def show_findings(report: ConfigReport) -> int:
    """Print the problems and return the exit status."""
    findings = findings_of(report)
    for finding in findings:
        _show_finding(finding)
    if any(not finding.is_note for finding in findings):
        return EXIT_FAILED
    count = len(report.reads) + len(report.documents)
    click.echo(f"ok: {count} file{'s' * (count != 1)}")
    return 0


def _show_finding(finding: ConfigFinding) -> None:
    """Print problems on stdout and notes on stderr."""
    problem, is_note = finding
    text = printable(str(problem))
    click.echo(f"note: {text}" if is_note else text, err=is_note)
    if problem.hint:
        click.echo(f"  hint: {printable(problem.hint)}", err=is_note)


# --- show


def _leaves(document: Document, path: jsonc.Path = ()) -> Iterator[tuple[jsonc.Path, Json]]:
    """All values, one by one. A list is one value, because layers do not merge lists."""
    for name, value in document.items():
        if isinstance(value, dict) and value:
            yield from _leaves(cast("Document", value), (*path, name))
        else:
            yield (*path, name), value


def _origin(report: ConfigReport, path: jsonc.Path) -> str:
    """The highest layer with a value at this path."""
    found, *others = report.layers
    for layer in reversed(others):
        if value_at(layer.document, path) is not None:
            return layer.name
    if path[0] == "providers" and value_at(found.document, path) is not None:
        return found_origin(str(path[1]), report.found)
    return "default"


# --- findings


def findings_of(report: ConfigReport) -> list[ConfigFinding]:
    """All findings, in the order of the files and their lines."""
    models = models_of(report)
    found = [
        *_in_texts(report),
        *_untrusted(report),
        *_references(report, models),
        *_selections(report, models),
    ]
    named = {finding.problem.key for finding in found}
    found += _providers(report, models, named)
    order = [layer.name for layer in report.layers]
    order += [str(read.source.file) for read in report.reads]
    unique = dict.fromkeys(found)
    return sorted(unique, key=lambda one: (order.index(one.problem.file), one.problem.line))


def _in_texts(report: ConfigReport) -> Iterator[ConfigFinding]:
    """Values that do not fit the schema.

    Files of other programs and documents of clients are used as far as they are known.
    """
    for read in report.reads:
        for problem in read.checked.problems:
            yield ConfigFinding(problem, is_note=not read.is_bad)
    for read in report.documents:
        for problem in read.checked.problems:
            yield ConfigFinding(problem, is_note=read.checked.is_json)


def _untrusted(report: ConfigReport) -> Iterator[ConfigFinding]:
    for read, ignored in untrusted_parts(report):
        keys = ", ".join(sorted(key_of(path) for path, _ in ignored))
        what = f"it is not trusted, so this part of it is ignored: {keys}"
        hint = "read it, then run: culm trust"
        yield ConfigFinding(ConfigProblem(str(read.source.file), 0, "", what, hint), is_note=True)


# --- references


def _references(report: ConfigReport, models: ModelConfig) -> Iterator[ConfigFinding]:
    """References that cannot be resolved, as far as they take effect; runs no command."""
    whole = report.whole
    for layer in report.layers:
        if layer.read is None:
            continue
        for path, text in strings_in(cast("Json", layer.document)):
            if not _is_resolved(path, whole) or value_at(whole, path) != text:
                continue
            # By its name, so that a reference to itself is detected.
            name = str(path[-1])
            is_variable = path[0] == "env" and name.isascii() and name.isidentifier()
            asked = f"${name}" if is_variable else text
            if reason := why_unresolved(asked, models.variables):
                yield ConfigFinding(layer.problem(path, key_of(path), reason, _hint_for(reason)))


def _is_resolved(path: jsonc.Path, whole: Document) -> bool:
    """Return whether references at this path are resolved."""
    match path:
        case ("env", _):
            return True
        case ("providers", name, "api_key" | "base_url") | (
            "providers",
            name,
            "extra_headers",
            _,
        ):
            return not value_at(whole, ("providers", name, "disable"))
        case _:
            return False


def _hint_for(reason: str) -> str:
    return UNSET_HINT if reason.endswith("is not set") else ""


# --- models and providers


def _selections(report: ConfigReport, models: ModelConfig) -> Iterator[ConfigFinding]:
    """Selected models that are not available."""
    for layer in report.layers:
        if layer.read is None:
            continue
        for path in _selected(layer):
            chosen = value_at(layer.document, path)
            if not isinstance(chosen, dict) or value_at(report.whole, path) != chosen:
                continue
            fields = cast("Document", chosen)
            provider, model = str(fields.get("provider", "")), str(fields.get("model", ""))
            if not provider and not model:
                continue  # The same as no selection.
            if value_at(report.whole, ("providers", provider)) is None:
                reason = models.why_not(provider, model)
                key_path = (*path, "provider")
                hint = _nearest_provider(report, models, provider)
                yield ConfigFinding(layer.problem(key_path, key_of(key_path), reason, hint))
            elif not model:
                yield ConfigFinding(layer.problem(path, key_of(path), "no model is named"))
            else:
                yield from _misspelled(models, layer, (*path, "model"), provider, model)


def _selected(layer: ConfigLayer) -> Iterator[jsonc.Path]:
    for role in ROLES:
        yield "models", role
        others = value_at(layer.document, ("fallbacks", role))
        for n in range(len(cast("list[Json]", others)) if isinstance(others, list) else 0):
            yield "fallbacks", role, n


def _nearest_provider(report: ConfigReport, models: ModelConfig, provider: str) -> str:
    known = known_providers()
    locals_ = [server.id for server in LOCAL_SERVERS]
    if is_off(report.location.env) and (provider in known or provider in locals_):
        return f"{OFF} is set, which turns discovery off"
    if provider in known:
        return f"set {known[provider].key_env}, or write providers.{provider}.api_key"
    if provider in locals_:
        return "no such server answers on this machine; start it"
    there = models.providers
    close = difflib.get_close_matches(provider.lower(), [*there, *known, *locals_], 1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(there)}"


def _misspelled(
    models: ModelConfig, layer: ConfigLayer, path: jsonc.Path, provider: str, model: str
) -> Iterator[ConfigFinding]:
    """A note for a model that its provider does not list; it may exist all the same."""
    listed = [one.id for one in models.providers[provider].models]
    close = difflib.get_close_matches(model, listed, 1, 0.8)
    if listed and model not in listed and close:
        what = f"provider {provider!r} lists no model {model!r}"
        hint = f"did you mean {close[0]!r}?"
        yield ConfigFinding(layer.problem(path, key_of(path), what, hint), is_note=True)


def _providers(
    report: ConfigReport, models: ModelConfig, named: set[str]
) -> Iterator[ConfigFinding]:
    """Configured providers that are not usable."""
    for name, provider in models.providers.items():
        key = key_of(("providers", name))
        reason = "" if provider.disable else models.why_not(name, ANY)
        if not reason or any(one.startswith(f"{key}.") for one in named):
            continue
        path = ("providers", name)
        writers = [
            layer
            for layer in report.layers
            if layer.read is not None and value_at(layer.document, path) is not None
        ]
        if writers:
            yield ConfigFinding(writers[-1].problem(path, key, reason))

"""The configuration of a directory, read without a server but by the same rules.

Owns the list of files, in their order, and the layer of each. The functions that decide which part
of a file takes effect are the server's own, so both agree. Secrets are hidden before a value is
shown: references may be shown, values and literal keys may not.
"""

import asyncio
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import cast

import click

from culm.clock import LoopClock
from culm.config import jsonc
from culm.config.checking import ConfigProblem, Document
from culm.config.documents import DocumentFile
from culm.config.layers import provider_ids
from culm.config.sources import (
    ConfigSource,
    FileSources,
    ReadSource,
    TrustedFiles,
    missing,
    read_source,
    read_sources,
    sources_of,
)
from culm.errors import Failed, InvalidRequest
from culm.model.choice import ModelConfig, layers_of, merged_config
from culm.model.local_servers import OFFLINE, FoundProviders, LocalServers, find_local_servers
from culm.redaction import RedactedStruct
from culm.settings import default_config_file, default_data_dir
from culm.wire.codec import Json, folded, printable
from culm.wire.config import ModelType
from culm.workspace.roots import project_folder

TRIES = 5  # A file may be in the middle of a change; five in a row are not an accident.
ANY = "any"  # A placeholder for a model where only its provider matters.
ROLES: tuple[ModelType, ...] = ("large", "small")
SECRET = "[secret]"
# Fields that only the provider may see.
KEY_FIELDS = frozenset(
    {"api_key", "oauth", "oauth_client_secret", "oauth_token", "extra_headers", "headers"}
)
# Further fields that may contain a key.
SECRET_FIELDS = KEY_FIELDS | {"args", "env", "extra_body", "provider_options"}
# A default (`${NAME:-…}`) is a literal, so such a text is not a mere reference.
_REFERENCE = re.compile(r"\$(?:[A-Za-z_]\w*|\{[A-Za-z_]\w*\}|\((?:[^()]|\([^()]*\))*\))", re.ASCII)
_SCHEMES = ("", "Bearer ", "Basic ", "Token ")  # Before a reference, in a header.
_CREDENTIALS = re.compile(r"(?<=//)[^/?#\s]*@|\?[^#\s]+")  # In a URL.


class ConfigLocation(RedactedStruct, frozen=True):
    """The files that configure a directory."""

    directory: Path  # With links resolved, as for the workspaces of a server.
    config_file: Path
    data_dir: Path
    env: Mapping[str, str]

    @property
    def user_document(self) -> Path:
        """Settings that clients made for all workspaces."""
        return self.data_dir / "config.json"

    @property
    def own_document(self) -> Path:
        """Settings that clients made for this workspace."""
        return project_folder(self.data_dir, self.directory) / "config.json"


def location_of(
    directory: Path, config_file: Path | None, data_dir: Path | None, env: Mapping[str, str]
) -> ConfigLocation:
    """Raises `InvalidRequest` if the named file does not exist."""
    if config_file is not None and not config_file.exists():
        raise InvalidRequest(f"cannot read {config_file.absolute()}: no such file")
    return ConfigLocation(
        directory.resolve(),
        (config_file or default_config_file(env)).absolute(),
        (data_dir or default_data_dir(env)).absolute(),
        env,
    )


def current_location(
    directory: Path, config_file: Path | None, data_dir: Path | None
) -> ConfigLocation:
    """The location for the environment of this process; raises `InvalidRequest`."""
    return location_of(directory, config_file, data_dir, dict(os.environ))


class ConfigLayer(RedactedStruct, frozen=True):
    """The values of one origin; later layers override earlier ones."""

    name: str  # The file, or `found`.
    read: ReadSource | None  # None if there is no file.
    document: Document  # The part that takes effect.

    def problem(self, path: jsonc.Path, key: str, what: str, hint: str = "") -> ConfigProblem:
        """A problem at a path of the layer."""
        line = 0
        if self.read is not None:
            text = self.read.content.decode()
            line = jsonc.line_of(text, _as_written(jsonc.parse(text), path))
        return ConfigProblem(self.name, line, key, what, hint)


def _as_written(value: Json, path: jsonc.Path) -> jsonc.Path:
    """The path as the file spells it: a checked document has the spelling of the schema."""
    written: jsonc.Path = ()
    for step in path:
        if isinstance(step, str) and isinstance(value, dict) and step not in value:
            names = cast("Document", value)
            step = next((name for name in names if folded(name) == folded(step)), step)
        written = (*written, step)
        value = value_at(value, (step,))
    return written


class ConfigReport(RedactedStruct, frozen=True, dict=True):
    """All files as read at one moment."""

    location: ConfigLocation
    found: FoundProviders
    reads: Sequence[ReadSource]  # The existing files of people, the lowest first.
    documents: Sequence[ReadSource]  # The existing files of clients.
    layers: Sequence[ConfigLayer]
    notices: Sequence[str] = ()

    @cached_property
    def whole(self) -> Document:
        """All layers merged; includes keys, with references as they are written."""
        return merged_config([layer.document for layer in self.layers], self.location.env)


def read_report(directory: Path, config_file: Path | None, data_dir: Path | None) -> ConfigReport:
    """Read the configuration, for a command; raises `AppError`."""
    return asyncio.run(read_location(current_location(directory, config_file, data_dir)))


def show_notices(report: ConfigReport) -> None:
    """Print the problems that a server would log."""
    for notice in report.notices:
        click.echo(f"note: {printable(notice)}", err=True)


async def read_location(location: ConfigLocation) -> ConfigReport:
    """Read all files; raises `Failed` if they keep changing."""
    # The commands report these problems themselves; a server would log them.
    logging.getLogger("culm").addHandler(logging.NullHandler())
    trusted = TrustedFiles(location.data_dir)
    found = await find_local_servers(location.env, LocalServers(LoopClock()))
    values, documents = await asyncio.to_thread(_read_documents, location, trusted)
    files = FileSources(location.config_file, location.directory, trusted)
    sources = sources_of(location.config_file, location.directory)
    for _ in range(TRIES):
        loaded = await files.load({*found.providers, *provider_ids(values[0])})
        reads = await asyncio.to_thread(read_sources, sources, trusted)
        if not await files.changed():
            break
    else:
        raise Failed(f"the files of {location.directory} keep changing", hint="try again")
    good = {read.source.file: read for read in reads if not read.is_bad}
    good |= {read.source.file: read for read in documents if read.checked.is_json}
    project = [read.source.file for read in good.values() if read.source.owner == "project"]
    names = [location.config_file, location.user_document, *project, location.own_document]
    first, *others = layers_of(found, loaded, *values)
    layers = [
        ConfigLayer(str(file), good.get(file), document)
        for file, document in zip(names, others, strict=True)
    ]
    broken = [str(read.checked.problems[0]) for read in documents if not read.checked.is_json]
    notices = [*loaded.notices, *(f"{what}; the file is ignored" for what in broken)]
    return ConfigReport(
        location, found, reads, documents, [ConfigLayer("found", None, first), *layers], notices
    )


def _read_documents(
    location: ConfigLocation, trusted: TrustedFiles
) -> tuple[list[Document], list[ReadSource]]:
    """The effective values of the clients' documents, and the documents that exist."""
    values: list[Document] = []
    reads: list[ReadSource] = []
    for file in (location.user_document, location.own_document):
        document = DocumentFile(file)
        document.load()
        values.append(document.value)
        if (read := read_source(ConfigSource(file, "user"), trusted)) is not None:
            reads.append(read)
    return values, reads


async def read_alone(location: ConfigLocation, file: Path) -> ConfigReport:
    """Read one file by its absolute path, as if it were the only one and trusted."""
    found = await find_local_servers(location.env, LocalServers(LoopClock()))
    known = [
        one for one in sources_of(location.config_file, location.directory) if one.file == file
    ]
    source = known[0] if known else ConfigSource(file, "user")
    read = read_source(source, TrustedFiles(location.data_dir))
    if read is None:
        raise InvalidRequest(f"cannot read {file}: no such file")
    document = {} if read.is_bad else read.checked.document
    layers = [ConfigLayer("found", None, found.document), ConfigLayer(str(file), read, document)]
    return ConfigReport(location, found, [read], [], layers)


def untrusted_parts(
    reading: ConfigReport,
) -> Iterator[tuple[ReadSource, list[tuple[jsonc.Path, Json]]]]:
    """The project's files that set more than they may, with the parts that are ignored."""
    for layer in reading.layers:
        if layer.read is not None and not layer.read.trusted:
            ignored = list(missing(layer.read.checked.document, layer.document))
            if ignored:
                yield layer.read, ignored


def found_origin(provider_id: str, found: FoundProviders) -> str:
    """The origin of a provider that was discovered, not configured."""
    provider = found.providers.get(provider_id)
    fields = cast("Document", provider) if isinstance(provider, dict) else {}
    if provider_id == OFFLINE:
        return "built in"
    if key := fields.get("api_key"):
        return f"environment {str(key).removeprefix('$')}"
    return f"found at {fields.get('base_url')}"


def value_at(document: Json, path: jsonc.Path) -> Json:
    """The value at a path; None if there is none."""
    for step in path:
        if isinstance(step, int):
            items = cast("list[Json]", document) if isinstance(document, list) else []
            document = items[step] if step < len(items) else None
        else:
            fields = cast("Document", document) if isinstance(document, dict) else {}
            document = fields.get(step)
    return document


def models_of(reading: ConfigReport) -> ModelConfig:
    """The choices that a server would make here."""
    return ModelConfig(reading.whole, reading.location.env)


# --- secrets


def without_secrets(value: Json, path: jsonc.Path = ()) -> Json:
    """The value at a path of a configuration, safe to show to anybody."""
    if isinstance(value, dict):
        fields = cast("Document", value)
        return {name: without_secrets(inner, (*path, name)) for name, inner in fields.items()}
    if isinstance(value, list):
        items = cast("list[Json]", value)
        return [without_secrets(inner, path) for inner in items]
    if isinstance(value, str):
        is_secret = not SECRET_FIELDS.isdisjoint(path)
        return _hidden_text(value) if is_secret else without_credentials(value)
    return value


def _hidden_text(text: str) -> str:
    found = _REFERENCE.search(text)
    is_reference = found is not None and _REFERENCE.sub("", text) in _SCHEMES
    return text if is_reference or not text else SECRET


def without_credentials(text: str) -> str:
    """A text without the user and the query of the URLs in it."""
    return _CREDENTIALS.sub("", text) if "//" in text else text

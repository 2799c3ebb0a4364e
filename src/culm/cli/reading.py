"""What configures a directory, read without a server and by the rules of one.

Owns which files those are, in their order, and what each of them adds. Which part counts is
decided by the functions that a server uses, so both say the same.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import cast

from culm.clock import LoopClock
from culm.config import jsonc
from culm.config.checking import ConfigProblem, Document
from culm.config.documents import DocumentFile
from culm.config.layers import provider_ids
from culm.config.sources import (
    ConfigSource,
    FileSources,
    ReadSource,
    read_source,
    read_sources,
    sources_of,
)
from culm.config.trust import TrustedFiles, missing
from culm.errors import Failed, InvalidRequest
from culm.model.local_servers import OFFLINE, FoundProviders, LocalServers, find_local_servers
from culm.model.merge import layers_of, merged_config
from culm.settings import default_config_file, default_data_dir
from culm.wire.codec import Json, folded
from culm.workspace.roots import project_folder

TRIES = 5  # Somebody may be writing a file just now; nobody writes five times in a row.


# None of these is ever printed by accident: they hold keys.


@dataclass(frozen=True, slots=True, repr=False)
class ConfigLocation:
    """Whose configuration is meant."""

    directory: Path  # With links resolved, as a server names its workspaces.
    config_file: Path
    data_dir: Path
    env: Mapping[str, str]

    @property
    def user_document(self) -> Path:
        """What clients set for all workspaces ..."""
        return self.data_dir / "config.json"

    @property
    def own_document(self) -> Path:
        """... and for this one."""
        return project_folder(self.data_dir, self.directory) / "config.json"


def location_of(
    directory: Path, config_file: Path | None, data_dir: Path | None, env: Mapping[str, str]
) -> ConfigLocation:
    """Raises `InvalidRequest` for a file that was named and is not there."""
    if config_file is not None and not config_file.exists():
        raise InvalidRequest(f"cannot read {config_file.absolute()}: there is no such file")
    return ConfigLocation(
        directory.resolve(),
        (config_file or default_config_file(env)).absolute(),
        (data_dir or default_data_dir(env)).absolute(),
        env,
    )


@dataclass(frozen=True, slots=True, repr=False)
class ConfigLayer:
    """What one origin adds; the later go over the earlier."""

    name: str  # The file, or `found`.
    read: ReadSource | None  # None if it is in no file, or the file is not there.
    document: Document  # What counts of it.

    def problem(self, path: jsonc.Path, key: str, what: str, hint: str = "") -> ConfigProblem:
        """Something that is wrong at a path of it."""
        line = 0
        if self.read is not None:
            text = self.read.content.decode()
            line = jsonc.line_of(text, _as_written(jsonc.parse(text), path))
        return ConfigProblem(self.name, line, key, what, hint)


def _as_written(value: Json, path: jsonc.Path) -> jsonc.Path:
    """A path as the file spells it: a document that was checked is spelled as the schema is."""
    written: jsonc.Path = ()
    for step in path:
        if isinstance(step, str) and isinstance(value, dict) and step not in value:
            names = cast("Document", value)
            step = next((name for name in names if folded(name) == folded(step)), step)
        written = (*written, step)
        value = value_at(value, (step,))
    return written


@dataclass(frozen=True, repr=False)
class ConfigReport:
    """All that was read, at one moment."""

    location: ConfigLocation
    found: FoundProviders
    reads: Sequence[ReadSource]  # The files of people that are there, the lowest first.
    documents: Sequence[ReadSource]  # Those of clients.
    layers: Sequence[ConfigLayer]
    notices: Sequence[str] = ()

    @cached_property
    def whole(self) -> Document:
        """All layers as one; keys included, references as they are written."""
        return merged_config([layer.document for layer in self.layers], self.location.env)


async def read_location(place: ConfigLocation) -> ConfigReport:
    """Read everything; raises `Failed` if the files do not keep still."""
    # What the server would log is said by the commands themselves.
    logging.getLogger("culm").addHandler(logging.NullHandler())
    trusted = TrustedFiles(place.data_dir)
    found = await find_local_servers(place.env, LocalServers(LoopClock()))
    values, documents = await asyncio.to_thread(_read_documents, place, trusted)
    files = FileSources(place.config_file, place.directory, trusted)
    sources = sources_of(place.config_file, place.directory)
    for _ in range(TRIES):
        loaded = await files.load({*found.providers, *provider_ids(values[0])})
        reads = await asyncio.to_thread(read_sources, sources, trusted)
        if not await files.changed():
            break
    else:
        raise Failed(f"the files of {place.directory} change all the time", hint="try again")
    good = {read.source.file: read for read in reads if not read.is_bad}
    good |= {read.source.file: read for read in documents if read.checked.is_json}
    project = [read.source.file for read in good.values() if read.source.owner == "project"]
    names = [place.config_file, place.user_document, *project, place.own_document]
    first, *others = layers_of(found, loaded, *values)
    layers = [
        ConfigLayer(str(file), good.get(file), document)
        for file, document in zip(names, others, strict=True)
    ]
    broken = [str(read.checked.problems[0]) for read in documents if not read.checked.is_json]
    notices = [*loaded.notices, *(f"{what}; nothing in it counts" for what in broken)]
    return ConfigReport(
        place, found, reads, documents, [ConfigLayer("found", None, first), *layers], notices
    )


def _read_documents(
    place: ConfigLocation, trusted: TrustedFiles
) -> tuple[list[Document], list[ReadSource]]:
    """What counts of the clients' documents, and those that are there."""
    values: list[Document] = []
    reads: list[ReadSource] = []
    for file in (place.user_document, place.own_document):
        document = DocumentFile(file)
        document.load()
        values.append(document.value)
        if (read := read_source(ConfigSource(file, "user"), trusted)) is not None:
            reads.append(read)
    return values, reads


async def read_alone(place: ConfigLocation, file: Path) -> ConfigReport:
    """One file by its absolute path, as if there were no other and as if it were trusted."""
    found = await find_local_servers(place.env, LocalServers(LoopClock()))
    known = [one for one in sources_of(place.config_file, place.directory) if one.file == file]
    source = known[0] if known else ConfigSource(file, "user")
    read = read_source(source, TrustedFiles(place.data_dir))
    if read is None:
        raise InvalidRequest(f"cannot read {file}: there is no such file")
    document = {} if read.is_bad else read.checked.document
    layers = [ConfigLayer("found", None, found.document), ConfigLayer(str(file), read, document)]
    return ConfigReport(place, found, [read], [], layers)


def untrusted_parts(
    reading: ConfigReport,
) -> Iterator[tuple[ReadSource, list[tuple[jsonc.Path, Json]]]]:
    """The project's files that want more than they may, with what they want."""
    for layer in reading.layers:
        if layer.read is not None and not layer.read.trusted:
            ignored = list(missing(layer.read.checked.document, layer.document))
            if ignored:
                yield layer.read, ignored


def found_origin(provider_id: str, found: FoundProviders) -> str:
    """How a provider was found that nobody configured."""
    provider = found.providers.get(provider_id)
    fields = cast("Document", provider) if isinstance(provider, dict) else {}
    if provider_id == OFFLINE:
        return "built in"
    if key := fields.get("api_key"):
        return f"environment {str(key).removeprefix('$')}"
    return f"found at {fields.get('base_url')}"


def value_at(document: Json, path: jsonc.Path) -> Json:
    """What stands at a path; None if nothing does."""
    for step in path:
        if isinstance(step, int):
            items = cast("list[Json]", document) if isinstance(document, list) else []
            document = items[step] if step < len(items) else None
        else:
            fields = cast("Document", document) if isinstance(document, dict) else {}
            document = fields.get(step)
    return document

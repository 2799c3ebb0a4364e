"""Configuration files that people write: the user's, and over it those of a project.

They are read up to a size limit and checked. While a file has errors, its last valid content
counts. The user's file also contains the settings of the server, which are read once, at its start.

A repository's author also wrote its configuration. Until the user runs `culm trust` for exactly
this content, the file is restricted: it may select among the user's own models and set display
options. It may not set a provider, an address, a header, a command, a tool or a permission.
"""

import asyncio
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, Protocol, cast

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from culm.config import jsonc
from culm.config.checking import (
    CheckedDocument,
    ConfigProblem,
    Document,
    check_text,
    key_of,
    unusable,
)
from culm.config.documents import shown_config
from culm.config.layers import provider_ids
from culm.config.schema import ProjectFile, UserFile
from culm.errors import InvalidRequest, Rejected
from culm.files import UnreadableFile, locked, read_file, replace_file
from culm.redaction import RedactedStruct
from culm.settings import Settings, default_config_file
from culm.wire.codec import Json, decode, encode, strings_in

FILE_BYTES_MAX = 256 << 10
TRUST_BYTES_MAX = 1 << 20
# In this order; later files take precedence.
PROJECT_FILES = (".crush.json", "crush.json", ".culm.json", "culm.json")

# --- trusted contents


def digest_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class TrustedFiles:
    """The digest of the trusted content of each file. Methods block on disk access."""

    def __init__(self, data_dir: Path) -> None:
        self.file = data_dir / "trust.json"

    def known(self) -> dict[str, str]:
        """The digest of each trusted content by file. If unreadable, nothing is trusted."""
        try:
            return decode(read_file(self.file, TRUST_BYTES_MAX), dict[str, str])
        except (FileNotFoundError, UnreadableFile, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def is_trusted(self, file: Path, content: bytes) -> bool:
        return self.known().get(_name(file)) == digest_of(content)

    def add(self, contents: Mapping[Path, bytes]) -> None:
        """Trust these contents; raises OSError."""
        with locked(self.file):
            known = self.known()
            known |= {_name(file): digest_of(content) for file, content in contents.items()}
            replace_file(self.file, encode(known))

    def remove(self, files: Collection[Path]) -> None:
        with locked(self.file):
            gone = {_name(file) for file in files}
            known = {file: digest for file, digest in self.known().items() if file not in gone}
            replace_file(self.file, encode(known))


def _name(file: Path) -> str:
    """A path as JSON text; bytes that are not UTF-8 are escaped."""
    return str(file).encode(errors="backslashreplace").decode()


# --- files

Owner = Literal["user", "project"]


class ConfigSource(NamedTuple):
    """A file that may contain configuration."""

    file: Path
    owner: Owner

    @property
    def kind(self) -> type[Struct]:
        return UserFile if self.owner == "user" else ProjectFile

    @property
    def is_crush(self) -> bool:
        """True for a file of Crush, which may contain keys that culm does not know."""
        return self.file.name.endswith("crush.json")


class ReadSource(RedactedStruct, frozen=True):
    """The content of one file, checked."""

    source: ConfigSource
    content: bytes
    checked: CheckedDocument
    trusted: bool  # It is the user's own file, or the user ran `culm trust` for its content.

    @property
    def is_bad(self) -> bool:
        """True if the file has errors because of which its content is not used."""
        lenient = self.source.is_crush and self.checked.is_json
        return bool(self.checked.problems) and not lenient


class LoadedConfig(RedactedStruct, frozen=True):
    """The content of all files."""

    user: Document = field(default_factory=dict[str, Json])
    project: tuple[Document, ...] = ()  # Later ones take precedence; restricted unless trusted.
    notices: tuple[str, ...] = ()  # Messages for people.


class ConfigSources(Protocol):
    """The configuration files of one workspace."""

    @property
    def can_change(self) -> bool: ...

    async def load(self, providers: Collection[str]) -> LoadedConfig:
        """Read the files. `providers` are the user's providers from other sources."""
        ...

    async def changed(self) -> bool:
        """Return True if a file has changed since the last `load`."""
        ...


class FixedSources:
    """A fixed configuration, for a workspace without configuration files."""

    can_change = False

    def __init__(self, user: Document) -> None:
        self._loaded = LoadedConfig(user)

    async def load(self, providers: Collection[str]) -> LoadedConfig:
        return self._loaded

    async def changed(self) -> bool:
        return False


Signature = tuple[tuple[int, int, int] | None, ...]


class FileSources:
    """The files of one workspace, read in a thread because the disk may be slow."""

    can_change = True

    def __init__(
        self,
        user_file: Path | None,
        folder: Path,
        trusted: TrustedFiles,
        good: dict[Path, ReadSource] | None = None,
    ) -> None:
        self._all = sources_of(user_file, folder)
        self._trusted = trusted
        self._signature: Signature = ()  # Of the files as last loaded.
        # The last valid content of each file. That of the user's file outlives the workspace: a
        # typo in it must not send the next prompt to another provider.
        self._users = {} if good is None else good
        self._projects: dict[Path, ReadSource] = {}

    async def load(self, providers: Collection[str]) -> LoadedConfig:
        return await asyncio.to_thread(self._load, frozenset(providers))

    async def changed(self) -> bool:
        return await asyncio.to_thread(self._stat_all) != self._signature

    def _stat_all(self) -> Signature:
        files = [source.file for source in self._all]
        return tuple(_stat(file) for file in (*files, self._trusted.file))

    def _load(self, providers: frozenset[str]) -> LoadedConfig:
        """Read all files. The last valid content of a file with errors counts."""
        self._signature = self._stat_all()  # Before reading, so that no later change is missed.
        notices: list[str] = []
        user: Document = {}
        project: list[Document] = []
        found = read_sources(self._all, self._trusted)
        present = {read.source.file for read in found}
        for known in (self._users, self._projects):
            for file in known.keys() - present:
                del known[file]
        for read in found:
            kept = self._kept(read, notices)
            if kept is None:
                continue
            if kept.source.owner == "user":
                user = kept.checked.document
                providers |= set(provider_ids(user))
            elif kept.trusted:
                project.append(kept.checked.document)
                providers |= set(provider_ids(kept.checked.document))
            else:
                document, ignored = restrict(kept.checked.document, providers)
                project.append(document)
                if ignored:
                    notices.append(untrusted_notice(kept.source.file, ignored))
        return LoadedConfig(user, tuple(project), tuple(notices))

    def _kept(self, read: ReadSource, notices: list[str]) -> ReadSource | None:
        """The content of a file to use: the present one, or the last valid one."""
        notices.extend(_notice(problem) for problem in read.checked.problems)
        known = self._users if read.source.owner == "user" else self._projects
        if not read.is_bad:
            known[read.source.file] = read
            return read
        good = known.get(read.source.file)
        used = "its last valid content is used" if good else "it is ignored"
        notices.append(f"{read.source.file} has errors; until they are fixed, {used}")
        if good is None or good.source.owner == "user":
            return good
        # Trust belongs to a content, and may have been revoked in the meantime.
        return replace(good, trusted=self._trusted.is_trusted(good.source.file, good.content))


def sources_of(user_file: Path | None, folder: Path | None) -> tuple[ConfigSource, ...]:
    user = [] if user_file is None else [ConfigSource(user_file, "user")]
    project = (
        [] if folder is None else [ConfigSource(folder / name, "project") for name in PROJECT_FILES]
    )
    return (*user, *project)


def read_sources(sources: Sequence[ConfigSource], trusted: TrustedFiles) -> list[ReadSource]:
    """Read every file that exists, in order of increasing precedence; blocks."""
    found = [read_source(source, trusted) for source in sources]
    return [read for read in found if read is not None]


def read_source(source: ConfigSource, trusted: TrustedFiles) -> ReadSource | None:
    """Read and check one file; None if it does not exist."""
    file = str(source.file)
    try:
        content = read_file(source.file, FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except UnreadableFile as exc:
        problem = ConfigProblem(file, 0, "", f"cannot be read: {exc}")
        return ReadSource(source, b"", unusable(problem), trusted=False)
    try:
        text = content.decode()
    except UnicodeDecodeError as exc:
        line = content[: exc.start].count(b"\n") + 1
        checked = unusable(ConfigProblem(file, line, "", "it is not UTF-8"))
    else:
        checked = check_text(text, source.kind, file)
    is_trusted = source.owner == "user" or trusted.is_trusted(source.file, content)
    return ReadSource(source, content, checked, is_trusted)


def untrusted_notice(file: Path, ignored: Collection[str]) -> str:
    return (
        f"{file} is not trusted, so this part of it is ignored: {', '.join(sorted(ignored))}. "
        "Read it, then run: culm trust"
    )


def _notice(problem: ConfigProblem) -> str:
    return f"{problem} ({problem.hint})" if problem.hint else str(problem)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (OSError, ValueError):
        return None
    # A change of mode only changes ctime, and a file may be rewritten with its old mtime.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino


# --- restriction of untrusted files

# Request parameters of a selected model. `provider_options` is not one: it can contain anything.
_SELECTION = frozenset(
    {
        "model",
        "provider",
        "reasoning_effort",
        "think",
        "max_tokens",
        "temperature",
        "top_p",
        "top_k",
        "frequency_penalty",
        "presence_penalty",
    }
)
_DISPLAY = frozenset({"tui", "notifications", "progress"})


class RestrictedDocument(NamedTuple):
    document: Document
    ignored: tuple[str, ...]  # The keys that need trust.


def restrict(document: Document, providers: Collection[str]) -> RestrictedDocument:
    """The allowed part of an untrusted document, which may select models of `providers`."""
    allowed: Document = {}
    if "$schema" in document:
        allowed["$schema"] = document["$schema"]
    models = _selections(document.get("models"), providers)
    if models:
        allowed["models"] = models
    fallbacks: Document = {}
    for role, choices in _items(document.get("fallbacks")):
        kept = [_selection(one, providers) for one in cast("list[Json]", choices or [])]
        if any(kept):  # An empty list would silently remove the user's own fallbacks.
            fallbacks[role] = [one for one in kept if one is not None]
    if fallbacks:
        allowed["fallbacks"] = fallbacks
    options = dict(_options(document.get("options")))
    if options:
        allowed["options"] = options
    return RestrictedDocument(
        allowed, tuple(key_of(path) for path, _ in missing(document, allowed))
    )


def _items(value: Json) -> Iterator[tuple[str, Json]]:
    yield from cast("Document", value).items() if isinstance(value, dict) else ()


def _selections(value: Json, providers: Collection[str]) -> Document:
    kept = {role: _selection(chosen, providers) for role, chosen in _items(value)}
    return {role: chosen for role, chosen in kept.items() if chosen is not None}


def _selection(value: Json, providers: Collection[str]) -> Document | None:
    chosen = {name: inner for name, inner in _items(value) if name in _SELECTION}
    if chosen.get("provider") not in providers or _has_reference(chosen):
        return None
    return chosen


def _options(value: Json) -> Iterator[tuple[str, Json]]:
    for name, inner in _items(value):
        if name == "context_paths" and isinstance(inner, list):
            if paths := [path for path in cast("list[Json]", inner) if is_inside(path)]:
                yield name, paths
        elif name in _DISPLAY and not _has_reference(inner):
            yield name, inner


def is_inside(path: Json) -> bool:
    """Return True if a path, as written, stays below the directory of its file."""
    if not isinstance(path, str) or not path or "$" in path or path.startswith("~"):
        return False
    pure = PurePosixPath(path)
    return not pure.is_absolute() and ".." not in pure.parts


def _has_reference(value: Json) -> bool:
    return any("$" in text for _, text in strings_in(value))


def missing(
    whole: Document, part: Document, path: jsonc.Path = ()
) -> Iterator[tuple[jsonc.Path, Json]]:
    """The values of `whole` that `part` lacks or has changed, each at its highest path."""
    for name, value in whole.items():
        left = part.get(name)
        if isinstance(value, dict) and isinstance(left, dict):
            yield from missing(cast("Document", value), cast("Document", left), (*path, name))
        elif name not in part or value != left:
            yield (*path, name), value


# --- the user's file at the start of the server


def read_user_file(file: Path | None, env: Mapping[str, str]) -> tuple[Settings, Path]:
    """The settings, and the path of the file: `file` or the default one, which need not exist.

    Raises `InvalidRequest` with every problem in the file.
    """
    path = (file or default_config_file(env)).absolute()
    read = read_source(ConfigSource(path, "user"), TrustedFiles(path.parent))
    if read is None:
        if file is not None:
            raise InvalidRequest(f"cannot read {path}: no such file")
        return Settings(), path
    if read.checked.problems:
        raise _refusal(read.checked.problems)
    try:
        shown_config(read.checked.document, data_directory="", debug=False)
    except Rejected as exc:
        raise InvalidRequest(f"{path}: {exc.message}") from exc
    fields = {
        name: value
        for name, value in read.checked.document.items()
        if name in Settings.__struct_fields__ and value is not None
    }
    return msgspec.convert(fields, Settings), path


def _refusal(problems: tuple[ConfigProblem, ...]) -> InvalidRequest:
    hints = dict.fromkeys(problem.hint for problem in problems if problem.hint)
    hint = "; ".join([*hints, "docs/configuration.md lists every key"])
    return InvalidRequest("\n".join(map(str, problems)), hint=hint)

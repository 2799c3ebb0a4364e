"""The files that people write, as one workspace sees them: the user's, and the project's over it.

Reads them within bounds, checks them, keeps the last good content of each, and knows which may
say what.
"""

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

from msgspec import Struct

from culm.config.checking import CheckedDocument, ConfigProblem, Document, check_text, unusable
from culm.config.layers import provider_ids
from culm.config.schema import ProjectFile, UserFile
from culm.config.trust import TrustedFiles, restrict
from culm.files import UnreadableFile, read_file
from culm.wire.codec import Json

FILE_BYTES_MAX = 256 << 10
# In this order, each over the one before it.
PROJECT_FILES = (".crush.json", "crush.json", ".culm.json", "culm.json")

Owner = Literal["user", "project"]


class ConfigSource(NamedTuple):
    """A file that may hold configuration."""

    file: Path
    owner: Owner

    @property
    def kind(self) -> type[Struct]:
        return UserFile if self.owner == "user" else ProjectFile

    @property
    def is_crush(self) -> bool:
        """Another program's file: it may know keys that we do not."""
        return self.file.name.endswith("crush.json")


@dataclass(frozen=True, slots=True, repr=False)
class ReadSource:
    """One file as it was found."""

    source: ConfigSource
    content: bytes
    checked: CheckedDocument
    trusted: bool  # The user's own, or said to be.

    @property
    def is_bad(self) -> bool:
        """Whether it is to be mended before it counts."""
        lenient = self.source.is_crush and self.checked.is_json
        return bool(self.checked.problems) and not lenient


@dataclass(frozen=True, slots=True, repr=False)
class LoadedConfig:
    """What all files say together."""

    user: Document = field(default_factory=dict[str, Json])
    project: tuple[Document, ...] = ()  # The later over the earlier; restricted unless trusted.
    notices: tuple[str, ...] = ()  # What a person should know, in sentences.


class ConfigSources(Protocol):
    """What people have written for one workspace."""

    @property
    def can_change(self) -> bool: ...

    async def load(self, providers: Collection[str]) -> LoadedConfig:
        """What the files say; `providers` are those the user has otherwise."""
        ...

    async def changed(self) -> bool:
        """Whether they differ from what was loaded last."""
        ...


class FixedSources:
    """Said once and for all: for a workspace whose configuration is in no file."""

    can_change = False

    def __init__(self, user: Document) -> None:
        self._loaded = LoadedConfig(user)

    async def load(self, providers: Collection[str]) -> LoadedConfig:
        return self._loaded

    async def changed(self) -> bool:
        return False


Signature = tuple[tuple[int, int, int] | None, ...]


class FileSources:
    """The files of one workspace, read in a thread: a disk may take its time."""

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
        self._signature: Signature = ()  # Of what was loaded last.
        # The last content of each file that was in order. The user's outlives the workspace: one
        # slip must not send the next prompt to another provider.
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
        """One that is bad counts as it was when it was last good."""
        self._signature = self._stat_all()  # Before the reading: a later change is seen later.
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
        """The content that counts."""
        notices.extend(_sentence(problem) for problem in read.checked.problems)
        known = self._users if read.source.owner == "user" else self._projects
        if not read.is_bad:
            known[read.source.file] = read
            return read
        good = known.get(read.source.file)
        what = "it counts as it was before" if good else "nothing in it counts"
        notices.append(f"{read.source.file} is to be mended; until then {what}")
        if good is None or good.source.owner == "user":
            return good
        # Trust is of a content, and may have been taken back meanwhile.
        return replace(good, trusted=self._trusted.is_trusted(good.source.file, good.content))


def sources_of(user_file: Path | None, folder: Path | None) -> tuple[ConfigSource, ...]:
    user = [] if user_file is None else [ConfigSource(user_file, "user")]
    project = (
        [] if folder is None else [ConfigSource(folder / name, "project") for name in PROJECT_FILES]
    )
    return (*user, *project)


def read_sources(sources: Sequence[ConfigSource], trusted: TrustedFiles) -> list[ReadSource]:
    """Every file that is there, the lowest first. Blocks as the disk does."""
    found = [read_source(source, trusted) for source in sources]
    return [read for read in found if read is not None]


def read_source(source: ConfigSource, trusted: TrustedFiles) -> ReadSource | None:
    """One file, checked; None if there is none."""
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
        "Read it, then say: culm trust"
    )


def _sentence(problem: ConfigProblem) -> str:
    return f"{problem} ({problem.hint})" if problem.hint else str(problem)


def _stat(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except (OSError, ValueError):
        return None
    # A change of mode moves only ctime, and a file may be written anew with its old mtime.
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino

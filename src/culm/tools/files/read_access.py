"""What a call that reads is about: the real path, whether it is free, and what is asked if not."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from culm.store.store import Store
from culm.tools.base import CallRequest, ResolvedAction
from culm.tools.files.file_executor import FileExecutor, StopFlag
from culm.tools.files.paths import MissingPath, PathTarget, WorkspacePaths, is_below
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.files.walk import list_directory
from culm.wire.codec import encodable

SIMILAR_MAX = 3
NAMES_COMPARED_MAX = 2000  # Comparing takes time, and a longer list is no help.


class FileAccess(Protocol):
    """What file tools stand on; a `Kit` is one."""

    @property
    def inside(self) -> WorkspacePaths: ...

    @property
    def work(self) -> FileExecutor: ...

    @property
    def store(self) -> Store: ...

    @property
    def outputs(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class ReadAccess:
    target: PathTarget
    is_free: bool  # In the workspace, or output that we keep for it.


def check_read(ground: FileAccess, path: str, stop: StopFlag) -> ReadAccess:
    """Find what is to be read; raises `Refused`. Blocks as the disk does."""
    try:
        target = ground.inside.resolve(path)
    except MissingPath as missing:
        raise OpenRefused(f"{missing}{_similar(ground, missing, stop)}") from missing
    return ReadAccess(target, _is_free(ground, target.path))


def _is_free(ground: FileAccess, path: str) -> bool:
    return ground.inside.contains(path) or is_below(path, os.path.realpath(ground.outputs))


def _similar(ground: FileAccess, missing: MissingPath, stop: StopFlag) -> str:
    """A hint at the names that were perhaps meant; none where reading is not free."""
    if not _is_free(ground, missing.within):
        return ""
    try:
        with ground.inside.open_real(missing.within) as place:
            entries, _ = list_directory(place.descriptor, place.parts, stop.is_set)
            names = {entry.name.casefold(): entry.parts for entry in entries[:NAMES_COMPARED_MAX]}
            close = difflib.get_close_matches(missing.name.casefold(), names, SIMILAR_MAX)
            if not close:
                return ""
            return f" Similar: {', '.join(place.shown_below(names[name]) for name in close)}."
    except (OpenRefused, OSError):
        return ""


def reading_action(
    call: CallRequest,
    name: str,
    verb: str,
    found: ReadAccess,
    arguments: msgspec.Struct,
    field: str,
) -> ResolvedAction:
    """What a call that reads will do; `field` is the argument that has the path."""
    path = shown(found.target.path)
    given = encodable(msgspec.to_builtins(arguments))
    return ResolvedAction(
        tool=call.name,
        name=name,
        description=f"{verb} {path}",
        path=shown(found.target.directory),
        params={**given, field: path},
        resolved={"path": exact(found.target.path), "arguments": given},
        is_free=found.is_free,
        paths=(path,),
        coverage=(f"{name}:{exact(found.target.directory)}",),
        why="" if found.is_free else f"{path} is outside the workspace",
    )


def exact(path: str) -> str:
    """A path for the digest and for grants: two that differ stay different, UTF-8 or not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"bytes:{os.fsencode(path).hex()}"
    return path

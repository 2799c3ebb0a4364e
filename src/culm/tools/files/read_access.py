"""The access check of a call that reads: the real path, and whether it needs approval."""

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
NAMES_COMPARED_MAX = 2000  # Comparing takes time, and a longer list does not help.


class FileAccess(Protocol):
    """The services that file tools need; `ToolContext` implements it."""

    @property
    def paths(self) -> WorkspacePaths: ...

    @property
    def executor(self) -> FileExecutor: ...

    @property
    def store(self) -> Store: ...

    @property
    def outputs(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class ReadAccess:
    """The target of a read, and whether it is free."""

    target: PathTarget
    is_free: bool  # In the workspace, or kept output of its commands.


def check_read(access: FileAccess, path: str, stop: StopFlag) -> ReadAccess:
    """Resolve the path to be read; raises `OpenRefused`. Does blocking disk I/O."""
    try:
        target = access.paths.resolve(path)
    except MissingPath as missing:
        raise OpenRefused(f"{missing}{_similar(access, missing, stop)}") from missing
    return ReadAccess(target, _is_free(access, target.path))


def _is_free(access: FileAccess, path: str) -> bool:
    return access.paths.contains(path) or is_below(path, os.path.realpath(access.outputs))


def _similar(access: FileAccess, missing: MissingPath, stop: StopFlag) -> str:
    """Suggest similar names; none where reading is not free."""
    if not _is_free(access, missing.within):
        return ""
    try:
        with access.paths.open_real(missing.within) as opened:
            entries, _ = list_directory(opened.descriptor, opened.parts, stop.is_set)
            names = {entry.name.casefold(): entry.parts for entry in entries[:NAMES_COMPARED_MAX]}
            close = difflib.get_close_matches(missing.name.casefold(), names, SIMILAR_MAX)
            if not close:
                return ""
            return f" Similar: {', '.join(opened.shown_below(names[name]) for name in close)}."
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
    """Return the action of a call that reads; `field` is the argument with the path."""
    path = shown(found.target.path)
    values = encodable(msgspec.to_builtins(arguments))
    return ResolvedAction(
        tool=call.name,
        name=name,
        description=f"{verb} {path}",
        path=shown(found.target.directory),
        params={**values, field: path},
        resolved={"path": exact(found.target.path), "arguments": values},
        is_free=found.is_free,
        paths=(path,),
        coverage=(f"{name}:{exact(found.target.directory)}",),
        why="" if found.is_free else f"{path} is outside the workspace",
    )


def exact(path: str) -> str:
    """Return a path for the digest and for grants: different paths stay different, UTF-8 or not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"bytes:{os.fsencode(path).hex()}"
    return path

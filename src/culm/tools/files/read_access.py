"""What a call that reads is about: the real path, whether it is free, and what is asked if not."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from culm.store.store import Store
from culm.tools.base import Action, Call
from culm.tools.files.file_executor import FileWork, Stop
from culm.tools.files.paths import Inside, Missing, Target, is_below
from culm.tools.files.safe_open import Refused, shown
from culm.tools.files.walk import list_directory
from culm.wire.codec import encodable

SIMILAR_MAX = 3
NAMES_COMPARED_MAX = 2000  # Comparing takes time, and a longer list is no help.


class Ground(Protocol):
    """What file tools stand on; a `Kit` is one."""

    @property
    def inside(self) -> Inside: ...

    @property
    def work(self) -> FileWork: ...

    @property
    def store(self) -> Store: ...

    @property
    def outputs(self) -> Path: ...


@dataclass(frozen=True, slots=True)
class Look:
    target: Target
    is_free: bool  # In the workspace, or output that we keep for it.


def look(ground: Ground, path: str, stop: Stop) -> Look:
    """Find what is to be read; raises `Refused`. Blocks as the disk does."""
    try:
        target = ground.inside.resolve(path)
    except Missing as missing:
        raise Refused(f"{missing}{_similar(ground, missing, stop)}") from missing
    return Look(target, _is_free(ground, target.path))


def _is_free(ground: Ground, path: str) -> bool:
    return ground.inside.holds(path) or is_below(path, os.path.realpath(ground.outputs))


def _similar(ground: Ground, missing: Missing, stop: Stop) -> str:
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
    except (Refused, OSError):
        return ""


def reading_action(
    call: Call, name: str, verb: str, found: Look, arguments: msgspec.Struct, field: str
) -> Action:
    """What a call that reads will do; `field` is the argument that has the path."""
    path = shown(found.target.path)
    given = encodable(msgspec.to_builtins(arguments))
    return Action(
        tool=call.name,
        name=name,
        description=f"{verb} {path}",
        path=shown(found.target.directory),
        params={**given, field: path},
        resolved={"path": exact(found.target.path), "arguments": given},
        is_free=found.is_free,
        paths=(path,),
        grains=(f"{name}:{exact(found.target.directory)}",),
        why="" if found.is_free else f"{path} is outside the workspace",
    )


def exact(path: str) -> str:
    """A path for the digest and for grants: two that differ stay different, UTF-8 or not."""
    try:
        path.encode()
    except UnicodeEncodeError:
        return f"bytes:{os.fsencode(path).hex()}"
    return path

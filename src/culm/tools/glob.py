"""`glob`: files by their names, the newest first."""

import heapq
import os
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import PathText, make_spec, metadata
from culm.tools.base import CallResult
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.paths import KERNEL_FOLDERS, OpenPath, PathTarget, WorkspacePaths
from culm.tools.files.read_access import FileAccess
from culm.tools.files.read_tool import ReadTool
from culm.tools.files.safe_open import OpenRefused, shown
from culm.tools.files.walk import WalkReport, walk
from culm.tools.search.patterns import (
    PATTERN_CHARS_MAX,
    IgnoreRules,
    expand_braces,
    parse_gitignore,
    parse_glob,
)

FILES_MAX = 100
GITIGNORE_BYTES_MAX = 64 << 10
OUTSIDE_IGNORED = "\n".join(KERNEL_FOLDERS)  # Nothing in there is a file, and there is no end.
DESCRIPTION = (
    "Find files by name, the newest first. Knows *, ?, [..], {a,b} and **, which "
    "is any number of directories: **/*.py finds all Python files. Names with a dot in front are "
    f"found only if the pattern has the dot. At most {FILES_MAX} paths. Outside the workspace a "
    "person is asked first."
)


class GlobArguments(Struct, frozen=True):
    pattern: Annotated[
        str,
        Meta(
            min_length=1,
            max_length=PATTERN_CHARS_MAX,
            description="The pattern, from `path` down, like src/**/*.py.",
        ),
    ]
    path: Annotated[
        PathText,
        Meta(description="The directory to look in; relative to the workspace, the default."),
    ] = ""


SPEC = make_spec("glob", DESCRIPTION, GlobArguments)


@dataclass(frozen=True, slots=True, order=True)
class _File:
    changed_ns: int
    path: str


def make_glob(context: FileAccess) -> ReadTool[GlobArguments]:
    return ReadTool(
        context,
        SPEC,
        GlobArguments,
        lambda given: _start(given)[0],
        lambda given, target, stop: _glob(context.inside, given, target, stop),
        verb="Find files in",
    )


def _glob(
    inside: WorkspacePaths, given: GlobArguments, target: PathTarget, stop: StopFlag
) -> CallResult:
    _, pattern = _start(given)
    walked = WalkReport()
    with inside.open_real(target.path) as place:
        rules = parse_gitignore(read_gitignore(inside) if place.is_inside else OUTSIDE_IGNORED)
        if not place.is_directory:
            raise OpenRefused(f"{place.shown} is a file; `path` is a directory.")
        # One more than is shown tells whether there are more.
        with closing(_files(place, pattern, rules, stop, walked)) as files:
            found = heapq.nlargest(FILES_MAX + 1, files)
    is_cut = len(found) > FILES_MAX or walked.is_cut or walked.is_stopped
    lines = [file.path for file in found[:FILES_MAX]]
    count = len(lines)
    if not lines:
        so_far = " so far" if walked.is_stopped else ""
        lines.append(f"No file matches {shown(given.pattern)}{so_far}.")
    if len(found) > FILES_MAX:
        lines.append(f"(only the newest {FILES_MAX} are shown; use a narrower pattern)")
    lines += notes(walked.unread, is_cut=walked.is_cut, is_stopped=walked.is_stopped)
    return CallResult("\n".join(lines), metadata=metadata(number_of_files=count, truncated=is_cut))


def _start(given: GlobArguments) -> tuple[str, str]:
    """Where to walk, and what is matched from there.

    Directories that the pattern names are walked to, so they count though they are ignored.
    """
    path, pattern = given.path or ".", given.pattern
    if pattern.startswith("/"):
        path, pattern = "/", pattern.lstrip("/")
    elif pattern.startswith("~/") and not given.path:
        path, pattern = "~", pattern[2:].lstrip("/")
    head, *rest = pattern.split("/")
    while rest and not any(character in head for character in "*?[{\\"):
        path = f"{path.rstrip('/')}/{head}"
        head, *rest = rest
    pattern = "/".join((head, *rest))
    if ".." in pattern.split("/"):
        raise OpenRefused("A pattern goes down only; say with `path` where to look.")
    return path, pattern or "**"


def _files(
    place: OpenPath, pattern: str, rules: IgnoreRules, stop: StopFlag, walked: WalkReport
) -> Generator[_File]:
    glob = parse_glob(pattern, hidden=False)
    names_dot = any(
        part.startswith(".") for one in expand_braces(pattern) for part in one.split("/")
    )
    skip = len(place.parts)
    with closing(
        walk(place.descriptor, place.parts, rules, stop.is_set, walked, hidden=names_dot)
    ) as entries:
        for entry in entries:
            if glob.matches(entry.parts[skip:]):
                try:
                    status = os.stat(entry.name, dir_fd=entry.within, follow_symlinks=False)
                except OSError:
                    continue  # It was deleted meanwhile.
                yield _File(status.st_mtime_ns, place.shown_below(entry.parts))


def read_gitignore(inside: WorkspacePaths) -> str:
    """The workspace's own .gitignore; nothing if it has none that can be read."""
    try:
        with inside.open(".gitignore") as place:
            if place.is_directory:
                return ""
            return os.read(place.descriptor, GITIGNORE_BYTES_MAX).decode(errors="replace")
    except OpenRefused:
        return ""


def notes(unread: int, *, is_cut: bool, is_stopped: bool) -> list[str]:
    """What a result says of what was not seen."""
    found: list[str] = []
    if unread:
        found.append(f"(directories that could not be read: {unread})")
    if is_cut:
        found.append("(a directory has too many names; some were not looked at)")
    if is_stopped:
        found.append("(time was over; this is not all)")
    return found

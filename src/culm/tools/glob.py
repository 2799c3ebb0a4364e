"""`glob`: files by name, the newest first."""

import heapq
import os
from collections.abc import Generator
from contextlib import closing
from typing import Annotated

from msgspec import Meta, Struct

from culm.tools.arguments import PathText, make_spec, metadata
from culm.tools.base import CallResult
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.paths import KERNEL_FOLDERS, OpenPath, PathTarget, WorkspacePaths
from culm.tools.files.read_tool import FileAccess, ReadTool
from culm.tools.files.safe_open import OpenRefused, TreeWalk, read_gitignore, shown
from culm.tools.search.patterns import (
    PATTERN_CHARS_MAX,
    IgnoreRules,
    combine_gitignores,
    expand_braces,
    parse_glob,
)
from culm.wire.tools import ToolFacts

FILES_MAX = 100
# Outside the workspace; the contents of these are not files, and endless.
_OUTSIDE_IGNORED = "".join(f"{folder}/\n" for folder in KERNEL_FOLDERS)
DESCRIPTION = (
    "Find files by name, the newest first. Supports *, ?, [..], {a,b} and **, which "
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


SPEC = make_spec(
    "glob",
    DESCRIPTION,
    GlobArguments,
    ToolFacts(kind="read", path_arguments=("path",), shown_arguments=("pattern", "path")),
)


class _File(Struct, frozen=True, order=True):
    changed_ns: int
    path: str


def make_glob(context: FileAccess) -> ReadTool[GlobArguments]:
    return ReadTool(
        context,
        SPEC,
        GlobArguments,
        lambda arguments: _start(arguments)[0],
        lambda arguments, target, stop: _glob(context.paths, arguments, target, stop),
        verb="Find files in",
    )


def _glob(
    paths: WorkspacePaths, arguments: GlobArguments, target: PathTarget, stop: StopFlag
) -> CallResult:
    _, pattern = _start(arguments)
    with paths.open_real(target.path) as opened:
        if not opened.is_directory:
            raise OpenRefused(f"{opened.shown} is a file; `path` must be a directory.")
        rules = combine_gitignores(gitignores_above(paths, opened))
        names_dot = any(
            part.startswith(".") for one in expand_braces(pattern) for part in one.split("/")
        )
        walked = TreeWalk(stop.is_set, hidden=names_dot, nested_rules=opened.is_inside)
        # One more than is shown, to detect that there are more.
        with closing(_files(opened, pattern, rules, walked)) as files:
            found = heapq.nlargest(FILES_MAX + 1, files)
    is_cut = len(found) > FILES_MAX or walked.is_cut or walked.is_stopped
    lines = [file.path for file in found[:FILES_MAX]]
    count = len(lines)
    if not lines:
        so_far = " so far" if walked.is_stopped else ""
        lines.append(f"No file matches {shown(arguments.pattern)}{so_far}.")
    if len(found) > FILES_MAX:
        lines.append(f"(only the newest {FILES_MAX} are shown; use a narrower pattern)")
    lines += notes(walked.unread, is_cut=walked.is_cut, is_stopped=walked.is_stopped)
    return CallResult("\n".join(lines), metadata=metadata(number_of_files=count, truncated=is_cut))


def _start(arguments: GlobArguments) -> tuple[str, str]:
    """Return the directory to walk, and the pattern relative to it.

    Directories that the pattern names are walked to, so they are found even if they are ignored.
    """
    path, pattern = arguments.path or ".", arguments.pattern
    if pattern.startswith("/"):
        path, pattern = "/", pattern.lstrip("/")
    elif pattern.startswith("~/") and not arguments.path:
        path, pattern = "~", pattern[2:].lstrip("/")
    head, *rest = pattern.split("/")
    while rest and not any(character in head for character in "*?[{\\"):
        path = f"{path.rstrip('/')}/{head}"
        head, *rest = rest
    pattern = "/".join((head, *rest))
    if ".." in pattern.split("/"):
        raise OpenRefused("A pattern may not contain `..`; set `path` to search elsewhere.")
    return path, pattern or "**"


def _files(
    opened: OpenPath, pattern: str, rules: IgnoreRules, walked: TreeWalk
) -> Generator[_File]:
    glob = parse_glob(pattern, hidden=False)
    skip = len(opened.parts)
    with closing(walked.files(opened.descriptor, opened.parts, rules)) as entries:
        for entry in entries:
            if glob.matches(entry.parts[skip:]):
                try:
                    status = os.stat(entry.name, dir_fd=entry.within, follow_symlinks=False)
                except OSError:
                    continue  # It has been deleted meanwhile.
                yield _File(status.st_mtime_ns, opened.shown_below(entry.parts))


def gitignores_above(paths: WorkspacePaths, start: OpenPath) -> list[str]:
    """Return the .gitignore of each directory above the start of a search, from the root down."""
    if not start.is_inside:
        return [_OUTSIDE_IGNORED]
    return [_read_gitignore_of(paths, start.parts[:depth]) for depth in range(len(start.parts))]


def _read_gitignore_of(paths: WorkspacePaths, parts: tuple[str, ...]) -> str:
    try:
        with paths.open("/".join(parts) or ".") as opened:
            return read_gitignore(opened.descriptor)
    except OpenRefused:
        return ""  # It has just been moved.


def notes(unread: int, *, is_cut: bool, is_stopped: bool) -> list[str]:
    """Return the notes of a result about files that were not searched."""
    found: list[str] = []
    if unread:
        found.append(f"(directories that could not be read: {unread})")
    if is_cut:
        found.append("(a directory has too many entries; some were not searched)")
    if is_stopped:
        found.append("(out of time; the result is incomplete)")
    return found

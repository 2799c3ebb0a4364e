"""`ls`: a directory as a tree, listed level by level, so that a cut drops the deepest entries."""

from collections import deque
from typing import Annotated

from msgspec import Meta, Struct, field
from msgspec import field as struct_field

from culm.tools.arguments import PathText, make_spec, metadata
from culm.tools.base import CallResult
from culm.tools.files.file_executor import StopFlag
from culm.tools.files.paths import OpenPath, PathTarget, WorkspacePaths
from culm.tools.files.read_tool import FileAccess, ReadTool
from culm.tools.files.safe_open import DirectoryEntry, OpenRefused, list_directory, shown
from culm.tools.search.patterns import SKIPPED_DIRECTORIES, Glob, parse_glob
from culm.wire.tools import ToolFacts

ENTRIES_MAX = 1000  # More names than anybody reads.
DEPTH = 2
IGNORES_MAX = 100
DESCRIPTION = (
    "List a directory as a tree. Directories end in a slash; generated ones (.git, "
    f"node_modules, …) are shown but not entered. At most {ENTRIES_MAX} entries. Outside the "
    "workspace a person is asked first."
)


class LsArguments(Struct, frozen=True):
    path: Annotated[
        PathText,
        Meta(description="The directory; relative to the workspace, which is the default."),
    ] = ""
    ignore: Annotated[
        list[PathText],
        Meta(
            max_length=IGNORES_MAX,
            description='A list of glob patterns to leave out, like ["*.log"].',
        ),
    ] = struct_field(default_factory=list[str])
    depth: Annotated[
        int, Meta(ge=1, le=20, description=f"How many levels, 1 to 20. Default: {DEPTH}.")
    ] = DEPTH


SPEC = make_spec("ls", DESCRIPTION, LsArguments, ToolFacts(kind="read", path_arguments=("path",)))


class _Directory(Struct):
    """One listed directory; `note` describes the entries that are not shown."""

    parts: tuple[str, ...]
    level: int
    entries: list[DirectoryEntry] = field(default_factory=list[DirectoryEntry])
    note: str = ""


class _Listing(Struct):
    """The directories listed so far."""

    directories: dict[tuple[str, ...], _Directory] = field(
        default_factory=dict[tuple[str, ...], _Directory]
    )
    count: int = 0
    ignored: int = 0
    is_cut: bool = False


def make_ls(context: FileAccess) -> ReadTool[LsArguments]:
    return ReadTool(
        context,
        SPEC,
        LsArguments,
        lambda arguments: arguments.path,
        lambda arguments, target, stop: _ls(context.paths, arguments, target, stop),
        action="list",
        verb="List",
    )


def _ls(
    paths: WorkspacePaths, arguments: LsArguments, target: PathTarget, stop: StopFlag
) -> CallResult:
    ignore = [parse_glob(text, hidden=True) for text in arguments.ignore]
    with paths.open_real(target.path) as opened:
        if not opened.is_directory:
            raise OpenRefused(f"{opened.shown} is a file; use view to read it.")
        listing = _Listing()
        todo = deque([_Directory(opened.parts, 1)])
        _list(opened, todo[0], ignore, listing, stop)
    while todo and not stop.is_set():
        directory = todo.popleft()
        listing.directories[directory.parts] = directory
        if directory.level >= arguments.depth:
            continue
        for entry in directory.entries:
            if _is_entered(entry):
                below = _Directory(entry.parts, directory.level + 1)
                _list_below(paths, opened, below, ignore, listing, stop)
                todo.append(below)
    listing.directories |= {directory.parts: directory for directory in todo}
    listing.is_cut |= stop.is_set()
    text = "\n".join(_lines(opened, listing, stop))
    return CallResult(
        text, metadata=metadata(number_of_files=listing.count, truncated=listing.is_cut)
    )


def _is_entered(entry: DirectoryEntry) -> bool:
    return entry.is_directory and entry.name not in SKIPPED_DIRECTORIES


def _list_below(
    paths: WorkspacePaths,
    start: OpenPath,
    directory: _Directory,
    ignore: list[Glob],
    listing: _Listing,
    stop: StopFlag,
) -> None:
    """List one directory. It is opened from the root: a breadth-first walk keeps none open."""
    if listing.count >= ENTRIES_MAX or stop.is_set():
        directory.note = "not listed"
        listing.is_cut = True
        return
    try:
        with paths.open_real("/".join((start.root.rstrip("/"), *directory.parts))) as opened:
            if opened.is_directory:
                _list(opened, directory, ignore, listing, stop)
            else:
                directory.note = "changed while it was listed"
    except OpenRefused:
        directory.note = "cannot be read"


def _list(
    opened: OpenPath, directory: _Directory, ignore: list[Glob], listing: _Listing, stop: StopFlag
) -> None:
    try:
        entries, is_whole = list_directory(opened.descriptor, opened.parts, stop.is_set)
    except OSError as exc:
        raise OpenRefused(f"{opened.shown} cannot be read: {exc.strerror}.") from exc
    # Many patterns take time: after a stop the rest is dropped.
    wanted = [entry for entry in entries if not (stop.is_set() or _is_ignored(entry, ignore))]
    listing.ignored += len(entries) - len(wanted)
    room = ENTRIES_MAX - listing.count
    directory.entries = wanted[:room]
    listing.count += len(directory.entries)
    if not is_whole or len(wanted) > room:
        more = len(wanted) - len(directory.entries)
        directory.note = f"{'' if is_whole else 'at least '}{more} more, not shown"
        listing.is_cut = True


def _is_ignored(entry: DirectoryEntry, ignore: list[Glob]) -> bool:
    return any(glob.matches((entry.name,)) or glob.matches(entry.parts) for glob in ignore)


def _lines(start: OpenPath, listing: _Listing, stop: StopFlag) -> list[str]:
    lines = [f"{shown(start.path).rstrip('/')}/"]
    _draw(listing.directories[start.parts], listing, lines)
    if stop.is_set():
        return [*lines, "(out of time; the result is incomplete)"]
    if listing.ignored:
        lines.append(f"({listing.ignored} left out by `ignore`)")
    if listing.is_cut:
        lines.append("(not everything is shown; list one of its directories, or use glob)")
    elif not listing.count:
        lines.append("(empty)")
    return lines


def _draw(directory: _Directory, listing: _Listing, lines: list[str]) -> None:
    indent = "  " * directory.level
    for entry in directory.entries:
        slash = "/" if entry.is_directory else " (link)" if entry.is_link else ""
        lines.append(f"{indent}{shown(entry.name)}{slash}")
        below = listing.directories.get(entry.parts)
        if below is not None:
            _draw(below, listing, lines)
    if directory.note:
        lines.append(f"{indent}({directory.note})")

"""Listing a directory and walking the tree below it, within bounds and never through a link."""

import os
from collections.abc import Callable, Generator
from typing import NamedTuple

from culm.tools.files.safe_open import DEPTH_MAX, open_directory
from culm.tools.search.patterns import SKIPPED_DIRECTORIES, IgnoreRules

NAMES_MAX = 10_000  # Per directory; larger ones contain data, not sources.
Stopped = Callable[[], bool]


class DirectoryEntry(NamedTuple):
    """One name in a directory."""

    within: int  # The descriptor of its directory; valid while the lister has it open.
    parts: tuple[str, ...]  # From the workspace down.
    is_directory: bool
    is_link: bool

    @property
    def name(self) -> str:
        return self.parts[-1]


class WalkReport:
    """The parts that a walk could not read. It is filled during the walk."""

    def __init__(self) -> None:
        self.unread = 0  # Directories that could not be opened, or are too deep.
        self.is_cut = False  # Some directory has too many entries.
        self.is_stopped = False


def list_directory(
    descriptor: int, within: tuple[str, ...], stopped: Stopped
) -> tuple[list[DirectoryEntry], bool]:
    """List a directory by name; return the entries and whether they are all; raises OSError."""
    found: list[DirectoryEntry] = []
    with os.scandir(descriptor) as listing:
        for number, entry in enumerate(listing):
            if number >= NAMES_MAX or stopped():
                return sorted(found, key=_by_name), False
            is_directory = entry.is_dir(follow_symlinks=False)
            parts = (*within, entry.name)
            found.append(DirectoryEntry(descriptor, parts, is_directory, entry.is_symlink()))
    return sorted(found, key=_by_name), True


def _by_name(entry: DirectoryEntry) -> str:
    return entry.name


def walk(
    descriptor: int,
    within: tuple[str, ...],
    rules: IgnoreRules,
    stopped: Stopped,
    walked: WalkReport,
    *,
    hidden: bool,
) -> Generator[DirectoryEntry]:
    """Yield every file and link below an open directory that no rule hides, directory by directory.

    Close it before `descriptor`; unreadable directories are counted in `walked`.
    """
    try:
        entries, is_whole = list_directory(descriptor, within, stopped)
    except OSError:
        walked.unread += 1
        return
    walked.is_stopped |= stopped()
    walked.is_cut |= not (is_whole or walked.is_stopped)
    for entry in entries:
        if stopped():
            walked.is_stopped = True
            return
        if _is_skipped(entry, rules, hidden=hidden):
            continue
        if entry.is_directory:
            yield from _walk_into(entry, rules, stopped, walked, hidden=hidden)
        else:
            yield entry


def _walk_into(
    entry: DirectoryEntry, rules: IgnoreRules, stopped: Stopped, walked: WalkReport, *, hidden: bool
) -> Generator[DirectoryEntry]:
    try:
        if len(entry.parts) > DEPTH_MAX:
            raise OSError
        descriptor = open_directory(entry.name, entry.within)
    except OSError:
        walked.unread += 1
        return
    try:
        yield from walk(descriptor, entry.parts, rules, stopped, walked, hidden=hidden)
    finally:
        os.close(descriptor)


def _is_skipped(entry: DirectoryEntry, rules: IgnoreRules, *, hidden: bool) -> bool:
    if entry.is_directory and entry.name in SKIPPED_DIRECTORIES:
        return True
    if entry.name.startswith(".") and entry.is_directory and not hidden:
        return True
    return rules.hides(entry.parts, is_directory=entry.is_directory)

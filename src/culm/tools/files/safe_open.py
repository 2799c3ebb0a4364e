"""Opening and walking directories by name: never through a link, never blocking.

Owns how a name is opened and shown, and how a tree is walked. Like everything that the search
process (`search/process.py`) imports, it uses only modules that a bare interpreter loads in
milliseconds.
"""

import os
import re
import stat
from collections.abc import Callable, Generator
from typing import NamedTuple

from culm.tools.search.patterns import SKIPPED_DIRECTORIES, IgnoreRules

DEPTH_MAX = 128  # Each level of a path uses a descriptor while it is walked.
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Passing through a directory needs no permission to list it, on systems that distinguish the two.
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: the file may have been replaced by a pipe.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SPECIAL = (
    (stat.S_ISLNK, "a link"),  # Only if it was created just now: links were resolved before.
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class OpenRefused(Exception):
    """A refusal to read or write, with a message for the model."""


def open_directory(name: str, within: int) -> int:
    """Open a directory that is not a link, to list it; raises OSError."""
    return os.open(name, _DIRECTORY, dir_fd=within)


def pass_directory(name: str, within: int | None) -> int:
    """Open a directory that is not a link, to open names in it; raises OSError."""
    return os.open(name, _PASSED, dir_fd=within)


def open_file(name: str, within: int, path: str) -> tuple[int, os.stat_result]:
    """Open a regular file that is not a link; raises `OpenRefused`, OSError. Never blocks."""
    # Checked before it is opened, because opening some devices has an effect, ...
    check_regular(os.stat(name, dir_fd=within, follow_symlinks=False), path)
    descriptor = os.open(name, _FILE, dir_fd=within)
    try:
        status = os.fstat(descriptor)
        check_regular(status, path)  # ... and after, because it may have been replaced.
    except (OSError, OpenRefused):
        os.close(descriptor)
        raise
    return descriptor, status


def check_regular(status: os.stat_result, path: str) -> None:
    """Raise `OpenRefused` unless it is a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for test, name in _SPECIAL if test(status.st_mode)), "not a file")
        raise OpenRefused(f"{path} is {kind}; only files and directories are read.")


def shown(name: str) -> str:
    """Return a name for display to a model or a person: one line of valid UTF-8."""
    if name.isascii() and name.isprintable():
        return name
    return _UNFIT.sub(_escaped, name)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return "\ufffd" if "\ud800" <= character <= "\udfff" else ascii(character)[1:-1]


# --- listing a directory and walking the tree below it, within bounds


GITIGNORE_BYTES_MAX = 64 << 10
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


class TreeWalk:
    """A walk over a tree of directories. It records the parts that it could not read."""

    def __init__(self, stopped: Stopped, *, hidden: bool, nested_rules: bool) -> None:
        self.unread = 0  # Directories that could not be opened, or are too deep.
        self.is_cut = False  # Some directory has too many entries.
        self.is_stopped = False
        self._stopped = stopped
        self._hidden = hidden
        self._nested_rules = nested_rules

    def files(
        self, descriptor: int, within: tuple[str, ...], rules: IgnoreRules
    ) -> Generator[DirectoryEntry]:
        """Yield every file and link below an open directory that no rule hides, by directory.

        `rules` are those of the directories above; each .gitignore on the way adds its own if
        `nested_rules` is set. Close the generator before `descriptor`.
        """
        try:
            entries, is_whole = list_directory(descriptor, within, self._stopped)
        except OSError:
            self.unread += 1
            return
        self.is_stopped |= self._stopped()
        self.is_cut |= not (is_whole or self.is_stopped)
        if self._nested_rules:
            rules = rules.below(len(within), read_gitignore(descriptor))
        for entry in entries:
            if self._stopped():
                self.is_stopped = True
                return
            if self._is_skipped(entry, rules):
                continue
            if entry.is_directory:
                yield from self._files_in(entry, rules)
            else:
                yield entry

    def _files_in(self, entry: DirectoryEntry, rules: IgnoreRules) -> Generator[DirectoryEntry]:
        try:
            if len(entry.parts) > DEPTH_MAX:
                raise OSError
            descriptor = open_directory(entry.name, entry.within)
        except OSError:
            self.unread += 1
            return
        try:
            yield from self.files(descriptor, entry.parts, rules)
        finally:
            os.close(descriptor)

    def _is_skipped(self, entry: DirectoryEntry, rules: IgnoreRules) -> bool:
        if entry.is_directory and entry.name in SKIPPED_DIRECTORIES:
            return True
        if entry.name.startswith(".") and entry.is_directory and not self._hidden:
            return True
        return rules.hides(entry.parts, is_directory=entry.is_directory)


def read_gitignore(within: int) -> str:
    """Return the .gitignore of a directory; "" if it has none that can be read."""
    try:
        descriptor, _ = open_file(".gitignore", within, ".gitignore")
    except (OSError, OpenRefused):
        return ""
    try:
        return os.read(descriptor, GITIGNORE_BYTES_MAX).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)

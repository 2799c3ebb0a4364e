"""Opening one name in an open directory: never through a link, never blocking.

Owns how a name is opened and how it is shown. Like everything that the search process
(`search/process.py`) imports, it uses only modules that a bare interpreter loads in milliseconds.
"""

import os
import re
import stat

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

"""Opening one name in an open directory: never through a link, never waiting for anybody.

Owns how a name is opened and how it is shown. Like everything that the search process (`search.py`)
imports, it keeps to the few modules that a bare interpreter loads in milliseconds.
"""

import os
import re
import stat

DEPTH_MAX = 128  # Each level of a path holds a descriptor while it is walked.
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# To pass through one needs no right to list it, where the system makes that difference.
_PASSED = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Not blocking: what was a file a moment ago may be a pipe now.
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
_SPECIAL = (
    (stat.S_ISLNK, "a link"),  # Only if it was put there this moment: links were read before.
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class OpenRefused(Exception):
    """Something that is not read. The words are for the model."""


def open_directory(name: str, within: int) -> int:
    """Open a directory that is no link, to list it; raises OSError."""
    return os.open(name, _DIRECTORY, dir_fd=within)


def pass_directory(name: str, within: int | None) -> int:
    """Open a directory that is no link, to open what is in it; raises OSError."""
    return os.open(name, _PASSED, dir_fd=within)


def open_file(name: str, within: int, path: str) -> tuple[int, os.stat_result]:
    """Open a regular file, which is no link; raises `Refused`, OSError. Never waits for anybody."""
    # Looked at before it is opened, for opening some devices does something, ...
    check_regular(os.stat(name, dir_fd=within, follow_symlinks=False), path)
    descriptor = os.open(name, _FILE, dir_fd=within)
    try:
        status = os.fstat(descriptor)
        check_regular(status, path)  # ... and after, for it may have been swapped.
    except (OSError, OpenRefused):
        os.close(descriptor)
        raise
    return descriptor, status


def check_regular(status: os.stat_result, path: str) -> None:
    """Raise `Refused` unless it is a file with contents of its own."""
    if not stat.S_ISREG(status.st_mode):
        kind = next((word for test, word in _SPECIAL if test(status.st_mode)), "no regular file")
        raise OpenRefused(f"{path} is {kind}; only files and directories are read.")


def shown(name: str) -> str:
    """A name as a model and a person may see it: one line, and nothing UTF-8 cannot carry."""
    if name.isascii() and name.isprintable():
        return name
    return _UNFIT.sub(_escaped, name)


def _escaped(found: re.Match[str]) -> str:
    character = found[0]
    return "\ufffd" if "\ud800" <= character <= "\udfff" else ascii(character)[1:-1]

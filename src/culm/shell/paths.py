"""The real paths that a command names, and whether they are inside the workspace.

The file system is read through `PathDisk`, so that tests can decide on plain values.
"""

import errno
import os
import posixpath
import stat
from collections.abc import Iterable, Sequence
from fnmatch import translate
from pathlib import Path
from re import compile as compile_pattern
from typing import Protocol

PATH_CHARACTERS_MAX = 4096  # The limit of Linux; a longer path is not looked up.
MATCHES_MAX = 500  # A pattern that matches more is not resolved and needs approval.
NULL = "/dev/null"


class PathDisk(Protocol):
    def real(self, path: str) -> str | None:
        """Return the path with every link resolved; None if it cannot be resolved."""
        ...

    def names(self, directory: str) -> Iterable[str] | None:
        """List a directory; None if it cannot be listed within bounds."""
        ...

    def exists(self, path: str) -> bool: ...

    def is_link(self, path: str) -> bool: ...


class RealDisk:
    """The file system of this machine. Reads names and links only."""

    NAMES_MAX = 5_000

    def real(self, path: str) -> str | None:
        if len(path) > PATH_CHARACTERS_MAX or "\x00" in path:
            return None
        try:
            return os.path.realpath(path, strict=True)
        except FileNotFoundError:
            return os.path.realpath(path)
        except OSError as error:
            return os.path.realpath(path) if error.errno == errno.ENOTDIR else None

    def names(self, directory: str) -> Iterable[str] | None:
        found: list[str] = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    found.append(entry.name)
                    if len(found) > self.NAMES_MAX:
                        return None
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError:
            return None
        return found

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def is_link(self, path: str) -> bool:
        try:
            return stat.S_ISLNK(os.lstat(path).st_mode)
        except OSError as error:
            # A missing path is not a link; a path that cannot be read may be one.
            return error.errno not in (errno.ENOENT, errno.ENOTDIR)


class ReadablePaths:
    """The directories whose contents may be read without approval."""

    def __init__(self, inside: Sequence[Path], disk: PathDisk) -> None:
        self._disk = disk
        # One judgement sees one state of the disk and looks up each path once.
        self._found: dict[str, str | None] = {}
        reals = [self.real("", str(root)) for root in inside]
        self._roots = tuple(real for real in reals if real is not None)

    def real(self, directory: str, text: str) -> str | None:
        """Resolve a path from a directory that is a real path itself."""
        path = posixpath.join(directory, text)
        if path not in self._found:
            self._found[path] = self._look_up(directory, text, path)
        return self._found[path]

    def _look_up(self, directory: str, text: str, path: str) -> str | None:
        parts = text.split("/")
        if not directory or text.startswith("/") or ".." in parts or len(path) > 255:
            return self._disk.real(path)
        real = directory.rstrip("/")
        for part in parts:
            if part in ("", "."):
                continue
            real = f"{real}/{part}"
            if self._disk.is_link(real):
                return self._disk.real(path)
        return real or "/"

    def contains(self, real: str) -> bool:
        return any(
            real == root or real.startswith(root if root.endswith("/") else root + "/")
            for root in self._roots
        )

    def names(self, directory: str, text: str) -> list[str] | None:
        """List a path if it is a directory; None if it has too many entries."""
        found = self._disk.names(posixpath.join(directory, text))
        names = None if found is None else list(found)
        return names if names is None or len(names) <= MATCHES_MAX else None

    def matches(self, directory: str, pattern: str) -> list[str] | None:
        """Expand a pattern; to itself if nothing matches, None if too many names do."""
        found = ["/" if pattern.startswith("/") else ""]
        for part in [part for part in pattern.split("/") if part]:
            if "*" not in part and "?" not in part:
                found = [posixpath.join(base, part) for base in found]
                continue
            is_match = compile_pattern(translate(part)).match
            following: list[str] = []
            for base in found:
                names = self._disk.names(posixpath.join(directory, base))
                if names is None:
                    return None
                # A name that begins with a dot needs one in the pattern.
                following += [
                    posixpath.join(base, name)
                    for name in names
                    # In some locales `?` is a byte.
                    if (is_match(name) or is_match(os.fsencode(name).decode("latin-1")))
                    and (name[0] != "." or part[0] == ".")
                ]
                if len(following) > MATCHES_MAX:
                    return None
            found = following
        return found or [pattern]

    def resolve_cd(self, directory: str, target: str) -> str | None:
        """Resolve `cd target`; None if the result is uncertain.

        The shell remembers the links it came through, and `..` goes back over them, so a path
        through a link is not resolved here.
        """
        path = posixpath.normpath(posixpath.join(directory, target))
        return path if self.real("", path) == path == self.real(directory, target) else None

    def owns_repository(self, directory: str) -> bool:
        """Return True if git, started here, uses the repository of the workspace."""
        while self.contains(directory):
            if self._disk.exists(posixpath.join(directory, ".git")):
                return directory in self._roots
            # A bare repository: its configuration can name programs to run.
            if self._disk.exists(posixpath.join(directory, "HEAD")):
                return False
            directory = posixpath.dirname(directory)
        return False

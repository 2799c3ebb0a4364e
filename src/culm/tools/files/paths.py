"""Paths that a model wrote: resolving them, and opening exactly the resolved path.

Owns the way from a name to an open descriptor. It has two steps, between which a person may be
asked. `resolve` walks a path component by component from `/`: each is opened in the directory
before it, links are read and walked here, and the result is a path without any link. `open_real`
opens such a path, again component by component, through no link at all. So a link that is created
in between makes the open fail; it is never followed.
"""

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import Struct

from culm.tools.files.safe_open import (
    DEPTH_MAX,
    OpenRefused,
    check_regular,
    open_directory,
    open_file,
    pass_directory,
    shown,
)

LINKS_MAX = 40  # The limit of Linux before it reports a loop.
# Their contents are generated on reading: without a size, and often without an end.
KERNEL_FOLDERS = ("/proc", "/sys")


class MissingPath(OpenRefused):
    """`name` does not exist in the real directory `within`; `rest` was expected below it."""

    def __init__(self, message: str, within: str, name: str, rest: Sequence[str]) -> None:
        super().__init__(message)
        self.within = within
        self.name = name
        self.rest = tuple(rest)


class PathTarget(Struct, frozen=True):
    """The regular file or directory that a path resolves to."""

    path: str  # Absolute and without links; a byte that is not UTF-8 is an unpaired surrogate.
    is_directory: bool

    @property
    def directory(self) -> str:
        return self.path if self.is_directory else os.path.dirname(self.path)  # noqa: PTH120


class OpenPath(Struct, frozen=True):
    """An open regular file or directory."""

    descriptor: int
    parts: tuple[str, ...]  # Its real path, from the workspace down, or else from `/`.
    status: os.stat_result
    root: str  # The directory that `parts` is relative to.
    is_inside: bool = True

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def path(self) -> str:
        return os.path.join(self.root, *self.parts)  # noqa: PTH118 - a Path is slower

    def shown_below(self, parts: Sequence[str]) -> str:
        """Return a path, given like `parts`, as the model would write it."""
        path = "/".join(parts)
        return shown((path or ".") if self.is_inside else f"/{path}")

    @property
    def shown(self) -> str:
        return self.shown_below(self.parts)


class WorkspacePaths:
    """One workspace, and paths relative to it. Everything here does blocking disk I/O."""

    def __init__(self, workspace: Path) -> None:
        self.root = Path(os.path.realpath(workspace))
        self.writing = threading.Lock()  # Held while a file is compared and replaced.

    def contains(self, path: str) -> bool:
        """Return True if a resolved path is in the workspace."""
        return is_below(path, str(self.root))

    def shown(self, path: str) -> str:
        """Return a resolved path for display: relative to the workspace if it is inside."""
        if not self.contains(path):
            return shown(path)
        return shown(path[len(str(self.root)) :].strip("/") or ".")

    def resolve(self, path: str) -> PathTarget:
        """Resolve `path`; raises `OpenRefused`, in particular `MissingPath`.

        It is relative to the workspace, unless it begins with `/` or with `~`, the home of the
        user.
        """
        trail = _Trail()
        try:
            return self._walk(trail, deque(self._names(path)))
        except OSError as exc:
            raise OpenRefused(f"{shown(path)} cannot be read: {exc.strerror or exc}.") from exc
        finally:
            trail.close()

    def _names(self, path: str) -> Sequence[str]:
        if "\0" in path:
            raise OpenRefused("The path contains a NUL character.")
        if path == "~" or path.startswith("~/"):
            path = os.path.expanduser(path)  # noqa: PTH111 - a Path would hide `..`
        names = path.split("/")
        return names if path.startswith("/") else (*self.root.parts[1:], *names)

    def _walk(self, trail: "_Trail", todo: deque[str]) -> PathTarget:
        links = 0
        while todo:
            name = todo.popleft()
            if name in ("", "."):
                continue
            if name == "..":
                trail.leave()
                continue
            status = trail.look(name)
            if status is None:
                raise self._missing(trail, name, todo)
            if stat.S_ISLNK(status.st_mode):
                links += 1
                if links > LINKS_MAX:
                    raise OpenRefused(f"{shown(trail.path(name))} leads through too many links.")
                target = os.readlink(name, dir_fd=trail.last)
                if target.startswith("/"):
                    trail.restart()
                todo.extendleft(reversed(target.split("/")))
            elif stat.S_ISDIR(status.st_mode):
                trail.enter(name)
            elif any(part not in ("", ".") for part in todo):
                raise OpenRefused(f"{self.shown(trail.path(name))} is not a directory.")
            else:
                return self._checked(PathTarget(trail.path(name), is_directory=False), status)
        return self._checked(PathTarget(trail.path(), is_directory=True), os.fstat(trail.last))

    def _checked(self, target: PathTarget, status: os.stat_result) -> PathTarget:
        path = self.shown(target.path)
        if not target.is_directory:
            check_regular(status, path)
        if any(is_below(target.path, folder) for folder in KERNEL_FOLDERS):
            raise OpenRefused(f"{path} is generated by the kernel; use bash to read it.")
        return target

    def _missing(self, trail: "_Trail", name: str, rest: Sequence[str]) -> OpenRefused:
        path = trail.path(name)
        if is_below(str(self.root), path):
            return OpenRefused(f"The workspace is gone: there is no {shown(path)}.")
        where = " in the workspace" if self.contains(path) else ""
        message = f"There is no {self.shown(path)}{where}."
        return MissingPath(
            message, trail.path(), name, [part for part in rest if part not in ("", ".")]
        )

    @contextmanager
    def open(self, path: str) -> Generator[OpenPath]:
        """Open `path` in the workspace; raises `OpenRefused`."""
        target = self.resolve(path)
        if not self.contains(target.path):
            raise OpenRefused(
                f"{shown(path)} is outside the workspace (really {shown(target.path)})."
            )
        with self.open_real(target.path) as opened:
            yield opened

    @contextmanager
    def open_real(self, path: str) -> Generator[OpenPath]:
        """Open a resolved path; raises `OpenRefused` if it has changed since."""
        trail = _Trail()
        try:
            yield self._open(trail, path)
        except OSError as exc:
            raise OpenRefused(f"{self.shown(path)} cannot be read: {exc.strerror or exc}.") from exc
        finally:
            trail.close()

    def _open(self, trail: "_Trail", path: str) -> OpenPath:
        names = [name for name in path.split("/") if name]
        for name in names[:-1]:
            trail.enter(name)
        is_inside = self.contains(path)
        root = str(self.root) if is_inside else "/"
        parts = tuple(names[len(self.root.parts) - 1 :] if is_inside else names)
        name = names[-1] if names else "."
        status = trail.look(name)
        if status is None:
            raise self._missing(trail, name, ())
        if stat.S_ISLNK(status.st_mode):
            raise OpenRefused(f"{self.shown(path)} cannot be read: {_CHANGED}.")
        if not stat.S_ISDIR(status.st_mode):
            descriptor, status = open_file(name, trail.last, self.shown(path))
            trail.keep(descriptor)
            return OpenPath(descriptor, parts, status, root, is_inside)
        try:
            descriptor = trail.keep(open_directory(name, trail.last))
        except OSError as exc:
            raise _describe(exc, self.shown(path)) from exc
        return OpenPath(descriptor, parts, os.fstat(descriptor), root, is_inside)

    @contextmanager
    def open_parent(self, path: str, *, make: bool = False) -> Generator[tuple[int, str]]:
        """Open the directory of a resolved path, and return it with the name in it.

        With `make`, missing directories are created. Raises `OpenRefused`, OSError.
        """
        trail = _Trail()
        try:
            *above, name = path.split("/")[1:]
            for part in above:
                if make and trail.look(part) is None:
                    with suppress(FileExistsError):  # Another process was faster; if it is a link,
                        os.mkdir(part, dir_fd=trail.last)  # entering it fails.
                trail.enter(part)
            yield trail.last, name
        finally:
            trail.close()


def is_below(path: str, folder: str) -> bool:
    """Return True if a resolved path is `folder` or in it."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


_CHANGED = "it has been replaced meanwhile, and a link is not followed"


def _describe(exc: OSError, path: str) -> OpenRefused:
    changed = exc.errno in (errno.ENOTDIR, errno.ELOOP)
    return OpenRefused(f"{path} cannot be read: {_CHANGED if changed else exc.strerror or exc}.")


class _Trail:
    """The directories on the way, open from `/` down to the last one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._descriptors = [pass_directory("/", None)]

    @property
    def last(self) -> int:
        return self._descriptors[-1]

    def path(self, name: str = "") -> str:
        return "/" + "/".join((*self._names, name) if name else self._names)

    def look(self, name: str) -> os.stat_result | None:
        """Return the status of `name`, without following it; None if it does not exist."""
        try:
            return os.stat(name, dir_fd=self.last, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except ValueError as exc:  # An unpaired surrogate that stands for no byte.
            raise OpenRefused(f"{shown(name)} is not a valid path.") from exc

    def enter(self, name: str) -> None:
        if len(self._descriptors) > DEPTH_MAX:
            raise OpenRefused(f"A path may have at most {DEPTH_MAX} directories.")
        try:
            self._descriptors.append(pass_directory(name, self.last))
        except OSError as exc:
            raise _describe(exc, shown(self.path(name))) from exc
        self._names.append(name)

    def keep(self, descriptor: int) -> int:
        """Close this descriptor, too, at the end."""
        self._descriptors.append(descriptor)
        return descriptor

    def leave(self) -> None:
        if self._names:
            self._names.pop()
            os.close(self._descriptors.pop())

    def restart(self) -> None:
        while self._names:
            self.leave()

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

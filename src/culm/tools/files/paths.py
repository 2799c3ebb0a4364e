"""Paths that a model wrote: what they really name, and opening exactly that.

Owns the way from a name to an open descriptor. It has two steps, between which a person may be
asked. `resolve` walks a path component by component from `/`: each is opened in the directory
before it, links are read and walked here, and what comes out is a path without any link.
`open_real` opens such a path, again component by component, and passes no link at all. So a link
that is put there in between makes the open fail; it is never followed.
"""

import errno
import os
import stat
import threading
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from culm.tools.files.safe_open import (
    DEPTH_MAX,
    OpenRefused,
    check_regular,
    open_directory,
    open_file,
    pass_directory,
    shown,
)

LINKS_MAX = 40  # As many as Linux follows before it speaks of a loop.
# What stands there is made up by the kernel while it is read: without size, and often without end.
KERNEL_FOLDERS = ("/proc", "/sys")


class MissingPath(OpenRefused):
    """There is no `name` in the real directory `within`; `rest` should have been below it."""

    def __init__(self, said: str, within: str, name: str, rest: Sequence[str]) -> None:
        super().__init__(said)
        self.within = within
        self.name = name
        self.rest = tuple(rest)


@dataclass(frozen=True, slots=True)
class PathTarget:
    """What a path really names: a regular file or a directory."""

    path: str  # Absolute and without links; a byte that is no UTF-8 is half a surrogate pair.
    is_directory: bool

    @property
    def directory(self) -> str:
        return self.path if self.is_directory else os.path.dirname(self.path)  # noqa: PTH120


@dataclass(frozen=True, slots=True)
class OpenPath:
    """A regular file or a directory, open."""

    descriptor: int
    parts: tuple[str, ...]  # Where it really is, from the workspace down, or else from `/`.
    status: os.stat_result
    root: str  # What `parts` counts from.
    is_inside: bool = True

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def path(self) -> str:
        return os.path.join(self.root, *self.parts)  # noqa: PTH118 - a Path is slower

    def shown_below(self, parts: Sequence[str]) -> str:
        """A path, given like `parts`, as the model would write it."""
        path = "/".join(parts)
        return shown((path or ".") if self.is_inside else f"/{path}")

    @property
    def shown(self) -> str:
        return self.shown_below(self.parts)


class WorkspacePaths:
    """One workspace, and paths as seen from it. Everything here blocks as the disk does."""

    def __init__(self, workspace: Path) -> None:
        self.root = Path(os.path.realpath(workspace))
        self.writing = threading.Lock()  # Held while one of its files is looked at and replaced.

    def contains(self, path: str) -> bool:
        """Whether a resolved path is in the workspace."""
        return is_below(path, str(self.root))

    def shown(self, path: str) -> str:
        """A resolved path as the model would write it: from the workspace, if it is in there."""
        if not self.contains(path):
            return shown(path)
        return shown(path[len(str(self.root)) :].strip("/") or ".")

    def resolve(self, path: str) -> PathTarget:
        """Find out what `path` really names; raises `Refused`, of which `Missing` is one.

        It counts from the workspace, unless it begins with `/` or with `~`, the user's home.
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
            raise OpenRefused("A path has no NUL character in it.")
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
                raise OpenRefused(f"{self.shown(trail.path(name))} is no directory.")
            else:
                return self._checked(PathTarget(trail.path(name), is_directory=False), status)
        return self._checked(PathTarget(trail.path(), is_directory=True), os.fstat(trail.last))

    def _checked(self, target: PathTarget, status: os.stat_result) -> PathTarget:
        path = self.shown(target.path)
        if not target.is_directory:
            check_regular(status, path)
        if any(is_below(target.path, folder) for folder in KERNEL_FOLDERS):
            raise OpenRefused(
                f"{path} is made up by the kernel and is no file; use bash to read it."
            )
        return target

    def _missing(self, trail: "_Trail", name: str, rest: Sequence[str]) -> OpenRefused:
        path = trail.path(name)
        if is_below(str(self.root), path):
            return OpenRefused(f"The workspace is gone: there is no {shown(path)}.")
        where = " in the workspace" if self.contains(path) else ""
        said = f"There is no {self.shown(path)}{where}."
        return MissingPath(
            said, trail.path(), name, [part for part in rest if part not in ("", ".")]
        )

    @contextmanager
    def open(self, path: str) -> Generator[OpenPath]:
        """Open what `path` names in the workspace; raises `Refused`."""
        target = self.resolve(path)
        if not self.contains(target.path):
            raise OpenRefused(
                f"{shown(path)} is outside the workspace (really {shown(target.path)})."
            )
        with self.open_real(target.path) as place:
            yield place

    @contextmanager
    def open_real(self, path: str) -> Generator[OpenPath]:
        """Open a resolved path; raises `Refused` if it is not any more what it was."""
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
        """The directory of a resolved path, open to work in, and the name in there.

        With `make`, directories that are not there are made. Raises `Refused`, OSError.
        """
        trail = _Trail()
        try:
            *above, name = path.split("/")[1:]
            for part in above:
                if make and trail.look(part) is None:
                    with suppress(FileExistsError):  # Somebody was faster; if it is a link,
                        os.mkdir(part, dir_fd=trail.last)  # entering it fails.
                trail.enter(part)
            yield trail.last, name
        finally:
            trail.close()


def is_below(path: str, folder: str) -> bool:
    """Whether a resolved path is `folder` or in it."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


_CHANGED = "it was changed into something else meanwhile, and a link is not followed"


def _describe(exc: OSError, path: str) -> OpenRefused:
    changed = exc.errno in (errno.ENOTDIR, errno.ELOOP)
    return OpenRefused(f"{path} cannot be read: {_CHANGED if changed else exc.strerror or exc}.")


class _Trail:
    """The directories walked through, open from `/` down to the last one."""

    def __init__(self) -> None:
        self._names: list[str] = []
        self._descriptors = [pass_directory("/", None)]

    @property
    def last(self) -> int:
        return self._descriptors[-1]

    def path(self, name: str = "") -> str:
        return "/" + "/".join((*self._names, name) if name else self._names)

    def look(self, name: str) -> os.stat_result | None:
        """What `name` is, without following it; None if it is not there."""
        try:
            return os.stat(name, dir_fd=self.last, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except ValueError as exc:  # Half a surrogate pair that stands for no byte.
            raise OpenRefused(f"{shown(name)} is no path.") from exc

    def enter(self, name: str) -> None:
        if len(self._descriptors) > DEPTH_MAX:
            raise OpenRefused(f"A path may go {DEPTH_MAX} directories deep.")
        try:
            self._descriptors.append(pass_directory(name, self.last))
        except OSError as exc:
            raise _describe(exc, shown(self.path(name))) from exc
        self._names.append(name)

    def keep(self, descriptor: int) -> int:
        """Close this one, too, at the end."""
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

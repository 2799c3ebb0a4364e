"""Paths inside a workspace, opened so that nothing leads out of it.

Owns the way from a name that a model wrote to an open descriptor. Every component is opened in the
directory before it and no link is followed by the kernel: links are read and walked here. So a
link that is swapped between the check and the open makes the open fail; it never leads out.
"""

import os
import stat
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from culm.tools.opening import DEPTH_MAX, Refused, open_directory, open_file, shown

LINKS_MAX = 40  # As many as Linux follows before it speaks of a loop.


class Missing(Refused):
    """There is no `name` in the directory `within`."""

    def __init__(self, within: tuple[str, ...], name: str) -> None:
        super().__init__(f"There is no {shown('/'.join((*within, name)))} in the workspace.")
        self.within = within
        self.name = name


@dataclass(frozen=True, slots=True)
class Place:
    """A regular file or a directory of the workspace, open."""

    descriptor: int
    parts: tuple[str, ...]  # Where it really is, from the workspace down.
    status: os.stat_result

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.status.st_mode)

    @property
    def shown(self) -> str:
        return shown("/".join(self.parts) or ".")


class Inside:
    """The inside of one workspace. Everything here blocks as the disk does."""

    def __init__(self, workspace: Path) -> None:
        self.root = Path(os.path.realpath(workspace))
        self._spellings = (workspace.parts, self.root.parts)

    @contextmanager
    def open(self, path: str) -> Generator[Place]:
        """Open what `path` names; raises `Refused`, of which `Missing` is one."""
        trail = _Trail()
        try:
            trail.enter(os.fspath(self.root), None)
            yield self._walk(trail, deque(self._parts(path)))
        except OSError as exc:
            raise Refused(f"{shown(path)} cannot be read: {exc.strerror or exc}.") from exc
        finally:
            trail.close()

    def _walk(self, trail: "_Trail", todo: deque[str]) -> Place:
        turns = 0  # Links, and ways out that lead back in.
        while todo:
            name = todo.popleft()
            if name in ("", "."):
                continue
            if name == ".." and trail.names:
                trail.leave()
                continue
            kind = stat.S_IFLNK if name == ".." else trail.kind_of(name)
            if kind == stat.S_IFLNK:
                turns += 1
                if turns > LINKS_MAX:
                    raise Refused(f"{trail.path_of(name)} leads through too many links.")
                self._turn(trail, todo, name)
            elif kind == stat.S_IFDIR:
                trail.enter(name, trail.last)
            elif any(part not in ("", ".") for part in todo):
                raise Refused(f"{trail.path_of(name)} is no directory.")
            else:
                return trail.open_file(name)
        return Place(trail.last, tuple(trail.names), os.fstat(trail.last))

    def _turn(self, trail: "_Trail", todo: deque[str], name: str) -> None:
        """Put what a link says in front of what is left to walk."""
        target = ".." if name == ".." else os.readlink(name, dir_fd=trail.last)
        if name == ".." or os.path.isabs(target):  # noqa: PTH117 - a Path would hide `..`
            target = os.path.join(self.root, target, *todo)  # noqa: PTH118
            todo.clear()
            trail.restart()
        todo.extendleft(reversed(self._parts(target)))

    def _parts(self, path: str) -> Sequence[str]:
        """The components of `path`, from the workspace or (of a link) from where it stands."""
        if "\0" in path:
            raise Refused("A path has no NUL character in it.")
        parts = path.split("/")
        if parts[0] or not path:
            return parts
        path = f"/{path.lstrip('/')}"
        for spelling in self._spellings:
            if Path(path).parts[: len(spelling)] == spelling and ".." not in parts:
                return Path(path).parts[len(spelling) :]
        try:
            real = Path(os.path.realpath(path))
        except ValueError as exc:  # Half a surrogate pair.
            raise Refused(f"{shown(path)} is no path.") from exc
        if not real.is_relative_to(self.root):
            raise Refused(
                f"{shown(path)} is outside the workspace (really {shown(str(real))}); reading "
                "there needs permission, which comes with a later version."
            )
        return real.relative_to(self.root).parts


class _Trail:
    """The directories walked through, open from the workspace down to the last one."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._descriptors: list[int] = []

    @property
    def last(self) -> int:
        return self._descriptors[-1]

    def path_of(self, name: str) -> str:
        return shown("/".join((*self.names, name)))

    def kind_of(self, name: str) -> int:
        try:
            return stat.S_IFMT(os.stat(name, dir_fd=self.last, follow_symlinks=False).st_mode)
        except FileNotFoundError:
            raise Missing(tuple(self.names), name) from None
        except ValueError as exc:
            raise Refused(f"{self.path_of(name)} is no path.") from exc

    def enter(self, name: str, within: int | None) -> None:
        if len(self._descriptors) > DEPTH_MAX:
            raise Refused(f"A path may go {DEPTH_MAX} directories deep.")
        self._descriptors.append(open_directory(name, within))
        if within is not None:
            self.names.append(name)

    def leave(self) -> None:
        self.names.pop()
        os.close(self._descriptors.pop())

    def restart(self) -> None:
        while self.names:
            self.leave()

    def open_file(self, name: str) -> Place:
        descriptor, status = open_file(name, self.last, self.path_of(name))
        self._descriptors.append(descriptor)
        return Place(descriptor, (*self.names, name), status)

    def close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

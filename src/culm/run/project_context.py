"""Looking around before a turn: the context files of a project, and how its repository stands.

Reads within bounds and starts no program: a repository can make `git` run things. Every function
blocks as the disk does.
"""

import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path

from msgspec import UNSET

from culm.files import UnreadableFile, read_file
from culm.run.system_prompt import ContextFile, ProjectContext
from culm.wire.config import Options

CONTEXT_FILES = ("AGENTS.md", "CLAUDE.md", "CRUSH.md", ".cursorrules")
FILE_BYTES_MAX = 32 << 10  # Of one context file: some eight thousand tokens, in every request ...
ALL_BYTES_MAX = 128 << 10  # ... and of all of them.
FOLDER_NAMES_MAX = 1000  # Looked at, in a folder of rules ...
FOLDER_FILES_MAX = 20  # ... and read.
PATHS_MAX = 100  # Of those that a configuration adds.
READ_BYTES_MAX = 4 << 20  # A file larger than this is no text for agents.
GIT_BYTES_MAX = 4096

# Nothing else is repeated: a model would read it, and so would its provider.
_HEAD = re.compile(r"ref: refs/heads/(?P<branch>\S{1,200})|(?P<commit>[0-9a-f]{12})[0-9a-f]{28,52}")
_UNDER_WAY = {
    "MERGE_HEAD": "a merge is under way",
    "rebase-merge": "a rebase is under way",
    "rebase-apply": "a rebase is under way",
    "CHERRY_PICK_HEAD": "a cherry-pick is under way",
    "BISECT_LOG": "a bisection is under way",
}


@dataclass(frozen=True, slots=True)
class ContextPaths:
    """Which files agents should read: of the project, and of the user wherever they are."""

    project: tuple[str, ...] = CONTEXT_FILES
    user: tuple[str, ...] = ()


def context_paths_of(options: Options) -> ContextPaths:
    """The usual ones, and what the configuration adds."""
    project = () if options.context_paths is UNSET else options.context_paths
    user = () if options.global_context_paths is UNSET else options.global_context_paths
    return ContextPaths((*CONTEXT_FILES, *project[:PATHS_MAX]), tuple(user[:PATHS_MAX]))


def read_project_context(
    path: Path, paths: ContextPaths, now_s: float, is_over: Callable[[], bool] = bool
) -> ProjectContext:
    """All there is to know; once `is_over`, what is known by then."""
    return ProjectContext(
        path=str(path),
        date=datetime.fromtimestamp(now_s, UTC).astimezone().strftime("%A, %d %B %Y"),
        platform=f"{platform.system()} {platform.machine()}",
        git=git_state(path),
        files=tuple(context_files(path, paths, is_over)),
    )


# --- context files


def context_files(
    path: Path, paths: ContextPaths, is_over: Callable[[], bool] = bool
) -> Iterator[ContextFile]:
    """The files that are there, in order and each once, as far as the bounds allow."""
    left = ALL_BYTES_MAX
    seen: set[tuple[int, int]] = set()
    for name, file in _candidates(path, paths):
        if is_over():
            return
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) in seen:
                continue  # On some disks one file answers to several spellings, or is a link.
            data = read_file(file, READ_BYTES_MAX)
        except (OSError, ValueError, UnreadableFile):
            continue
        seen.add((found.st_dev, found.st_ino))
        room = min(FILE_BYTES_MAX, left)
        text = _decoded(data, room).strip()
        left -= min(len(data), room)
        if text:
            yield ContextFile(name, text, is_cut=len(data) > room)
        if left <= 0:
            return


def _decoded(data: bytes, room: int) -> str:
    """The beginning of a text, not cut within a character."""
    while 0 < room < len(data) and data[room] & 0xC0 == 0x80:
        room -= 1
    return data[:room].decode(errors="replace")


def _candidates(path: Path, paths: ContextPaths) -> Iterator[tuple[str, Path]]:
    for name in dict.fromkeys(str(Path(name)) for name in paths.project):
        for file in _files_at(path / name):
            if _is_below(file, path):  # Also where a link leads.
                yield str(file.relative_to(path)), file
    for name in paths.user:
        try:
            place = Path(name).expanduser()
        except RuntimeError:
            continue  # Nobody's home.
        for file in _files_at(place):
            yield str(file), file


def _files_at(place: Path) -> Iterator[Path]:
    """A file, or the texts in a folder of rules."""
    try:
        if place.is_dir():
            with os.scandir(place) as entries:
                names = sorted(entry.name for entry in islice(entries, FOLDER_NAMES_MAX))
            texts = (place / name for name in names if name.endswith((".md", ".mdc")))
            yield from islice(texts, FOLDER_FILES_MAX)
        else:
            yield place
    except (OSError, ValueError):
        return


def _is_below(file: Path, folder: Path) -> bool:
    try:
        return file.resolve().is_relative_to(folder.resolve()) and file.is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


# --- git


def git_state(path: Path) -> str:
    """The branch and what is under way, read from the repository's own files."""
    folder = _git_folder(path)
    if folder is None:
        return ""
    found = _HEAD.fullmatch(_line(folder / "HEAD"))
    if found is None:
        return "a repository that cannot be read"
    where = f"branch {found['branch']}" if found["branch"] else f"detached at {found['commit']}"
    under_way = [words for name, words in _UNDER_WAY.items() if (folder / name).exists()]
    return ", ".join([where, *under_way])


def _git_folder(path: Path) -> Path | None:
    """Where the repository of a directory keeps its state; a worktree's `.git` is a file."""
    for place in (path, *path.parents):
        git = place / ".git"
        try:
            if git.is_dir():
                return git
            if git.is_file():
                named = _line(git).removeprefix("gitdir: ")
                return place / named if named else None
        except OSError:
            return None
    return None


def _line(file: Path) -> str:
    """The first line of a file that is no link: a repository could show us any other by one."""
    try:
        data = b"" if file.is_symlink() else read_file(file, GIT_BYTES_MAX)
    except (OSError, UnreadableFile):
        return ""
    text = data.decode(errors="replace").partition("\n")[0].strip()
    return "".join(c for c in text if c.isprintable())

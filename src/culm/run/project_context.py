"""The system prompt, and the facts about a project in it: context files, state of the repository.

Reads bounded amounts and starts no programs, because a repository can make `git` execute code.
Every function that reads blocks on the disk.
"""

import os
import platform
import re
import stat
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import UNSET, Struct

from culm.files import UnreadableFile, read_file
from culm.wire.config import Options

CONTEXT_FILES = ("AGENTS.md", "CLAUDE.md", "CRUSH.md", ".cursorrules")
FILE_BYTES_MAX = 32 << 10  # For one context file: about eight thousand tokens, in every request.
ALL_BYTES_MAX = 128 << 10  # For all context files together.
FOLDER_NAMES_MAX = 1000  # Entries listed in a folder of rules.
FOLDER_FILES_MAX = 20  # Files read from a folder of rules.
PATHS_MAX = 100  # For paths added by the configuration.
READ_BYTES_MAX = 4 << 20  # A larger file was not written for agents.
GIT_BYTES_MAX = 4096

SYSTEM = """\
You are culm, an agent that works with a person in the directory {path}.
Do what was asked, no more and no less. Use the tools you are given instead of guessing, look
before you change something, and say plainly what you did, what you found and what did not work.
Answer briefly, in the language of the person."""

CONTEXT = """\
These files were written for agents by whoever wrote the project or by the person you work with.
Follow them where they do not go against what the person asks."""

# Nothing else is passed on: the model and its provider would read it.
_HEAD = re.compile(r"ref: refs/heads/(?P<branch>\S{1,200})|(?P<commit>[0-9a-f]{12})[0-9a-f]{28,52}")
_UNDER_WAY = {
    "MERGE_HEAD": "a merge is under way",
    "rebase-merge": "a rebase is under way",
    "rebase-apply": "a rebase is under way",
    "CHERRY_PICK_HEAD": "a cherry-pick is under way",
    "BISECT_LOG": "a bisection is under way",
}


class ContextFile(NamedTuple):
    """A file that agents should read first."""

    name: str
    text: str
    is_cut: bool = False


class ProjectContext(NamedTuple):
    """Facts about the project directory and the date."""

    path: str
    date: str = ""
    platform: str = ""
    git: str = ""  # The state of the repository; empty if there is none.
    files: tuple[ContextFile, ...] = ()


class ContextPaths(Struct, frozen=True):
    """The files that agents should read: of the project, and of the user."""

    project: tuple[str, ...] = CONTEXT_FILES
    user: tuple[str, ...] = ()


def context_paths_of(options: Options) -> ContextPaths:
    """Return the default paths and those that the configuration adds."""
    project = () if options.context_paths is UNSET else options.context_paths
    user = () if options.global_context_paths is UNSET else options.global_context_paths
    return ContextPaths((*CONTEXT_FILES, *project[:PATHS_MAX]), tuple(user[:PATHS_MAX]))


def read_project_context(
    path: Path, paths: ContextPaths, now_s: float, is_over: Callable[[], bool] = bool
) -> ProjectContext:
    """Collect the context; once `is_over` returns True, stop with the files read so far."""
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
    """Return the existing files in order, each once, within the size limits."""
    left = ALL_BYTES_MAX
    seen: set[tuple[int, int]] = set()
    for name, file in _candidates(path, paths):
        if is_over():
            return
        try:
            found = file.stat()
            if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) in seen:
                continue  # On some disks several spellings name one file; it may also be a link.
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
    """Decode the beginning of a text without cutting a character."""
    while 0 < room < len(data) and data[room] & 0xC0 == 0x80:
        room -= 1
    return data[:room].decode(errors="replace")


def _candidates(path: Path, paths: ContextPaths) -> Iterator[tuple[str, Path]]:
    for name in dict.fromkeys(str(Path(name)) for name in paths.project):
        for file in _files_at(path / name):
            if _is_below(file, path):  # Checks the target of a link.
                yield str(file.relative_to(path)), file
    for name in paths.user:
        try:
            location = Path(name).expanduser()
        except RuntimeError:
            continue  # That user has no home directory.
        for file in _files_at(location):
            yield str(file), file


def _files_at(location: Path) -> Iterator[Path]:
    """Return the file itself, or the text files in a folder of rules."""
    try:
        if location.is_dir():
            with os.scandir(location) as entries:
                names = sorted(entry.name for entry in islice(entries, FOLDER_NAMES_MAX))
            texts = (location / name for name in names if name.endswith((".md", ".mdc")))
            yield from islice(texts, FOLDER_FILES_MAX)
        else:
            yield location
    except (OSError, ValueError):
        return


def _is_below(file: Path, folder: Path) -> bool:
    try:
        return file.resolve().is_relative_to(folder.resolve()) and file.is_relative_to(folder)
    except (OSError, ValueError, RuntimeError):
        return False


# --- git


def git_state(path: Path) -> str:
    """Describe the branch and operations in progress, read from the repository's own files."""
    folder = _git_folder(path)
    if folder is None:
        return ""
    found = _HEAD.fullmatch(_line(folder / "HEAD"))
    if found is None:
        return "a repository that cannot be read"
    where = f"branch {found['branch']}" if found["branch"] else f"detached at {found['commit']}"
    under_way = [text for name, text in _UNDER_WAY.items() if (folder / name).exists()]
    return ", ".join([where, *under_way])


def _git_folder(path: Path) -> Path | None:
    """Find the directory with the repository's state; in a worktree `.git` is a file."""
    for location in (path, *path.parents):
        git = location / ".git"
        try:
            if git.is_dir():
                return git
            if git.is_file():
                named = _line(git).removeprefix("gitdir: ")
                return location / named if named else None
        except OSError:
            return None
    return None


def _line(file: Path) -> str:
    """Read the first line of a file. A link is ignored, as it could expose any other file."""
    try:
        data = b"" if file.is_symlink() else read_file(file, GIT_BYTES_MAX)
    except (OSError, UnreadableFile):
        return ""
    text = data.decode(errors="replace").partition("\n")[0].strip()
    return "".join(c for c in text if c.isprintable())


# --- the system prompt


def system_prompt(context: ProjectContext, prefix: str = "") -> str:
    """Assemble the system prompt; `prefix` is required by some providers."""
    facts = [
        f"Date: {context.date}" if context.date else "",
        f"Platform: {context.platform}" if context.platform else "",
        f"Git: {context.git}" if context.git else "",
    ]
    parts = [
        prefix,
        SYSTEM.format(path=context.path),
        "\n".join(fact for fact in facts if fact),
        _files_text(context.files),
    ]
    return "\n\n".join(part for part in parts if part)


def _files_text(files: tuple[ContextFile, ...]) -> str:
    if not files:
        return ""
    return "\n\n".join([CONTEXT, *map(_file_text, files)])


def _file_text(file: ContextFile) -> str:
    end = "\n[The rest of this file was cut off.]" if file.is_cut else ""
    return f'<file path="{file.name}">\n{file.text}{end}\n</file>'

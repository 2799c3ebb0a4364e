"""The environment of commands: variables without interaction, and working directories.

Also prevents `git` from running programs that a repository names, in commands that need no
approval. The functions here are pure, except `why_git_asks`, which reads files.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from culm.files import UnreadableFile, read_file
from culm.tools.files.paths import WorkspacePaths
from culm.tools.files.safe_open import OpenRefused

OURS = "CULM_"  # Settings and tokens of the server, which commands must not see.
CONFIG_BYTES_MAX = 1 << 20
PATH_BYTES_MAX = 8192
SESSIONS_MAX = 1000  # The oldest is dropped, and starts in the workspace again.

# No one can use a pager, type a password or watch a cursor.
_QUIET = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}
# Only if the user has not set them: the editor may open a window.
_UNLESS_SET = {"GIT_EDITOR": "true", "DEBIAN_FRONTEND": "noninteractive"}
_COLORED = {"COLORTERM": "truecolor", "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1"}

# These override the configuration of a repository. Programs configured under an arbitrary name,
# such as diff drivers, cannot be disabled like this; `why_git_asks` looks for them.
_GIT_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "diff.ignoreSubmodules": "all",  # Submodules have a configuration of their own.
    "log.showSignature": "false",
    "safe.bareRepository": "explicit",  # Any directory can look like a bare repository.
}
_GIT_ENV = {
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ALLOW_PROTOCOL": "none",  # A partial clone fetches missing objects, by any program.
    "GIT_NO_LAZY_FETCH": "1",
}
# They change the meaning of a command, or the programs and settings it finds.
_UNSAFE_VARIABLES = re.compile(
    r"BASH_ENV|ENV|CDPATH|GLOBIGNORE|SHELLOPTS|BASHOPTS|PS4|BASH_FUNC_.*|PROMPT_COMMAND"
    r"|GREP_OPTIONS|RIPGREP_CONFIG_PATH|POSIXLY_CORRECT|LESSOPEN|LESSCLOSE"
    r"|GIT_(?!CONFIG_(?:GLOBAL|SYSTEM|NOSYSTEM)$).*"
)

# Keys that name a program, another configuration file or another working tree.
_RISKY = re.compile(
    rb"(?:^|\])[ \t\r]*"
    rb"(textconv|command|cmd|external|clean|smudge|process|program|worktree|ignore)[ \t]*="
    rb"|\[(include)(?:if)?\b",
    re.IGNORECASE | re.MULTILINE,
)


def command_env(base: Mapping[str, str], cwd: str) -> dict[str, str]:
    """Return the environment for a command of an agent."""
    env = {name: value for name, value in base.items() if not name.startswith(OURS)}
    env.pop("OLDPWD", None)
    return {**_UNLESS_SET, **env, **_QUIET, "PWD": cwd}


def user_command_env(base: Mapping[str, str], cwd: str, columns: int) -> dict[str, str]:
    """Return the environment for a command that a person typed; the client shows colors."""
    env = {**command_env(base, cwd), **_COLORED, "TERM": base.get("TERM", "xterm-256color")}
    return {**env, "COLUMNS": str(columns)} if columns > 0 else env


def unasked_env(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """Return the environment for a free command: it runs no program of the workspace."""
    safe = {name: value for name, value in env.items() if not _UNSAFE_VARIABLES.fullmatch(name)}
    safe.update(_GIT_ENV)
    for number, (key, value) in enumerate(_GIT_CONFIG.items()):
        safe[f"GIT_CONFIG_KEY_{number}"] = key
        safe[f"GIT_CONFIG_VALUE_{number}"] = value
    safe["GIT_CONFIG_COUNT"] = str(len(_GIT_CONFIG))
    # An invalid `.git` would make git search above the workspace.
    safe["GIT_CEILING_DIRECTORIES"] = str(root.parent)
    safe["PATH"] = _path_outside(env.get("PATH", os.defpath), root)
    return safe


def _path_outside(path: str, root: Path) -> str:
    """Remove the directories in which the workspace could put an `ls` of its own."""
    folders = [folder for folder in path.split(":") if folder.startswith("/")]
    real = [Path(os.path.realpath(folder)) for folder in folders]
    kept = [
        folder
        for folder, resolved in zip(folders, real, strict=True)
        if not resolved.is_relative_to(root)
    ]
    return ":".join(kept) or os.defpath


def why_git_asks(paths: Iterable[str]) -> str:
    """Return why `git` in one of these directories is not harmless; empty if it is.

    Only the configuration of the repository counts, not the configuration of the user. Does
    blocking disk I/O.
    """
    for folder in dict.fromkeys(_repository(Path(path)) for path in paths):
        if folder is None:
            continue
        for file in _configurations(*folder):
            try:
                found = _RISKY.search(read_file(file, CONFIG_BYTES_MAX))
            except FileNotFoundError:
                continue
            except (OSError, UnreadableFile) as exc:
                return f"{file} cannot be read: {exc}"
            if found:
                key = (found[1] or found[2]).decode().lower()
                return f'{file} sets "{key}", which can make git run a program or read elsewhere'
    return ""


def _repository(path: Path) -> tuple[Path, Path] | None:
    """Find the working tree around a path, and its repository."""
    for folder in (path, *path.parents):
        git = folder / ".git"
        if git.is_dir():
            return folder, git
        if git.is_file():
            return folder, folder / _text(git).removeprefix("gitdir: ")
    return None


def _configurations(tree: Path, git: Path) -> Iterator[Path]:
    yield tree / ".gitmodules"
    shared = git / _text(git / "commondir")  # In a linked working tree.
    for folder in dict.fromkeys((git, shared)):
        yield folder / "config"
        yield folder / "config.worktree"


def _text(file: Path) -> str:
    """Read a path from a file as git does: everything but line ends at the end."""
    try:
        return os.fsdecode(read_file(file, PATH_BYTES_MAX).rstrip(b"\r\n"))
    except (OSError, UnreadableFile):
        return ""


class WorkingDirectories:
    """The working directory of the next command of each session of a workspace.

    Kept in memory only: after a restart every session starts in the workspace again.
    """

    def __init__(self, paths: WorkspacePaths) -> None:
        self._paths = paths
        self._root = str(paths.root)
        self._by_session: dict[str, str] = {}

    def move(self, session_id: str, directory: str) -> bool:
        """Remember the directory a command ended in; outside the workspace: reset, return False."""
        self._by_session.pop(session_id, None)
        is_inside = self._paths.contains(directory)
        if is_inside and directory != self._root:
            self._by_session[session_id] = directory
            while len(self._by_session) > SESSIONS_MAX:
                del self._by_session[next(iter(self._by_session))]
        return is_inside

    def resolve(self, session_id: str, wanted: str) -> str:
        """Return the real path of a working directory; raises `OpenRefused`. Blocks on the disk."""
        here = self._by_session.get(session_id, self._root)
        if not wanted:
            # It may have been removed meanwhile.
            return here if self._is_same(here) else self._root
        path = wanted if wanted.startswith(("/", "~")) else f"{here}/{wanted}"
        target = self._paths.resolve(path)
        if not target.is_directory:
            raise OpenRefused(f"{self._paths.shown(target.path)} is not a directory.")
        return target.path

    def check(self, directory: str) -> None:
        """Raise `OpenRefused` unless a real path is still a directory and contains no link."""
        if not self._is_same(directory):
            path = self._paths.shown(directory)
            raise OpenRefused(f"{path} is no longer the same directory; nothing was run.")

    def _is_same(self, directory: str) -> bool:
        try:
            target = self._paths.resolve(directory)
        except OpenRefused:
            return False
        return target.is_directory and target.path == directory

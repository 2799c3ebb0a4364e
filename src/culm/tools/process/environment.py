"""The environment of commands: the user's, made fit for a process that nobody sits in front of.

Also what keeps `git` from running programs that a repository names, in commands that nobody was
asked about. Pure, but for `why_git_asks`, which reads files.
"""

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from culm.files import UnreadableFile, read_file

OURS = "CULM_"  # Settings and tokens of the server, which are no business of a command.
CONFIG_BYTES_MAX = 1 << 20
PATH_BYTES_MAX = 8192

# Nobody is there to page, to type a password or to watch a cursor move.
_QUIET = {
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "MANPAGER": "cat",
    "SYSTEMD_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
}
# Only where the user has no word of his own: his editor may well be a window.
_UNLESS_SET = {"GIT_EDITOR": "true", "DEBIAN_FRONTEND": "noninteractive"}
_COLOURED = {"COLORTERM": "truecolor", "CLICOLOR_FORCE": "1", "FORCE_COLOR": "1"}

# Over whatever a repository says. Programs that only a name in its configuration calls for, such
# as drivers of a diff, cannot be switched off like this; `why_git_asks` looks for them.
_GIT_CONFIG = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.pager": "cat",
    "diff.ignoreSubmodules": "all",  # Their configuration is another one.
    "log.showSignature": "false",
    "safe.bareRepository": "explicit",  # Any folder of files can pretend to be one.
}
_GIT_ENV = {
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "GIT_OPTIONAL_LOCKS": "0",
    "GIT_ALLOW_PROTOCOL": "none",  # A partial clone fetches what it lacks, by any program.
    "GIT_NO_LAZY_FETCH": "1",
}
# They change what the words of a command mean, or which programs and settings it finds.
_TWISTING = re.compile(
    r"BASH_ENV|ENV|CDPATH|GLOBIGNORE|SHELLOPTS|BASHOPTS|PS4|BASH_FUNC_.*|PROMPT_COMMAND"
    r"|GREP_OPTIONS|RIPGREP_CONFIG_PATH|POSIXLY_CORRECT|LESSOPEN|LESSCLOSE"
    r"|GIT_(?!CONFIG_(?:GLOBAL|SYSTEM|NOSYSTEM)$).*"
)

# Keys that name a program, another file of configuration or another working tree.
_RISKY = re.compile(
    rb"(?:^|\])[ \t\r]*"
    rb"(textconv|command|cmd|external|clean|smudge|process|program|worktree|ignore)[ \t]*="
    rb"|\[(include)(?:if)?\b",
    re.IGNORECASE | re.MULTILINE,
)


def command_env(base: Mapping[str, str], cwd: str) -> dict[str, str]:
    """For a command of an agent."""
    env = {name: value for name, value in base.items() if not name.startswith(OURS)}
    env.pop("OLDPWD", None)
    return {**_UNLESS_SET, **env, **_QUIET, "PWD": cwd}


def user_command_env(base: Mapping[str, str], cwd: str, columns: int) -> dict[str, str]:
    """For a command that a person typed, whose client shows colours."""
    env = {**command_env(base, cwd), **_COLOURED, "TERM": base.get("TERM", "xterm-256color")}
    return {**env, "COLUMNS": str(columns)} if columns > 0 else env


def unasked_env(env: Mapping[str, str], root: Path) -> dict[str, str]:
    """For a command that nobody was asked about: it runs no program that the workspace brings."""
    tame = {name: value for name, value in env.items() if not _TWISTING.fullmatch(name)}
    tame.update(_GIT_ENV)
    for number, (key, value) in enumerate(_GIT_CONFIG.items()):
        tame[f"GIT_CONFIG_KEY_{number}"] = key
        tame[f"GIT_CONFIG_VALUE_{number}"] = value
    tame["GIT_CONFIG_COUNT"] = str(len(_GIT_CONFIG))
    # A `.git` that is none would make git look for one above the workspace.
    tame["GIT_CEILING_DIRECTORIES"] = str(root.parent)
    tame["PATH"] = _path_outside(env.get("PATH", os.defpath), root)
    return tame


def _path_outside(path: str, root: Path) -> str:
    """Without the places where the workspace could put an `ls` of its own."""
    folders = [folder for folder in path.split(":") if folder.startswith("/")]
    real = [Path(os.path.realpath(folder)) for folder in folders]
    kept = [
        folder
        for folder, place in zip(folders, real, strict=True)
        if not place.is_relative_to(root)
    ]
    return ":".join(kept) or os.defpath


def why_git_asks(places: Iterable[str]) -> str:
    """Why a `git` that works in one of these places is not harmless; empty if it is.

    Only what the repository says counts: what the user says of all his repositories is his word.
    Blocks as the disk does.
    """
    for folder in dict.fromkeys(_repository(Path(place)) for place in places):
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


def _repository(place: Path) -> tuple[Path, Path] | None:
    """The working tree around a place, and where its repository is."""
    for folder in (place, *place.parents):
        git = folder / ".git"
        if git.is_dir():
            return folder, git
        if git.is_file():
            return folder, folder / _text(git).removeprefix("gitdir: ")
    return None


def _configurations(tree: Path, git: Path) -> Iterator[Path]:
    yield tree / ".gitmodules"
    shared = git / _text(git / "commondir")  # Of a working tree that is not the first.
    for folder in dict.fromkeys((git, shared)):
        yield folder / "config"
        yield folder / "config.worktree"


def _text(file: Path) -> str:
    """A path in a file, as git reads it: all of it but line ends at the end."""
    try:
        return os.fsdecode(read_file(file, PATH_BYTES_MAX).rstrip(b"\r\n"))
    except (OSError, UnreadableFile):
        return ""

"""Note files beside worktrees, for recovery after a server was killed.

A note exists from the start of a worktree's creation until its removal. It distinguishes a worktree
that was left incomplete, or whose agent was not stored yet, from one that an agent has worked in.
"""

import logging
from pathlib import Path

from msgspec import MsgspecError, Struct

from culm.files import UnreadableFile, read_file, replace_file
from culm.wire.codec import decode, encode

log = logging.getLogger(__name__)

SUFFIX = ".json"
NOTE_BYTES_MAX = 64 << 10  # A few paths.


class WorktreeNote(Struct, frozen=True):
    common: str  # The git directory that all working trees of the repository share.
    base: str
    branch: str = ""  # Set before the branch is created.
    workspace: str = ""  # This and `entry` are set once the worktree is complete.
    entry: str = ""


def noted_in(folders: Path) -> list[str]:
    """List the names of all worktrees there, incomplete ones included. Blocks on disk I/O."""
    try:
        return [note.stem for note in folders.glob(f"*{SUFFIX}")]
    except OSError as exc:
        log.warning("cannot list the worktrees in %s: %s", folders, exc)
        return []


def write_note(folder: Path, note: WorktreeNote) -> None:
    """Write or replace the note of a worktree; raises `OSError`."""
    # After a crash of the machine the state of the other files is unknown anyway, so the worktree
    # is left for people to clean up.
    replace_file(_file_of(folder), encode(note), durable=False)


def find_note(folder: Path) -> WorktreeNote | None:
    try:
        return decode(read_file(_file_of(folder), NOTE_BYTES_MAX), WorktreeNote)
    except FileNotFoundError:
        return None
    except (UnreadableFile, MsgspecError) as exc:
        log.warning("worktree %s is kept because its note cannot be read: %s", folder, exc)
        return None


def remove_note(folder: Path) -> None:
    try:
        _file_of(folder).unlink(missing_ok=True)
    except OSError as exc:
        log.warning("cannot remove the note of worktree %s: %s", folder, exc)


def _file_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{SUFFIX}")

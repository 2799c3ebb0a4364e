"""What is noted of a worktree, in a file beside it, for who comes after a server that was killed.

A note is there from the beginning of a worktree until that is gone. So what was left half made, or
before it was written down who works there, can be told from what somebody has worked in.
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
    common: str  # What all working trees of the repository share.
    base: str
    branch: str = ""  # Once there may be one.
    workspace: str = ""  # This and the next, once it is whole.
    entry: str = ""


def noted_in(folders: Path) -> list[str]:
    """The names of all worktrees there, also of those half made. Blocks as the disk does."""
    try:
        return [note.stem for note in folders.glob(f"*{SUFFIX}")]
    except OSError as exc:
        log.warning("the worktrees in %s cannot be listed: %s", folders, exc)
        return []


def write_note(folder: Path, note: WorktreeNote) -> None:
    """Raises `OSError`."""
    # After a crash of the machine nobody knows what else is there: it is left for people.
    replace_file(_file_of(folder), encode(note), durable=False)


def find_note(folder: Path) -> WorktreeNote | None:
    try:
        return decode(read_file(_file_of(folder), NOTE_BYTES_MAX), WorktreeNote)
    except FileNotFoundError:
        return None
    except (UnreadableFile, MsgspecError) as exc:
        log.warning("%s is left, as its note cannot be read: %s", folder, exc)
        return None


def remove_note(folder: Path) -> None:
    try:
        _file_of(folder).unlink(missing_ok=True)
    except OSError as exc:
        log.warning("the note of worktree %s is left: %s", folder, exc)


def _file_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{SUFFIX}")

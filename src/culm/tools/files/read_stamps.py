"""What a session knows of files: how each looked when it was last read or written there.

An edit of a file that looks otherwise would overwrite what the model has never seen.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass

from culm.errors import AppError
from culm.store.base import Unit
from culm.store.history import mark_read, read_stamp
from culm.store.store import Store
from culm.tools.base import CallResult
from culm.tools.files.read_access import FileAccess, exact


@dataclass(frozen=True, slots=True)
class ReadResult:
    """A result, and the file that the session knows now."""

    result: CallResult
    path: str  # Real.
    stamp: str


def stamp_of(status: os.stat_result) -> str:
    """The same as long as nobody wrote the file or put another in its place."""
    return f"{status.st_mtime_ns}:{status.st_size}:{status.st_ino}"


async def note_read(ground: FileAccess, session_id: str, read: ReadResult) -> None:
    """Note it durably. If it cannot be noted the model may have to read the file again."""
    if exact(read.path) == read.path:  # Else no column of text can hold it.
        with suppress(AppError):
            await asyncio.shield(ground.store.write(mark_read(session_id, read.path, read.stamp)))


class OwnWrites:
    """Files that were written here, until the store has them: by session and path, their stamps.

    It saves the next edit the wait for a commit; what counts is in the store.
    """

    def __init__(self) -> None:
        self._stamps: dict[tuple[str, str], str] = {}

    def note(self, ground: FileAccess, session_id: str, path: str, stamp: str, unit: Unit) -> None:
        """Record a write that has happened. Nobody waits for it.

        The store keeps to the order, so a result that is durable has its versions beside it.
        """
        key = session_id, path
        self._stamps[key] = stamp

        def forget(_: object) -> None:
            if self._stamps.get(key) == stamp:
                del self._stamps[key]

        ground.store.write(unit, on_commit=forget, on_fail=forget)

    def has(self, session_id: str, path: str, stamp: str) -> bool:
        return self._stamps.get((session_id, path)) == stamp


async def find_staleness(store: Store, session_id: str, path: str, stamp: str) -> str | None:
    """Why a session may not write a file that looks like `stamp`, in words; None if it may."""
    known = await store.read(read_stamp(session_id, path))
    if known != stamp:
        await store.write(lambda tx: None)  # A write of ours may be on its way: let it pass.
        known = await store.read(read_stamp(session_id, path))
    if not known:
        return "was not read in this session yet; view it first"
    return None if known == stamp else "has changed since it was last read; view it again first"

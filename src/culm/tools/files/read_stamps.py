"""The state of files that a session knows: the stamp of each when it last read or wrote it.

An edit of a file with another stamp would overwrite contents that the model has never seen.
"""

import asyncio
import os
from contextlib import suppress
from dataclasses import dataclass

from culm.errors import AppError
from culm.store.base import Unit
from culm.store.sessions import mark_read, read_stamp
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
    """Return a value that changes when the file is written or replaced."""
    return f"{status.st_mtime_ns}:{status.st_size}:{status.st_ino}"


async def note_read(access: FileAccess, session_id: str, read: ReadResult) -> None:
    """Store it durably. If that fails, the model may have to read the file again."""
    if exact(read.path) == read.path:  # Otherwise it cannot be stored as text.
        with suppress(AppError):
            await asyncio.shield(access.store.write(mark_read(session_id, read.path, read.stamp)))


class OwnWrites:
    """Stamps of files written by this process until the store has them, by session and path.

    It saves the next edit the wait for a commit; the store is authoritative.
    """

    def __init__(self) -> None:
        self._stamps: dict[tuple[str, str], str] = {}

    def note(self, access: FileAccess, session_id: str, path: str, stamp: str, unit: Unit) -> None:
        """Record a write that has happened, without waiting.

        The store keeps the order, so a durable result always has its versions stored, too.
        """
        key = session_id, path
        self._stamps[key] = stamp

        def forget(_: object) -> None:
            if self._stamps.get(key) == stamp:
                del self._stamps[key]

        access.store.write(unit, on_commit=forget, on_fail=forget)

    def has(self, session_id: str, path: str, stamp: str) -> bool:
        return self._stamps.get((session_id, path)) == stamp


async def find_staleness(store: Store, session_id: str, path: str, stamp: str) -> str | None:
    """Return why a session may not write a file with this `stamp`; None if it may."""
    known = await store.read(read_stamp(session_id, path))
    if known != stamp:
        await store.write(lambda tx: None)  # A write of this process may be pending: wait for it.
        known = await store.read(read_stamp(session_id, path))
    if not known:
        return "was not read in this session yet; view it first"
    return None if known == stamp else "has changed since it was last read; view it again first"

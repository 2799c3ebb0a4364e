"""Files of sessions, as clients ask for them: the versions written, and what was read when."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from culm.errors import InvalidRequest
from culm.ids import SessionId
from culm.store.history import files_of_session, last_read, mark_read, read_files
from culm.store.store import Store
from culm.tools.files.read_stamps import stamp_of
from culm.wire.files import File

PATH_CHARS_MAX = 4096  # What the system allows.
NEVER = datetime(1, 1, 1, tzinfo=UTC)  # Go's zero time, which clients take for "never".


def _find_stamp(path: str) -> str:
    try:
        return stamp_of(Path(path).stat())
    except (OSError, ValueError):
        return ""


@dataclass(frozen=True, slots=True)
class SessionFiles:
    store: Store
    check_open: Callable[[], None]  # Raises once the workspace is closing.

    async def history(self, session_id: SessionId) -> list[File]:
        return await self.store.read(files_of_session(session_id))

    async def mark_read(self, session_id: str, path: str) -> None:
        """Note that a session has read a file now."""
        self.check_open()
        if not path.startswith("/") or len(path) > PATH_CHARS_MAX:
            raise InvalidRequest(f"path must be absolute, of at most {PATH_CHARS_MAX} characters")
        # So that the agent may change what was put before it without reading it again.
        stamp = await asyncio.to_thread(_find_stamp, path)
        await asyncio.shield(self.store.write(mark_read(session_id, path, stamp)))

    async def last_read(self, session_id: str, path: str) -> datetime:
        """When a session last read a file; the year 1 if it never did."""
        at = await self.store.read(last_read(session_id, path))
        return NEVER if at is None else datetime.fromtimestamp(at, UTC)

    async def all_read(self, session_id: SessionId) -> list[str]:
        return await self.store.read(read_files(session_id))

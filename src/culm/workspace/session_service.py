"""The operations of clients on sessions and on the files that sessions read and wrote."""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

from culm.errors import InvalidRequest, SessionBusy, SessionNotFound
from culm.ids import SessionId
from culm.run.runs import Runs
from culm.store.agents import StoredAgent
from culm.store.sessions import (
    add_session,
    delete_session,
    files_of_session,
    find_session,
    last_read,
    mark_read,
    read_files,
    rename_session,
    top_sessions,
)
from culm.tools.files.read_tool import stamp_of
from culm.wire.messages import File, Session
from culm.workspace.agent_service import AgentService
from culm.workspace.services import WorkspaceServices
from culm.workspace.toolbox import Toolbox

TITLE_CHARS_MAX = 10_000  # A listing repeats the title of every session.
PATH_CHARS_MAX = 4096  # The limit of the operating system.
NEVER = datetime(1, 1, 1, tzinfo=UTC)  # Go's zero time, which clients show as "never".


class SessionService:
    """Sessions of one workspace, for its routes."""

    def __init__(
        self, services: WorkspaceServices, runs: Runs, toolbox: Toolbox, agents: AgentService
    ) -> None:
        self._store = services.store
        self._messages = services.messages
        self._lifetime = services.lifetime
        self._ids = services.server.ids
        self._sessions_max = services.server.settings.sessions_max
        self._runs = runs
        self._toolbox = toolbox
        self._agents = agents

    async def create(self, title: str) -> Session:
        self._lifetime.check_open()
        _check_title(title)
        unit = add_session(self._ids.session(), title, sessions_max=self._sessions_max)
        return await asyncio.shield(self._store.write(unit))

    async def get(self, session_id: SessionId) -> Session:
        session = await self._store.read(find_session(session_id))
        if session is None:
            raise SessionNotFound(session_id)
        return self._present(session)

    async def rename(self, session_id: SessionId, title: str) -> Session:
        self._lifetime.check_open()
        _check_title(title)
        write = self._store.write(rename_session(session_id, title))
        return self._present(await asyncio.shield(write))

    async def delete(self, session_id: SessionId) -> None:
        self._lifetime.check_open()
        if self._runs.of_session(session_id):
            raise SessionBusy

        removal: list[asyncio.Task[None]] = []

        def deleted(agents: list[StoredAgent]) -> None:
            gone = {session_id, *(stored.agent.session_id for stored in agents)}
            for one in gone:
                self._messages.forget_session(one)
                self._runs.forget_session(one)
            self._toolbox.forget_sessions(gone)
            removal.append(self._agents.forget(session_id, agents))

        await asyncio.shield(self._store.write(delete_session(session_id), deleted))
        await asyncio.wait(removal)

    def _present(self, session: Session) -> Session:
        session.attached_clients = self._lifetime.claims.attached_to(session.id)
        session.is_busy = self._runs.is_busy(session.id)
        return session

    # --- files

    async def history(self, session_id: SessionId) -> list[File]:
        return await self._store.read(files_of_session(session_id))

    async def mark_read(self, session_id: str, path: str) -> None:
        """Record that a session has read a file now."""
        self._lifetime.check_open()
        if not path.startswith("/") or len(path) > PATH_CHARS_MAX:
            raise InvalidRequest(f"path must be absolute, of at most {PATH_CHARS_MAX} characters")
        # The stamp lets the agent change a file that the user attached without reading it again.
        stamp = await asyncio.to_thread(_find_stamp, path)
        await asyncio.shield(self._store.write(mark_read(session_id, path, stamp)))

    async def last_read(self, session_id: str, path: str) -> datetime:
        """Return the time of a session's last read of a file; the year 1 if there was none."""
        at = await self._store.read(last_read(session_id, path))
        return NEVER if at is None else datetime.fromtimestamp(at, UTC)

    async def all_read(self, session_id: SessionId) -> list[str]:
        return await self._store.read(read_files(session_id))

    # Last, because it hides the type of this name.

    async def list(self) -> list[Session]:
        sessions = await self._store.read(top_sessions)
        attached = self._lifetime.claims.attached()
        for session in sessions:
            session.attached_clients = attached[session.id]
            session.is_busy = self._runs.is_busy(session.id)
        return sessions


def _check_title(title: str) -> None:
    if len(title) > TITLE_CHARS_MAX:
        raise InvalidRequest(f"title may have at most {TITLE_CHARS_MAX} characters")


def _find_stamp(path: str) -> str:
    try:
        return stamp_of(Path(path).stat())
    except (OSError, ValueError):
        return ""

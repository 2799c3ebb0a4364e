"""Which project is meant, where its mailboxes are, and who can be written to there.

All of it is read from files, so it works with no server running and beside one.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from culm.cli.names import NamedItem, find_named, nearest
from culm.clock import LoopClock
from culm.errors import DataUnusable, NotFound
from culm.fleet.names import is_safe_name
from culm.mail.base import check_address
from culm.mail.maildir import MaildirPostOffice
from culm.settings import default_data_dir
from culm.store.agents import agents_below, find_agent
from culm.store.base import Connection
from culm.store.checkup import read_store
from culm.store.sessions import find_session, top_sessions
from culm.wire.codec import printable
from culm.workspace.roots import project_folder, read_workspaces

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownProject:
    """A directory that culm knows, and where it keeps what it knows of it."""

    path: Path  # Real, as a server names it.
    root: Path  # The data directory it was opened with.

    @property
    def folder(self) -> Path:
        return project_folder(self.root, self.path)

    @property
    def database(self) -> Path:
        return self.folder / "culm.db"

    @property
    def mailboxes(self) -> Path:
        return self.folder / "mailboxes"

    @property
    def worktrees(self) -> Path:
        return self.folder / "worktrees"

    def post(self) -> MaildirPostOffice:
        return MaildirPostOffice(self.mailboxes, LoopClock())

    def is_there(self) -> bool:
        """Raises `DataUnusable`."""
        try:
            return self.database.is_file()
        except OSError as exc:
            raise DataUnusable(str(self.root), exc.strerror or str(exc)) from exc

    def read(self, query: Callable[[Connection], T]) -> T:
        """Raises `AppError`."""
        return read_store(self.database, query)


class UnknownProject(NotFound):
    code = "project_not_found"

    def __init__(self, path: Path, data_dir: Path) -> None:
        super().__init__(
            printable(f"culm has never been used in {path}"),
            hint=printable(f"--dir names a project that it was used in; {data_dir} was searched"),
        )


def data_dir_of(given: Path | None, env: Mapping[str, str]) -> Path:
    return (given or default_data_dir(env)).absolute()


def get_project(directory: Path, data_dir: Path) -> KnownProject:
    """Raises `NoProject`, `DataUnusable`."""
    path = directory.resolve()
    roots = [Path(known.root) for known in read_workspaces(data_dir) if known.path == str(path)]
    for root in (*roots, data_dir):
        project = KnownProject(path, root)
        if project.is_there():
            return project
    raise UnknownProject(path, data_dir)


def all_projects(data_dir: Path) -> list[KnownProject]:
    """Those that were ever opened and still have their data."""
    known = [KnownProject(Path(one.path), Path(one.root)) for one in read_workspaces(data_dir)]
    return [project for project in known if project.is_there()]


def check_recipient(project: KnownProject, name: str) -> str:
    """The address of its mailbox: an agent's own id. Raises `UnsafeAddress`.

    It is named by its id, the beginning of it, its session or its title; raises `NotFound` or
    `InvalidRequest` with the nearest.
    """

    def find(connection: Connection) -> str:
        if is_safe_name(name):
            if (stored := find_agent(name)(connection)) is not None:
                return stored.agent.agent_id
            if find_session(name)(connection) is not None:
                return name
        known = _recipients(connection)
        try:
            return find_named(known, name).id
        except NotFound:
            if not name or not nearest(known, name):
                check_address(name)  # What is no name, either, is told what an id looks like.
            raise

    return project.read(find)


def _recipients(connection: Connection) -> list[NamedItem]:
    """The latest first. An agent has a session of its own, which is not named beside it."""
    agents = agents_below("")(connection)
    theirs = {agent.session_id for agent in agents}
    tops = [one for one in top_sessions(connection) if one.id not in theirs]
    return [
        *(NamedItem("agent", agent.agent_id, agent.name) for agent in reversed(agents)),
        *(NamedItem("session", session.id, session.title) for session in tops),
    ]

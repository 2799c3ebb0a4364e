"""Projects that culm knows: their directories, their mailboxes, and the agents to write to.

All of it is read from files, so it works without a server as well as beside one.
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
from culm.store.files import read_store
from culm.store.sessions import find_session, top_sessions
from culm.wire.codec import printable
from culm.workspace.roots import project_folder, read_workspaces

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KnownProject:
    """A directory in which culm was used, and the paths of its data."""

    path: Path  # With links resolved, as a server names it.
    root: Path  # The data directory that it was opened with.

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
        """Return whether there is a database; raises `DataUnusable`."""
        try:
            return self.database.is_file()
        except OSError as exc:
            raise DataUnusable(str(self.root), exc.strerror or str(exc)) from exc

    def read(self, query: Callable[[Connection], T]) -> T:
        """Run a query; raises `AppError`."""
        return read_store(self.database, query)


class UnknownProject(NotFound):
    """Culm has never been used in this directory."""

    code = "project_not_found"

    def __init__(self, path: Path, data_dir: Path) -> None:
        super().__init__(
            printable(f"culm has never been used in {path}"),
            hint=printable(f"choose another project with --dir; searched in {data_dir}"),
        )


def data_dir_of(option: Path | None, env: Mapping[str, str]) -> Path:
    return (option or default_data_dir(env)).absolute()


def get_project(directory: Path, data_dir: Path) -> KnownProject:
    """The project of a directory; raises `UnknownProject`, `DataUnusable`."""
    path = directory.resolve()
    roots = [Path(known.root) for known in read_workspaces(data_dir) if known.path == str(path)]
    for root in (*roots, data_dir):
        project = KnownProject(path, root)
        if project.is_there():
            return project
    raise UnknownProject(path, data_dir)


def all_projects(data_dir: Path) -> list[KnownProject]:
    """All projects that were ever opened and still have their data."""
    known = [KnownProject(Path(one.path), Path(one.root)) for one in read_workspaces(data_dir)]
    return [project for project in known if project.is_there()]


def check_recipient(project: KnownProject, name: str) -> str:
    """Return the address of a mailbox, which is the id of its agent. Raises `UnsafeAddress`.

    The recipient is named by an id, a prefix of it, a session or a title; raises `NotFound` or
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
                check_address(name)  # It resembles no known name: explain the form of an id.
            raise

    return project.read(find)


def _recipients(connection: Connection) -> list[NamedItem]:
    """The latest first. The session of an agent is left out: the agent stands for it."""
    agents = agents_below("")(connection)
    theirs = {agent.session_id for agent in agents}
    tops = [one for one in top_sessions(connection) if one.id not in theirs]
    return [
        *(NamedItem("agent", agent.agent_id, agent.name) for agent in reversed(agents)),
        *(NamedItem("session", session.id, session.title) for session in tops),
    ]

"""Projects that culm knows: their directories, their mailboxes, and the agents to write to.

All of it is read and written in files, so it works without a server as well as beside one. Letters
are counted and read where they are: only the owner of a mailbox claims them. A letter that is
delivered is announced to the server if one is running; otherwise the server finds it when it
starts.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from msgspec import Struct

from culm.cli.names import NamedItem, find_named, nearest
from culm.client.http import RequestRefused, open_client
from culm.client.launch import ServerRequest, find_token, is_listening
from culm.clock import LoopClock, format_time
from culm.errors import AppError, DataUnusable, NotFound
from culm.files import is_safe_name, is_safe_stem
from culm.ids import Ids
from culm.mail.base import MAILBOXES_MAX, MailboxFailed, NoMailbox, check_address
from culm.mail.letters import (
    LETTER_BYTES_MAX,
    BadLetter,
    Letter,
    Sender,
    body_of,
    parse_name,
    read_letter,
    shown_of,
    text_of,
)
from culm.mail.maildir import (
    ForeignFile,
    MailboxFolders,
    MaildirPostOffice,
    Subfolder,
    open_folders,
)
from culm.settings import default_data_dir
from culm.store.agents import agents_below, find_agent
from culm.store.base import Connection
from culm.store.files import read_store
from culm.store.sessions import find_session, top_sessions
from culm.wire.agents import PERSON, LetterKind, LetterShown
from culm.wire.codec import printable
from culm.workspace.roots import project_folder, read_workspaces

T = TypeVar("T")
ASK_S_MAX = 86400  # The longest wait; `culm doctor` reports older mailboxes.
RING_S = 5.0  # The letter is safe, so a server that hangs is not worth a longer wait.
_WAITING = (Subfolder.NEW, Subfolder.CUR)
# In the direction in which letters move, so that a moving letter is not missed.
_PARTS = (*_WAITING, Subfolder.DEAD, Subfolder.CORRUPT)


class KnownProject(Struct, frozen=True):
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


# --- mailboxes


class MailboxSummary(Struct, frozen=True):
    """One mailbox and the number of its letters, or the reason why it cannot be used."""

    address: str
    waiting: int = 0  # Delivered or claimed.
    dead: int = 0
    corrupt: int = 0
    problem: str = ""


def addresses_in(mailboxes: Path) -> list[str]:
    """The addresses of all mailboxes, including empty ones; raises `MailboxFailed`."""
    try:
        with os.scandir(mailboxes) as entries:
            found = (entry.name for entry in islice(entries, MAILBOXES_MAX))
            return sorted(name for name in found if is_safe_stem(name))
    except FileNotFoundError:
        return []  # There are no mailboxes yet.
    except OSError as exc:
        raise MailboxFailed(mailboxes.name, exc.strerror or str(exc)) from exc


def summarize_mailbox(mailboxes: Path, address: str) -> MailboxSummary:
    """Count the letters; a mailbox that cannot be used is reported in the summary."""
    try:
        with open_folders(mailboxes, address) as box:
            counts = {part: len(box.names(part)) for part in _PARTS}
    except AppError as exc:
        return MailboxSummary(address, problem=exc.message)
    except OSError as exc:
        return MailboxSummary(address, problem=f"mailbox {address} cannot be read: {exc.strerror}")
    waiting = counts[Subfolder.NEW] + counts[Subfolder.CUR]
    return MailboxSummary(address, waiting, counts[Subfolder.DEAD], counts[Subfolder.CORRUPT])


class UnreadLetter(NamedTuple):
    """A letter that has not been read yet, with its text."""

    shown: LetterShown
    text: str


def letters_in(mailboxes: Path, address: str) -> Iterator[UnreadLetter]:
    """Letters that are waiting or claimed, in order; unreadable ones are skipped."""
    with suppress(AppError, OSError), open_folders(mailboxes, address) as box:
        for part in _WAITING:
            for name in box.names(part):
                if (letter := _find_letter(box, name, part)) is not None:
                    yield UnreadLetter(shown_of(letter, address), text_of(letter))


def find_in(mailboxes: Path, address: str, letter_id: str) -> LetterShown | None:
    """The state of a letter in a mailbox; None if it was read, never arrived, or is unsafe."""
    with suppress(AppError, OSError), open_folders(mailboxes, address) as box:
        for part in (*_PARTS, Subfolder.NEW):  # It may have been put back in the meantime.
            for name in box.names(part):
                found = parse_name(name)
                if found is not None and found[1] == letter_id:
                    letter = _find_letter(box, name, part)
                    shown = LetterShown(letter_id, from_="", to=address)
                    shown = shown if letter is None else shown_of(letter, address)
                    # A corrupt letter is never read either.
                    shown.state = "delivered" if part in _WAITING else "dead"
                    return shown
    return None


def _find_letter(box: MailboxFolders, name: str, part: Subfolder) -> Letter | None:
    try:
        return read_letter(name, box.read(name, part, LETTER_BYTES_MAX))
    except (BadLetter, NoMailbox, ForeignFile, OSError):
        return None


class MailOptions(Struct, frozen=True):
    """A letter to deliver."""

    project: KnownProject
    server: ServerRequest
    to: str
    text: str
    kind: LetterKind = "task"
    from_: str = ""  # The mailbox for the answer.
    expires_s: float | None = None


def deliver(sending: MailOptions) -> Letter:
    """Deliver to a checked recipient. The letter then survives a crash; raises `AppError`."""
    now_s = LoopClock().now_s()
    expires_s = sending.expires_s
    letter = Letter(
        id=Ids().letter(),
        from_=Sender(session_id=sending.from_ or PERSON, agent_id=sending.from_ or None),
        kind=sending.kind,
        body=body_of(sending.kind, sending.text),
        created_at=format_time(now_s),
        expires_at=None if expires_s is None else format_time(now_s + expires_s),
    )
    sending.project.post().make(sending.to).deliver(letter)
    return letter


class RingResult(Struct, frozen=True):
    """The outcome of announcing a letter to the server."""

    is_there: bool  # A server is running, whatever it answers.
    text: str = ""  # A note for the sender.


NO_SERVER = RingResult(
    is_there=False, text="no server is running; the letter is read when one starts"
)


async def ring(
    server: ServerRequest, project: KnownProject, agent: str, env: Mapping[str, str]
) -> RingResult:
    """Announce a letter to the server, once; a failure is reported in the result, not raised."""
    if server.can_start and not is_listening(server.url):
        return NO_SERVER
    token = find_token(server, None, env)
    try:
        async with asyncio.timeout(RING_S), open_client(server.url, token=token) as client:
            await client.ring(str(project.path), agent)
    except RequestRefused as exc:
        return RingResult(is_there=True, text=f"the server at {server.url} refused: {exc.message}")
    except OSError as exc:  # Includes a timeout.
        reason = str(exc) or "it does not answer"
        return RingResult(is_there=True, text=f"cannot notify the server at {server.url}: {reason}")
    return RingResult(is_there=True)

"""All workspaces of a server: one per canonical path, each opened and closed once.

Owns each workspace's task from opening to the last stage of closing, and decides when the server
may exit. `claims.py` decides how long a workspace stays open; `workspace.py` is its content.
"""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path

from msgspec import Struct, field
from msgspec.structs import replace

from culm.clock import Clock, Timer
from culm.errors import (
    AppError,
    ChannelsDiffer,
    ClientRetired,
    DataUnusable,
    InvalidRequest,
    LimitExceeded,
    ServerInUse,
    ShuttingDown,
    StoreBusy,
    WorkspaceClosing,
    WorkspaceNotFound,
    first_cause,
)
from culm.ids import ClientId, WorkspaceId, workspace_id_of
from culm.settings import Settings
from culm.wire.workspaces import CreateWorkspace
from culm.workspace.claims import Created, Released, Retired, WorkspaceFate
from culm.workspace.roots import WorkspaceInfo, read_workspaces
from culm.workspace.workspace import LiveWorkspace

log = logging.getLogger(__name__)

RETIRED_MAX = 100_000  # Retired ids to remember; each takes about 150 bytes.
RESOLVE_TIMEOUT_S = 5.0
PATH_SHOWN = 200  # Enough of an overlong path to recognize it.
ENVS_MAX = 256  # Paths whose environment is remembered for a later create without one.


# Errors that another `data_dir` from the client would not fix.
_OUR_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)

# Opens and closes a workspace: lock, store, recovery.
OpenWorkspace = Callable[
    [WorkspaceInfo, Mapping[str, str], Callable[[WorkspaceFate], None]],
    AbstractAsyncContextManager[LiveWorkspace],
]


class _Entry(Struct, eq=False):
    """A path that is being opened, is open, or is being closed."""

    about: WorkspaceInfo
    opened: asyncio.Future[LiveWorkspace]
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)  # Set when it begins to close.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[ClientId, None] = field(default_factory=dict[ClientId, None])
    resumed: bool = False  # Opened without a request, because it has runs to continue.
    workspace: LiveWorkspace | None = None
    task: asyncio.Task[None] | None = None

    @property
    def closing(self) -> bool:
        return self.unwanted.is_set()


class Registry:
    """The workspaces of a server. Created by `open_registry`."""

    def __init__(
        self,
        open_workspace: OpenWorkspace,
        data_dir: Path,
        settings: Settings,
        clock: Clock,
        on_leave: Callable[[], None],
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._open_workspace = open_workspace
        self._data_dir = data_dir
        self._settings = settings
        self._clock = clock
        self._on_leave = on_leave
        self._tasks = tasks
        self._entries: dict[Path, _Entry] = {}
        self._by_id: dict[WorkspaceId, LiveWorkspace] = {}
        self._pending = 0  # Creates in progress; the server does not exit during them.
        self._retired: dict[ClientId, None] = {}
        self._envs: dict[Path, Mapping[str, str]] = {}
        self._leaving = False
        self._left = False
        self._is_closing = False  # Workspaces are closed although clients are attached.
        self._linger: Timer | None = None

    # --- finding

    def get(self, workspace_id: str) -> LiveWorkspace:
        """Return the open workspace with this id. One that is closing counts as gone."""
        workspace = self._by_id.get(WorkspaceId(workspace_id))
        if workspace is None:
            # After a 404 an attached client would create it again, and would be refused.
            raise ShuttingDown if self._is_closing else WorkspaceNotFound
        return workspace

    def list(self) -> list[LiveWorkspace]:
        return list(self._by_id.values())

    # --- creating

    async def create(self, request: CreateWorkspace, client_id: ClientId) -> LiveWorkspace:
        """Open the workspace of a path, or join it; the client has a claim when this returns."""
        if not request.path:
            raise InvalidRequest("path is required")
        if "\0" in request.path + request.data_dir:
            raise InvalidRequest("a path cannot contain a NUL byte")
        self._admit(client_id)
        self._stop_lingering()
        self._pending += 1
        try:
            path, root = await self._resolve(request)
            async with asyncio.timeout(self._settings.teardown_s):
                while (entry := self._entries.get(path)) is not None and entry.closing:
                    await entry.gone.wait()
            # The client may have retired meanwhile, or the server begun to exit.
            self._admit(client_id)
            return await self._enter(path, root, request, client_id)
        except TimeoutError as exc:
            raise WorkspaceClosing from exc
        finally:
            self._pending -= 1
            self._consider_leaving()

    async def _resolve(self, request: CreateWorkspace) -> tuple[Path, Path]:
        """Resolve path and data directory; a hanging mount must not block the request."""
        run = asyncio.get_running_loop().run_in_executor
        root = request.data_dir or str(self._data_dir)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                path = await run(None, canonical, request.path)
                await run(None, check_directory, path)
                return path, await run(None, canonical, root)
        except TimeoutError as exc:
            raise DataUnusable(request.path, "the file system does not respond") from exc

    async def _enter(
        self, path: Path, root: Path, request: CreateWorkspace, client_id: ClientId
    ) -> LiveWorkspace:
        env = variables_of(request.env)
        if env and self._is_deserted(path):
            self._envs.pop(path, None)  # The client that opens it again defines its environment.
        entry = self._entries.get(path) or self._add_entry(path, root, request)
        if entry.resumed and entry.about.channels != tuple(request.channels):
            entry.about = replace(entry.about, channels=tuple(request.channels))
            entry.resumed = False  # The first creator defines it.
            if entry.workspace is not None:
                entry.workspace.about = entry.about
        if entry.about.channels != tuple(request.channels):
            raise ChannelsDiffer(request.path)
        env = self._env_of(path, env)
        if entry.workspace is not None:
            entry.workspace.lifetime.check_room(client_id)
            entry.workspace.lifetime.apply(Created(client_id))
            await entry.workspace.configuration.use_env(env)
            return entry.workspace
        if len(entry.waiting) >= self._settings.clients_max:
            raise LimitExceeded("clients of this workspace", self._settings.clients_max)
        entry.waiting[client_id] = None
        workspace = await asyncio.shield(entry.opened)
        if client_id in self._retired:
            raise ClientRetired
        # The environment may have arrived while the workspace was opening.
        await workspace.configuration.use_env(env)
        return workspace

    def _add_entry(self, path: Path, root: Path, request: CreateWorkspace) -> _Entry:
        if len(self._entries) >= self._settings.workspaces_max:
            raise LimitExceeded("open workspaces", self._settings.workspaces_max)
        about = WorkspaceInfo(
            id=workspace_id_of(path),
            path=path,
            given_path=request.path,
            root=root,
            yolo=request.yolo,
            debug=request.debug,
            channels=tuple(request.channels),
        )
        entry = _Entry(about, asyncio.get_running_loop().create_future())
        self._entries[path] = entry
        entry.task = self._tasks.create_task(self._host(entry), name=f"workspace {path}")
        return entry

    def resume(self, path: Path, root: Path) -> None:
        """Open a workspace for its unfinished runs; it stays open while they are live."""
        if path not in self._entries and not self._leaving:
            entry = self._add_entry(path, root, CreateWorkspace(path=str(path)))
            entry.resumed = True

    async def ring(self, path: str, agent_id: str) -> None:
        """Announce delivered letters; opens the project if it is known."""
        known = await asyncio.to_thread(read_workspaces, self._data_dir)
        wanted = await asyncio.to_thread(os.path.realpath, path)
        one = next((one for one in known if one.path == wanted), None)
        if one is None:
            raise WorkspaceNotFound
        self._pending += 1
        try:
            async with asyncio.timeout(self._settings.teardown_s):
                workspace = await self._wait_until_stable(Path(one.path))
        except TimeoutError as exc:
            raise WorkspaceClosing from exc
        finally:
            self._pending -= 1
            self._consider_leaving()
        if self._leaving:
            raise ShuttingDown
        if workspace is None:
            self.resume(Path(one.path), Path(one.root))
        else:
            await workspace.agents.ring(agent_id)

    async def _wait_until_stable(self, path: Path) -> LiveWorkspace | None:
        """Wait until a path is neither opening nor closing, as mail is not read then."""
        while (entry := self._entries.get(path)) is not None:
            if entry.closing:
                await entry.gone.wait()
            elif entry.workspace is None:
                await asyncio.wait({entry.opened})
            else:
                return entry.workspace
        return None

    def _is_deserted(self, path: Path) -> bool:
        """Return True if the workspace has no clients, no creates in progress and no live runs."""
        entry = self._entries.get(path)
        if entry is None:
            return True
        workspace = entry.workspace
        return (
            workspace is not None
            and not any(workspace.lifetime.presence())
            and not workspace.at_work
        )

    def _env_of(self, path: Path, env: Mapping[str, str]) -> Mapping[str, str]:
        """Return the first non-empty environment; later creates may omit it."""
        known = self._envs.pop(path, {}) or env
        self._envs[path] = known
        while len(self._envs) > ENVS_MAX:
            del self._envs[next(iter(self._envs))]
        return known

    def _admit(self, client_id: ClientId) -> None:
        if self._leaving:
            raise ShuttingDown
        if client_id in self._retired:
            raise ClientRetired

    # --- hosting: one task per workspace, which alone opens and closes it

    async def _host(self, entry: _Entry) -> None:
        try:
            env = self._env_of(entry.about.path, {})
            on_fate = partial(self._on_fate, entry)
            async with self._open_workspace(entry.about, env, on_fate) as workspace:
                if self._announce(entry, workspace):
                    await entry.unwanted.wait()
        except Exception as exc:  # boundary: the failure of one workspace must not end the server
            if not entry.opened.done():
                error = self._as_app_error(exc, entry.about)
                if entry.resumed:
                    log.error("cannot resume %s: %s", entry.about.path, error.message)
                self._fail(entry, error)
            elif isinstance(exc, StoreBusy):
                log.error("workspace %s did not close cleanly: %s", entry.about.path, exc.message)
            else:
                log.exception("workspace %s did not close cleanly", entry.about.path)
        finally:
            if not entry.opened.done():
                self._fail(entry, ShuttingDown())  # Cancelled: opening took too long.
            self._unlist(entry)
            if self._entries.get(entry.about.path) is entry:
                del self._entries[entry.about.path]
            entry.gone.set()
            self._consider_leaving()

    def _fail(self, entry: _Entry, error: AppError) -> None:
        entry.opened.set_exception(error)
        entry.opened.exception()  # Mark it as retrieved; waiters receive it, too.

    def _as_app_error(self, exc: Exception, about: WorkspaceInfo) -> AppError:
        exc = first_cause(exc)
        if isinstance(exc, StoreBusy):
            # A 503 would make a Crush client replace this server; it is reserved for exiting.
            return DataUnusable(str(about.root), exc.message)
        if isinstance(exc, AppError):
            return exc
        if isinstance(exc, TimeoutError):
            return DataUnusable(str(about.root), "it does not respond in time")
        if isinstance(exc, OSError) and about.root != self._data_dir and exc.errno not in _OUR_DISK:
            return InvalidRequest(f"cannot use data_dir {about.root}: {exc.strerror}")
        log.error("cannot open workspace %s", about.path, exc_info=exc)
        return DataUnusable(str(about.root), str(exc))

    def _announce(self, entry: _Entry, workspace: LiveWorkspace) -> bool:
        """Make it visible, with the claims of all waiting clients; False if none is left."""
        waiting = [c for c in entry.waiting if c not in self._retired]
        is_wanted = bool(waiting) or (entry.resumed and workspace.at_work > 0)
        if not is_wanted or self._leaving:
            self._fail(entry, ShuttingDown() if self._leaving else ClientRetired())
            self._unlist(entry)  # A client that arrives now waits for the next incarnation.
            return False
        entry.workspace = workspace
        self._by_id[entry.about.id] = workspace
        for client_id in waiting:
            workspace.lifetime.apply(Created(client_id))
        entry.opened.set_result(workspace)
        return True

    def _on_fate(self, entry: _Entry, fate: WorkspaceFate) -> None:
        if entry.workspace is None:
            return  # It is still opening; `_announce` decides if it is needed.
        # Closing ends live runs as interrupted; with CLOSE there are none.
        why = (
            "nobody needs it"
            if fate is WorkspaceFate.CLOSE
            else "its runs had no client for too long"
        )
        log.info("workspace %s closes: %s", entry.about.path, why)
        self._unlist(entry)
        self._consider_leaving()

    def _unlist(self, entry: _Entry) -> None:
        """Hide it: from now on routes return 404 and a create waits for a new incarnation."""
        entry.unwanted.set()
        if entry.workspace is not None:
            entry.workspace.lifetime.closing = True
            if self._by_id.get(entry.about.id) is entry.workspace:
                del self._by_id[entry.about.id]

    # --- clients leaving

    def release(self, workspace_id: str, client_id: ClientId) -> None:
        """Release a client's claim; unknown ids have no effect."""
        if workspace := self._by_id.get(WorkspaceId(workspace_id)):
            workspace.lifetime.apply(Released(client_id))

    def retire(self, client_id: ClientId) -> None:
        """Forget a client everywhere, permanently."""
        self._retired[client_id] = None
        if len(self._retired) > RETIRED_MAX:
            del self._retired[next(iter(self._retired))]
        for workspace in self.list():
            workspace.lifetime.apply(Retired(client_id))

    # --- the server leaving

    def request_leave(self) -> None:
        """Exit if nothing is open or opening; otherwise raise `ServerInUse`."""
        if self._leaving:
            return
        if not self._is_idle():
            raise ServerInUse
        self._leave()

    def _is_idle(self) -> bool:
        return not self._pending and all(entry.closing for entry in self._entries.values())

    def _consider_leaving(self) -> None:
        if self._leaving:
            self._leave()
        elif self._is_idle() and self._linger is None:
            if self._settings.linger_s > 0:
                self._linger = self._clock.call_later(self._settings.linger_s, self._lingered)
            else:
                self._leave()

    def _stop_lingering(self) -> None:
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _lingered(self) -> None:
        self._linger = None
        if self._is_idle():
            self._leave()

    def _leave(self) -> None:
        """Begin to exit: nothing opens from now on, and `on_leave` follows the last closing."""
        self._stop_lingering()
        self._leaving = True
        if not self._entries and not self._left:
            self._left = True
            self._on_leave()

    async def close(self) -> None:
        """Close everything, even with clients attached. Bounded, and safe to repeat."""
        self._stop_lingering()
        self._leaving = self._is_closing = True
        entries = list(self._entries.values())
        for entry in entries:
            self._unlist(entry)
        try:
            async with asyncio.timeout(self._settings.teardown_s):
                for entry in entries:
                    await entry.gone.wait()
        except TimeoutError:
            log.error("workspaces did not close in %s s; exiting anyway", self._settings.teardown_s)
            for entry in entries:
                if entry.task is not None:
                    entry.task.cancel()


def canonical(path: str) -> Path:
    """Resolve links and return an absolute path. A missing path is only made absolute."""
    try:
        return Path(path).resolve(strict=True)
    except (OSError, RuntimeError):  # Missing, not accessible, or a cycle of links.
        return Path(os.path.abspath(path))  # noqa: PTH100 - normalizes `..` without disk access


def variables_of(lines: Iterable[str]) -> dict[str, str]:
    """Parse an environment of `NAME=value` lines."""
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if name and equals}


def check_directory(path: Path) -> None:
    """Reject a path that no session could work in. A missing directory may be created later."""
    try:
        if not stat.S_ISDIR(path.stat().st_mode):
            raise InvalidRequest(f"{path} is not a directory")
    except FileNotFoundError:
        return
    except OSError as exc:
        raise InvalidRequest(f"cannot use {str(path)[:PATH_SHOWN]}: {exc.strerror}") from exc
    if not os.access(path, os.R_OK | os.X_OK):
        raise InvalidRequest(f"cannot read {path}: {os.strerror(errno.EACCES)}")


@asynccontextmanager
async def open_registry(
    open_workspace: OpenWorkspace,
    data_dir: Path,
    settings: Settings,
    clock: Clock,
    on_leave: Callable[[], None],
) -> AsyncGenerator[Registry]:
    """Open a registry; when the block ends every workspace has been closed, within a time limit."""
    async with asyncio.TaskGroup() as tasks:
        registry = Registry(open_workspace, data_dir, settings, clock, on_leave, tasks)
        try:
            yield registry
        finally:
            await registry.close()

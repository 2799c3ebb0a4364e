"""All workspaces of a server: one per canonical path, born once, closed once; and when to leave.

Owns each workspace's task from opening to the last stage of closing. Who keeps one alive is
`claims.py`; what is inside one is `workspace.py`.
"""

import asyncio
import errno
import logging
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

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
)
from culm.ids import ClientId, WorkspaceId, workspace_id_of
from culm.settings import Settings
from culm.wire.workspaces import CreateWorkspace
from culm.workspace.about import WorkspaceInfo
from culm.workspace.claims import Created, Released, Retired, WorkspaceFate
from culm.workspace.roots import read_workspaces
from culm.workspace.workspace import LiveWorkspace

log = logging.getLogger(__name__)

RETIRED_MAX = 100_000  # Ids remembered as retired; each costs some 150 bytes.
RESOLVE_TIMEOUT_S = 5.0
PATH_SHOWN = 200  # Of a path that is too long, this much is enough to know it by.
ENVS_MAX = 256  # Paths whose environment is remembered for a re-create that brings none.


# What no other `data_dir` of the client's would mend.
_OUR_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE)

# How a workspace is opened and closed again: lock, store, recovery.
OpenWorkspace = Callable[
    [WorkspaceInfo, Mapping[str, str]], AbstractAsyncContextManager[LiveWorkspace]
]


@dataclass(eq=False, slots=True)
class _Place:
    """A path that is being opened, is open, or is being closed."""

    about: WorkspaceInfo
    opened: asyncio.Future[LiveWorkspace]
    unwanted: asyncio.Event = field(default_factory=asyncio.Event)  # From here on it closes.
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: dict[ClientId, None] = field(default_factory=dict[ClientId, None])
    resumed: bool = False  # Nobody asked for it: it has runs to go on with.
    workspace: LiveWorkspace | None = None
    task: asyncio.Task[None] | None = None

    @property
    def closing(self) -> bool:
        return self.unwanted.is_set()


class Registry:
    """Made by `open_registry`."""

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
        self._places: dict[Path, _Place] = {}
        self._by_id: dict[WorkspaceId, LiveWorkspace] = {}
        self._pending = 0  # Creates in flight; the server does not leave under them.
        self._retired: dict[ClientId, None] = {}
        self._envs: dict[Path, Mapping[str, str]] = {}
        self._leaving = False
        self._left = False
        self._is_closing = False  # Workspaces are closed although clients are attached.
        self._linger: Timer | None = None

    # --- finding

    def get(self, workspace_id: str) -> LiveWorkspace:
        """The open workspace with this id; one that is closing answers as if it were gone."""
        workspace = self._by_id.get(WorkspaceId(workspace_id))
        if workspace is None:
            # After a 404 an attached client would create it anew, and would be refused.
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
                while (place := self._places.get(path)) is not None and place.closing:
                    await place.gone.wait()
            self._admit(client_id)  # It may have retired, or the server decided, meanwhile.
            return await self._enter(path, root, request, client_id)
        except TimeoutError as exc:
            raise WorkspaceClosing from exc
        finally:
            self._pending -= 1
            self._consider_leaving()

    async def _resolve(self, request: CreateWorkspace) -> tuple[Path, Path]:
        """Path and root as they are on disk; a mount that hangs must not hang the request."""
        run = asyncio.get_running_loop().run_in_executor
        root = request.data_dir or str(self._data_dir)
        try:
            async with asyncio.timeout(RESOLVE_TIMEOUT_S):
                path = await run(None, canonical, request.path)
                await run(None, check_directory, path)
                return path, await run(None, canonical, root)
        except TimeoutError as exc:
            raise DataUnusable(request.path, "the file system does not answer") from exc

    async def _enter(
        self, path: Path, root: Path, request: CreateWorkspace, client_id: ClientId
    ) -> LiveWorkspace:
        env = variables_of(request.env)
        if env and self._is_deserted(path):
            self._envs.pop(path, None)  # Whoever opens it anew says what its environment is.
        place = self._places.get(path) or self._found(path, root, request)
        if place.resumed and place.about.channels != tuple(request.channels):
            place.about = replace(place.about, channels=tuple(request.channels))
            place.resumed = False  # The first who creates it says what it is.
            if place.workspace is not None:
                place.workspace.about = place.about
        if place.about.channels != tuple(request.channels):
            raise ChannelsDiffer(request.path)
        env = self._env_of(path, env)
        if place.workspace is not None:
            place.workspace.check_room(client_id)
            place.workspace.claim(Created(client_id))
            await place.workspace.configuration.use_env(env)
            return place.workspace
        if len(place.waiting) >= self._settings.clients_max:
            raise LimitExceeded("clients of this workspace", self._settings.clients_max)
        place.waiting[client_id] = None
        workspace = await asyncio.shield(place.opened)
        if client_id in self._retired:
            raise ClientRetired
        await workspace.configuration.use_env(env)  # It may have come while this was opening.
        return workspace

    def _found(self, path: Path, root: Path, request: CreateWorkspace) -> _Place:
        if len(self._places) >= self._settings.workspaces_max:
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
        place = _Place(about, asyncio.get_running_loop().create_future())
        self._places[path] = place
        place.task = self._tasks.create_task(self._host(place), name=f"workspace {path}")
        return place

    def resume(self, path: Path, root: Path) -> None:
        """Open a workspace for the runs it has; it stays while they are live."""
        if path not in self._places and not self._leaving:
            place = self._found(path, root, CreateWorkspace(path=str(path)))
            place.resumed = True

    async def ring(self, path: str, agent_id: str) -> None:
        """Somebody has delivered letters; a project that is known is opened for them."""
        known = await asyncio.to_thread(read_workspaces, self._data_dir)
        wanted = await asyncio.to_thread(os.path.realpath, path)
        one = next((one for one in known if one.path == wanted), None)
        if one is None:
            raise WorkspaceNotFound
        self._pending += 1
        try:
            async with asyncio.timeout(self._settings.teardown_s):
                workspace = await self._settled(Path(one.path))
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

    async def _settled(self, path: Path) -> LiveWorkspace | None:
        """The open workspace of a path, once it neither opens nor closes: then it reads no mail."""
        while (place := self._places.get(path)) is not None:
            if place.closing:
                await place.gone.wait()
            elif place.workspace is None:
                await asyncio.wait({place.opened})
            else:
                return place.workspace
        return None

    def _is_deserted(self, path: Path) -> bool:
        """Nobody has it open, looks at it, waits for it, or has something running there."""
        place = self._places.get(path)
        if place is None:
            return True
        workspace = place.workspace
        return workspace is not None and not any(workspace.presence()) and not workspace.at_work

    def _env_of(self, path: Path, env: Mapping[str, str]) -> Mapping[str, str]:
        """The first environment that was not empty; a re-create need not bring it again."""
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

    async def _host(self, place: _Place) -> None:
        try:
            env = self._env_of(place.about.path, {})
            async with self._open_workspace(place.about, env) as workspace:
                if self._publish(place, workspace):
                    await place.unwanted.wait()
        except Exception as exc:  # boundary: one workspace's trouble is not the server's
            if not place.opened.done():
                error = self._as_app_error(exc, place.about)
                if place.resumed:
                    log.error("cannot go on with %s: %s", place.about.path, error.message)
                self._fail(place, error)
            elif isinstance(exc, StoreBusy):
                log.error("workspace %s did not close cleanly: %s", place.about.path, exc.message)
            else:
                log.exception("workspace %s did not close cleanly", place.about.path)
        finally:
            if not place.opened.done():
                self._fail(place, ShuttingDown())  # Cancelled: it took too long to open.
            self._unlist(place)
            if self._places.get(place.about.path) is place:
                del self._places[place.about.path]
            place.gone.set()
            self._consider_leaving()

    def _fail(self, place: _Place, error: AppError) -> None:
        place.opened.set_exception(error)
        place.opened.exception()  # Seen: whoever still waits for it gets it too.

    def _as_app_error(self, exc: Exception, about: WorkspaceInfo) -> AppError:
        if isinstance(exc, StoreBusy):
            # Here 503 would make a Crush client replace us; it is for when we leave.
            return DataUnusable(str(about.root), exc.message)
        if isinstance(exc, AppError):
            return exc
        if isinstance(exc, TimeoutError):
            return DataUnusable(str(about.root), "it does not answer in time")
        if isinstance(exc, OSError) and about.root != self._data_dir and exc.errno not in _OUR_DISK:
            return InvalidRequest(f"cannot use data_dir {about.root}: {exc.strerror}")
        log.error("cannot open workspace %s", about.path, exc_info=exc)
        return DataUnusable(str(about.root), str(exc))

    def _publish(self, place: _Place, workspace: LiveWorkspace) -> bool:
        """Let everybody see it, with the claims of all who wait; False if nobody does any more."""
        waiting = [c for c in place.waiting if c not in self._retired]
        is_wanted = bool(waiting) or (place.resumed and workspace.at_work > 0)
        if not is_wanted or self._leaving:
            self._fail(place, ShuttingDown() if self._leaving else ClientRetired())
            self._unlist(place)  # Whoever comes now waits for the next incarnation.
            return False
        place.workspace = workspace
        self._by_id[place.about.id] = workspace
        workspace.on_fate = lambda fate: self._on_fate(place, fate)
        for client_id in waiting:
            workspace.claim(Created(client_id))
        place.opened.set_result(workspace)
        return True

    def _on_fate(self, place: _Place, fate: WorkspaceFate) -> None:
        # Closing ends what still runs as interrupted; with CLOSE nothing does.
        why = (
            "nobody needs it"
            if fate is WorkspaceFate.CLOSE
            else "its runs were left alone too long"
        )
        log.info("workspace %s closes: %s", place.about.path, why)
        self._unlist(place)
        self._consider_leaving()

    def _unlist(self, place: _Place) -> None:
        """From here on every route answers 404 and a create waits for a new incarnation."""
        place.unwanted.set()
        if place.workspace is not None:
            place.workspace.closing = True
            if self._by_id.get(place.about.id) is place.workspace:
                del self._by_id[place.about.id]

    # --- clients leaving

    def release(self, workspace_id: str, client_id: ClientId) -> None:
        """Drop a client's hold; unknown ones change nothing."""
        if workspace := self._by_id.get(WorkspaceId(workspace_id)):
            workspace.claim(Released(client_id))

    def retire(self, client_id: ClientId) -> None:
        """Forget a client everywhere, for ever."""
        self._retired[client_id] = None
        if len(self._retired) > RETIRED_MAX:
            del self._retired[next(iter(self._retired))]
        for workspace in self.list():
            workspace.claim(Retired(client_id))

    # --- the server leaving

    def request_leave(self) -> None:
        """Leave if nothing is open or opening; otherwise refuse and change nothing."""
        if self._leaving:
            return
        if not self._is_idle():
            raise ServerInUse
        self._leave()

    def _is_idle(self) -> bool:
        return not self._pending and all(place.closing for place in self._places.values())

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
        """Final: from this step on no workspace is born here. Told once the last is closed."""
        self._stop_lingering()
        self._leaving = True
        if not self._places and not self._left:
            self._left = True
            self._on_leave()

    async def close(self) -> None:
        """Close everything, whoever is attached; bounded, and harmless to repeat."""
        self._stop_lingering()
        self._leaving = self._is_closing = True
        places = list(self._places.values())
        for place in places:
            self._unlist(place)
        try:
            async with asyncio.timeout(self._settings.teardown_s):
                for place in places:
                    await place.gone.wait()
        except TimeoutError:
            log.error(
                "workspaces did not close in %s s; leaving all the same", self._settings.teardown_s
            )
            for place in places:
                if place.task is not None:
                    place.task.cancel()


def canonical(path: str) -> Path:
    """Absolute with links resolved; a path that does not exist is keyed by its absolute form."""
    try:
        return Path(path).resolve(strict=True)
    except (OSError, RuntimeError):  # Not there, not ours to see, or a ring of links.
        return Path(os.path.abspath(path))  # noqa: PTH100 - cleans `..` and touches no disk


def variables_of(lines: Iterable[str]) -> dict[str, str]:
    """An environment as a create brings it: `NAME=value`."""
    pairs = (line.partition("=") for line in lines)
    return {name: value for name, equals, value in pairs if name and equals}


def check_directory(path: Path) -> None:
    """Refuse what no session could work in. One that is not there yet may be made later."""
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
    """When the block ends every workspace has been closed, within its bound."""
    async with asyncio.TaskGroup() as tasks:
        registry = Registry(open_workspace, data_dir, settings, clock, on_leave, tasks)
        try:
            yield registry
        finally:
            await registry.close()

"""The only module that picks implementations: from options to a running server."""

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import aiohttp

from culm.clock import Clock
from culm.config.documents import DocumentFile, open_document
from culm.config.sources import FileSources, ReadSource
from culm.config.trust import TrustedFiles
from culm.errors import AppError, DataUnusable, InvalidRequest, ListenFailed
from culm.fleet.host.base import Launcher
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.local import open_local_launcher
from culm.ids import Ids
from culm.mail.base import PostOffice, has_mailbox
from culm.mail.maildir import MaildirPostOffice
from culm.model.base import LanguageModel
from culm.model.choice import ChosenModel, make_model
from culm.model.local_servers import LocalServers, find_local_servers
from culm.processes.base import Processes
from culm.processes.client import open_processes
from culm.run.project_context import ContextPaths, read_project_context
from culm.run.system_prompt import ProjectContext
from culm.server.app import make_api, open_http
from culm.server.auth import RequestAuth, allowed_hosts, read_or_make_token
from culm.server.listen import Address, Listener, TcpAddress, listen, parse_address
from culm.settings import ServeOptions
from culm.store.files import find_askers_left, has_unfinished_runs
from culm.store.store import open_store
from culm.subagents.mail_room import STILL_ASKED_S
from culm.subagents.means import Means
from culm.tools.base import Tool
from culm.tools.files.file_executor import FileExecutor, open_file_executor
from culm.tools.process.jobs import BackgroundJobs
from culm.tools.registry import make_tools
from culm.tools.tool_context import ToolContext
from culm.wire.agents import OUTSIDE
from culm.workspace.about import WorkspaceInfo
from culm.workspace.config import ConfigOrigins
from culm.workspace.registry import OpenWorkspace, Registry, open_registry
from culm.workspace.roots import DataRoots, project_folder, read_workspaces, remember_workspace
from culm.workspace.toolbox import Equipment
from culm.workspace.workspace import LiveWorkspace, open_workspace

log = logging.getLogger(__name__)

T = TypeVar("T")

SEEN_S = 1.0  # As often as configuration is looked at.
# Trees bound themselves, and one that waits for another must not keep that from beginning.
FLEET = FleetBounds(runs_max=10_000, waiting_max=0)
LOOK_S = 2.0  # For one database at the start; a mount that hangs must not hang the server.


@dataclass(frozen=True, slots=True)
class Server:
    """Listening when it is handed out."""

    addresses: tuple[Address, ...]  # With the real ports.
    registry: Registry
    token: str | None


@asynccontextmanager
async def open_server(
    options: ServeOptions,
    clock: Clock,
    ids: Ids,
    on_leave: Callable[[], None],
    tools: Mapping[str, Tool] | None = None,
    launcher: Launcher | None = None,
) -> AsyncGenerator[Server]:
    """Listen, serve, and at the end of the block close everything in bounded stages.

    `on_leave` is called once when nobody needs the server any more. A `launcher` is for tests, as
    `tools` are: workers that are no processes. Raises `ListenFailed`,
    `InvalidRequest` for options that contradict each other.
    """
    wanted = tuple(parse_address(text) for text in options.hosts)
    tls = _check_network(options, wanted)
    _make_data_dir(options.data_dir)
    with ExitStack() as stack:
        listeners: list[Listener] = []
        for address in wanted:
            listeners.append(listen(address))
            stack.callback(listeners[-1].close)
        addresses = tuple(listener.address for listener in listeners)
        tcp = [(a.host, a.port) for a in addresses if isinstance(a, TcpAddress)]
        token = _token(options) if tcp and options.auth else None
        gate = RequestAuth(token, allowed_hosts(tcp, options.allow_hosts))
        async with (
            open_document(options.data_dir / "config.json") as user,
            open_file_executor(clock) as work,
            open_processes(options.data_dir, clock, ids) as processes,
            open_local_launcher(processes, _fabric_dir(options), clock) as local,
            open_fleet(launcher or local, clock, FLEET) as fleet,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            ) as http,
            open_registry(
                _opener(
                    options,
                    user,
                    _equipment(
                        options, http, work, processes, _means(options, fleet, work, clock), tools
                    ),
                    clock,
                    ids,
                ),
                options.data_dir,
                options.settings,
                clock,
                on_leave,
            ) as registry,
            open_http(make_api(registry, gate), listeners, tls),
        ):
            if _is_locking():  # Else they may be another server's, and at work.
                await _resume(registry, options.data_dir, clock)
            try:
                yield Server(addresses, registry, token)
            finally:
                # Out of sight first; then the streams end, so that no clean-up waits for them.
                for listener in listeners:
                    listener.hide()
                await registry.close()


def _equipment(
    options: ServeOptions,
    http: aiohttp.ClientSession,
    work: FileExecutor,
    processes: Processes,
    agents: Means,
    tools: Mapping[str, Tool] | None,
) -> Equipment:
    settings = options.settings

    def tools_of(context: ToolContext, jobs: BackgroundJobs) -> Mapping[str, Tool]:
        return make_tools(context, jobs) if tools is None else tools

    def make(chosen: ChosenModel) -> LanguageModel:
        return make_model(
            chosen,
            http,
            first_byte_s=settings.model_first_byte_s,
            stall_s=settings.model_stall_s,
        )

    seen: dict[tuple[Path, ContextPaths], tuple[float, ProjectContext]] = {}

    async def look(path: Path, paths: ContextPaths, now_s: float) -> ProjectContext:
        """Turns that begin together look once: each look is a thread's work beside the loop."""
        until_s, around = seen.get((path, paths), (0.0, ProjectContext(str(path))))
        if now_s < until_s:
            return around
        try:
            around = await work.run(
                lambda stop: read_project_context(path, paths, now_s, stop.is_set)
            )
        except TimeoutError:  # The disk does not answer; the model can.
            return ProjectContext(str(path))
        if len(seen) > options.settings.workspaces_max:
            seen.clear()
        seen[path, paths] = (now_s + SEEN_S, around)
        return around

    return Equipment(make, tools_of, look, dict(os.environ), processes, work, agents)


def _means(options: ServeOptions, fleet: Fleet, work: FileExecutor, clock: Clock) -> Means:
    async def beside(job: Callable[[], T]) -> T:
        return await work.run(lambda _: job())

    def make_post(folder: Path) -> PostOffice:
        return MaildirPostOffice(folder, clock)

    return Means(fleet, _fabric_dir(options), make_post, beside)


def _fabric_dir(options: ServeOptions) -> Path:
    return options.data_dir / "fabric"


def _is_locking() -> bool:
    return os.environ.get("CULM_NO_LOCK") not in ("1", "true")


def _has_work(folder: Path, clock: Clock) -> bool:
    """Whether something is to be done in a workspace: a run not ended and not held, or mail."""
    if has_unfinished_runs(folder / "culm.db"):
        return True
    post = MaildirPostOffice(folder / "mailboxes", clock)
    if any(not address.startswith(OUTSIDE) for address in post.addresses(claimed=True)):
        return True
    askers = find_askers_left(folder / "culm.db", int(clock.now_s() - STILL_ASKED_S))
    return any(not one.startswith(OUTSIDE) or has_mailbox(post, one) for one in askers)


async def _resume(registry: Registry, data_dir: Path, clock: Clock) -> None:
    """Open every workspace where something is to be done, though no client asks."""
    for known in await asyncio.to_thread(read_workspaces, data_dir):
        folder = project_folder(Path(known.root), Path(known.path))
        try:
            async with asyncio.timeout(LOOK_S):
                if await asyncio.to_thread(_has_work, folder, clock):
                    registry.resume(Path(known.path), Path(known.root))
        except (AppError, OSError) as exc:  # A time-out is an OSError.
            log.error("cannot go on with the runs of %s: %s", known.path, str(exc) or "time-out")


def _opener(
    options: ServeOptions, user: DocumentFile, equipment: Equipment, clock: Clock, ids: Ids
) -> OpenWorkspace:
    servers, trusted = LocalServers(clock), TrustedFiles(options.data_dir)
    good: dict[Path, ReadSource] = {}  # The user's file as it last was in order.
    roots = DataRoots(clock, locking=_is_locking())
    remembering = asyncio.Lock()  # One list, rewritten by one at a time.

    @asynccontextmanager
    async def open_one(
        about: WorkspaceInfo, env: Mapping[str, str]
    ) -> AsyncGenerator[LiveWorkspace]:
        folder = project_folder(about.root, about.path)
        # Not in the root, which a create may name: that can be inside a repository, and what is
        # in a repository is its writer's.
        own_file = project_folder(options.data_dir, about.path) / "config.json"
        async with (
            roots.hold(about.root) as alive_s,
            open_store(folder / "culm.db", clock, ids) as store,
            open_document(own_file) as own,
            open_workspace(
                about,
                store,
                ConfigOrigins(
                    FileSources(options.config_file, about.path, trusted, good),
                    (user, own),
                    partial(find_local_servers, servers=servers),
                ),
                equipment,
                clock,
                ids,
                options.settings,
                env=env,
                alive_s=alive_s,
            ) as workspace,
        ):
            async with remembering:
                await asyncio.to_thread(_remember, options.data_dir, about)
            yield workspace

    return open_one


def _remember(data_dir: Path, about: WorkspaceInfo) -> None:
    try:
        remember_workspace(data_dir, path=about.path, root=about.root, workspace_id=about.id)
    except (OSError, ValueError) as exc:
        log.warning("cannot note %s in workspaces.json: %s", about.path, exc)  # It works without.


def _token(options: ServeOptions) -> str:
    file = options.token_file or options.data_dir / "token"
    try:
        token = read_or_make_token(file)
    except OSError as exc:
        raise InvalidRequest(f"cannot use token file {file}: {exc.strerror}") from exc
    log.info("clients over TCP need the token in %s", file)
    return token


def _make_data_dir(data_dir: Path) -> None:
    """Find out now, not at the first create, that nothing can be stored there."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as exc:
        raise DataUnusable(str(data_dir), exc.strerror or str(exc)) from exc


def _check_network(options: ServeOptions, wanted: tuple[Address, ...]) -> ssl.SSLContext | None:
    """Refuse to be open to a network by accident."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidRequest("--tls-cert and --tls-key go together")
    beyond = [a for a in wanted if isinstance(a, TcpAddress) and not a.is_loopback]
    if beyond and not options.auth:
        raise ListenFailed(
            str(beyond[0]),
            "--no-auth is for loopback only",
            hint="leave it out and give clients the token",
        )
    if beyond and options.tls_cert is None and not options.plaintext_network:
        raise ListenFailed(
            str(beyond[0]),
            "without TLS the token and everything else can be read on the way",
            hint="give --tls-cert and --tls-key, or say --insecure-plaintext-network",
        )
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as exc:  # What ssl raises is one.
        files = f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key}"
        reason = "they are no matching PEM files" if isinstance(exc, ssl.SSLError) else exc.strerror
        raise InvalidRequest(f"cannot use {files}: {reason}") from exc
    return context

"""The only module that picks implementations: from options to a running server."""

import asyncio
import errno
import logging
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import aiohttp
from msgspec import Struct

from culm.clock import Clock
from culm.config.documents import DocumentFile, open_document
from culm.config.sources import FileSources, ReadSource, TrustedFiles
from culm.errors import AppError, DataUnusable, InvalidRequest, ListenFailed
from culm.fleet.host.base import Launcher
from culm.fleet.host.dispatch import FleetBounds, open_fleet
from culm.fleet.host.local import open_local_launcher
from culm.ids import Ids
from culm.mail.base import has_mailbox
from culm.mail.maildir import MaildirPostOffice
from culm.model.catalog import load_catalog
from culm.model.choice import make_model
from culm.model.local_servers import LocalServers, find_local_servers
from culm.processes.client import open_processes
from culm.run.project_context import ContextPaths, ProjectContext, read_project_context
from culm.server.api import Api
from culm.server.auth import RequestAuth, allowed_hosts, read_or_make_token
from culm.server.connection import open_http
from culm.server.listen import Address, Listener, TcpAddress, listen, parse_address
from culm.server.routes import ROUTES
from culm.services import BlockingCall, ServerServices
from culm.settings import ServeOptions
from culm.store.files import find_unanswered_senders, has_unfinished_runs
from culm.store.store import open_store
from culm.subagents.mail_room import STILL_ASKED_S
from culm.tools.base import Tool, ToolContext
from culm.tools.files.file_executor import FileExecutor, open_file_executor
from culm.tools.process.jobs import BackgroundJobs
from culm.wire.agents import EXTERNAL_PREFIX
from culm.workspace.claims import WorkspaceFate
from culm.workspace.config import ConfigOrigins
from culm.workspace.registry import OpenWorkspace, Registry, open_registry
from culm.workspace.roots import (
    DataRoots,
    WorkspaceInfo,
    project_folder,
    read_workspaces,
    remember_workspace,
)
from culm.workspace.workspace import LiveWorkspace, open_workspace

log = logging.getLogger(__name__)

T = TypeVar("T")

IMPORT_TOOLS_S = 0.1  # After a workspace was opened, so that its client has the answer.
CONTEXT_CACHE_S = 1.0  # The same interval at which the configuration is checked.
# Trees are bounded by themselves, and a waiting run must not prevent the one it waits for.
FLEET = FleetBounds(runs_max=10_000, waiting_max=0)
PROBE_S = 2.0  # For one database at startup; a hanging mount must not block the server.


class Server(Struct, frozen=True):
    """A server that is listening."""

    addresses: tuple[Address, ...]  # With the actual ports.
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
    """Listen and serve; at the end of the block close everything in bounded stages.

    `on_leave` is called once, when the server is no longer needed. `launcher` and `tools` are for
    tests: workers that are not processes. Raises `ListenFailed`, and `InvalidRequest` for
    conflicting options.
    """
    wanted = tuple(parse_address(text) for text in options.hosts)
    tls = _check_network(options, wanted)
    _make_data_dir(options.data_dir)
    load_catalog()
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
            open_local_launcher(processes, _discovery_dir(options), clock) as local,
            open_fleet(launcher or local, clock, FLEET) as fleet,
            aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), cookie_jar=aiohttp.DummyCookieJar()
            ) as http,
        ):
            services = ServerServices(
                settings=options.settings,
                clock=clock,
                ids=ids,
                env=dict(os.environ),
                processes=processes,
                executor=work,
                run_blocking=_blocking_in(work),
                make_model=partial(
                    make_model,
                    http=http,
                    first_byte_s=options.settings.model_first_byte_s,
                    stall_s=options.settings.model_stall_s,
                ),
                make_tools=_make_tools if tools is None else lambda context, jobs: tools,
                read_project_context=_cached_context(work, options.settings.workspaces_max, clock),
                fleet=fleet,
                discovery_dir=_discovery_dir(options),
                make_post=lambda folder: MaildirPostOffice(folder, clock),
            )
            async with (
                open_registry(
                    _opener(options, user, services, local.warm_nowait),
                    options.data_dir,
                    options.settings,
                    clock,
                    on_leave,
                ) as registry,
                open_http(Api(registry, gate, ROUTES).handle, listeners, tls),
            ):
                if _is_locking():  # Otherwise the runs may be active in another server.
                    await _resume(registry, options.data_dir, clock)
                try:
                    yield Server(addresses, registry, token)
                finally:
                    # Stop accepting clients first, then end the streams, so that the cleanup does
                    # not wait for them.
                    for listener in listeners:
                        listener.hide()
                    await registry.close()


def _make_tools(context: ToolContext, jobs: BackgroundJobs) -> Mapping[str, Tool]:
    # Not at the top: nobody waits for the tools who only opens a workspace.
    from culm.tools.registry import make_tools

    return make_tools(context, jobs)


def _import_tools_nowait() -> None:
    """Import the tools in a thread, so that the first prompt need not."""
    asyncio.get_running_loop().run_in_executor(None, import_module, "culm.tools.registry")


def _blocking_in(work: FileExecutor) -> BlockingCall:
    async def run_blocking(job: Callable[[], T]) -> T:
        return await work.run(lambda _: job())

    return run_blocking


def _cached_context(
    work: FileExecutor, workspaces_max: int, clock: Clock
) -> Callable[[Path, ContextPaths, float], Awaitable[ProjectContext]]:
    cache: dict[tuple[Path, ContextPaths], tuple[float, ProjectContext]] = {}

    async def read_context(path: Path, paths: ContextPaths, now_s: float) -> ProjectContext:
        """Read the context once for turns that begin together, as each read occupies a thread."""
        until_s, context = cache.get((path, paths), (0.0, ProjectContext(str(path))))
        if clock.monotonic_s() < until_s:
            return context
        try:
            context = await work.run(
                lambda stop: read_project_context(path, paths, now_s, stop.is_set)
            )
        except TimeoutError:  # The disk does not respond; the model can work without it.
            return ProjectContext(str(path))
        if len(cache) > workspaces_max:
            cache.clear()
        cache[path, paths] = (clock.monotonic_s() + CONTEXT_CACHE_S, context)
        return context

    return read_context


def _discovery_dir(options: ServeOptions) -> Path:
    return options.data_dir / "fabric"


def _is_locking() -> bool:
    return os.environ.get("CULM_NO_LOCK") not in ("1", "true")


def _has_work(folder: Path, clock: Clock) -> bool:
    """Return True if a workspace has unfinished runs that are not held, or mail."""
    if has_unfinished_runs(folder / "culm.db"):
        return True
    post = MaildirPostOffice(folder / "mailboxes", clock)
    if any(not address.startswith(EXTERNAL_PREFIX) for address in post.addresses(claimed=True)):
        return True
    askers = find_unanswered_senders(folder / "culm.db", int(clock.now_s() - STILL_ASKED_S))
    return any(not one.startswith(EXTERNAL_PREFIX) or has_mailbox(post, one) for one in askers)


async def _resume(registry: Registry, data_dir: Path, clock: Clock) -> None:
    """Open every workspace with work to do, without a request from a client."""
    for known in await asyncio.to_thread(read_workspaces, data_dir):
        folder = project_folder(Path(known.root), Path(known.path))
        try:
            async with asyncio.timeout(PROBE_S):
                if await asyncio.to_thread(_has_work, folder, clock):
                    registry.resume(Path(known.path), Path(known.root))
        except (AppError, OSError) as exc:  # A timeout is an OSError.
            log.error("cannot resume the runs of %s: %s", known.path, str(exc) or "time-out")


def _opener(
    options: ServeOptions,
    user: DocumentFile,
    services: ServerServices,
    prepare_workers: Callable[[], None],
) -> OpenWorkspace:
    clock, ids = services.clock, services.ids
    servers, trusted = LocalServers(clock), TrustedFiles(options.data_dir)
    good: dict[Path, ReadSource] = {}  # The last valid version of the user's file.
    roots = DataRoots(clock, locking=_is_locking())
    remembering = asyncio.Lock()  # The list is rewritten by one task at a time.

    @asynccontextmanager
    async def open_one(
        about: WorkspaceInfo, env: Mapping[str, str], on_fate: Callable[[WorkspaceFate], None]
    ) -> AsyncGenerator[LiveWorkspace]:
        # Not in the root, which a create may choose: it can be inside a repository, whose content
        # is untrusted.
        own_file = project_folder(options.data_dir, about.path) / "config.json"
        async with (
            roots.hold(about.root) as alive_s,
            open_store(about.folder / "culm.db", clock, ids) as store,
            open_document(own_file) as own,
            open_workspace(
                about,
                store,
                ConfigOrigins(
                    FileSources(options.config_file, about.path, trusted, good),
                    (user, own),
                    partial(find_local_servers, servers=servers),
                ),
                services,
                on_fate,
                env=env,
                alive_s=alive_s,
            ) as workspace,
        ):
            async with remembering:
                await asyncio.to_thread(_remember, options.data_dir, about)
            with (
                _called_after(clock, IMPORT_TOOLS_S, _import_tools_nowait),
                _called_after(clock, options.settings.prepare_workers_s, prepare_workers),
            ):
                yield workspace

    return open_one


@contextmanager
def _called_after(clock: Clock, delay_s: float, action: Callable[[], None]) -> Generator[None]:
    """Call `action` once if the block lasts so long; never if the delay is 0."""
    timer = clock.call_later(delay_s, action) if delay_s else None
    try:
        yield
    finally:
        if timer is not None:
            timer.cancel()


def _remember(data_dir: Path, about: WorkspaceInfo) -> None:
    try:
        remember_workspace(data_dir, path=about.path, root=about.root, workspace_id=about.id)
    except (OSError, ValueError) as exc:
        # The list is optional.
        log.warning("cannot record %s in workspaces.json: %s", about.path, exc)


def _token(options: ServeOptions) -> str:
    file = options.token_file or options.data_dir / "token"
    try:
        token = read_or_make_token(file)
    except OSError as exc:
        raise InvalidRequest(f"cannot use token file {file}: {exc.strerror}") from exc
    log.info("clients over TCP need the token in %s", file)
    return token


def _make_data_dir(data_dir: Path) -> None:
    """Fail at startup, not at the first create, if the data directory is unusable."""
    try:
        data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as exc:
        raise DataUnusable(str(data_dir), exc.strerror or str(exc)) from exc


def _check_network(options: ServeOptions, wanted: tuple[Address, ...]) -> ssl.SSLContext | None:
    """Refuse to listen on a network by accident."""
    if (options.tls_cert is None) != (options.tls_key is None):
        raise InvalidRequest("--tls-cert and --tls-key go together")
    beyond = [a for a in wanted if isinstance(a, TcpAddress) and not a.is_loopback]
    if beyond and not options.auth:
        raise ListenFailed(
            str(beyond[0]),
            "--no-auth is for loopback only",
            hint="remove it and give clients the token",
        )
    if beyond and options.tls_cert is None and not options.plaintext_network:
        raise ListenFailed(
            str(beyond[0]),
            "without TLS the token and all data are sent in plain text",
            hint="pass --tls-cert and --tls-key, or --insecure-plaintext-network",
        )
    if options.tls_cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.tls_cert, options.tls_key)
    except OSError as exc:  # ssl errors are OSErrors.
        files = f"--tls-cert {options.tls_cert} and --tls-key {options.tls_key}"
        reason = (
            "they are not matching PEM files" if isinstance(exc, ssl.SSLError) else exc.strerror
        )
        raise InvalidRequest(f"cannot use {files}: {reason}") from exc
    return context

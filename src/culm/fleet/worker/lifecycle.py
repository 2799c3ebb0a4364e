"""The lifecycle of a worker from its provision to its end: listen, register, serve, withdraw.

A worker ends when it has served its runs, when no host connects in time, when it is stopped, or
when its owner process is gone, even during a run. It first cancels the run, then withdraws its
record, and then ends its processes and removes its storage folder.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final, cast

from culm.clock import Clock, LoopClock
from culm.fleet.discovery.base import Discovery
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.names import is_safe_name
from culm.fleet.provision import (
    IDLE_S,
    SECONDS_MAX,
    BadProvision,
    OwnerStamp,
    Provision,
    storage_of,
)
from culm.fleet.transport.tls import ServerTls
from culm.fleet.transport.websocket import listen_websocket
from culm.fleet.worker.control import WorkerControl, open_control
from culm.fleet.worker.executors.base import WorkerServices, make_private
from culm.fleet.worker.executors.registry import open_executor
from culm.fleet.worker.lazy_processes import open_lazy_processes
from culm.fleet.worker.registration import make_record, open_registration
from culm.fleet.worker_server.base import Mode, ServeInTurn, ServeOnce, ServingSettings
from culm.fleet.worker_server.modes import serve_on
from culm.ids import Ids
from culm.processes.base import Processes
from culm.processes.client import open_processes
from culm.processes.linux import find_stat

POLL_S: Final = 0.5  # The interval for watching an owner without a pidfd.
STORAGE_KEPT_S: Final = 7 * 86_400.0  # How long the folder of a killed worker is kept.
FOLDERS_MAX: Final = 10_000  # Inspected per cleanup.


@dataclass(frozen=True, slots=True)
class WorkerEndpoint:
    """The settings of a worker's endpoint, which are not part of the provision."""

    host: str = "127.0.0.1"
    port: int = 0
    tls: ServerTls | None = None
    labels: tuple[str, ...] = ()
    mode: Mode | None = None  # By default derived from the provision.
    on_ready: Callable[[str], None] = lambda _: None  # Called with the URL, once it is reachable.
    on_leave: Callable[[], None] = lambda: None  # Called when the shutdown begins.


async def work(
    provision: Provision, stop: asyncio.Event, endpoint: WorkerEndpoint | None = None
) -> None:
    """Serve until the end; raises `BadProvision`, `ConnectTimeout`, `AppError` and OSError."""
    try:
        await _work(provision, stop, endpoint or WorkerEndpoint())
    except ExceptionGroup as exc:
        # Each task group that the error passed through has wrapped it once more.
        raise _innermost(exc) from exc


def _innermost(group: ExceptionGroup[Exception]) -> Exception:
    first = group.exceptions[0]
    if isinstance(first, ExceptionGroup):
        # An ExceptionGroup contains only exceptions of type Exception.
        return _innermost(cast("ExceptionGroup[Exception]", first))
    return first


async def _work(provision: Provision, stop: asyncio.Event, endpoint: WorkerEndpoint) -> None:
    clock = LoopClock()
    async with AsyncExitStack() as stack:
        control = await _enter_control(provision, stack)
        discovery = FileDiscovery(Path(provision.fabric_dir), clock)
        services = await stack.enter_async_context(_open_services(provision, control, discovery))
        executor = await stack.enter_async_context(open_executor(provision, services))
        token = provision.secrets.worker_auth_token or None
        listening = listen_websocket(endpoint.host, endpoint.port, token, endpoint.tls)
        listener = await stack.enter_async_context(listening)
        if control is not None:
            control.ready(listener.endpoint)
            endpoint.on_ready(listener.endpoint)
        make = partial(
            *(make_record, provision.identity, endpoint.labels, listener.endpoint),
            *(provision.owner, clock.now_s()),
        )
        # A host without a control socket waits for the record; one with a control socket does not.
        registration = open_registration(discovery, make, clock, at_once=control is None)
        await stack.enter_async_context(registration)
        if control is None:
            endpoint.on_ready(listener.endpoint)
        settings = serving_settings_of(provision, clock, services.ids)
        serving = serve_on(listener, executor, endpoint.mode or mode_of(provision), settings)
        gone = _until_owner_gone(control, provision.owner)
        await _until_first(serving, stop.wait(), gone, endpoint.on_leave)


async def _enter_control(provision: Provision, stack: AsyncExitStack) -> WorkerControl | None:
    descriptor = provision.culm.control_fd
    if descriptor is None:
        return None
    try:
        return await stack.enter_async_context(open_control(descriptor))
    except OSError as exc:
        raise BadProvision(f"culm.control_fd is not a control socket: {exc.strerror}") from exc


@asynccontextmanager
async def _open_services(
    provision: Provision, control: WorkerControl | None, discovery: Discovery
) -> AsyncGenerator[WorkerServices]:
    clock, ids = LoopClock(), Ids()
    storage = storage_of(provision)

    @asynccontextmanager
    async def open_own() -> AsyncGenerator[Processes]:
        await asyncio.to_thread(make_private, storage)
        async with open_processes(storage, clock, ids) as processes:
            yield processes

    # The processes of an owner are opened lazily, too.
    opening = (
        open_lazy_processes(open_own) if control is None else control.open_processes(clock, ids)
    )
    try:
        async with opening as processes:
            yield WorkerServices(clock, ids, processes, storage)
    finally:
        if storage.exists():
            await asyncio.to_thread(remove_storage, provision, discovery, clock.now_s())


async def _until_owner_gone(control: WorkerControl | None, owner: OwnerStamp | None) -> None:
    """Wait for the end of the owner; for ever if it cannot be observed."""
    if control is not None:
        await control.gone()
    elif owner is not None:
        await _owner_gone(owner)
    else:
        await asyncio.Event().wait()


async def _until_first(
    serving: Coroutine[None, None, None],
    stopped: Coroutine[None, None, object],
    owner_gone: Coroutine[None, None, None],
    on_leave: Callable[[], None],
) -> None:
    """Serve until one of the three ends, then cancel the others."""
    async with asyncio.TaskGroup() as group:
        tasks = {
            group.create_task(serving, name="serve"),
            group.create_task(stopped, name="stop"),
            group.create_task(owner_gone, name="owner"),
        }
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        on_leave()
        for task in tasks:
            task.cancel()


# --- limits of the provision


def mode_of(provision: Provision) -> Mode:
    if not provision.reusable:
        return ServeOnce()
    idle_s = provision.limits.idle_timeout_secs
    return ServeInTurn(IDLE_S if idle_s is None else min(idle_s, SECONDS_MAX))


def serving_settings_of(provision: Provision, clock: Clock, ids: Ids) -> ServingSettings:
    run_s = provision.limits.run_timeout_secs
    return ServingSettings(
        clock,
        ids,
        run_s=None if run_s is None else min(run_s, SECONDS_MAX),
        host_calls=provision.culm.host_calls,
        depth=provision.identity.depth,
        depth_max=provision.capabilities.depth_max,
    )


# --- the owner process, which a worker must not outlive


async def _owner_gone(owner: OwnerStamp) -> None:
    """Wait until the owner is gone; return at once if its pid already belongs to another."""
    try:
        # Opened before the check: from here on a reuse of the pid cannot go unnoticed.
        handle = os.pidfd_open(owner.process_id)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # Not Linux, or an old kernel.
        await _poll(owner)
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        if _is_alive(owner):
            await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)


async def _poll(owner: OwnerStamp) -> None:
    while _is_alive(owner):  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(POLL_S)


def _is_alive(owner: OwnerStamp) -> bool:
    """Check the pid and the start time; without /proc only the pid."""
    stat = find_stat(owner.process_id)
    if stat is not None:
        start = owner.process_start_id
        # A start id that is text comes from another program and cannot be compared.
        return stat.is_alive and (not isinstance(start, int) or start == stat.start_ticks)
    if find_stat(os.getpid()) is not None:
        return False
    try:
        os.kill(owner.process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # It belongs to another user.
    return True


# --- the storage folder, created on first use


def remove_storage(provision: Provision, discovery: Discovery, now_s: float) -> None:
    """Remove the worker's folder, and old folders of killed workers that are not registered.

    A folder named in the provision stays, and so do those beside it. Blocks on disk I/O.
    """
    if provision.storage_dir is not None:
        return
    own = storage_of(provision)
    shutil.rmtree(own, ignore_errors=True)
    for folder in _old_folders(own.parent, now_s - STORAGE_KEPT_S):
        if discovery.resolve(folder.name) is None:
            shutil.rmtree(folder, ignore_errors=True)


def _old_folders(parent: Path, before_s: float) -> Iterator[Path]:
    with suppress(OSError), os.scandir(parent) as entries:
        for _, entry in zip(range(FOLDERS_MAX), entries, strict=False):
            is_folder = is_safe_name(entry.name) and entry.is_dir(follow_symlinks=False)
            if is_folder and entry.stat(follow_symlinks=False).st_mtime < before_s:
                yield Path(entry.path)

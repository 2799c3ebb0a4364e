"""The lifecycle of a worker from its provision to its end: listen, register, serve, withdraw.

A worker ends when it has served its runs, when no host connects in time, when it is stopped, or
when its owner process is gone, even during a run. It first cancels the run, then withdraws its
record, and then ends its processes and removes its storage folder.
"""

import asyncio
import logging
import os
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final, cast

from msgspec import Struct

from culm import __version__
from culm.clock import Clock, LoopClock, format_time, pause
from culm.files import is_safe_name
from culm.fleet.discovery.base import (
    RENEW_S,
    AgentRecord,
    Discovery,
    OwnerProcess,
    ProcessPlace,
    renewed,
)
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import (
    IDLE_S,
    SECONDS_MAX,
    BadProvision,
    Identity,
    OwnerStamp,
    Provision,
    limits_of,
    storage_of,
)
from culm.fleet.transport.tls import ServerTls
from culm.fleet.transport.websocket import listen_websocket
from culm.fleet.worker.control import WorkerControl, open_control
from culm.fleet.worker.executors.base import WorkerServices, open_executor
from culm.fleet.worker_server.connection import Mode, ServeInTurn, ServeOnce, serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from culm.processes.client import open_processes
from culm.processes.linux import find_stat, read_world_id

_log = logging.getLogger(__name__)

POLL_S: Final = 0.5  # The interval for watching an owner without a pidfd.
STORAGE_KEPT_S: Final = 7 * 86_400.0  # How long the folder of a killed worker is kept.
FOLDERS_MAX: Final = 10_000  # Inspected per cleanup.
SETTLE_S: Final = 0.25  # A thread during the first connection would delay it by milliseconds.
WITHDRAW_S: Final = 2.0  # A slower disk leaves a record behind, whose lease runs out.

MakeRecord = Callable[[], AgentRecord]  # Called in a thread, when the record is first needed.


class WorkerEndpoint(Struct, frozen=True):
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
        settings = ServingSettings(clock, services.ids, limits_of(provision))
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
    # The supervisor is started or requested with the first process: most workers start none.
    opening = (
        open_processes(storage, clock, ids) if control is None else control.open_processes(clock)
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


def mode_of(provision: Provision) -> Mode:
    if not provision.reusable:
        return ServeOnce()
    idle_s = provision.limits.idle_timeout_secs
    return ServeInTurn(IDLE_S if idle_s is None else min(idle_s, SECONDS_MAX))


# --- the record in discovery: registered, renewed while it serves, withdrawn at the end


def make_record(
    identity: Identity,
    labels: Sequence[str],
    endpoint: str,
    owner: OwnerStamp | None,
    now_s: float,
) -> AgentRecord:
    """Build the record of this process, which began to serve at `now_s`."""
    return renewed(
        AgentRecord(
            agent_id=identity.child_id,
            role=identity.role,
            labels=[*labels],
            endpoint=endpoint,
            pid=os.getpid(),
            version=__version__,
            started_at=format_time(now_s),
            lease_expires_at="",
            culm=_process_place(owner),
        ),
        now_s,
    )


def _process_place(owner: OwnerStamp | None) -> ProcessPlace | None:
    """Identify this process; None on systems without process start times."""
    own = find_stat(os.getpid())
    return (
        None if own is None else ProcessPlace(own.start_ticks, read_world_id(), _find_owner(owner))
    )


def _find_owner(stamp: OwnerStamp | None) -> OwnerProcess | None:
    if stamp is None:
        return None
    if isinstance(stamp.process_start_id, int):
        return OwnerProcess(stamp.process_id, stamp.process_start_id)
    stat = find_stat(stamp.process_id)
    return None if stat is None else OwnerProcess(stat.pid, stat.start_ticks)


class _Registration:
    """A worker's record in discovery, written in one thread at a time.

    Disk I/O never blocks the loop. If a slow disk is still writing when the worker leaves, the
    withdrawal comes after that.
    """

    def __init__(self, discovery: Discovery, make: MakeRecord) -> None:
        self._discovery = discovery
        self._make = make
        self._record: AgentRecord | None = None
        self._lock = threading.Lock()
        self._is_begun = False  # A write was requested, whether or not its thread has started.
        self._is_over = False

    async def publish(self, now_s: float) -> None:
        """Write or renew the record; after a cancel it may still be written. Raises OSError."""
        self._is_begun = True
        await asyncio.to_thread(self._publish, now_s)

    async def renew(self, clock: Clock, *, at_once: bool) -> None:
        """Renew the record until this is cancelled."""
        await pause(clock, RENEW_S if at_once else SETTLE_S)
        while True:
            try:
                await self.publish(clock.now_s())
            except OSError as exc:
                # The host may still know the worker by its socket; the next attempt may succeed.
                _log.warning("cannot write the record: %s", exc.strerror)
            await pause(clock, RENEW_S)

    async def withdraw(self) -> None:
        """Remove the record, if the disk does so in time, and write nothing afterwards."""
        if not self._is_begun:
            return
        try:
            async with asyncio.timeout(WITHDRAW_S):
                await asyncio.to_thread(self._withdraw)
        except TimeoutError:
            _log.warning("cannot withdraw the record within %g s", WITHDRAW_S)
        except OSError as exc:
            _log.warning("cannot withdraw the record: %s", exc.strerror)

    def _publish(self, now_s: float) -> None:
        with self._lock:
            if not self._is_over:
                self._record = self._record or self._make()
                self._discovery.publish(renewed(self._record, now_s))

    def _withdraw(self) -> None:
        with self._lock:
            self._is_over = True
            if (own := self._record) is None:
                return
            found = self._discovery.resolve(own.agent_id)
            # A new worker with the same id keeps its record.
            if found is None or found.pid == own.pid:
                self._discovery.withdraw(own.agent_id)


@asynccontextmanager
async def open_registration(
    discovery: Discovery, make: MakeRecord, clock: Clock, *, at_once: bool
) -> AsyncGenerator[None]:
    """Be registered in discovery until the block ends.

    With `at_once` the record is written before the block begins, which may raise OSError. Otherwise
    it is written a moment later: the host does not need it and has work for us first.
    """
    registration = _Registration(discovery, make)
    try:
        if at_once:
            await registration.publish(clock.now_s())
        async with asyncio.TaskGroup() as group:
            renewing = registration.renew(clock, at_once=at_once)
            task = group.create_task(renewing, name="registration")
            try:
                yield
            finally:
                task.cancel()
    finally:
        await registration.withdraw()


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

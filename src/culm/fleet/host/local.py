"""Local workers: forked from the zygote, spawned where there is none, or other programs.

A launcher owns every worker that it launched, and the zygote. The fleet assigns the runs. Workers
that a crashed server left behind are ended first: a worker ends by itself when its owner is gone,
so these hung or were stopped.
"""

import asyncio
import logging
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec import Struct

from culm.clock import Clock, pause
from culm.fleet.discovery.base import AgentRecord, Discovery, is_live, is_running
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.local_worker import ControlSocket, ForkedProcess, LocalWorker
from culm.fleet.host.startup import (
    LAUNCH_S,
    WORKER,
    ZYGOTE,
    WorkerStartup,
    make_stamp,
    open_startup,
    python_argv,
    stamped,
)
from culm.fleet.host.zygote_client import ZygoteClient, start_zygote
from culm.fleet.provision import Provision, storage_beside
from culm.processes.base import Processes, ProcessStartFailed
from culm.processes.linux import (
    descendants_of,
    end_one,
    find_stat,
    is_alive,
    now_s,
    read_table,
    read_world_id,
)

_log = logging.getLogger(__name__)

CONTROL: Final = 3  # The descriptor of a worker's control socket.
FORKS_MAX: Final = 16  # Requested but not forked yet, so that requests always fit into the socket.
WARM_S: Final = 15.0  # For a zygote to start: an interpreter and all imports.
FORK_S: Final = 5.0  # For one fork of a warm zygote, on a busy machine.
LAST_PACKET_S: Final = 0.1  # For the last packets of a zygote that is gone.
ZYGOTES_MAX: Final = 2  # Zygotes tried for one worker.
# A zygote without error output was killed, perhaps with its supervisor: try again.
FAILURES_MAX: Final = 3
REST_S: Final = 60.0  # Time without a zygote after one could not start.
POLL_S: Final = 0.02  # Interval at which the record of another program is looked up.
END_BOUND_S: Final = 3.0  # For a worker that was left behind.
_PAUSE_S: Final = 0.01


class LaunchSettings(Struct, frozen=True):
    """Programs to run in new interpreters (Python statements), and how long to wait for them."""

    zygote: str = ZYGOTE
    worker: str = WORKER
    path: Path | None = None  # Where they find their modules; None means where ours are.
    launch_s: float = LAUNCH_S
    warm_s: float = WARM_S
    fork_s: float = FORK_S


class _ProcessLauncher(ABC):
    """The part of a `Launcher` that is the same for all worker processes on this machine."""

    _control_fd: int | None = None  # The descriptor of a worker's control socket, if it has one.

    def __init__(
        self, processes: Processes, clock: Clock, tasks: asyncio.TaskGroup, launch_s: float
    ) -> None:
        self._processes = processes
        self._clock = clock
        self._tasks = tasks
        self._launch_s = launch_s
        self._workers: set[LocalWorker] = set()

    async def launch(self, provision: Provision) -> LocalWorker:
        given = stamped(provision, make_stamp(self._clock.now_s()), self._control_fd)
        discovery = FileDiscovery(Path(given.fabric_dir), self._clock)
        self._workers = {worker for worker in self._workers if not worker.is_ended}
        async with open_startup(given, discovery, self._launch_s) as startup:
            self._workers.add(startup.worker)
            await self._start(startup, discovery)
            return startup.worker

    @abstractmethod
    async def _start(self, startup: WorkerStartup, discovery: Discovery) -> None:
        """Start the process and wait until the worker is ready; raises `LaunchFailed`."""
        ...

    async def _spawn(self, startup: WorkerStartup, argv: Sequence[str], passed: list[int]) -> None:
        started = await startup.start(self._processes, argv, passed)
        self._tasks.create_task(started.watch(), name=f"worker {startup.worker.id}")

    async def close(self) -> None:
        """End every worker."""
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.kill(), name=f"end {worker.id}")


class LocalLauncher(_ProcessLauncher):
    """Implements `Launcher`. Created by `open_local_launcher`."""

    _control_fd = CONTROL

    def __init__(
        self, processes: Processes, clock: Clock, tasks: asyncio.TaskGroup, settings: LaunchSettings
    ) -> None:
        super().__init__(processes, clock, tasks, settings.launch_s)
        self._settings = settings
        self._zygote: ZygoteClient | None = None
        self._zygote_turn = asyncio.Lock()
        self._failures = 0  # Consecutive failures of zygotes to start.
        self._resting_until_s = 0.0
        self._forks = asyncio.Semaphore(FORKS_MAX)
        self._asking: set[LocalWorker] = set()  # Waiting for a channel to the supervisor.
        self._is_closing = False

    def warm_nowait(self) -> None:
        """Have a zygote ready, because a worker will be needed soon."""
        if not self._is_closing:
            self._tasks.create_task(self._get_zygote(), name="zygote")

    async def close(self) -> None:
        """End every worker, and the zygote."""
        self._is_closing = True
        await super().close()
        async with self._zygote_turn:
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None

    async def _start(self, startup: WorkerStartup, discovery: Discovery) -> None:
        if not await self._fork_by_zygote(startup):
            if self._is_closing:
                raise LaunchFailed("the server is stopping")
            control = startup.begin(self._on_supervisor)
            argv = python_argv(self._settings.worker, self._settings.path)
            with control.theirs:
                await self._spawn(startup, argv, [control.theirs.fileno()])
        await startup.ready()

    async def _fork_by_zygote(self, startup: WorkerStartup) -> bool:
        for _ in range(ZYGOTES_MAX):
            zygote = await self._get_zygote()
            if zygote is None:
                return False
            if await self._fork(startup, zygote):
                return True
        return False

    async def _fork(self, startup: WorkerStartup, zygote: ZygoteClient) -> bool:
        """Return True if there is a process now; if not, the zygote is lost."""
        control = startup.begin(self._on_supervisor)
        try:
            async with asyncio.timeout(self._settings.warm_s):
                if not await zygote.warmed():
                    return False
            async with self._forks:
                zygote.request_fork(
                    startup.document, startup.worker.tail.write_fd, control.theirs.fileno()
                )
                control.theirs.close()
                try:
                    await self._on_fork(startup, zygote, control)
                except asyncio.CancelledError:
                    # The fork happens anyway: the canceling task waits until it can be killed.
                    with suppress(TimeoutError):
                        await self._on_fork(startup, zygote, control)
                    raise
        except (OSError, TimeoutError):
            zygote.kill()  # It hangs or is gone.
        if control.refusal:
            reason = os.strerror(control.refusal).lower()
            raise LaunchFailed(f"no further process can be started: {reason}")
        return startup.worker.process is not None

    async def _on_fork(
        self, startup: WorkerStartup, zygote: ZygoteClient, control: ControlSocket
    ) -> None:
        """Raises TimeoutError."""

        def is_known() -> bool:
            return control.is_forked or control.is_over

        with zygote.notify_on_loss(startup.notify):
            async with asyncio.timeout(self._settings.fork_s):
                await startup.until(lambda: is_known() or zygote.is_lost)
        # Packets that it sent before it was lost may still arrive. A fork that was not reported
        # ends by itself, because nobody holds the other end of its control socket.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_PACKET_S):
                await startup.until(is_known)
        handle = control.take_handle()
        if handle is not None:
            fork = ForkedProcess(control.pid, handle, startup.notify)
            zygote.expect(fork)
            startup.attach(fork)

    async def _get_zygote(self) -> ZygoteClient | None:
        """Return a zygote that is not known to be lost; None if there can be none."""
        async with self._zygote_turn:
            if self._zygote is not None and self._zygote.is_lost:
                await self._discard_zygote(self._zygote)
            if self._zygote is None and self._may_start():
                worker_supervisor = self._processes.worker_supervisor
                assert worker_supervisor is not None
                try:
                    argv = python_argv(self._settings.zygote, self._settings.path)
                    self._zygote = await start_zygote(worker_supervisor, argv)
                except (ProcessStartFailed, OSError) as exc:
                    _log.warning("no zygote could be started; workers are spawned: %s", exc)
            return self._zygote

    def _may_start(self) -> bool:
        is_rested = self._clock.now_s() >= self._resting_until_s
        return self._processes.worker_supervisor is not None and is_rested and not self._is_closing

    async def _discard_zygote(self, zygote: ZygoteClient) -> None:
        self._zygote = None
        errors = zygote.stderr_tail()
        await zygote.close()
        self._failures = 0 if zygote.is_warm else self._failures + 1
        if zygote.is_warm:
            _log.warning("the zygote died; its workers go on. %s", errors)
        elif errors or self._failures >= FAILURES_MAX:
            self._resting_until_s = self._clock.now_s() + REST_S
            _log.error("the zygote did not start; workers are spawned meanwhile. %s", errors)

    def _on_supervisor(self, worker: LocalWorker, control: ControlSocket) -> None:
        """A worker needs a channel to start a process. It asks once and waits for the answer."""
        if worker not in self._asking and not self._is_closing:
            self._asking.add(worker)
            self._tasks.create_task(self._give_supervisor(worker, control), name="worker channel")

    async def _give_supervisor(self, worker: LocalWorker, control: ControlSocket) -> None:
        try:
            worker_supervisor = self._processes.worker_supervisor
            if worker_supervisor is None:
                raise ProcessStartFailed("there is no supervisor on this platform")
            worker_channel = await worker_supervisor.connect()
            with worker_channel.socket:
                if control.is_over:
                    return  # It ended meanwhile.
                control.pass_supervisor(worker_channel)
            live = [one for one in worker.worker_channels if not one.over.is_set()]
            worker.worker_channels = [*live, worker_channel]
        except ProcessStartFailed as exc:
            control.refuse_supervisor(str(exc))
        except OSError as exc:
            _log.warning("a worker got no supervisor channel: %s", exc)
        finally:
            self._asking.discard(worker)


class ForeignLauncher(_ProcessLauncher):
    """Implements `Launcher` for workers that are other programs.

    They read a provision and publish themselves in discovery. They run under the supervisor, so
    that they and all they start end with the server. Created by `open_foreign_launcher`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        processes: Processes,
        clock: Clock,
        tasks: asyncio.TaskGroup,
        launch_s: float,
    ) -> None:
        super().__init__(processes, clock, tasks, launch_s)
        self._argv = argv

    def warm_nowait(self) -> None:
        self._processes.warm_nowait()

    async def _start(self, startup: WorkerStartup, discovery: Discovery) -> None:
        worker = startup.worker
        # A record that an earlier worker with this id left must not be mistaken for this one's.
        await asyncio.to_thread(discovery.withdraw, worker.id)
        await self._spawn(startup, self._argv, [])
        while True:
            record = await asyncio.to_thread(discovery.resolve, worker.id)
            if not worker.is_alive:
                await startup.fail_ended()
            assert worker.pid is not None
            if record is not None and is_below(record.pid, worker.pid):
                break
            await pause(self._clock, POLL_S)
        worker.endpoint = record.endpoint


def is_below(pid: int, root: int) -> bool:
    """Return True for that process and its descendants: a script may start the worker.

    The token is sent to the endpoint in the record, so the record must be the worker's own. Without
    /proc that is assumed.
    """
    if pid == root or find_stat(root) is None:
        return True
    return any(stat.pid == pid for stat in descendants_of(root, read_table()))


@asynccontextmanager
async def open_local_launcher(
    processes: Processes, discovery_dir: Path, clock: Clock, settings: LaunchSettings | None = None
) -> AsyncGenerator[LocalLauncher]:
    """At the end of the block no worker and no zygote is left.

    First ends the workers that an earlier server with this discovery directory left behind.
    """
    await asyncio.to_thread(_prepare, discovery_dir, clock)
    async with asyncio.TaskGroup() as tasks:
        launcher = LocalLauncher(processes, clock, tasks, settings or LaunchSettings())
        try:
            yield launcher
        finally:
            await launcher.close()


def _prepare(discovery_dir: Path, clock: Clock) -> None:
    discovery_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    end_leftover_workers(discovery_dir, clock)


@asynccontextmanager
async def open_foreign_launcher(
    argv: Sequence[str], processes: Processes, clock: Clock, launch_s: float = LAUNCH_S
) -> AsyncGenerator[ForeignLauncher]:
    """At the end of the block no worker is left."""
    async with asyncio.TaskGroup() as tasks:
        launcher = ForeignLauncher(argv, processes, clock, tasks, launch_s)
        try:
            yield launcher
        finally:
            await launcher.close()


# --- workers that a crashed server left


def end_leftover_workers(discovery_dir: Path, clock: Clock) -> None:
    """End the workers whose owner is gone, and verify it. Blocks if there are any.

    A worker whose owner lives, or that was started manually, is not touched.
    """
    discovery = FileDiscovery(discovery_dir, clock)
    world, now = read_world_id(), clock.now_s()
    left = [record for record in discovery.records() if is_leftover(record, world, now)]
    for record in left:
        if _end(record):
            _log.warning("ended worker %s, left by a crash", record.agent_id)
        with suppress(OSError):
            discovery.withdraw(record.agent_id)
        # The ids of records are safe names: discovery reads no others.
        shutil.rmtree(storage_beside(discovery_dir, record.agent_id), ignore_errors=True)


def is_leftover(record: AgentRecord, world: str, now_s: float) -> bool:
    """Return True if a worker of ours has no owner or no process any more.

    For one on another machine or in another container, only the lease is known.
    """
    placed = record.culm
    if placed is None or not world:
        return False
    if placed.world != world:
        return not is_live(record, now_s)
    if not is_running(record):
        return True
    return placed.owner is not None and not is_alive(placed.owner.pid, placed.owner.start_ticks)


def _end(record: AgentRecord) -> bool:
    """Kill it and wait until it is gone; return True if it was alive."""
    if record.culm is None or not is_running(record):
        return False
    if not end_one(record.pid, record.culm.start_ticks):
        return False
    until_s = now_s() + END_BOUND_S
    while is_running(record) and now_s() < until_s:
        time.sleep(_PAUSE_S)
    return True

"""Local workers: forked from the zygote, or spawned where there is none.

Owns the zygote and every worker that was launched. The fleet assigns the runs.
"""

import asyncio
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from culm.clock import Clock
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.control_socket import ControlSocket
from culm.fleet.host.leftovers import end_leftover_workers
from culm.fleet.host.local_worker import LocalWorker
from culm.fleet.host.provision_file import WORKER, ZYGOTE, make_stamp, python_argv, stamped
from culm.fleet.host.startup import LAUNCH_S, WorkerStartup, open_startup
from culm.fleet.host.worker_process import ForkedProcess
from culm.fleet.host.zygote_client import ZygoteClient, start_zygote
from culm.fleet.provision import Provision
from culm.processes.base import Processes, ProcessStartFailed

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


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """Programs to run in new interpreters (Python statements), and how long to wait for them."""

    zygote: str = ZYGOTE
    worker: str = WORKER
    path: Path | None = None  # Where they find their modules; None means where ours are.
    launch_s: float = LAUNCH_S
    warm_s: float = WARM_S
    fork_s: float = FORK_S


class LocalLauncher:
    """Implements `Launcher`. Created by `open_local_launcher`."""

    def __init__(
        self, processes: Processes, clock: Clock, tasks: asyncio.TaskGroup, settings: LaunchSettings
    ) -> None:
        self._processes = processes
        self._clock = clock
        self._tasks = tasks
        self._settings = settings
        self._zygote: ZygoteClient | None = None
        self._zygote_turn = asyncio.Lock()
        self._failures = 0  # Consecutive failures of zygotes to start.
        self._resting_until_s = 0.0
        self._forks = asyncio.Semaphore(FORKS_MAX)
        self._workers: set[LocalWorker] = set()
        self._asking: set[LocalWorker] = set()  # Waiting for a channel to the supervisor.
        self._is_closing = False

    def warm_nowait(self) -> None:
        """Have a zygote ready, because a worker will be needed soon."""
        if not self._is_closing:
            self._tasks.create_task(self._warm(), name="zygote")

    async def launch(self, provision: Provision) -> LocalWorker:
        owner = make_stamp(self._clock.now_s())
        given = stamped(provision, owner, CONTROL)
        discovery = FileDiscovery(Path(given.fabric_dir), self._clock)
        self._forget_ended()
        async with open_startup(given, discovery, self._settings.launch_s) as startup:
            self._workers.add(startup.worker)
            await self._start(startup)
            await startup.ready()
            return startup.worker

    async def close(self) -> None:
        """End every worker, and the zygote."""
        self._is_closing = True
        async with asyncio.TaskGroup() as group:
            for worker in self._workers:
                group.create_task(worker.kill(), name=f"end {worker.id}")
        async with self._zygote_turn:
            if self._zygote is not None:
                await self._zygote.close()
                self._zygote = None

    def _forget_ended(self) -> None:
        self._workers = {worker for worker in self._workers if not worker.is_ended}

    async def _start(self, startup: WorkerStartup) -> None:
        for _ in range(ZYGOTES_MAX):
            zygote = await self._get_zygote()
            if zygote is None:
                break
            if await self._fork(startup, zygote):
                return
        await self._spawn(startup)

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
            fork = ForkedProcess(control.pid, handle)
            zygote.expect(fork)
            startup.attach(fork)

    async def _spawn(self, startup: WorkerStartup) -> None:
        if self._is_closing:
            raise LaunchFailed("the server is stopping")
        control = startup.begin(self._on_supervisor)
        argv = python_argv(self._settings.worker, self._settings.path)
        with control.theirs:
            started = await startup.start(self._processes, argv, [control.theirs.fileno()])
        self._tasks.create_task(started.watch(), name=f"worker {startup.worker.id}")

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

    async def _warm(self) -> None:
        await self._get_zygote()

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

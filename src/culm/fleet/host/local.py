"""Workers of this machine: forked from the zygote, or spawned where there is none.

Owns the zygote and every worker that was launched. Who gets which assignment is the fleet's.
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

CONTROL: Final = 3  # Where a worker finds its control.
FORKS_MAX: Final = 16  # Ordered and not forked yet; so orders always fit into the socket.
WARM_S: Final = 15.0  # For a zygote that only just starts: an interpreter, and all imports.
FORK_S: Final = 5.0  # For one fork of a warm one, on a busy machine.
LAST_WORD_S: Final = 0.1  # Of a zygote that is gone.
ZYGOTES_MAX: Final = 2  # Tried for one worker.
FAILURES_MAX: Final = 3  # One that says nothing was killed, perhaps with its keeper: try again.
REST_S: Final = 60.0  # Without a zygote, after one could not start.


@dataclass(frozen=True, slots=True)
class LaunchSettings:
    """What is run in new interpreters (Python statements), and for how long we wait for it."""

    zygote: str = ZYGOTE
    worker: str = WORKER
    path: Path | None = None  # Where they find their modules; None is where ours are.
    launch_s: float = LAUNCH_S
    warm_s: float = WARM_S
    fork_s: float = FORK_S


class LocalLauncher:
    """Implements `Launcher`. Made by `open_local_launcher`."""

    def __init__(
        self, processes: Processes, clock: Clock, tasks: asyncio.TaskGroup, terms: LaunchSettings
    ) -> None:
        self._processes = processes
        self._clock = clock
        self._tasks = tasks
        self._terms = terms
        self._zygote: ZygoteClient | None = None
        self._zygote_turn = asyncio.Lock()
        self._failures = 0  # One after the other, of zygotes to start.
        self._resting_until_s = 0.0
        self._forks = asyncio.Semaphore(FORKS_MAX)
        self._workers: set[LocalWorker] = set()
        self._asking: set[LocalWorker] = set()  # For a way to the keeper.
        self._is_closing = False

    def warm_nowait(self) -> None:
        """A worker will be wanted soon: have a zygote ready."""
        if not self._is_closing:
            self._tasks.create_task(self._warm(), name="zygote")

    async def launch(self, provision: Provision) -> LocalWorker:
        owner = make_stamp(self._clock.now_s())
        given = stamped(provision, owner, CONTROL)
        discovery = FileDiscovery(Path(given.fabric_dir), self._clock)
        self._forget_ended()
        async with open_startup(given, discovery, self._terms.launch_s) as birth:
            self._workers.add(birth.worker)
            await self._start(birth)
            await birth.ready()
            return birth.worker

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

    async def _start(self, birth: WorkerStartup) -> None:
        for _ in range(ZYGOTES_MAX):
            zygote = await self._get_zygote()
            if zygote is None:
                break
            if await self._fork(birth, zygote):
                return
        await self._spawn(birth)

    async def _fork(self, birth: WorkerStartup, zygote: ZygoteClient) -> bool:
        """Whether there is a process now; if not, the zygote is lost."""
        control = birth.begin(self._on_supervisor)
        try:
            async with asyncio.timeout(self._terms.warm_s):
                if not await zygote.warmed():
                    return False
            async with self._forks:
                zygote.order(birth.document, birth.worker.tail.mouth, control.theirs.fileno())
                control.theirs.close()
                try:
                    await self._on_fork(birth, zygote, control)
                except asyncio.CancelledError:
                    # It comes all the same: who cancelled waits until it can be ended.
                    with suppress(TimeoutError):
                        await self._on_fork(birth, zygote, control)
                    raise
        except (OSError, TimeoutError):
            zygote.kill()  # It hangs, or is gone.
        if control.refusal:
            reason = os.strerror(control.refusal).lower()
            raise LaunchFailed(f"no further process can be started: {reason}")
        return birth.worker.process is not None

    async def _on_fork(
        self, birth: WorkerStartup, zygote: ZygoteClient, control: ControlSocket
    ) -> None:
        """Raises TimeoutError."""

        def is_known() -> bool:
            return control.is_forked or control.is_over

        with zygote.notify_on_loss(birth.notify):
            async with asyncio.timeout(self._terms.fork_s):
                await birth.until(lambda: is_known() or zygote.is_lost)
        # What it said before it was lost is on its way. If it said nothing, but forked, that one
        # ends by itself: nobody holds the other end of its control.
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_WORD_S):
                await birth.until(is_known)
        handle = control.take_handle()
        if handle is not None:
            fork = ForkedProcess(control.pid, handle)
            zygote.expect(fork)
            birth.hold(fork)

    async def _spawn(self, birth: WorkerStartup) -> None:
        if self._is_closing:
            raise LaunchFailed("the server is stopping")
        control = birth.begin(self._on_supervisor)
        argv = python_argv(self._terms.worker, self._terms.path)
        with control.theirs:
            started = await birth.start(self._processes, argv, [control.theirs.fileno()])
        self._tasks.create_task(started.watch(), name=f"worker {birth.worker.id}")

    async def _get_zygote(self) -> ZygoteClient | None:
        """One that lives, as far as we know. None if there can be none."""
        async with self._zygote_turn:
            if self._zygote is not None and self._zygote.is_lost:
                await self._bury(self._zygote)
            if self._zygote is None and self._may_start():
                nursery = self._processes.nursery
                assert nursery is not None
                try:
                    argv = python_argv(self._terms.zygote, self._terms.path)
                    self._zygote = await start_zygote(nursery, argv)
                except (ProcessStartFailed, OSError) as exc:
                    _log.warning("there is no zygote, workers are spawned: %s", exc)
            return self._zygote

    def _may_start(self) -> bool:
        is_rested = self._clock.now_s() >= self._resting_until_s
        return self._processes.nursery is not None and is_rested and not self._is_closing

    async def _bury(self, zygote: ZygoteClient) -> None:
        self._zygote = None
        words = zygote.stderr_tail()
        await zygote.close()
        self._failures = 0 if zygote.is_warm else self._failures + 1
        if zygote.is_warm:
            _log.warning("the zygote died; its workers live on. %s", words)
        elif words or self._failures >= FAILURES_MAX:
            self._resting_until_s = self._clock.now_s() + REST_S
            _log.error("the zygote did not start; workers are spawned meanwhile. %s", words)

    async def _warm(self) -> None:
        await self._get_zygote()

    def _on_supervisor(self, worker: LocalWorker, control: ControlSocket) -> None:
        """A worker wants to start a process. It asks once, and waits for the answer."""
        if worker not in self._asking and not self._is_closing:
            self._asking.add(worker)
            self._tasks.create_task(self._give_supervisor(worker, control), name="keeper")

    async def _give_supervisor(self, worker: LocalWorker, control: ControlSocket) -> None:
        try:
            nursery = self._processes.nursery
            if nursery is None:
                raise ProcessStartFailed("there is no keeper here")
            worker_channel = await nursery.connect()
            with worker_channel.socket:
                if control.is_over:
                    return  # It ended while it asked.
                control.pass_supervisor(worker_channel)
            live = [one for one in worker.worker_channels if not one.over.is_set()]
            worker.worker_channels = [*live, worker_channel]
        except ProcessStartFailed as exc:
            control.refuse_supervisor(str(exc))
        except OSError as exc:
            _log.warning("a worker got no keeper: %s", exc)
        finally:
            self._asking.discard(worker)


@asynccontextmanager
async def open_local_launcher(
    processes: Processes, fabric_dir: Path, clock: Clock, terms: LaunchSettings | None = None
) -> AsyncGenerator[LocalLauncher]:
    """At the end of the block no worker and no zygote is left.

    First ends the workers that an earlier server with this fabric left behind.
    """
    await asyncio.to_thread(_prepare, fabric_dir, clock)
    async with asyncio.TaskGroup() as tasks:
        launcher = LocalLauncher(processes, clock, tasks, terms or LaunchSettings())
        try:
            yield launcher
        finally:
            await launcher.close()


def _prepare(fabric_dir: Path, clock: Clock) -> None:
    fabric_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    end_leftover_workers(fabric_dir, clock)

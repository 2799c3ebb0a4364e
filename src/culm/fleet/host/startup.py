"""A worker that is being started: from its document to the moment it is ready, or to nothing."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final

from culm.fleet.discovery.base import Discovery
from culm.fleet.environment import keyless_env
from culm.fleet.host.base import LaunchFailed, NotReady
from culm.fleet.host.control_socket import ControlSocket
from culm.fleet.host.local_worker import LocalWorker
from culm.fleet.host.provision_file import open_document
from culm.fleet.host.worker_process import SpawnedProcess, WorkerProcess
from culm.fleet.provision import Provision
from culm.logs import redact
from culm.processes.base import Processes, ProcessOwner, ProcessRequest, ProcessStartFailed

LAUNCH_S: Final = 30.0  # From the order to the moment it is ready.
_LEAVE_S: Final = 0.5  # Between the end of its control and that of the process.


class WorkerStartup:
    """Made by `open_birth`, which ends what does not come to life."""

    def __init__(self, given: Provision, discovery: Discovery) -> None:
        self.document = open_document(given)
        try:
            self.worker = LocalWorker(given, discovery)
        except OSError:
            os.close(self.document)
            raise
        self._news = asyncio.Event()

    def begin(self, on_supervisor: Callable[[LocalWorker, ControlSocket], None]) -> ControlSocket:
        """A control for the next attempt to start it, which reads the document anew."""
        if self.worker.control is not None:
            self.worker.control.close()
        os.lseek(self.document, 0, os.SEEK_SET)
        worker = self.worker
        control = ControlSocket(self.notify, lambda: on_supervisor(worker, control))
        worker.control = control
        return control

    def hold(self, process: WorkerProcess) -> None:
        self.worker.process = process
        self.worker.tail.close_mouth()
        process.on_end = self.notify

    def notify(self) -> None:
        """There is news."""
        self._news.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait for news until it did."""
        while not happened():
            self._news.clear()
            await self._news.wait()

    async def ready(self) -> None:
        """Wait until it says so; raises `LaunchFailed` if it ends before that."""
        process, control = self.worker.process, self.worker.control
        assert process is not None
        assert control is not None
        await self.until(
            lambda: bool(control.endpoint) or control.is_over or process.ended.is_set()
        )
        if not control.endpoint or control.is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await process.ended.wait()
            await self.fail_ended()
        self.worker.endpoint = control.endpoint

    async def fail_ended(self) -> None:
        """Raises `LaunchFailed`, which says how it ended."""
        process = self.worker.process
        assert process is not None
        if not process.ended.is_set():
            how, failure = "it has let go of its owner", LaunchFailed
        else:
            how = await process.how()
            failure = NotReady if await process.was_killed() else LaunchFailed
        raise failure(await self.with_stderr(f"the worker ended before it was ready: {how}"))

    async def with_stderr(self, said: str) -> str:
        """Together with what it printed last."""
        words = redact(await self.worker.stderr_tail())
        return f"{said}\n{words}" if words else said

    async def start(
        self, processes: Processes, argv: Iterable[str], further: list[int]
    ) -> SpawnedProcess:
        """Start its process as a command in custody; raises `LaunchFailed`."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        passed = (self.document, null, self.worker.tail.mouth, *further)
        order = ProcessRequest(
            [*argv], "/", keyless_env(os.environ), ProcessOwner("", "worker"), passed
        )
        try:
            started = SpawnedProcess(await processes.start(order))
        except ProcessStartFailed as exc:
            raise LaunchFailed(f"the worker could not be started: {exc}") from exc
        finally:
            os.close(null)
        self.hold(started)
        return started


@asynccontextmanager
async def open_startup(
    given: Provision, discovery: Discovery, bound_s: float
) -> AsyncGenerator[WorkerStartup]:
    """Raises `LaunchFailed`, and `NotReady` if the block takes too long; then nothing is left."""
    try:
        birth = WorkerStartup(given, discovery)
    except OSError as exc:
        raise LaunchFailed(f"the worker could not be started: {exc.strerror}") from exc
    is_ready = False
    try:
        async with asyncio.timeout(bound_s):
            yield birth
        is_ready = True
    except TimeoutError:
        words = f"the worker was not ready within {bound_s:g} s, and was ended"
        raise NotReady(await birth.with_stderr(words)) from None
    except OSError as exc:
        raise LaunchFailed(f"the worker could not be started: {exc.strerror}") from exc
    finally:
        os.close(birth.document)
        if not is_ready:
            await birth.worker.kill()

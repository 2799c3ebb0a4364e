"""A worker being started: from its document until it is ready, or until nothing is left of it."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Final

from culm.fleet.discovery.base import Discovery
from culm.fleet.host.base import LaunchFailed, NotReady
from culm.fleet.host.control_socket import ControlSocket
from culm.fleet.host.local_worker import LocalWorker
from culm.fleet.host.provision_file import open_document
from culm.fleet.host.worker_process import SpawnedProcess, WorkerProcess
from culm.fleet.provision import Provision, keyless_env
from culm.logs import redact
from culm.processes.base import Processes, ProcessOwner, ProcessRequest, ProcessStartFailed

LAUNCH_S: Final = 30.0  # From the request until it is ready.
_LEAVE_S: Final = 0.5  # Between the end of its control socket and that of the process.


class WorkerStartup:
    """Created by `open_startup`, which kills a worker that does not become ready."""

    def __init__(self, provision: Provision, discovery: Discovery) -> None:
        self.document = open_document(provision)
        try:
            self.worker = LocalWorker(provision, discovery)
        except OSError:
            os.close(self.document)
            raise
        self._changed = asyncio.Event()

    def begin(self, on_supervisor: Callable[[LocalWorker, ControlSocket], None]) -> ControlSocket:
        """Create a control socket for the next start attempt, which reads the document anew."""
        if self.worker.control is not None:
            self.worker.control.close()
        os.lseek(self.document, 0, os.SEEK_SET)
        worker = self.worker
        control = ControlSocket(self.notify, lambda: on_supervisor(worker, control))
        worker.control = control
        return control

    def attach(self, process: WorkerProcess) -> None:
        self.worker.process = process
        self.worker.tail.close_write_fd()
        process.on_end = self.notify

    def notify(self) -> None:
        """Wake `until`."""
        self._changed.set()

    async def until(self, happened: Callable[[], bool]) -> None:
        """Wait until the condition holds, checking at each notification."""
        while not happened():
            self._changed.clear()
            await self._changed.wait()

    async def ready(self) -> None:
        """Wait until the worker is ready; raises `LaunchFailed` if it ends before that."""
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
        """Raises `LaunchFailed` with the exit status."""
        process = self.worker.process
        assert process is not None
        if not process.ended.is_set():
            how, failure = "it closed its control socket", LaunchFailed
        else:
            how = await process.describe_exit()
            failure = NotReady if await process.was_killed() else LaunchFailed
        raise failure(await self.with_stderr(f"the worker ended before it was ready: {how}"))

    async def with_stderr(self, message: str) -> str:
        """Append the last stderr output to a message."""
        text = redact(await self.worker.stderr_tail())
        return f"{message}\n{text}" if text else message

    async def start(
        self, processes: Processes, argv: Iterable[str], further: list[int]
    ) -> SpawnedProcess:
        """Start its process under the supervisor; raises `LaunchFailed`."""
        null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        passed = (self.document, null, self.worker.tail.write_fd, *further)
        request = ProcessRequest(
            [*argv], "/", keyless_env(os.environ), ProcessOwner("", "worker"), passed
        )
        try:
            started = SpawnedProcess(await processes.start(request))
        except ProcessStartFailed as exc:
            raise LaunchFailed(f"the worker could not be started: {exc}") from exc
        finally:
            os.close(null)
        self.attach(started)
        return started


@asynccontextmanager
async def open_startup(
    provision: Provision, discovery: Discovery, bound_s: float
) -> AsyncGenerator[WorkerStartup]:
    """Raises `LaunchFailed`, or `NotReady` if the block takes too long; then nothing is left."""
    try:
        startup = WorkerStartup(provision, discovery)
    except OSError as exc:
        raise LaunchFailed(f"the worker could not be started: {exc.strerror}") from exc
    is_ready = False
    try:
        async with asyncio.timeout(bound_s):
            yield startup
        is_ready = True
    except TimeoutError:
        message = f"the worker was not ready within {bound_s:g} s and was killed"
        raise NotReady(await startup.with_stderr(message)) from None
    except OSError as exc:
        raise LaunchFailed(f"the worker could not be started: {exc.strerror}") from exc
    finally:
        os.close(startup.document)
        if not is_ready:
            await startup.worker.kill()

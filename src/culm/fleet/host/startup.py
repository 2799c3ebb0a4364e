"""A worker being started: from its document until it is ready, or until nothing is left of it.

The document is its provision, completed here and passed on in an anonymous file.
"""

import asyncio
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace

import culm
from culm.clock import format_time
from culm.fleet.discovery.base import Discovery
from culm.fleet.host.base import LaunchFailed, NotReady
from culm.fleet.host.local_worker import (
    ControlSocket,
    LocalWorker,
    SpawnedProcess,
    WorkerProcess,
    describe_exit,
)
from culm.fleet.provision import BadProvision, OwnerStamp, Provision, encode_provision, keyless_env
from culm.processes.base import Processes, ProcessOwner, ProcessRequest, ProcessStartFailed
from culm.processes.linux import find_stat, read_boot_id
from culm.redaction import redact

TOKEN_BYTES: Final = 32
# The path is appended last, so that nothing beside our package shadows a module of Python.
_BEFORE = "import sys; sys.path.append(sys.argv.pop()); "
ZYGOTE: Final = "from culm.fleet.worker.zygote import main; main()"
WORKER: Final = "from culm.fleet.worker.main import run_worker; sys.exit(run_worker())"
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
            exit_ = await process.exit()
            how = describe_exit(exit_)
            failure = LaunchFailed if exit_.signal is None else NotReady
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
            started = SpawnedProcess(await processes.start(request), self.notify)
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


def python_argv(program: str, path: Path | None = None) -> list[str]:
    """Command line that runs a program with the packages of this process and our own."""
    root = path or Path(culm.__file__).parents[1]
    return [sys.executable, "-I", "-c", _BEFORE + program, str(root)]


def make_stamp(now_s: float) -> OwnerStamp:
    """Identify this process as an owner. Its instance id is constant while it lives."""
    pid = os.getpid()
    stat = find_stat(pid)
    if stat is None:
        return OwnerStamp(pid, f"{pid}", format_time(now_s))
    instance = f"{read_boot_id()}.{pid}.{stat.start_ticks}"
    return OwnerStamp(pid, instance, format_time(now_s), stat.start_ticks)


def stamped(provision: Provision, owner: OwnerStamp, control_fd: int | None) -> Provision:
    """Copy a provision with its owner, a shared secret token, and its control descriptor.

    Its paths are absolute, because a worker does not start in our directory.
    """
    given = provision.secrets
    token = given.worker_auth_token or secrets.token_urlsafe(TOKEN_BYTES)
    return replace(
        provision,
        fabric_dir=str(Path(provision.fabric_dir).absolute()),
        workspace=_absolute(provision.workspace),
        storage_dir=_absolute(provision.storage_dir),
        owner=owner,
        secrets=replace(given, worker_auth_token=token),
        culm=replace(provision.culm, control_fd=control_fd),
    )


def _absolute(path: str | None) -> str | None:
    return None if path is None else str(Path(path).absolute())


def open_document(provision: Provision) -> int:
    """Return a descriptor at the start of the document; raises `LaunchFailed`, OSError."""
    try:
        view = memoryview(encode_provision(provision))
    except BadProvision as exc:
        raise LaunchFailed(f"the provision cannot be sent: {exc}") from exc
    if hasattr(os, "memfd_create"):
        document = os.memfd_create("provision", os.MFD_CLOEXEC)
    else:
        # Unnamed from the start, and readable only for us.
        with tempfile.TemporaryFile() as file:
            document = os.dup(file.fileno())
    try:
        while view:
            view = view[os.write(document, view) :]
        os.lseek(document, 0, os.SEEK_SET)
    except OSError:
        os.close(document)
        raise
    return document

"""Processes started through a supervisor: the server's side.

Owns the supervisor process, the worker channels to it, and the recovery after its death. The
processes themselves are in `supervised.py`. Opened by `open_processes`.
"""

import asyncio
import itertools
import logging
import os
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import culm
from culm.clock import Clock
from culm.ids import Ids
from culm.processes.base import (
    ProcessRequest,
    ProcessStartFailed,
    WorkerChannel,
    WorkerSupervisor,
)
from culm.processes.linux import become_subreaper, is_subreaper
from culm.processes.packets import NUMBERS, send_with
from culm.processes.process_set import ProcessSet, end_leftovers, end_orphans, make_process_set
from culm.processes.supervised import (
    LOSS_BOUND_S,
    SupervisedProcess,
    SupervisedProcesses,
    SupervisorChannel,
    watch_processes,
)
from culm.processes.supervisor import CONNECTIONS_MAX
from culm.processes.table import make_command

_log = logging.getLogger(__name__)

CLOSE_BOUND_S = 5.0  # For the supervisor to end; it has no processes left then.
# The path is appended last, so that nothing beside our package shadows a module of Python.
_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop()); "
    "from culm.processes.supervisor import main; main()"
)


class SupervisorProcess:
    """A supervisor and our channel to it."""

    def __init__(self, process_set: ProcessSet) -> None:
        """Raises OSError if the process cannot be started."""
        self.process_set = process_set
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        log = os.open(process_set.folder / "keeper.log", flags, 0o600)
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passed = (theirs.fileno(), process_set.lock)
        arguments = [*passed, os.getpid(), process_set.process_tag, process_set.folder]
        root = Path(culm.__file__).parents[1]
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, *map(str, arguments), str(root)]
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=passed,
                cwd="/",
            )
        except OSError:
            control.close()
            raise
        finally:
            theirs.close()
            os.close(log)
        self.channel = SupervisorChannel(control, process_set.process_tag)

    def kill(self) -> None:
        self._process.kill()

    def collect(self, bound_s: float) -> bool:
        """Wait for its end, at most `bound_s`. Blocks."""
        try:
            self._process.wait(bound_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stderr_tail(self) -> str:
        """Return the end of its error output, if any."""
        try:
            data = (self.process_set.folder / "keeper.log").read_bytes()
        except OSError:
            return ""
        return data[-2000:].decode("utf-8", "replace").strip()


class ServerProcesses(SupervisedProcesses):
    """Implements `Processes` and `WorkerSupervisor`."""

    def __init__(self, data_dir: Path, clock: Clock, ids: Ids) -> None:
        super().__init__(clock, "server")
        self._data_dir = data_dir
        self._ids = ids
        self._supervisor: SupervisorProcess | None = None  # Until its processes have ended.
        self._sidecars: set[int] = set()  # They die with the supervisor and become our children.
        self._bases = itertools.count(1)
        self._worker_channels: dict[int, WorkerChannel] = {}
        self._connecting: dict[int, asyncio.Event] = {}

    @property
    def worker_supervisor(self) -> WorkerSupervisor:
        return self

    def warm_nowait(self) -> None:
        """Have a supervisor ready, so that the first start does not wait for one."""
        if self._supervisor is None and not self._is_closing:
            with suppress(OSError):  # The first start tries again and reports the reason.
                self._start_supervisor()

    async def _open_channel(self) -> SupervisorChannel:
        return self._start_supervisor()

    def _start_supervisor(self) -> SupervisorChannel:
        process_set = make_process_set(self._data_dir, self._ids.chance())
        try:
            self._supervisor = SupervisorProcess(process_set)
        except OSError:
            process_set.close(keep=False)
            raise
        self._use(self._supervisor.channel)
        return self._supervisor.channel

    async def start_sidecar(self, request: ProcessRequest) -> None:
        command = make_command(request, None)
        try:
            channel = await self._get_channel()
            channel.send_command("hold", [], command, request.descriptors)
        except OSError as exc:
            raise ProcessStartFailed(
                f"`{request.argv[0]}` could not be started: {exc.strerror}"
            ) from exc

    async def connect(self) -> WorkerChannel:
        for _ in range(2):
            try:
                worker_channel = await self._connect(await self._get_channel())
            except OSError as exc:
                raise ProcessStartFailed(
                    f"the supervisor cannot be reached: {exc.strerror}"
                ) from exc
            if worker_channel is not None:
                return worker_channel
        raise ProcessStartFailed("the supervisor cannot be reached: it died")

    async def _connect(self, channel: SupervisorChannel) -> WorkerChannel | None:
        """Return None if the supervisor is dead or does not answer."""
        if len(self._worker_channels) >= CONNECTIONS_MAX:
            raise ProcessStartFailed(f"{CONNECTIONS_MAX} workers already use the supervisor")
        base = next(self._bases) * NUMBERS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker_channel = WorkerChannel(ours, channel.process_tag, base)
        self._worker_channels[base] = worker_channel
        self._connecting[base] = answered = asyncio.Event()
        is_connected = False
        try:
            with theirs:
                send_with(channel.control, f"connect {base}".encode(), [theirs.fileno()])
            async with asyncio.timeout(LOSS_BOUND_S):
                await answered.wait()
            is_connected = not worker_channel.over.is_set()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            self._drop(channel)
        finally:
            del self._connecting[base]
            if not is_connected:
                self._worker_channels.pop(base, None)
                ours.close()  # If the supervisor has the other end, it sees the close.
        return worker_channel if is_connected else None

    def _on_packet(self, fields: list[str]) -> None:
        match fields:
            case ["connected", base]:
                self._answer(int(base))
            case ["over", base]:
                self._end_channel(int(base))
            case ["held", pid]:
                self._sidecars.add(int(pid))
            case ["unheld", pid]:
                self._sidecars.discard(int(pid))
            case _:
                super()._on_packet(fields)

    def _answer(self, base: int) -> None:
        if (answered := self._connecting.get(base)) is not None:
            answered.set()

    def _end_channel(self, base: int) -> None:
        if (worker_channel := self._worker_channels.pop(base, None)) is not None:
            worker_channel.over.set()
        self._answer(base)

    async def _recover(self, lost: list[SupervisedProcess]) -> list[int]:
        supervisor = self._supervisor
        assert supervisor is not None
        _log.error(
            "the supervisor died; its processes are being ended. %s", supervisor.stderr_tail()
        )
        try:
            ended, left = await self._end_remains(
                supervisor, frozenset(process.shim for process in lost if process.shim)
            )
        finally:
            self._supervisor = None
        if ended:
            _log.warning("ended %d processes that no shim had ended", ended)
        for base in list(self._worker_channels):
            self._end_channel(base)
        supervisor.process_set.close(keep=bool(left))
        return left

    async def _close_supervisor(self, left: list[int]) -> list[int]:
        await self._is_idle.wait()
        if (supervisor := self._supervisor) is not None:
            self._close_channels()  # This makes it end.
            if not await asyncio.to_thread(supervisor.collect, CLOSE_BOUND_S):
                _, left = await self._end_remains(supervisor, frozenset())
            supervisor.process_set.close(keep=bool(left))
        return left

    async def _end_remains(
        self, supervisor: SupervisorProcess, shims: frozenset[int]
    ) -> tuple[int, list[int]]:
        """Return how many processes were killed that no shim had ended, and the pids left."""
        supervisor.kill()
        sidecars = frozenset(self._sidecars)
        self._sidecars.clear()
        await asyncio.to_thread(supervisor.collect, CLOSE_BOUND_S)
        return await asyncio.to_thread(
            end_orphans, supervisor.process_set.process_tag, shims, sidecars
        )


@asynccontextmanager
async def open_supervised_processes(
    data_dir: Path, clock: Clock, ids: Ids
) -> AsyncGenerator[ServerProcesses]:
    """At the end of the block, no process it started is left. Ends leftovers of a crash first."""
    await asyncio.to_thread(end_leftovers, data_dir)
    was_subreaper = is_subreaper()
    become_subreaper()
    try:
        async with watch_processes(ServerProcesses(data_dir, clock, ids)) as processes:
            yield processes
    finally:
        if not was_subreaper:
            become_subreaper(on=False)

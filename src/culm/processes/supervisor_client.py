"""Processes started through a supervisor: the server's side.

Owns the supervisor, the worker channels to it, and the recovery after its death. The processes
themselves are in `process_table.py`. Opened by `open_processes`.
"""

import asyncio
import itertools
import logging
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from culm.clock import Clock
from culm.ids import Ids
from culm.processes.base import (
    ProcessHandle,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
    WorkerChannel,
    WorkerSupervisor,
)
from culm.processes.channel import SupervisorChannel
from culm.processes.commands import make_command
from culm.processes.linux import become_subreaper, is_subreaper
from culm.processes.orphans import end_orphans
from culm.processes.packets import NUMBERS, encode_command, receive
from culm.processes.process_set import end_leftovers, make_process_set
from culm.processes.process_table import LOSS_BOUND_S, ProcessTable
from culm.processes.supervisor import CONNECTIONS_MAX
from culm.processes.supervisor_process import SupervisorProcess

_log = logging.getLogger(__name__)

CLOSE_BOUND_S = 5.0  # For the supervisor to end; it has no processes left then.


class SupervisedProcesses:
    """Implements `Processes`, `WorkerSupervisor` and `ChannelSource`."""

    def __init__(self, data_dir: Path, clock: Clock, ids: Ids) -> None:
        self._data_dir = data_dir
        self._ids = ids
        self._table = ProcessTable(self, clock)
        self._supervisor: SupervisorProcess | None = None
        self._is_closing = False
        self._dead: asyncio.Queue[SupervisorProcess] = asyncio.Queue(1)
        # Clear while the remains of a dead supervisor are being ended.
        self._idle = asyncio.Event()
        self._idle.set()
        self._sidecars: set[int] = set()  # They die with the supervisor and become our children.
        self._bases = itertools.count(1)
        self._worker_channels: dict[int, WorkerChannel] = {}
        self._connecting: dict[int, asyncio.Event] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def worker_supervisor(self) -> WorkerSupervisor:
        return self

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        return await self._table.start(request)

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return await self._table.processes(workspace_id)

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self._table.end_all(workspace_id)

    def warm_nowait(self) -> None:
        """Have a supervisor ready, so that the first start does not wait for one."""
        if self._supervisor is None and self._idle.is_set() and not self._is_closing:
            with suppress(OSError):  # The first start tries again and reports the reason.
                self._get_supervisor()

    async def start_sidecar(self, request: ProcessRequest) -> None:
        body = encode_command(make_command(request, None))
        try:
            supervisor = await self._wait_for_supervisor()
            supervisor.start_sidecar(body, request.descriptors)
        except OSError as exc:
            raise ProcessStartFailed(
                f"`{request.argv[0]}` could not be started: {exc.strerror}"
            ) from exc

    async def connect(self) -> WorkerChannel:
        for _ in range(2):
            try:
                worker_channel = await self._connect(await self._wait_for_supervisor())
            except OSError as exc:
                raise ProcessStartFailed(
                    f"the supervisor cannot be reached: {exc.strerror}"
                ) from exc
            if worker_channel is not None:
                return worker_channel
        raise ProcessStartFailed("the supervisor cannot be reached: it died")

    async def _connect(self, supervisor: SupervisorProcess) -> WorkerChannel | None:
        """Return None if the supervisor is dead or does not answer."""
        if len(self._worker_channels) >= CONNECTIONS_MAX:
            raise ProcessStartFailed(f"{CONNECTIONS_MAX} workers already use the supervisor")
        base = next(self._bases) * NUMBERS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker_channel = WorkerChannel(ours, supervisor.process_set.process_tag, base)
        self._worker_channels[base] = worker_channel
        self._connecting[base] = answered = asyncio.Event()
        is_connected = False
        try:
            with theirs:
                supervisor.connect(base, theirs.fileno())
            async with asyncio.timeout(LOSS_BOUND_S):
                await answered.wait()
            is_connected = not worker_channel.over.is_set()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            self.drop(supervisor.channel)
        finally:
            del self._connecting[base]
            if not is_connected:
                self._worker_channels.pop(base, None)
                ours.close()  # If the supervisor has the other end, it sees the close.
        return worker_channel if is_connected else None

    async def close(self) -> None:
        """End and verify everything, then end the supervisor. Bounded."""
        self._is_closing = True
        try:
            left = await self._table.end(self._table.held)
            await self._idle.wait()
            if (supervisor := self._supervisor) is not None:
                await self._close_supervisor(supervisor, left)
        finally:
            # If that was interrupted: the closed sockets make the supervisor and the shims end
            # everything by themselves.
            if self._supervisor is not None:
                self._loop.remove_reader(self._supervisor.channel.control)
                self._supervisor.channel.control.close()
            self._table.close()

    async def watch(self) -> None:
        """Clean up after each supervisor that dies, one after the other."""
        while True:
            supervisor = await self._dead.get()
            try:
                await self._inherit(supervisor)
            except Exception:  # boundary: the server goes on; the next start gets a supervisor
                _log.exception("the processes of a dead supervisor could not be ended")
            finally:
                self._idle.set()

    async def get(self) -> SupervisorChannel:
        return (await self._wait_for_supervisor()).channel

    async def _wait_for_supervisor(self) -> SupervisorProcess:
        await self._idle.wait()
        if self._is_closing:
            raise ProcessStartFailed("the server is stopping")
        return self._get_supervisor()

    def _get_supervisor(self) -> SupervisorProcess:
        if self._supervisor is None:
            process_set = make_process_set(self._data_dir, self._ids.chance())
            try:
                self._supervisor = SupervisorProcess(process_set)
            except OSError:
                process_set.close(keep=False)
                raise
            self._loop.add_reader(self._supervisor.channel.control, self._read, self._supervisor)
        return self._supervisor

    def _read(self, supervisor: SupervisorProcess) -> None:
        packets, is_over = receive(supervisor.channel.control)
        for fields in packets:
            match fields:
                case ["lost", number, swept, left]:
                    self._table.on_lost(number, swept, left)
                case ["connected", base]:
                    self._answer(int(base))
                case ["over", base]:
                    self._end_channel(int(base))
                case ["held", pid]:
                    self._sidecars.add(int(pid))
                case ["unheld", pid]:
                    self._sidecars.discard(int(pid))
                case _:
                    raise AssertionError(f"unknown packet from the supervisor: {fields}")
        if is_over:
            self.drop(supervisor.channel)

    def _answer(self, base: int) -> None:
        if (answered := self._connecting.get(base)) is not None:
            answered.set()

    def _end_channel(self, base: int) -> None:
        if (worker_channel := self._worker_channels.pop(base, None)) is not None:
            worker_channel.over.set()
        self._answer(base)

    def drop(self, channel: SupervisorChannel) -> None:
        """Drop a dead supervisor; its processes are ended before the next one starts."""
        supervisor = self._supervisor
        if supervisor is not None and supervisor.channel is channel:
            self._supervisor = None
            channel.is_dropped = True
            self._loop.remove_reader(channel.control)
            self._idle.clear()
            self._dead.put_nowait(supervisor)

    async def _inherit(self, supervisor: SupervisorProcess) -> None:
        _log.error(
            "the supervisor died; its processes are being ended. %s", supervisor.stderr_tail()
        )
        supervisor.kill()
        held = self._table.held
        shims = frozenset(process.shim for process in held if process.shim)
        for process in held:
            process.is_stopping = True
        sidecars = frozenset(self._sidecars)
        self._sidecars.clear()
        ended, left = await asyncio.to_thread(_end_remains, supervisor, shims, sidecars)
        if ended:
            _log.warning("ended %d processes that no shim had ended", ended)
        self._table.lose(self._table.held, left)
        for base in list(self._worker_channels):
            self._end_channel(base)
        supervisor.channel.control.close()
        supervisor.process_set.close(keep=bool(left))

    async def _close_supervisor(self, supervisor: SupervisorProcess, left: list[int]) -> None:
        self._supervisor = None
        self._loop.remove_reader(supervisor.channel.control)
        supervisor.channel.control.close()  # This makes it end.
        self._table.close()
        if not await asyncio.to_thread(supervisor.collect, CLOSE_BOUND_S):
            supervisor.kill()
            sidecars = frozenset(self._sidecars)
            nobody = frozenset[int]()
            _, left = await asyncio.to_thread(_end_remains, supervisor, nobody, sidecars)
        if left:
            _log.error("processes could not be ended: %s", left)
        supervisor.process_set.close(keep=bool(left))


def _end_remains(
    supervisor: SupervisorProcess, shims: frozenset[int], sidecars: frozenset[int]
) -> tuple[int, list[int]]:
    supervisor.collect(CLOSE_BOUND_S)
    return end_orphans(supervisor.process_set.process_tag, shims, sidecars)


@asynccontextmanager
async def open_supervised_processes(
    data_dir: Path, clock: Clock, ids: Ids
) -> AsyncGenerator[SupervisedProcesses]:
    """At the end of the block, no process it started is left. Ends leftovers of a crash first."""
    await asyncio.to_thread(end_leftovers, data_dir)
    was_subreaper = is_subreaper()
    become_subreaper()
    processes = SupervisedProcesses(data_dir, clock, ids)
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(processes.watch(), name="supervisor watch")
            try:
                yield processes
            finally:
                await processes.close()
                watch.cancel()
    finally:
        if not was_subreaper:
            become_subreaper(on=False)

"""Custody with a keeper: the server's side of it.

Owns the keeper, who else may order from it, and what to do when it dies. The processes themselves
are `holding.py`'s. Made by `open_custody`.
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
from culm.processes.commands import parse_order
from culm.processes.linux import become_subreaper, is_subreaper
from culm.processes.orphans import end_orphans
from culm.processes.packets import NUMBERS, encode_command, receive
from culm.processes.process_set import end_leftovers, make_set
from culm.processes.process_table import LOSS_BOUND_S, ProcessTable
from culm.processes.supervisor import CONNECTIONS_MAX
from culm.processes.supervisor_process import SupervisorProcess

_log = logging.getLogger(__name__)

CLOSE_BOUND_S = 5.0  # For the keeper to end; it holds nothing then.


class SupervisedProcesses:
    """Implements `Custody`, `Nursery` and `Lines`."""

    def __init__(self, data_dir: Path, clock: Clock, ids: Ids) -> None:
        self._data_dir = data_dir
        self._ids = ids
        self._holding = ProcessTable(self, clock)
        self._supervisor: SupervisorProcess | None = None
        self._is_closing = False
        self._dead: asyncio.Queue[SupervisorProcess] = asyncio.Queue(1)
        self._idle = asyncio.Event()  # Not while the remains of a keeper are ended.
        self._idle.set()
        self._sidecars: set[int] = set()  # They die with the keeper, and fall to us.
        self._bases = itertools.count(1)
        self._worker_channels: dict[int, WorkerChannel] = {}
        self._connecting: dict[int, asyncio.Event] = {}
        self._loop = asyncio.get_running_loop()

    @property
    def nursery(self) -> WorkerSupervisor:
        return self

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        return await self._holding.start(order)

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return await self._holding.processes(workspace_id)

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self._holding.end_all(workspace_id)

    def warm_nowait(self) -> None:
        """Have a keeper ready: the first start then does not wait for one."""
        if self._supervisor is None and self._idle.is_set() and not self._is_closing:
            with suppress(OSError):  # The first start tries again, and says why not.
                self._get_supervisor()

    async def start_sidecar(self, order: ProcessRequest) -> None:
        body = encode_command(parse_order(order, None))
        try:
            supervisor = await self._wait_for_supervisor()
            supervisor.hold(body, order.descriptors)
        except OSError as exc:
            raise ProcessStartFailed(
                f"`{order.argv[0]}` could not be started: {exc.strerror}"
            ) from exc

    async def connect(self) -> WorkerChannel:
        for _ in range(2):
            try:
                worker_channel = await self._connect(await self._wait_for_supervisor())
            except OSError as exc:
                raise ProcessStartFailed(f"no keeper can be reached: {exc.strerror}") from exc
            if worker_channel is not None:
                return worker_channel
        raise ProcessStartFailed("no keeper can be reached: it died")

    async def _connect(self, supervisor: SupervisorProcess) -> WorkerChannel | None:
        """None if the keeper is dead, which also one is that does not answer."""
        if len(self._worker_channels) >= CONNECTIONS_MAX:
            raise ProcessStartFailed(f"{CONNECTIONS_MAX} workers have a keeper already")
        base = next(self._bases) * NUMBERS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        worker_channel = WorkerChannel(ours, supervisor.set.process_tag, base)
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
            self.drop(supervisor.line)
        finally:
            del self._connecting[base]
            if not is_connected:
                self._worker_channels.pop(base, None)
                ours.close()  # Should the keeper have the other end, it sees that.
        return worker_channel if is_connected else None

    async def close(self) -> None:
        """End everything, verify it, and end the keeper. Bounded."""
        self._is_closing = True
        try:
            left = await self._holding.end(self._holding.held)
            await self._idle.wait()
            if (supervisor := self._supervisor) is not None:
                await self._close_supervisor(supervisor, left)
        finally:
            # If that was cut short: without these, keeper and wardens end all by themselves.
            if self._supervisor is not None:
                self._loop.remove_reader(self._supervisor.line.control)
                self._supervisor.line.control.close()
            self._holding.close()

    async def watch(self) -> None:
        """Deal with every keeper that dies, one after the other."""
        while True:
            supervisor = await self._dead.get()
            try:
                await self._inherit(supervisor)
            except Exception:  # boundary: the server lives on, and the next start gets a keeper
                _log.exception("what a dead keeper held could not be dealt with")
            finally:
                self._idle.set()

    async def get(self) -> SupervisorChannel:
        return (await self._wait_for_supervisor()).line

    async def _wait_for_supervisor(self) -> SupervisorProcess:
        await self._idle.wait()
        if self._is_closing:
            raise ProcessStartFailed("the server is stopping")
        return self._get_supervisor()

    def _get_supervisor(self) -> SupervisorProcess:
        if self._supervisor is None:
            process_set = make_set(self._data_dir, self._ids.chance())
            try:
                self._supervisor = SupervisorProcess(process_set)
            except OSError:
                process_set.close(keep=False)
                raise
            self._loop.add_reader(self._supervisor.line.control, self._read, self._supervisor)
        return self._supervisor

    def _read(self, supervisor: SupervisorProcess) -> None:
        packets, is_over = receive(supervisor.line.control)
        for words in packets:
            match words:
                case ["lost", number, swept, left]:
                    self._holding.on_lost(number, swept, left)
                case ["connected", base]:
                    self._answer(int(base))
                case ["over", base]:
                    self._end_channel(int(base))
                case ["held", pid]:
                    self._sidecars.add(int(pid))
                case ["unheld", pid]:
                    self._sidecars.discard(int(pid))
                case _:
                    raise AssertionError(f"no word of a keeper: {words}")
        if is_over:
            self.drop(supervisor.line)

    def _answer(self, base: int) -> None:
        if (answered := self._connecting.get(base)) is not None:
            answered.set()

    def _end_channel(self, base: int) -> None:
        if (worker_channel := self._worker_channels.pop(base, None)) is not None:
            worker_channel.over.set()
        self._answer(base)

    def drop(self, line: SupervisorChannel) -> None:
        """What it held is ended before the next keeper starts."""
        supervisor = self._supervisor
        if supervisor is not None and supervisor.line is line:
            self._supervisor = None
            line.is_dropped = True
            self._loop.remove_reader(line.control)
            self._idle.clear()
            self._dead.put_nowait(supervisor)

    async def _inherit(self, supervisor: SupervisorProcess) -> None:
        _log.error("the keeper died; what it held is ended. %s", supervisor.stderr_tail())
        supervisor.kill()
        held = self._holding.held
        shims = frozenset(kept.shim for kept in held if kept.shim)
        for kept in held:
            kept.is_stopping = True
        sidecars = frozenset(self._sidecars)
        self._sidecars.clear()
        ended, left = await asyncio.to_thread(_end_remains, supervisor, shims, sidecars)
        if ended:
            _log.warning("ended %d processes that no warden had ended", ended)
        self._holding.lose(self._holding.held, left)
        for base in list(self._worker_channels):
            self._end_channel(base)
        supervisor.line.control.close()
        supervisor.set.close(keep=bool(left))

    async def _close_supervisor(self, supervisor: SupervisorProcess, left: list[int]) -> None:
        self._supervisor = None
        self._loop.remove_reader(supervisor.line.control)
        supervisor.line.control.close()  # It ends by this.
        self._holding.close()
        if not await asyncio.to_thread(supervisor.collect, CLOSE_BOUND_S):
            supervisor.kill()
            sidecars = frozenset(self._sidecars)
            nobody = frozenset[int]()
            _, left = await asyncio.to_thread(_end_remains, supervisor, nobody, sidecars)
        if left:
            _log.error("processes could not be ended: %s", left)
        supervisor.set.close(keep=bool(left))


def _end_remains(
    supervisor: SupervisorProcess, shims: frozenset[int], sidecars: frozenset[int]
) -> tuple[int, list[int]]:
    supervisor.collect(CLOSE_BOUND_S)
    return end_orphans(supervisor.set.process_tag, shims, sidecars)


@asynccontextmanager
async def open_supervised_processes(
    data_dir: Path, clock: Clock, ids: Ids
) -> AsyncGenerator[SupervisedProcesses]:
    """At the end of the block nothing it started is left. First ends what a crash had left."""
    await asyncio.to_thread(end_leftovers, data_dir)
    was_subreaper = is_subreaper()
    become_subreaper()
    processes = SupervisedProcesses(data_dir, clock, ids)
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(processes.watch(), name="custody")
            try:
                yield processes
            finally:
                await processes.close()
                watch.cancel()
    finally:
        if not was_subreaper:
            become_subreaper(on=False)

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
    SupervisorChannelOffer,
    WorkerSupervisor,
)
from culm.processes.channel import SupervisorChannel
from culm.processes.commands import parse_order
from culm.processes.linux import become_subreaper, is_subreaper
from culm.processes.orphans import end_inherited
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
        self._keeper: SupervisorProcess | None = None
        self._is_closing = False
        self._dead: asyncio.Queue[SupervisorProcess] = asyncio.Queue(1)
        self._idle = asyncio.Event()  # Not while the remains of a keeper are ended.
        self._idle.set()
        self._companions: set[int] = set()  # They die with the keeper, and fall to us.
        self._bases = itertools.count(1)
        self._passages: dict[int, SupervisorChannelOffer] = {}
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
        if self._keeper is None and self._idle.is_set() and not self._is_closing:
            with suppress(OSError):  # The first start tries again, and says why not.
                self._get_keeper()

    async def start_companion(self, order: ProcessRequest) -> None:
        body = encode_command(parse_order(order, None))
        try:
            keeper = await self._wait_for_keeper()
            keeper.hold(body, order.descriptors)
        except OSError as exc:
            raise ProcessStartFailed(
                f"`{order.argv[0]}` could not be started: {exc.strerror}"
            ) from exc

    async def connect(self) -> SupervisorChannelOffer:
        for _ in range(2):
            try:
                passage = await self._connect(await self._wait_for_keeper())
            except OSError as exc:
                raise ProcessStartFailed(f"no keeper can be reached: {exc.strerror}") from exc
            if passage is not None:
                return passage
        raise ProcessStartFailed("no keeper can be reached: it died")

    async def _connect(self, keeper: SupervisorProcess) -> SupervisorChannelOffer | None:
        """None if the keeper is dead, which also one is that does not answer."""
        if len(self._passages) >= CONNECTIONS_MAX:
            raise ProcessStartFailed(f"{CONNECTIONS_MAX} workers have a keeper already")
        base = next(self._bases) * NUMBERS
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        passage = SupervisorChannelOffer(ours, keeper.set.mark, base)
        self._passages[base] = passage
        self._connecting[base] = answered = asyncio.Event()
        is_connected = False
        try:
            with theirs:
                keeper.connect(base, theirs.fileno())
            async with asyncio.timeout(LOSS_BOUND_S):
                await answered.wait()
            is_connected = not passage.over.is_set()
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            self.drop(keeper.line)
        finally:
            del self._connecting[base]
            if not is_connected:
                self._passages.pop(base, None)
                ours.close()  # Should the keeper have the other end, it sees that.
        return passage if is_connected else None

    async def close(self) -> None:
        """End everything, verify it, and end the keeper. Bounded."""
        self._is_closing = True
        try:
            left = await self._holding.end(self._holding.held)
            await self._idle.wait()
            if (keeper := self._keeper) is not None:
                await self._close_keeper(keeper, left)
        finally:
            # If that was cut short: without these, keeper and wardens end all by themselves.
            if self._keeper is not None:
                self._loop.remove_reader(self._keeper.line.control)
                self._keeper.line.control.close()
            self._holding.close()

    async def watch(self) -> None:
        """Deal with every keeper that dies, one after the other."""
        while True:
            keeper = await self._dead.get()
            try:
                await self._inherit(keeper)
            except Exception:  # boundary: the server lives on, and the next start gets a keeper
                _log.exception("what a dead keeper held could not be dealt with")
            finally:
                self._idle.set()

    async def get(self) -> SupervisorChannel:
        return (await self._wait_for_keeper()).line

    async def _wait_for_keeper(self) -> SupervisorProcess:
        await self._idle.wait()
        if self._is_closing:
            raise ProcessStartFailed("the server is stopping")
        return self._get_keeper()

    def _get_keeper(self) -> SupervisorProcess:
        if self._keeper is None:
            process_set = make_set(self._data_dir, self._ids.chance())
            try:
                self._keeper = SupervisorProcess(process_set)
            except OSError:
                process_set.close(keep=False)
                raise
            self._loop.add_reader(self._keeper.line.control, self._read, self._keeper)
        return self._keeper

    def _read(self, keeper: SupervisorProcess) -> None:
        packets, is_over = receive(keeper.line.control)
        for words in packets:
            match words:
                case ["lost", number, swept, left]:
                    self._holding.on_lost(number, swept, left)
                case ["connected", base]:
                    self._answer(int(base))
                case ["over", base]:
                    self._end_passage(int(base))
                case ["held", pid]:
                    self._companions.add(int(pid))
                case ["unheld", pid]:
                    self._companions.discard(int(pid))
                case _:
                    raise AssertionError(f"no word of a keeper: {words}")
        if is_over:
            self.drop(keeper.line)

    def _answer(self, base: int) -> None:
        if (answered := self._connecting.get(base)) is not None:
            answered.set()

    def _end_passage(self, base: int) -> None:
        if (passage := self._passages.pop(base, None)) is not None:
            passage.over.set()
        self._answer(base)

    def drop(self, line: SupervisorChannel) -> None:
        """What it held is ended before the next keeper starts."""
        keeper = self._keeper
        if keeper is not None and keeper.line is line:
            self._keeper = None
            line.is_dropped = True
            self._loop.remove_reader(line.control)
            self._idle.clear()
            self._dead.put_nowait(keeper)

    async def _inherit(self, keeper: SupervisorProcess) -> None:
        _log.error("the keeper died; what it held is ended. %s", keeper.last_words())
        keeper.kill()
        held = self._holding.held
        wardens = frozenset(kept.warden for kept in held if kept.warden)
        for kept in held:
            kept.is_stopping = True
        companions = frozenset(self._companions)
        self._companions.clear()
        ended, left = await asyncio.to_thread(_end_remains, keeper, wardens, companions)
        if ended:
            _log.warning("ended %d processes that no warden had ended", ended)
        self._holding.lose(self._holding.held, left)
        for base in list(self._passages):
            self._end_passage(base)
        keeper.line.control.close()
        keeper.set.close(keep=bool(left))

    async def _close_keeper(self, keeper: SupervisorProcess, left: list[int]) -> None:
        self._keeper = None
        self._loop.remove_reader(keeper.line.control)
        keeper.line.control.close()  # It ends by this.
        self._holding.close()
        if not await asyncio.to_thread(keeper.collect, CLOSE_BOUND_S):
            keeper.kill()
            companions = frozenset(self._companions)
            nobody = frozenset[int]()
            _, left = await asyncio.to_thread(_end_remains, keeper, nobody, companions)
        if left:
            _log.error("processes could not be ended: %s", left)
        keeper.set.close(keep=bool(left))


def _end_remains(
    keeper: SupervisorProcess, wardens: frozenset[int], companions: frozenset[int]
) -> tuple[int, list[int]]:
    keeper.collect(CLOSE_BOUND_S)
    return end_inherited(keeper.set.mark, wardens, companions)


@asynccontextmanager
async def open_keeper_custody(
    data_dir: Path, clock: Clock, ids: Ids
) -> AsyncGenerator[SupervisedProcesses]:
    """At the end of the block nothing it started is left. First ends what a crash had left."""
    await asyncio.to_thread(end_leftovers, data_dir)
    was_subreaper = is_subreaper()
    become_subreaper()
    custody = SupervisedProcesses(data_dir, clock, ids)
    try:
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(custody.watch(), name="custody")
            try:
                yield custody
            finally:
                await custody.close()
                watch.cancel()
    finally:
        if not was_subreaper:
            become_subreaper(on=False)

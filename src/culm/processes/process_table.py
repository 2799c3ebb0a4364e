"""What is held by a keeper's wardens for one client: the server, or one of its workers.

Owns the processes, from the order to the end. Which keeper they are ordered from, and what to do
when it dies, is the matter of whoever has the lines: `keeper_custody.py` and `remote.py`.
"""

import asyncio
import itertools
import logging
import socket
from typing import Protocol

from culm.clock import Clock
from culm.processes.base import (
    ProcessExit,
    ProcessHandle,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.processes.channel import SupervisorChannel
from culm.processes.commands import describe_failure, parse_order, title_of
from culm.processes.linux import ProcStat, is_of, read_table
from culm.processes.packets import encode_command, parse_left
from culm.processes.process_handle import SupervisedProcess
from culm.processes.tree import descendants_of

_log = logging.getLogger(__name__)

PROCESSES_MAX = 256  # Each is a warden of 3 MB beside the command; a flood is refused.
STARTS_MAX = 16  # At once; so their packets always fit into the keeper's socket.
START_BOUND_S = 10.0  # For the exec, which may have to wait for a slow disk.
LOSS_BOUND_S = 3.0  # For the keeper's word on a warden that died; else the keeper is stuck.


class ChannelSource(Protocol):
    """Who has the line to the keeper of today."""

    async def get(self) -> SupervisorChannel:
        """Waits while what a dead keeper held is ended. Raises `StartFailed`, OSError."""
        ...

    def drop(self, line: SupervisorChannel) -> None:
        """Its keeper is dead, or as good as dead. May be said twice."""
        ...


class ProcessTable:
    """The part of `Custody` that has to do with processes."""

    def __init__(self, lines: ChannelSource, clock: Clock) -> None:
        self._lines = lines
        self._clock = clock
        self._numbers = itertools.count(1)
        self._held: dict[int, SupervisedProcess] = {}
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._loop = asyncio.get_running_loop()

    @property
    def held(self) -> list[SupervisedProcess]:
        return list(self._held.values())

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        async with self._starts:
            kept = await self._start(order)
            if kept.is_untouched:
                # The keeper died with the order unread: the next one gets it.
                kept = await self._start(order)
        if kept.failure is not None:
            step, number = kept.failure
            raise ProcessStartFailed(await asyncio.to_thread(describe_failure, order, step, number))
        if not kept.pid:
            raise ProcessStartFailed(
                f"`{order.argv[0]}` was lost while it was started; nothing of it is left"
            )
        return kept

    async def _start(self, order: ProcessRequest) -> SupervisedProcess:
        """What became of it, one way or the other."""
        kept = await self._begin(order)
        try:
            async with asyncio.timeout(START_BOUND_S):
                await kept.started.wait()
        except TimeoutError:
            await kept.kill(0)
            raise ProcessStartFailed(f"`{order.argv[0]}` did not start in time") from None
        except asyncio.CancelledError:
            await kept.kill(0)  # Bounded; whoever cancelled waits until nothing is left.
            raise
        return kept

    async def _begin(self, order: ProcessRequest) -> SupervisedProcess:
        """Send the order; from here on the process is held."""
        failed = f"`{order.argv[0] if order.argv else ''}` could not be started:"
        for _ in range(2):
            line: SupervisorChannel | None = None
            try:
                line = await self._lines.get()
                return self._send(order, line)
            except OSError as exc:
                if line is None or not isinstance(exc, BrokenPipeError | ConnectionResetError):
                    raise ProcessStartFailed(f"{failed} {exc.strerror}") from exc
                # The keeper died just now, and has read nothing of it: another one gets it.
                self._lines.drop(line)
        raise ProcessStartFailed(f"{failed} its keeper died")

    def _send(self, order: ProcessRequest, line: SupervisorChannel) -> SupervisedProcess:
        if len(self._held) >= PROCESSES_MAX:
            raise ProcessStartFailed(f"{PROCESSES_MAX} processes are running already")
        number = line.base + next(self._numbers)
        body = encode_command(parse_order(order, line.token(number)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                line.start(number, theirs.fileno(), body, order.descriptors)
            except OSError:
                ours.close()
                raise
        kept = SupervisedProcess(number, order, ours, line)
        kept.started_s = order.started_s or self._clock.now_s()
        kept.on_gone = self._on_gone
        kept.on_deaf = self._on_deaf
        self._held[number] = kept
        return kept

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        held = [kept for kept in self._held.values() if _is_for(kept, workspace_id)]
        if not held:
            return []
        found = await asyncio.to_thread(find_members, held)
        for kept, members in found:
            if kept.is_gone and kept.exit is not None and not members:
                self._held.pop(kept.number, None)  # What was left of it has ended since.
        return [
            self._show(kept, members)
            for kept, members in found
            if kept.is_shown and (members or not kept.is_stopping)
        ]

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self.end([kept for kept in self.held if _is_for(kept, workspace_id)])

    async def end(self, held: list[SupervisedProcess]) -> list[int]:
        """The pids that could not be ended."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(kept.kill(), name=f"end {kept.pid}") for kept in held]
        return sorted({pid for task in tasks for pid in task.result().left})

    def on_lost(self, number: str, swept: str, left: str) -> None:
        """The keeper's word on a warden that died."""
        kept = self._held.get(int(number))
        if kept is not None:
            self._lose(kept, int(swept), parse_left(left))

    def lose(self, held: list[SupervisedProcess], left: list[int]) -> None:
        """Their keeper died, and what it held was ended but for those left."""
        for kept in held:
            self._lose(kept, 0, left)

    def _lose(self, kept: SupervisedProcess, swept: int, left: list[int]) -> None:
        kept.end(ProcessExit(None, swept=swept, left=tuple(left), lost=True))
        kept.close()
        if not left:
            self._held.pop(kept.number, None)

    def close(self) -> None:
        """Let go of all that is left: the wardens end it."""
        for kept in self.held:
            kept.close()

    def _on_gone(self, kept: SupervisedProcess) -> None:
        if kept.exit is None:
            # Its warden was killed. The keeper says so when it has ended what that held.
            self._loop.call_later(LOSS_BOUND_S, self._on_silence, kept)
        elif not kept.exit.lost or not kept.exit.left:
            self._held.pop(kept.number, None)

    def _on_silence(self, kept: SupervisedProcess) -> None:
        if kept.exit is None and not kept.line.is_dropped:
            _log.error("the keeper does not answer; it is replaced")
            self._lines.drop(kept.line)

    def _on_deaf(self, kept: SupervisedProcess) -> None:
        """A warden does not end what it holds: the keeper shall."""
        if not kept.line.is_dropped:
            kept.line.end(kept.number)
            self._loop.call_later(LOSS_BOUND_S, self._on_silence, kept)

    def _show(self, kept: SupervisedProcess, members: list[ProcStat]) -> ProcessInfo:
        return ProcessInfo(
            kept.pid,
            title_of(kept.order),
            kept.order.owner,
            max(0.0, self._clock.now_s() - kept.started_s),
            sum(stat.rss_bytes for stat in members),
            tuple(stat.pid for stat in members),
            kept.is_stopping,
        )


def _is_for(kept: SupervisedProcess, workspace_id: str) -> bool:
    return kept.order.owner.workspace_id == workspace_id


def find_members(held: list[SupervisedProcess]) -> list[tuple[SupervisedProcess, list[ProcStat]]]:
    """What lives of each: below its warden or, without one, by name and mark. Blocks."""
    table = read_table()
    found: list[tuple[SupervisedProcess, list[ProcStat]]] = []
    for kept in held:
        if kept.exit is None or not kept.is_gone:
            members = descendants_of(kept.shim, table) if kept.shim else []
        else:
            left = [table[pid] for pid in kept.exit.left if pid in table]
            members = [stat for stat in left if is_of(kept.line.mark, stat.pid)]
        found.append((kept, [stat for stat in members if stat.is_alive]))
    return found

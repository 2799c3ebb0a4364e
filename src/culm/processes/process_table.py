"""The supervised processes of one client: the server, or one of its workers.

Owns the processes from the request to the end. The `ChannelSource` picks the supervisor and
recovers from its death: `supervisor_client.py` and `remote.py`.
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
from culm.processes.commands import describe_failure, make_command, title_of
from culm.processes.linux import ProcStat, has_process_tag, read_table
from culm.processes.packets import encode_command, parse_left
from culm.processes.process_handle import SupervisedProcess
from culm.processes.tree import descendants_of

_log = logging.getLogger(__name__)

PROCESSES_MAX = 256  # Each is a shim of 3 MB besides the command; more are refused.
STARTS_MAX = 16  # At once, so that their packets always fit into the supervisor's socket.
START_BOUND_S = 10.0  # For the exec, which may have to wait for a slow disk.
# For the report on a shim that died; without it the supervisor is considered stuck.
LOSS_BOUND_S = 3.0


class ChannelSource(Protocol):
    """Provides the channel to the current supervisor."""

    async def get(self) -> SupervisorChannel:
        """Return the channel, after the remains of a dead supervisor were ended.

        Raises `ProcessStartFailed` and OSError.
        """
        ...

    def drop(self, channel: SupervisorChannel) -> None:
        """Drop the channel of a dead or stuck supervisor. Idempotent."""
        ...


class ProcessTable:
    """The part of `Processes` that is the same for server and worker."""

    def __init__(self, channels: ChannelSource, clock: Clock) -> None:
        self._channels = channels
        self._clock = clock
        self._numbers = itertools.count(1)
        self._held: dict[int, SupervisedProcess] = {}
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._loop = asyncio.get_running_loop()

    @property
    def held(self) -> list[SupervisedProcess]:
        return list(self._held.values())

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        async with self._starts:
            process = await self._start(request)
            if process.is_untouched:
                # The supervisor died with the request unread: the next one gets it.
                process = await self._start(request)
        if process.failure is not None:
            step, number = process.failure
            raise ProcessStartFailed(
                await asyncio.to_thread(describe_failure, request, step, number)
            )
        if not process.pid:
            raise ProcessStartFailed(
                f"`{request.argv[0]}` was lost during its start; no process of it is left"
            )
        return process

    async def _start(self, request: ProcessRequest) -> SupervisedProcess:
        """Start the process and wait until the result is known."""
        process = await self._begin(request)
        try:
            async with asyncio.timeout(START_BOUND_S):
                await process.started.wait()
        except TimeoutError:
            await process.kill(0)
            raise ProcessStartFailed(f"`{request.argv[0]}` did not start in time") from None
        except asyncio.CancelledError:
            await process.kill(0)  # Bounded; the canceling task waits until nothing is left.
            raise
        return process

    async def _begin(self, request: ProcessRequest) -> SupervisedProcess:
        """Send the request; from here on the process is supervised."""
        failed = f"`{request.argv[0] if request.argv else ''}` could not be started:"
        for _ in range(2):
            channel: SupervisorChannel | None = None
            try:
                channel = await self._channels.get()
                return self._send(request, channel)
            except OSError as exc:
                if channel is None or not isinstance(exc, BrokenPipeError | ConnectionResetError):
                    raise ProcessStartFailed(f"{failed} {exc.strerror}") from exc
                # The supervisor died just now and has read nothing: another one gets the request.
                self._channels.drop(channel)
        raise ProcessStartFailed(f"{failed} the supervisor died")

    def _send(self, request: ProcessRequest, channel: SupervisorChannel) -> SupervisedProcess:
        if len(self._held) >= PROCESSES_MAX:
            raise ProcessStartFailed(f"{PROCESSES_MAX} processes are running already")
        number = channel.base + next(self._numbers)
        body = encode_command(make_command(request, channel.token(number)))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                channel.start(number, theirs.fileno(), body, request.descriptors)
            except OSError:
                ours.close()
                raise
        process = SupervisedProcess(number, request, ours, channel)
        process.started_s = request.started_s or self._clock.now_s()
        process.on_gone = self._on_gone
        process.on_unresponsive = self._on_unresponsive
        self._held[number] = process
        return process

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        held = [process for process in self._held.values() if _is_for(process, workspace_id)]
        if not held:
            return []
        found = await asyncio.to_thread(find_members, held)
        for process, members in found:
            if process.is_gone and process.exit is not None and not members:
                self._held.pop(process.number, None)  # Its leftovers have ended since.
        return [
            self._show(process, members)
            for process, members in found
            if process.is_shown and (members or not process.is_stopping)
        ]

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self.end([process for process in self.held if _is_for(process, workspace_id)])

    async def end(self, held: list[SupervisedProcess]) -> list[int]:
        """Kill processes; return the pids that could not be killed."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(process.kill(), name=f"end {process.pid}") for process in held
            ]
        return sorted({pid for task in tasks for pid in task.result().left})

    def on_lost(self, number: str, swept: str, left: str) -> None:
        """Handle the supervisor's report on a shim that died."""
        process = self._held.get(int(number))
        if process is not None:
            self._lose(process, int(swept), parse_left(left))

    def lose(self, held: list[SupervisedProcess], left: list[int]) -> None:
        """Record that their supervisor died; their trees have ended, except for `left`."""
        for process in held:
            self._lose(process, 0, left)

    def _lose(self, process: SupervisedProcess, swept: int, left: list[int]) -> None:
        process.end(ProcessExit(None, swept=swept, left=tuple(left), lost=True))
        process.close()
        if not left:
            self._held.pop(process.number, None)

    def close(self) -> None:
        """Close all channels: the shims end what is left."""
        for process in self.held:
            process.close()

    def _on_gone(self, process: SupervisedProcess) -> None:
        if process.exit is None:
            # Its shim was killed. The supervisor reports that when it has killed the shim's tree.
            self._loop.call_later(LOSS_BOUND_S, self._on_no_report, process)
        elif not process.exit.lost or not process.exit.left:
            self._held.pop(process.number, None)

    def _on_no_report(self, process: SupervisedProcess) -> None:
        if process.exit is None and not process.supervisor_channel.is_dropped:
            _log.error("the supervisor does not respond and is replaced")
            self._channels.drop(process.supervisor_channel)

    def _on_unresponsive(self, process: SupervisedProcess) -> None:
        """Let the supervisor end a tree that its shim does not end."""
        if not process.supervisor_channel.is_dropped:
            process.supervisor_channel.end(process.number)
            self._loop.call_later(LOSS_BOUND_S, self._on_no_report, process)

    def _show(self, process: SupervisedProcess, members: list[ProcStat]) -> ProcessInfo:
        return ProcessInfo(
            process.pid,
            title_of(process.request),
            process.request.owner,
            max(0.0, self._clock.now_s() - process.started_s),
            sum(stat.rss_bytes for stat in members),
            tuple(stat.pid for stat in members),
            process.is_stopping,
        )


def _is_for(process: SupervisedProcess, workspace_id: str) -> bool:
    return process.request.owner.workspace_id == workspace_id


def find_members(held: list[SupervisedProcess]) -> list[tuple[SupervisedProcess, list[ProcStat]]]:
    """Find the living processes of each: below its shim, or else by pid and tag. Blocks."""
    table = read_table()
    found: list[tuple[SupervisedProcess, list[ProcStat]]] = []
    for process in held:
        if process.exit is None or not process.is_gone:
            members = descendants_of(process.shim, table) if process.shim else []
        else:
            left = [table[pid] for pid in process.exit.left if pid in table]
            members = [
                stat
                for stat in left
                if has_process_tag(process.supervisor_channel.process_tag, stat.pid)
            ]
        found.append((process, [stat for stat in members if stat.is_alive]))
    return found

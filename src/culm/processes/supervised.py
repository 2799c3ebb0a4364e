"""Processes started through a supervisor, on the side of its client: the server, or a worker.

Owns the processes from the request to the end, and the channel to the current supervisor. Where
that channel comes from, and what is done after the supervisor died, is different for the server
(`supervisor_client.py`) and for a worker (`remote.py`).
"""

import asyncio
import itertools
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from culm.clock import Clock
from culm.processes.base import (
    KILL_BOUND_S,
    KILL_GRACE_S,
    ProcessExit,
    ProcessHandle,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.processes.linux import (
    ProcStat,
    descendants_of,
    has_process_tag,
    read_table,
    token_of,
)
from culm.processes.packets import (
    SpawnCommand,
    encode_command,
    parse_ended,
    parse_left,
    receive,
    send,
    send_with,
)
from culm.processes.shim import VERIFY_S
from culm.processes.table import HeldProcess, ProcessTable, describe_failure, make_command

_log = logging.getLogger(__name__)

PROCESSES_MAX = 256  # Each is a shim of 3 MB besides the command; more are refused.
STARTS_MAX = 16  # At once, so that their packets always fit into the supervisor's socket.
START_BOUND_S = 10.0  # For the exec, which may have to wait for a slow disk.
START_ATTEMPTS = 3  # Supervisors that may die, one after the other, with the request unread.
# For the report on a shim that died; without it the supervisor is considered stuck.
LOSS_BOUND_S = 3.0
MARGIN_S = 0.3  # For packets on a busy machine.
GRACE_S_MAX = KILL_BOUND_S - VERIFY_S - 2 * MARGIN_S - 0.4
TAKE_OVER_S = KILL_BOUND_S - MARGIN_S


class SupervisorChannel:
    """`control` is readable when the supervisor sent something or is gone."""

    def __init__(self, control: socket.socket, process_tag: int, base: int = 0) -> None:
        self.control = control
        self.process_tag = process_tag  # The tag of the supervisor's process set.
        # Its requests are numbered above this; no other channel uses those numbers.
        self.base = base
        self.is_dropped = False

    def send_command(
        self, head: str, before: Sequence[int], command: SpawnCommand, descriptors: Sequence[int]
    ) -> None:
        """Send a packet, the number of descriptors and the descriptors; the command goes as a file.

        Raises OSError, without an effect, if the supervisor is gone or its queue is full.
        """
        file = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            view = memoryview(encode_command(command))
            while view:
                view = view[os.write(file, view) :]
            passed = [*before, file, *descriptors]
            send_with(self.control, f"{head} {len(passed)}".encode(), passed)
        finally:
            os.close(file)


class SupervisedProcess(HeldProcess):
    """Implements `ProcessHandle`. `is_gone` means that the shim is gone, so nothing is left."""

    def __init__(
        self,
        number: int,
        request: ProcessRequest,
        started_s: float,
        channel: socket.socket,
        supervisor_channel: SupervisorChannel,
        *,
        on_gone: Callable[["SupervisedProcess"], None],
        on_unresponsive: Callable[["SupervisedProcess"], None],
    ) -> None:
        super().__init__(request, 0, started_s)
        self.number = number
        self.supervisor_channel = supervisor_channel  # On which it was requested.
        self.shim = 0
        self.failure: tuple[str, int] | None = None  # The step and errno of a failed start.
        self.is_begun = False  # A shim has it; before that, nothing can have happened.
        self.is_gone = False
        self.started = asyncio.Event()  # Or failed, or ended.
        self._channel = channel
        self._on_gone = on_gone  # The shim is gone.
        self._on_unresponsive = on_unresponsive  # The supervisor must take over.
        self._loop.add_reader(channel, self._read)

    @property
    def is_untouched(self) -> bool:
        """The process was lost before a shim began it."""
        return self.exit is not None and self.exit.lost and not self.is_begun

    @property
    def is_shown(self) -> bool:
        """The process started, and its tree is not known to have ended completely."""
        return bool(self.pid) and (self.exit is None or bool(self.exit.left))

    async def kill(self, grace_s: float = KILL_GRACE_S) -> ProcessExit:
        if self.exit is not None:
            return self.exit
        self.is_stopping = True
        grace_s = max(0.0, min(grace_s, GRACE_S_MAX))
        begun_s = self._loop.time()
        if not self.is_gone:
            send(self._channel, f"kill {int(grace_s * 1000)}".encode())
        if not await self._ends_by(begun_s + grace_s + VERIFY_S + MARGIN_S):
            # The shim does not respond: it may be stopped or starved.
            self._on_unresponsive(self)
            await self._ends_by(begun_s + TAKE_OVER_S)
        if self.exit is None:
            return ProcessExit(None, left=(self.pid,) if self.pid else ())
        return self.exit

    def end(self, exit_: ProcessExit) -> None:
        super().end(exit_)
        self.started.set()

    def close(self) -> None:
        """Close the channel: the shim, if it lives, then ends its process tree."""
        if not self.is_gone:
            self.is_gone = True
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._on_gone(self)

    def _read(self) -> None:
        packets, is_over = receive(self._channel)
        for fields in packets:
            self._on_packet(fields)
        if is_over:
            self.close()

    def _on_packet(self, fields: list[str]) -> None:
        match fields:
            case ["begun"]:
                self.is_begun = True
            case ["started", pid, _, shim]:
                self.pid, self.shim = int(pid), int(shim)
                self.started.set()
            case ["failed", step, number]:
                self.failure = step, int(number)
                self.end(ProcessExit(None))
            case ["ended", *rest]:
                code, number, swept, left, lost = parse_ended(rest)
                self.is_stopping = self.is_stopping or bool(left)
                self.end(ProcessExit(code, number, swept, tuple(left), lost))
            case _:
                raise AssertionError(f"unknown packet from a shim: {fields}")


class SupervisedProcesses(ProcessTable[SupervisedProcess], ABC):
    """The part of `Processes` that is the same for server and worker."""

    def __init__(self, clock: Clock, client: str) -> None:
        super().__init__(clock)
        self._client = client  # Named in messages.
        self._numbers = itertools.count(1)
        self._starts = asyncio.Semaphore(STARTS_MAX)
        self._loop = asyncio.get_running_loop()
        self._channel: SupervisorChannel | None = None
        # Set while no supervisor is dead whose processes have not been ended yet.
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._has_dropped = asyncio.Event()
        self._is_closing = False

    @abstractmethod
    async def _open_channel(self) -> SupervisorChannel:
        """Open and `_use` a channel to a supervisor. Raises `ProcessStartFailed` and OSError."""
        ...

    @abstractmethod
    async def _recover(self, lost: list[SupervisedProcess]) -> list[int]:
        """Wait until the processes of a dead supervisor have ended; return the pids left."""
        ...

    @abstractmethod
    async def _close_supervisor(self, left: list[int]) -> list[int]:
        """Close the supervisor, if it is ours; return the pids left."""
        ...

    def _on_packet(self, fields: list[str]) -> None:
        """Handle a packet of the supervisor that is not about a process."""
        raise AssertionError(f"unknown packet from the supervisor: {fields}")

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        async with self._starts:
            for _ in range(START_ATTEMPTS):
                process = await self._request(request)
                if process is not None:
                    await self._wait_for_start(process)
                    if not process.is_untouched:
                        break
            else:
                raise ProcessStartFailed(
                    f"`{request.argv[0]}` could not be started: the supervisor died"
                )
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

    async def _request(self, request: ProcessRequest) -> SupervisedProcess | None:
        """Send the request; None if the supervisor died just now and has read nothing."""
        channel: SupervisorChannel | None = None
        try:
            channel = await self._get_channel()
            return self._send(request, channel)
        except OSError as exc:
            if channel is None or not isinstance(exc, BrokenPipeError | ConnectionResetError):
                name = request.argv[0] if request.argv else ""
                raise ProcessStartFailed(f"`{name}` could not be started: {exc.strerror}") from exc
            self._drop(channel)
            return None

    async def _get_channel(self) -> SupervisorChannel:
        """Return the channel, after the remains of a dead supervisor were ended."""
        await self._is_idle.wait()
        if self._is_closing:
            raise ProcessStartFailed(f"the {self._client} is stopping")
        return self._channel or await self._open_channel()

    def _send(self, request: ProcessRequest, channel: SupervisorChannel) -> SupervisedProcess:
        """Send the request; from here on the process is supervised."""
        if len(self._held) >= PROCESSES_MAX:
            raise ProcessStartFailed(f"{PROCESSES_MAX} processes are running already")
        number = channel.base + next(self._numbers)
        command = make_command(request, token_of(channel.process_tag, number))
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                channel.send_command(
                    f"start {number}", [theirs.fileno()], command, request.descriptors
                )
            except OSError:
                ours.close()
                raise
        process = SupervisedProcess(
            number,
            request,
            self._started_s(request),
            ours,
            channel,
            on_gone=self._on_gone,
            on_unresponsive=self._on_unresponsive,
        )
        self._held[number] = process
        return process

    async def _wait_for_start(self, process: SupervisedProcess) -> None:
        """Wait until the result of the start is known."""
        try:
            async with asyncio.timeout(START_BOUND_S):
                await process.started.wait()
        except TimeoutError:
            await process.kill(0)
            name = process.request.argv[0]
            raise ProcessStartFailed(f"`{name}` did not start in time") from None
        except asyncio.CancelledError:
            await process.kill(0)  # Bounded; the canceling task waits until nothing is left.
            raise

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        held = self._held_for(workspace_id)
        if not held:
            return []
        found = await asyncio.to_thread(find_members, held)
        for process, members in found:
            if process.is_gone and process.exit is not None and not members:
                self._held.pop(process.number, None)  # Its leftovers have ended since.
        return [
            self._show(
                process,
                [stat.pid for stat in members],
                sum(stat.rss_bytes for stat in members),
            )
            for process, members in found
            if process.is_shown and (members or not process.is_stopping)
        ]

    def _use(self, channel: SupervisorChannel) -> None:
        self._channel = channel
        self._loop.add_reader(channel.control, self._read, channel)

    def _read(self, channel: SupervisorChannel) -> None:
        packets, is_over = receive(channel.control)
        for fields in packets:
            match fields:
                case ["lost", number, swept, left]:
                    # A shim died; its tree has been killed.
                    if (process := self._held.get(int(number))) is not None:
                        self._lose(process, int(swept), parse_left(left))
                case _:
                    self._on_packet(fields)
        if is_over:
            self._drop(channel)

    def _drop(self, channel: SupervisorChannel) -> None:
        """Drop a dead or stuck supervisor; its processes are ended before the next one is used."""
        if self._channel is channel:
            channel.is_dropped = True
            self._close_channel()
            self._is_idle.clear()
            self._has_dropped.set()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._loop.remove_reader(self._channel.control)
            self._channel.control.close()
            self._channel = None

    async def watch(self) -> None:
        """Clean up after each supervisor that dies, one after the other."""
        while True:
            await self._has_dropped.wait()
            self._has_dropped.clear()
            lost = [each for each in self._held.values() if each.supervisor_channel.is_dropped]
            for process in lost:
                process.is_stopping = True
            try:
                left = await self._recover(lost)
                for process in lost:
                    self._lose(process, 0, left)
            except Exception:  # boundary: the client goes on; the next start gets a supervisor
                _log.exception("the processes of a dead supervisor could not be ended")
            finally:
                if not self._has_dropped.is_set():
                    self._is_idle.set()

    def _lose(self, process: SupervisedProcess, swept: int, left: list[int]) -> None:
        """Record the death of its shim or supervisor; its tree has ended, except for `left`."""
        process.end(ProcessExit(None, swept=swept, left=tuple(left), lost=True))
        process.close()
        if not left:
            self._held.pop(process.number, None)

    def _on_gone(self, process: SupervisedProcess) -> None:
        if process.exit is None:
            # Its shim was killed. The supervisor reports that when it has killed the shim's tree.
            self._loop.call_later(LOSS_BOUND_S, self._on_no_report, process)
        elif not process.exit.lost or not process.exit.left:
            self._held.pop(process.number, None)

    def _on_no_report(self, process: SupervisedProcess) -> None:
        if process.exit is None and not process.supervisor_channel.is_dropped:
            _log.error("the supervisor does not respond and is replaced")
            self._drop(process.supervisor_channel)

    def _on_unresponsive(self, process: SupervisedProcess) -> None:
        """Let the supervisor end a tree that its shim does not end."""
        if not process.supervisor_channel.is_dropped:
            send(process.supervisor_channel.control, f"end {process.number}".encode())
            self._loop.call_later(LOSS_BOUND_S, self._on_no_report, process)

    async def close(self) -> None:
        """End and verify everything, then close the supervisor. Bounded."""
        self._is_closing = True
        try:
            left = await self._close_supervisor(await self._end(self._held.values()))
            if left:
                _log.error("processes could not be ended: %s", left)
        finally:
            # If that was interrupted: the closed sockets make the supervisor and the shims end
            # everything by themselves.
            self._close_channels()

    def _close_channels(self) -> None:
        """Close all channels: the shims end what is left."""
        self._close_channel()
        for process in list(self._held.values()):
            process.close()


T = TypeVar("T", bound=SupervisedProcesses)


@asynccontextmanager
async def watch_processes(processes: T) -> AsyncGenerator[T]:
    """At the end of the block, no process it started is left."""
    async with asyncio.TaskGroup() as group:
        watch = group.create_task(processes.watch(), name="supervisor watch")
        try:
            yield processes
        finally:
            await processes.close()
            watch.cancel()


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

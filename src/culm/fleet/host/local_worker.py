"""A worker process on this machine: connected by its link, ended with all it started.

The packets on its control socket are described in `fleet/worker/control.py`.
"""

import asyncio
import logging
import os
import shutil
import signal
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from culm.fleet.discovery.base import Discovery
from culm.fleet.provision import Provision, storage_of
from culm.fleet.tail import StderrTail
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.transport.websocket import connect_websocket
from culm.processes.base import (
    KILL_BOUND_S,
    ProcessExit,
    ProcessHandle,
    WorkerChannel,
)
from culm.processes.packets import receive_or_end, send, send_with

_log = logging.getLogger(__name__)

# For the commands of a killed worker: their shims allow 0.3 s, then kill them.
COMMANDS_S: Final = 3.0
TIDY_S: Final = 2.0
STATUS_S: Final = 0.3  # For the zygote's report on the exit of a fork.


class WorkerProcess(ABC):
    """The process of a worker, watched by a handle and ended reliably."""

    def __init__(self, pid: int, on_end: Callable[[], None]) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self._on_end = on_end

    @abstractmethod
    async def exit(self) -> ProcessExit:
        """Return its exit status, as far as it is known. Only valid after its end."""
        ...

    @abstractmethod
    async def kill(self) -> bool:
        """Kill it and wait until it is gone, in bounded time; return whether it is."""
        ...

    def _end(self) -> None:
        self.ended.set()
        self._on_end()


class ForkedProcess(WorkerProcess):
    """The zygote or a fork of it: not our child, unless its supervisor and the zygote died."""

    def __init__(self, pid: int, handle: int, on_end: Callable[[], None]) -> None:
        super().__init__(pid, on_end)
        self._handle: int | None = handle
        self._exit: asyncio.Future[ProcessExit] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(handle, self._on_handle)

    def on_exited(self, status: int) -> None:
        """The zygote reaped it, with this status from `waitpid`."""
        if not self._exit.done():
            code = os.waitstatus_to_exitcode(status)
            self._exit.set_result(ProcessExit(None, -code) if code < 0 else ProcessExit(code))

    async def exit(self) -> ProcessExit:
        await asyncio.wait({self._exit}, timeout=STATUS_S)
        return self._exit.result() if self._exit.done() else ProcessExit(None)

    async def kill(self) -> bool:
        self.kill_nowait()
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_BOUND_S):
                await self.ended.wait()
        return self.ended.is_set()

    def kill_nowait(self) -> None:
        if self._handle is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Stop watching it."""
        if self._handle is not None:
            asyncio.get_running_loop().remove_reader(self._handle)
            os.close(self._handle)
            self._handle = None

    def _on_handle(self) -> None:
        self.close()
        # The parent depends on which process died first; if it is our child, nobody else reaps it.
        with suppress(ChildProcessError):
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.on_exited(status)
        self._end()


class SpawnedProcess(WorkerProcess):
    """A supervised command with a shim: all it starts ends with it."""

    def __init__(self, held: ProcessHandle, on_end: Callable[[], None]) -> None:
        super().__init__(held.pid, on_end)
        self._held = held

    async def watch(self) -> None:
        """Wait until it has ended. Its owner runs this."""
        await self._held.wait()
        self._end()

    async def exit(self) -> ProcessExit:
        return await self._held.wait()

    async def kill(self) -> bool:
        return not (await self._held.kill(0)).left


def describe_exit(exit_: ProcessExit) -> str:
    if exit_.code is not None:
        return f"exit status {exit_.code}"
    if exit_.signal is None:
        return "exit status unknown"
    try:
        return f"ended by {signal.Signals(exit_.signal).name}"
    except ValueError:
        return f"ended by signal {exit_.signal}"


class ControlSocket:
    """The server's end of a worker's control socket: while it is open, the worker has an owner.

    `theirs` is for the worker. `on_change` is called after every packet and at the end.
    """

    def __init__(self, on_change: Callable[[], None], on_supervisor: Callable[[], None]) -> None:
        self._on_change = on_change
        self._on_supervisor = on_supervisor  # Called when the worker needs a supervisor channel.
        self.pid = 0
        self.refusal = 0  # The errno, if no process could be forked.
        self.endpoint = ""  # Set once it is ready.
        self.is_over = False
        self._handle: int | None = None  # The pidfd of its process.
        self._is_open = True
        self._channel, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self._read)

    @property
    def is_forked(self) -> bool:
        """The result of the fork is known, even if it is a failure."""
        return self._handle is not None or bool(self.refusal)

    def take_handle(self) -> int | None:
        """Hand over the pidfd of its process, which the caller closes."""
        handle, self._handle = self._handle, None
        return handle

    def pass_supervisor(self, worker_channel: WorkerChannel) -> None:
        """Raises OSError if the worker is gone."""
        packet = f"keeper {worker_channel.process_tag} {worker_channel.base}".encode()
        send_with(self._channel, packet, [worker_channel.socket.fileno()])

    def refuse_supervisor(self, why: str) -> None:
        send(self._channel, f"refused {why}".encode()[:1000])

    def close(self) -> None:
        """Close it, which leaves the worker without an owner."""
        self.theirs.close()
        if self._is_open:
            self._is_open = False
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self.is_over = True
            self._on_change()
        if (handle := self.take_handle()) is not None:
            os.close(handle)

    def _read(self) -> None:
        received = receive_or_end(self._channel)
        if received is None:
            return
        packet, descriptors = received
        if not packet:
            self._loop.remove_reader(self._channel)
            self.is_over = True
        else:
            self._on_packet(packet.decode("utf-8", "replace").split(" "), descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        self._on_change()

    def _on_packet(self, fields: list[str], descriptors: list[int]) -> None:
        """Ignore unknown packets of a worker."""
        match fields:
            case ["forked", pid] if self._is_awaited(pid) and len(descriptors) == 1:
                self.pid, self._handle = int(pid), descriptors.pop()
            case ["unforked", number] if self._is_awaited(number):
                self.refusal = int(number)
            case ["ready", endpoint] if endpoint.startswith(("ws://", "wss://")):
                self.endpoint = endpoint
            case ["keeper"]:
                self._on_supervisor()
            case _:
                return

    def _is_awaited(self, number: str) -> bool:
        """Return True if the zygote may still send this; a worker itself must not."""
        return not self.is_forked and not self.pid and number.isdecimal()


class LocalWorker:
    """Implements `Worker`. `provision` is the provision its process received, with its token."""

    def __init__(self, provision: Provision, discovery: Discovery) -> None:
        self.id = provision.identity.child_id
        self.endpoint = ""  # Set once it is ready.
        self.process: WorkerProcess | None = None  # Set once it is started.
        self.control: ControlSocket | None = None  # Only for workers of ours.
        self.worker_channels: list[WorkerChannel] = []  # Its channels to the supervisor.
        self.tail = StderrTail()
        self.is_ended = False
        self._token = provision.secrets.worker_auth_token or None
        self._discovery = discovery
        self._own_storage = None if provision.storage_dir is not None else storage_of(provision)
        self._ending = asyncio.Lock()

    @property
    def pid(self) -> int | None:
        return None if self.process is None else self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process is not None and not self.process.ended.is_set()

    async def connect(self) -> Link:
        if not self.is_alive:
            raise ConnectFailed("the worker has ended")
        return await connect_websocket(self.endpoint, self._token)

    async def stderr_tail(self) -> str:
        return await self.tail.final_text()

    async def kill(self) -> None:
        async with self._ending:
            if self.is_ended:
                return
            try:
                if self.process is not None and not await self.process.kill():
                    _log.error("worker %s, pid %s, could not be ended", self.id, self.pid)
            finally:
                # Even if that was interrupted: without an owner it ends by itself.
                if self.control is not None:
                    self.control.close()
                self.tail.close()
            await self._commands_gone()
            await self._tidy_up()
            self.is_ended = True

    async def _commands_gone(self) -> None:
        """Verify that the processes it started have ended, which they do by themselves."""
        with suppress(TimeoutError):
            async with asyncio.timeout(COMMANDS_S):
                for worker_channel in self.worker_channels:
                    await worker_channel.over.wait()
                return
        _log.error("commands of worker %s are left", self.id)

    async def _tidy_up(self) -> None:
        """Remove what the worker would have removed itself."""
        try:
            async with asyncio.timeout(TIDY_S):
                await asyncio.to_thread(self._remove_traces)
        except (OSError, TimeoutError) as exc:
            _log.warning("files of worker %s could not be removed: %s", self.id, exc)

    def _remove_traces(self) -> None:
        self._discovery.withdraw(self.id)
        if self._own_storage is not None:
            shutil.rmtree(self._own_storage, ignore_errors=True)

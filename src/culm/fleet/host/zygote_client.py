"""The server's end of a zygote: started by the supervisor, requested to fork, ended.

The packets are described in `fleet/worker/zygote.py`.
"""

import asyncio
import logging
import os
import socket
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Final

from culm.fleet.host.local_worker import ForkedProcess
from culm.fleet.provision import keyless_env
from culm.processes.base import ProcessOwner, ProcessRequest, WorkerSupervisor
from culm.processes.packets import receive_or_end, send_with

_log = logging.getLogger(__name__)

END_BOUND_S: Final = 5.0  # An interpreter that is only just starting sends its pid after this.
# More than are requested at once; a fork that was given up is never asked for.
_EARLY_MAX: Final = 64
_TAIL_BYTES: Final = 2000


class ZygoteClient:
    """Created by `start_zygote`."""

    def __init__(self, channel: socket.socket, log: int) -> None:
        self.is_warm = False
        self.is_lost = False
        self._channel = channel
        self._log = log
        self._process: ForkedProcess | None = None  # None until it has begun.
        self._begun = asyncio.Event()  # Or lost, like the next one.
        self._warmed = asyncio.Event()
        self._forks: dict[int, ForkedProcess] = {}
        self._waiting: set[Callable[[], None]] = set()  # Called when it is lost.
        self._early: dict[int, int] = {}  # Exits that were reported before we knew of the fork.
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(channel, self._read)

    async def warmed(self) -> bool:
        """Wait until it is warm; False if it is lost."""
        await self._warmed.wait()
        return not self.is_lost

    def request_fork(self, document: int, stderr: int, control: int) -> None:
        """Request a fork; the rest arrives on its control socket. Raises OSError."""
        send_with(self._channel, b"fork", [document, stderr, control])

    @contextmanager
    def notify_on_loss(self, callback: Callable[[], None]) -> Generator[None]:
        """Call `callback` if the zygote is lost meanwhile."""
        self._waiting.add(callback)
        try:
            yield
        finally:
            self._waiting.discard(callback)

    def expect(self, fork: ForkedProcess) -> None:
        """Report the exit of a fork when it is known."""
        status = self._early.pop(fork.pid, None)
        if status is None:
            self._forks[fork.pid] = fork
        else:
            fork.on_exited(status)

    def kill(self) -> None:
        """Kill a zygote that does not respond. Its workers go on."""
        if self._process is not None:
            self._process.kill_nowait()
        self._lose()

    async def close(self) -> None:
        """End it and wait until it is gone, in bounded time."""
        try:
            if not self.is_lost:
                # This makes it end, once it reads the channel.
                self._channel.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(END_BOUND_S):
                await self._begun.wait()
                self.kill()
                if self._process is not None:
                    await self._process.ended.wait()
        except TimeoutError:
            _log.error("the zygote could not be ended")
        finally:
            self.kill()
            if self._process is not None:
                self._process.close()
            os.close(self._log)

    def stderr_tail(self) -> str:
        """Return the end of its error output, if any."""
        size = os.fstat(self._log).st_size
        data = os.pread(self._log, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return data.decode("utf-8", "replace").strip()

    def _read(self) -> None:
        received = receive_or_end(self._channel)
        if received is None:
            return
        packet, descriptors = received
        match packet.decode().split(" "):
            case ["begun", pid]:
                self._process = ForkedProcess(int(pid), descriptors.pop(), self._begun.set)
                self._begun.set()
            case ["warm"]:
                self.is_warm = True
                self._warmed.set()
            case ["exited", pid, status]:
                self._on_exited(int(pid), int(status))
            case _:
                self._lose()

    def _on_exited(self, pid: int, status: int) -> None:
        fork = self._forks.pop(pid, None)
        if fork is not None:
            fork.on_exited(status)
        elif len(self._early) < _EARLY_MAX:
            self._early[pid] = status

    def _lose(self) -> None:
        if not self.is_lost:
            self.is_lost = True
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self._begun.set()
            self._warmed.set()
            for callback in tuple(self._waiting):
                callback()


async def start_zygote(worker_supervisor: WorkerSupervisor, argv: Sequence[str]) -> ZygoteClient:
    """Raises `ProcessStartFailed`, OSError. A failure to run shows later, by its end."""
    channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    log = os.memfd_create("zygote", os.MFD_CLOEXEC)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    passed = (null, null, log, theirs.fileno())
    # Its workers inherit its environment.
    request = ProcessRequest(argv, "/", keyless_env(os.environ), ProcessOwner("", "zygote"), passed)
    try:
        await worker_supervisor.start_sidecar(request)
    except BaseException:  # boundary: canceled or refused; nothing is left open
        channel.close()
        os.close(log)
        raise
    finally:
        theirs.close()
        os.close(null)
    return ZygoteClient(channel, log)

"""The worker's end of its control socket: it reports that the worker is ready, requests a channel
to the supervisor, and by its end shows that the owner is gone.

worker → owner   forked <pid>                 with a pidfd of the process; sent by the zygote
                 ready <endpoint>
                 keeper                       requests a channel, to start a process
owner → worker   keeper <mark> <base>         with a socket to the supervisor
                 refused <reason>             no channel
"""

import asyncio
import errno
import os
import socket
from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Final

from culm.clock import Clock
from culm.processes.base import (
    Processes,
    ProcessStartFailed,
)
from culm.processes.client import missing_feature
from culm.processes.direct import open_direct_processes
from culm.processes.packets import receive_or_end, send
from culm.processes.remote import open_remote_processes
from culm.processes.supervised import SupervisorChannel

# The owner may first have to end the processes of a dead supervisor and to start a new one.
ANSWER_S: Final = 15.0


class WorkerControl:
    """The control socket of a worker; created by `open_control`."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._over = asyncio.Event()
        self._answer: asyncio.Future[SupervisorChannel] | None = None

    def ready(self, endpoint: str) -> None:
        """Report the endpoint. Never waits."""
        send(self._channel, f"ready {endpoint}".encode())

    async def gone(self) -> None:
        """Wait until the owner is gone."""
        await self._over.wait()

    def open_processes(self, clock: Clock) -> AbstractAsyncContextManager[Processes]:
        """Open processes under the owner's supervisor, requested when the first one starts."""
        if missing_feature() is not None:
            return open_direct_processes(clock)
        return open_remote_processes(self.request_supervisor, clock)

    async def request_supervisor(self) -> SupervisorChannel:
        """Get a new channel to the owner's supervisor. One request at a time.

        Raises `ProcessStartFailed`.
        """
        answer: asyncio.Future[SupervisorChannel] = asyncio.get_running_loop().create_future()
        self._answer = answer
        try:
            if self._over.is_set() or not send(self._channel, b"keeper"):
                raise ProcessStartFailed("no supervisor: the owner of this worker is gone")
            async with asyncio.timeout(ANSWER_S):
                return await answer
        except TimeoutError:
            raise ProcessStartFailed("no supervisor: the owner does not answer") from None
        except asyncio.CancelledError:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                answer.result().control.close()
            raise
        finally:
            self._answer = None

    def on_readable(self) -> None:
        """Receive one packet."""
        received = receive_or_end(self._channel)
        if received is None:
            return
        packet, descriptors = received
        if not packet:
            self._end()
            return
        match packet.decode("utf-8", "replace").split(" ", 2):
            case ["keeper", mark, base] if len(descriptors) == 1:
                control = socket.socket(fileno=descriptors.pop())
                if not self._resolve(SupervisorChannel(control, int(mark), int(base))):
                    control.close()  # The request was cancelled.
            case ["refused", *reason]:
                self._resolve(ProcessStartFailed(" ".join(reason)))
            case _:
                self._resolve(ProcessStartFailed("no supervisor: its socket did not arrive"))
        for descriptor in descriptors:
            os.close(descriptor)

    def _end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self._over.set()
        self._resolve(ProcessStartFailed("no supervisor: the owner of this worker is gone"))

    def _resolve(self, answer: SupervisorChannel | ProcessStartFailed) -> bool:
        """Answer the pending request. False if there is none."""
        if self._answer is None or self._answer.done():
            return False
        if isinstance(answer, SupervisorChannel):
            self._answer.set_result(answer)
        else:
            self._answer.set_exception(answer)
            self._answer.exception()  # The waiter may be cancelled before it reads the exception.
        return True


@asynccontextmanager
async def open_control(descriptor: int) -> AsyncGenerator[WorkerControl]:
    """Take over the descriptor; raises OSError if it is not a control socket."""
    channel = socket.socket(fileno=descriptor)
    if channel.type != socket.SOCK_SEQPACKET:
        channel.detach()
        raise OSError(errno.EPROTOTYPE, os.strerror(errno.EPROTOTYPE))
    loop = asyncio.get_running_loop()
    with channel:
        channel.set_inheritable(False)
        os.set_blocking(channel.fileno(), False)
        control = WorkerControl(channel)
        loop.add_reader(channel, control.on_readable)
        try:
            yield control
        finally:
            loop.remove_reader(channel)

"""The server's end of a worker's control socket.

The packets are described in `fleet/worker/control.py`. While the socket is open, the worker has an
owner.
"""

import asyncio
import os
import socket
from collections.abc import Callable

from culm.processes.base import WorkerChannel
from culm.processes.packets import receive_or_end, send, send_with


class ControlSocket:
    """`theirs` is for the worker. `on_change` is called after every packet and at the end."""

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

"""A channel to a supervisor. The server has one, and so has each worker that runs a command."""

import os
import socket
from collections.abc import Sequence

from culm.processes.linux import token_of
from culm.processes.packets import send, send_with


class SupervisorChannel:
    """`control` is readable when the supervisor sent something or is gone."""

    def __init__(self, control: socket.socket, process_tag: int, base: int = 0) -> None:
        self.control = control
        self.process_tag = process_tag  # The tag of the supervisor's process set.
        # Its requests are numbered above this; no other channel uses those numbers.
        self.base = base
        self.is_dropped = False

    def token(self, number: int) -> str:
        return token_of(self.process_tag, number)

    def start(self, number: int, channel: int, body: bytes, descriptors: Sequence[int]) -> None:
        """Raises OSError, without starting it, if the supervisor is gone or its queue is full."""
        self.pass_on(f"start {number}", [channel], body, descriptors)

    def end(self, number: int) -> bool:
        return send(self.control, f"end {number}".encode())

    def pass_on(
        self, head: str, before: Sequence[int], body: bytes, descriptors: Sequence[int]
    ) -> None:
        """Send a packet, the number of descriptors and the descriptors; `body` goes as a file."""
        file = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(file, view) :]
            passed = [*before, file, *descriptors]
            send_with(self.control, f"{head} {len(passed)}".encode(), passed)
        finally:
            os.close(file)

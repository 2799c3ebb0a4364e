"""A line to a keeper: orders go out, words of lost wardens come back. A server has one, and so
has each of its workers that runs a command."""

import os
import socket
from collections.abc import Sequence

from culm.processes.linux import token_of
from culm.processes.packets import send, send_with


class SupervisorChannel:
    """`control` is readable when the keeper says something or is gone."""

    def __init__(self, control: socket.socket, mark: int, base: int = 0) -> None:
        self.control = control
        self.mark = mark  # Of the keeper's set.
        self.base = base  # Numbers of its orders are above it; no other line uses those.
        self.is_dropped = False

    def token(self, number: int) -> str:
        return token_of(self.mark, number)

    def start(self, number: int, channel: int, body: bytes, descriptors: Sequence[int]) -> None:
        """Raises OSError if the keeper is gone or deaf; then nothing was started."""
        self.pass_on(f"start {number}", [channel], body, descriptors)

    def end(self, number: int) -> bool:
        return send(self.control, f"end {number}".encode())

    def pass_on(
        self, words: str, before: Sequence[int], body: bytes, descriptors: Sequence[int]
    ) -> None:
        """Words, how many descriptors follow, and those; what is in `body` goes as a file."""
        file = os.memfd_create("command", os.MFD_CLOEXEC)
        try:
            view = memoryview(body)
            while view:
                view = view[os.write(file, view) :]
            passed = [*before, file, *descriptors]
            send_with(self.control, f"{words} {len(passed)}".encode(), passed)
        finally:
            os.close(file)

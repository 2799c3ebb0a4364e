"""A client's handle for one supervised process: the channel to its shim."""

import asyncio
import socket
from collections.abc import Callable

from culm.processes.base import KILL_BOUND_S, KILL_GRACE_S, ProcessExit, ProcessRequest
from culm.processes.channel import SupervisorChannel
from culm.processes.packets import parse_ended, receive, send
from culm.processes.shim import VERIFY_S

MARGIN_S = 0.3  # For packets on a busy machine.
GRACE_S_MAX = KILL_BOUND_S - VERIFY_S - 2 * MARGIN_S - 0.4
TAKE_OVER_S = KILL_BOUND_S - MARGIN_S


class SupervisedProcess:
    """Implements `ProcessHandle`. `is_gone` means that the shim is gone, so nothing is left."""

    def __init__(
        self,
        number: int,
        request: ProcessRequest,
        channel: socket.socket,
        supervisor_channel: SupervisorChannel,
    ) -> None:
        self.number = number
        self.request = request
        self.started_s = 0.0
        self.supervisor_channel = supervisor_channel  # On which it was requested.
        self.pid = 0
        self.shim = 0
        self.failure: tuple[str, int] | None = None  # The step and errno of a failed start.
        self.exit: ProcessExit | None = None
        self.is_begun = False  # A shim has it; before that, nothing can have happened.
        self.is_stopping = False
        self.is_gone = False
        self.started = asyncio.Event()  # Or failed, or ended.
        self._ended = asyncio.Event()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        # Set by the process table: the shim is gone, or it does not respond and the supervisor must
        # take over.
        self.on_gone: Callable[[SupervisedProcess], None] = lambda _: None
        self.on_unresponsive: Callable[[SupervisedProcess], None] = lambda _: None
        self._loop.add_reader(channel, self._read)

    @property
    def is_untouched(self) -> bool:
        """The process was lost before a shim began it."""
        return self.exit is not None and self.exit.lost and not self.is_begun

    @property
    def is_shown(self) -> bool:
        """The process started, and its tree is not known to have ended completely."""
        return bool(self.pid) and (self.exit is None or bool(self.exit.left))

    async def wait(self) -> ProcessExit:
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

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
            self.on_unresponsive(self)
            await self._ends_by(begun_s + TAKE_OVER_S)
        if self.exit is None:
            return ProcessExit(None, left=(self.pid,) if self.pid else ())
        return self.exit

    async def _ends_by(self, at_s: float) -> bool:
        try:
            async with asyncio.timeout_at(at_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def end(self, exit_: ProcessExit) -> None:
        """Record the end; only the first call has an effect."""
        if self.exit is None:
            self.exit = exit_
            self._ended.set()
            self.started.set()

    def close(self) -> None:
        """Close the channel: the shim, if it lives, then ends its process tree."""
        if not self.is_gone:
            self.is_gone = True
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self.on_gone(self)

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
                ended = parse_ended(rest)
                left = tuple(ended.left)
                self.is_stopping = self.is_stopping or bool(left)
                self.end(ProcessExit(ended.code, ended.signal, ended.swept, left, ended.lost))
            case _:
                raise AssertionError(f"unknown packet from a shim: {fields}")

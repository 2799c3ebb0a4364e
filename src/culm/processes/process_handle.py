"""One process in the keeper's custody, as who ordered it sees it: a channel to its warden."""

import asyncio
import socket
from collections.abc import Callable

from culm.processes.base import KILL_BOUND_S, KILL_GRACE_S, ProcessExit, ProcessRequest
from culm.processes.channel import SupervisorChannel
from culm.processes.packets import parse_ended, receive, send
from culm.processes.shim import VERIFY_S

MARGIN_S = 0.3  # For the words to travel on a busy machine.
GRACE_S_MAX = KILL_BOUND_S - VERIFY_S - 2 * MARGIN_S - 0.4
TAKE_OVER_S = KILL_BOUND_S - MARGIN_S


class SupervisedProcess:
    """Implements `Held`. It is `gone` when its warden is: nothing is left then."""

    def __init__(
        self, number: int, order: ProcessRequest, channel: socket.socket, line: SupervisorChannel
    ) -> None:
        self.number = number
        self.order = order
        self.started_s = 0.0
        self.line = line  # By which it was ordered.
        self.pid = 0
        self.shim = 0
        self.failure: tuple[str, int] | None = None  # The step and errno of a failed start.
        self.exit: ProcessExit | None = None
        self.is_begun = False  # A warden has it; before that, nothing can have happened.
        self.is_stopping = False
        self.is_gone = False
        self.started = asyncio.Event()  # Or failed, or ended.
        self._ended = asyncio.Event()
        self._channel = channel
        self._loop = asyncio.get_running_loop()
        # What the custody does: told when the warden is gone, and how the keeper takes over.
        self.on_gone: Callable[[SupervisedProcess], None] = lambda _: None
        self.on_deaf: Callable[[SupervisedProcess], None] = lambda _: None
        self._loop.add_reader(channel, self._read)

    @property
    def is_untouched(self) -> bool:
        """Over before anything was done about it."""
        return self.exit is not None and self.exit.lost and not self.is_begun

    @property
    def is_shown(self) -> bool:
        """Started, and not known to have ended whole."""
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
            # The warden does not do it: it may be stopped, or starved.
            self.on_deaf(self)
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
        """Say how it ended; only the first word counts."""
        if self.exit is None:
            self.exit = exit_
            self._ended.set()
            self.started.set()

    def close(self) -> None:
        """Let go of the channel: if there is a warden, it ends all it holds."""
        if not self.is_gone:
            self.is_gone = True
            self._loop.remove_reader(self._channel)
            self._channel.close()
            self.on_gone(self)

    def _read(self) -> None:
        packets, is_over = receive(self._channel)
        for words in packets:
            self._on_packet(words)
        if is_over:
            self.close()

    def _on_packet(self, words: list[str]) -> None:
        match words:
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
                raise AssertionError(f"no word of a warden: {words}")

"""One process that gets data on its standard input and answers on its standard output.

Used for hooks and for tools from the configuration. Owns the pipes: it never waits for a process
that does not read, and it keeps only the beginning of endless output. When it returns or raises,
the process has ended and every descriptor is closed.
"""

import asyncio
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType

from culm.clock import Clock
from culm.processes.base import Processes, ProcessExit, ProcessOwner, ProcessRequest

PIECE_BYTES = 64 << 10
DRAIN_BYTES_MAX = 4 << 20  # After the exit: more than a pipe holds; a process may have escaped.


@dataclass(frozen=True, slots=True)
class ExchangeRequest:
    """The process to start, and its input."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    owner: ProcessOwner
    title: str
    data: bytes
    within_s: float
    output_bytes_max: int


@dataclass(frozen=True, slots=True)
class ExchangeAnswer:
    """The exit of the process, and its output."""

    exit: ProcessExit
    output: bytes
    errors: bytes
    is_cut: bool = False  # The output was longer.
    is_late: bool = False  # It was ended by the timeout.


async def exchange(processes: Processes, clock: Clock, request: ExchangeRequest) -> ExchangeAnswer:
    """Start a process, write its input and read its answer. Raises `ProcessStartFailed`.

    Cancelling this, or a timeout, ends the process and everything it started.
    """
    with _Pipes(request.data, request.output_bytes_max) as pipes:
        process_request = ProcessRequest(
            request.argv,
            request.cwd,
            request.env,
            request.owner,
            pipes.theirs,
            request.title,
            clock.now_s(),
        )
        handle = await processes.start(process_request)
        pipes.close_theirs()
        ended: ProcessExit | None = None
        is_late = False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(request.within_s):
                    ended = await handle.wait()
            is_late = ended is None
        finally:
            if ended is None:
                ended = await handle.kill()
        pipes.drain()
        return ExchangeAnswer(
            ended, bytes(pipes.output), bytes(pipes.errors), pipes.is_cut, is_late
        )


class _Pipes:
    """Standard input, output and errors of a process: our ends, and its ends until it starts."""

    def __init__(self, data: bytes, bytes_max: int) -> None:
        self.output = bytearray()
        self.errors = bytearray()
        self.is_cut = False
        self._rest = memoryview(data)
        self._bytes_max = bytes_max
        self._loop = asyncio.get_running_loop()
        self.theirs: list[int] = []
        self._ours: list[int] = []  # The open ones of input, output, errors.
        try:
            for is_input in (True, False, False):
                source, sink = os.pipe()
                self.theirs.append(source if is_input else sink)
                self._ours.append(sink if is_input else source)
                os.set_blocking(self._ours[-1], False)
        except OSError:
            self.close()
            raise
        self._input, self._from_output, self._from_errors = self._ours

    def __enter__(self) -> "_Pipes":
        self._loop.add_writer(self._input, self._write)
        self._loop.add_reader(self._from_output, self._read_output)
        self._loop.add_reader(self._from_errors, self._read_errors)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close_theirs(self) -> None:
        while self.theirs:
            os.close(self.theirs.pop())

    def close(self) -> None:
        self.close_theirs()
        for ours in tuple(self._ours):
            self._close(ours)

    def _close(self, ours: int) -> None:
        if ours in self._ours:
            self._ours.remove(ours)
            self._loop.remove_writer(ours)
            self._loop.remove_reader(ours)
            os.close(ours)

    def _write(self) -> None:
        try:
            self._rest = self._rest[os.write(self._input, self._rest[:PIECE_BYTES]) :]
        except BlockingIOError:
            return
        except OSError:  # The process has closed its input.
            self._rest = self._rest[:0]
        if not self._rest:
            self._close(self._input)

    def _read_output(self) -> int:
        return self._read(self._from_output, self.output)

    def _read_errors(self) -> int:
        return self._read(self._from_errors, self.errors)

    def _read(self, source: int, into: bytearray) -> int:
        """Read available data and keep as much as fits; return its size, 0 if none."""
        if source not in self._ours:
            return 0
        try:
            piece = os.read(source, PIECE_BYTES)
        except BlockingIOError:
            return 0
        room = self._bytes_max - len(into)
        into += piece[:room]
        if len(piece) > room and into is self.output:
            self.is_cut = True
        if not piece:
            self._close(source)
        return len(piece)

    def drain(self) -> None:
        """Read the remaining output of a process that has ended."""
        for read in (self._read_output, self._read_errors):
            left = DRAIN_BYTES_MAX
            while left > 0 and (count := read()):
                left -= count

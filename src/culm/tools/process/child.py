"""A child process that serves one request: started, read to its end, and never left behind.

Owns the pipes to it. The caller defines the request and interprets the answer.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from types import TracebackType
from typing import Protocol

from msgspec import Struct

from culm.clock import Clock
from culm.processes.base import (
    KILL_BOUND_S,
    Processes,
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
)

READ_BYTES = 64 << 10  # Per read; other tasks run in between.
REMAINING_BYTES_MAX = 1 << 20  # Read from a pipe after the deadline; none of ours holds more.
ERRORS_BYTES_MAX = 64 << 10  # Further error output is read and dropped.
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # Some programs cannot start without them.


class ProcessAccess(Protocol):
    """The services needed to run a process; `ToolContext` implements it."""

    @property
    def processes(self) -> Processes: ...

    @property
    def clock(self) -> Clock: ...


class ChildRequest(Struct, frozen=True):
    """The command line, input and output of a child process."""

    argv: Sequence[str]
    cwd: str
    owner: ProcessOwner
    title: str
    # Returns False when it needs no more output; the process is ended then.
    on_output: Callable[[bytes], bool]
    stdin: bytes = b""  # Its standard input.
    descriptors: Sequence[int] = ()  # The process gets them as 3 and up.


class ChildAnswer(Struct, frozen=True):
    """The exit of a child process, and its error output."""

    exit: ProcessExit
    errors: bytes
    is_whole: bool  # The output is complete; the process was not ended by us.


class CallDeadline:
    """The deadline of a call. Made by `open_deadline`."""

    def __init__(self) -> None:
        self.is_over = False
        self._waiting: asyncio.Future[None] | None = None

    def end(self) -> None:
        self.is_over = True
        if self._waiting is not None:
            _finish(self._waiting)

    def wake(self, waiting: asyncio.Future[None]) -> None:
        """Finish `waiting` at the deadline, or at once if it has passed."""
        self._waiting = waiting
        if self.is_over:
            _finish(waiting)


@contextmanager
def open_deadline(clock: Clock, seconds: float) -> Generator[CallDeadline]:
    deadline = CallDeadline()
    timer = clock.call_later(seconds, deadline.end)
    try:
        yield deadline
    finally:
        timer.cancel()


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@contextmanager
def open_memory(data: bytes) -> Generator[int]:
    """Open an anonymous file with `data`, to be read from its beginning.

    A pipe would not do: its capacity is limited, so somebody would have to feed it.
    """
    with ExitStack() as stack:
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("culm")
            stack.callback(os.close, descriptor)
        else:
            file = stack.enter_context(tempfile.TemporaryFile())
            descriptor = file.fileno()
        os.pwrite(descriptor, data, 0)
        yield descriptor


async def run_child(
    access: ProcessAccess, request: ChildRequest, deadline: CallDeadline
) -> ChildAnswer:
    """Run a child until its output ends or the deadline passes; raises `ProcessStartFailed`.

    Cancelling this ends the process, too.
    """
    with ExitStack() as stack:
        reader = _OutputReader(request.on_output)
        stack.callback(reader.close)
        with ExitStack() as theirs:
            process_request = _process_request(
                request, access.clock.monotonic_s(), reader.open(theirs), theirs
            )
            handle = await access.processes.start(process_request)
        return await _read_answer(handle, reader, deadline)


def _process_request(
    request: ChildRequest, now_s: float, pipes: Sequence[int], theirs: ExitStack
) -> ProcessRequest:
    stdin = theirs.enter_context(open_memory(request.stdin))
    env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    descriptors = (stdin, *pipes, *request.descriptors)
    return ProcessRequest(
        request.argv, request.cwd, env, request.owner, descriptors, request.title, now_s
    )


async def _read_answer(
    handle: ProcessHandle, reader: "_OutputReader", deadline: CallDeadline
) -> ChildAnswer:
    ended: ProcessExit | None = None
    try:
        deadline.wake(reader.done)
        await reader.done
        reader.read_remaining()
        if reader.is_whole:
            with suppress(TimeoutError):  # Its output has ended, but the process has not.
                async with asyncio.timeout(KILL_BOUND_S):
                    ended = await handle.wait()
    finally:
        if ended is None:
            ended = await handle.kill(0.0)
    return ChildAnswer(ended, bytes(reader.errors), reader.is_whole)


class _OutputReader:
    """Our ends of the output and error pipes of a process."""

    def __init__(self, on_output: Callable[[bytes], bool]) -> None:
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self.done = self._loop.create_future()
        self._output = -1
        self._has_enough = False
        self.is_whole = False
        self.errors = bytearray()

    def open(self, theirs: ExitStack) -> Sequence[int]:
        """Return the ends for the process, which `theirs` closes."""
        output = self._pipe(self._on_data, theirs)
        (self._output,) = self._open
        return output, self._pipe(self._on_error_data, theirs)

    def read_remaining(self) -> None:
        """Read output that was written before the deadline but not read yet. Never waits."""
        reads = REMAINING_BYTES_MAX // READ_BYTES
        with suppress(BlockingIOError):
            while reads and self._output in self._open and not self._has_enough:
                reads -= 1
                data = os.read(self._output, READ_BYTES)
                self._has_enough = not data or not self._on_output(data)

    def _pipe(self, on_data: Callable[[bytes], bool], theirs: ExitStack) -> int:
        ours, other = os.pipe()
        theirs.callback(os.close, other)
        os.set_blocking(ours, False)
        self._open.add(ours)
        self._loop.add_reader(ours, self._read, ours, on_data)
        return other

    def _read(self, ours: int, on_data: Callable[[bytes], bool]) -> None:
        try:
            data = os.read(ours, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            if not on_data(data):
                _finish(self.done)
            return
        self._close(ours)
        if not self._open:
            self.is_whole = not self.done.done()
            _finish(self.done)

    def _on_data(self, data: bytes) -> bool:
        if not self._has_enough:  # It counts even after the deadline: it was written before.
            self._has_enough = not self._on_output(data)
        return not self._has_enough

    def _on_error_data(self, data: bytes) -> bool:
        self.errors += data[: ERRORS_BYTES_MAX - len(self.errors)]
        return True

    def _close(self, ours: int) -> None:
        self._loop.remove_reader(ours)
        self._open.discard(ours)
        os.close(ours)

    def close(self) -> None:
        for ours in tuple(self._open):
            self._close(ours)


# --- one process that gets data on its standard input and answers on its standard output


PIECE_BYTES = 64 << 10
DRAIN_BYTES_MAX = 4 << 20  # After the exit: more than a pipe holds; a process may have escaped.


class ExchangeRequest(Struct, frozen=True):
    """The process to start, and its input."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]
    owner: ProcessOwner
    title: str
    data: bytes
    within_s: float
    output_bytes_max: int


class ExchangeAnswer(Struct, frozen=True):
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
            clock.monotonic_s(),
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

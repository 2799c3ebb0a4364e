"""A process that answers one question: started in custody, read to its end, never left behind.

Owns the pipes between it and us. What is asked and what the answer means is up to whoever asks.
"""

import asyncio
import os
import tempfile
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Protocol

from culm.clock import Clock
from culm.processes.base import (
    KILL_BOUND_S,
    Processes,
    ProcessExit,
    ProcessHandle,
    ProcessOwner,
    ProcessRequest,
)

READ_BYTES = 64 << 10  # At a time; other work gets its turn in between.
HEAR_OUT_BYTES_MAX = 1 << 20  # Of what waits in a pipe; none of ours holds more.
ERRORS_BYTES_MAX = 64 << 10  # What is said beyond is read and forgotten.
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")  # Some programs cannot start without.


class ProcessAccess(Protocol):
    """What it takes to run a process; a `Kit` has it."""

    @property
    def processes(self) -> Processes: ...

    @property
    def clock(self) -> Clock: ...


@dataclass(frozen=True, slots=True)
class ChildRequest:
    argv: Sequence[str]
    cwd: str
    owner: ProcessOwner
    title: str
    # Returns False when it has heard enough; the process is ended then.
    on_output: Callable[[bytes], bool]
    given: bytes = b""  # Its standard input.
    descriptors: Sequence[int] = ()  # It has them as 3 and further.


@dataclass(frozen=True, slots=True)
class ChildAnswer:
    exit: ProcessExit
    errors: bytes
    is_whole: bool  # It said all that it had to say; nobody ended it.


class CallDeadline:
    """The time by which a call must have its answer. Made by `open_deadline`."""

    def __init__(self) -> None:
        self.is_over = False
        self._waiting: asyncio.Future[None] | None = None

    def end(self) -> None:
        self.is_over = True
        if self._waiting is not None:
            _finish(self._waiting)

    def wake(self, waiting: asyncio.Future[None]) -> None:
        """Finish `waiting` when time is over, or at once if it is."""
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
    """A file without a name, to be read from its beginning.

    Not a pipe: a pipe holds only so much, and somebody would have to feed it.
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


async def ask(hands: ProcessAccess, question: ChildRequest, deadline: CallDeadline) -> ChildAnswer:
    """Run it until it has said all, or time is over; raises `StartFailed`.

    Cancelling this ends it, too.
    """
    with ExitStack() as stack:
        listening = _Listening(question.on_output)
        stack.callback(listening.close)
        with ExitStack() as theirs:
            order = _order(question, hands.clock.now_s(), listening.open(theirs), theirs)
            held = await hands.processes.start(order)
        return await _listen(held, listening, deadline)


def _order(
    question: ChildRequest, now_s: float, pipes: Sequence[int], theirs: ExitStack
) -> ProcessRequest:
    given = theirs.enter_context(open_memory(question.given))
    env = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    descriptors = (given, *pipes, *question.descriptors)
    return ProcessRequest(
        question.argv, question.cwd, env, question.owner, descriptors, question.title, now_s
    )


async def _listen(
    held: ProcessHandle, listening: "_Listening", deadline: CallDeadline
) -> ChildAnswer:
    how: ProcessExit | None = None
    try:
        deadline.wake(listening.done)
        await listening.done
        listening.hear_out()
        if listening.is_whole:
            with suppress(TimeoutError):  # It has nothing more to say, and yet does not end.
                async with asyncio.timeout(KILL_BOUND_S):
                    how = await held.wait()
    finally:
        if how is None:
            how = await held.kill(0.0)
    return ChildAnswer(how, bytes(listening.errors), listening.is_whole)


class _Listening:
    """Our ends of a process's output and errors."""

    def __init__(self, hear: Callable[[bytes], bool]) -> None:
        self._hear = hear
        self._loop = asyncio.get_running_loop()
        self._open: set[int] = set()
        self.done = self._loop.create_future()
        self._output = -1
        self._has_enough = False
        self.is_whole = False
        self.errors = bytearray()

    def open(self, theirs: ExitStack) -> Sequence[int]:
        """The ends for the process, which `theirs` closes."""
        output = self._pipe(self._take, theirs)
        (self._output,) = self._open
        return output, self._pipe(self._take_error, theirs)

    def hear_out(self) -> None:
        """Time may be over while what was said in time is still on its way. Never waits."""
        reads = HEAR_OUT_BYTES_MAX // READ_BYTES
        with suppress(BlockingIOError):
            while reads and self._output in self._open and not self._has_enough:
                reads -= 1
                data = os.read(self._output, READ_BYTES)
                self._has_enough = not data or not self._hear(data)

    def _pipe(self, take: Callable[[bytes], bool], theirs: ExitStack) -> int:
        ours, other = os.pipe()
        theirs.callback(os.close, other)
        os.set_blocking(ours, False)
        self._open.add(ours)
        self._loop.add_reader(ours, self._read, ours, take)
        return other

    def _read(self, ours: int, take: Callable[[bytes], bool]) -> None:
        try:
            data = os.read(ours, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            if not take(data):
                _finish(self.done)
            return
        self._close(ours)
        if not self._open:
            self.is_whole = not self.done.done()
            _finish(self.done)

    def _take(self, data: bytes) -> bool:
        if not self._has_enough:  # Whether or not time is over: it was said, and is read now.
            self._has_enough = not self._hear(data)
        return not self._has_enough

    def _take_error(self, data: bytes) -> bool:
        self.errors += data[: ERRORS_BYTES_MAX - len(self.errors)]
        return True

    def _close(self, ours: int) -> None:
        self._loop.remove_reader(ours)
        self._open.discard(ours)
        os.close(ours)

    def close(self) -> None:
        for ours in tuple(self._open):
            self._close(ours)

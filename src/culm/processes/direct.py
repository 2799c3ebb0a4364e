"""Processes without a supervisor, for platforms that lack a feature it needs.

The server starts each process in a session of its own and ends it by its process group. A process
that leaves the group is not found, and a killed server leaves its processes behind. Opened by
`open_processes`.
"""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from culm.clock import Clock
from culm.processes.base import (
    KILL_BOUND_S,
    KILL_GRACE_S,
    ProcessExit,
    ProcessHandle,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.processes.linux import TOKEN_NAME, read_table
from culm.processes.table import HeldProcess, ProcessTable, describe_failure, make_command

SETTLE_S = 0.1  # For processes that the command left and that are about to end.
SWEEP_GRACE_S = 0.5
SWEEP_BOUND_S = 2.0
_PAUSE_S = 0.01
# Moved out of the way first: the target of one may be the number of another.
_PLACE = """
import fcntl, os, sys
numbers = [int(n) for n in sys.argv[1].split(",")]
above = 3 + len(numbers)
away = [fcntl.fcntl(n, fcntl.F_DUPFD, above) for n in numbers]
for place, n in enumerate(away, 3):
    os.dup2(n, place)
os.closerange(above, max(away + numbers) + 1)
try:
    os.execvp(sys.argv[2], sys.argv[2:])
except OSError as exc:
    sys.exit(f"{sys.argv[2]}: {exc.strerror}")
"""


class DirectProcess(HeldProcess):
    """Implements `ProcessHandle`. A thread of its own waits for the process."""

    def __init__(
        self, request: ProcessRequest, process: subprocess.Popen[bytes], started_s: float
    ) -> None:
        super().__init__(request, process.pid, started_s)
        self._process = process
        threading.Thread(target=self._hold, name=f"hold {self.pid}", daemon=True).start()

    async def kill(self, grace_s: float = KILL_GRACE_S) -> ProcessExit:
        if self.exit is not None:
            return self.exit
        self.is_stopping = True
        begun_s = self._loop.time()
        try:
            if grace_s > 0 and _signal_group(self.pid, signal.SIGTERM):
                await self._ends_by(begun_s + min(grace_s, KILL_BOUND_S / 2))
        finally:
            if self.exit is None:
                _signal_group(self.pid, signal.SIGKILL)
        await self._ends_by(begun_s + KILL_BOUND_S)
        return self.exit or ProcessExit(None, left=(self.pid,))

    def _hold(self) -> None:
        """Wait for the process in its thread, then end what it left in its group."""
        status = self._process.wait()
        swept, left = _sweep_group(self.pid)
        code, number = (None, -status) if status < 0 else (status, None)
        exit_ = ProcessExit(code, number, swept, (self.pid,) if left else ())
        with suppress(RuntimeError):  # The loop is closed because the process took too long to end.
            self._loop.call_soon_threadsafe(self.end, exit_)


def _signal_group(group: int, number: int) -> bool:
    """Signal a group; False if it is empty. A group with a member keeps its id, so it is ours."""
    try:
        os.killpg(group, number)
    except OSError:
        return False
    return True


def _is_alive(group: int) -> bool:
    """Return True if a member is not a zombie, or if /proc is missing."""
    try:
        table = read_table()
    except OSError:
        return True
    return any(stat.group == group and stat.is_alive for stat in table.values())


def _sweep_group(group: int) -> tuple[int, bool]:
    """Return how many were killed (known only as 0 or 1) and whether something is left."""
    begun_s = time.monotonic()  # noqa: TID251 - in a thread, where no timer of the loop reaches
    is_asked = False
    while _signal_group(group, 0) and _is_alive(group):
        passed_s = time.monotonic() - begun_s  # noqa: TID251 - see above
        if passed_s > SWEEP_BOUND_S:
            return int(is_asked), True
        if passed_s > SETTLE_S + SWEEP_GRACE_S:
            _signal_group(group, signal.SIGKILL)
        elif passed_s > SETTLE_S and not is_asked:
            is_asked = _signal_group(group, signal.SIGTERM)
        time.sleep(_PAUSE_S)
    return int(is_asked), False


class DirectProcesses(ProcessTable[DirectProcess]):
    """Implements `Processes`."""

    worker_supervisor = None

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._numbers = itertools.count(1)
        self._is_closing = False

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        """Start without waiting, so that a cancel cannot interrupt it."""
        if self._is_closing:
            raise ProcessStartFailed("the server is stopping")
        number = next(self._numbers)
        process = DirectProcess(
            request, self._spawn(request, f"direct.{number}"), self._started_s(request)
        )
        self._forget_ended()
        self._held[number] = process
        return process

    def _spawn(self, request: ProcessRequest, token: str) -> subprocess.Popen[bytes]:
        command = make_command(request, token)
        null = [subprocess.DEVNULL] * (3 - len(request.descriptors))
        stdin, stdout, stderr, *further = [*request.descriptors, *null]
        try:
            return subprocess.Popen(
                _placing(further, command.argv) if further else command.argv,
                pass_fds=further,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=command.cwd,
                env={**request.env, TOKEN_NAME: token},
                start_new_session=True,
            )
        except OSError as exc:
            step = "exec" if Path(request.cwd).is_dir() else "chdir"
            raise ProcessStartFailed(describe_failure(request, step, exc.errno or 0)) from exc

    def warm_nowait(self) -> None:
        """Do nothing: there is no supervisor to prepare."""

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        """List the processes; their memory use is unknown here."""
        self._forget_ended()
        return [self._show(each, [each.pid], 0) for each in self._held_for(workspace_id)]

    async def close(self) -> None:
        self._is_closing = True
        await self._end(self._held.values())

    def _forget_ended(self) -> None:
        for number, process in list(self._held.items()):
            if process.exit is not None and not process.exit.left:
                del self._held[number]


def _placing(descriptors: Sequence[int], argv: Sequence[bytes]) -> list[bytes]:
    """Wrap a command in an interpreter that moves further descriptors to their numbers.

    `pass_fds` keeps our numbers. The move needs a program, because running Python code in a fork of
    a threaded server is unsafe.
    """
    numbers = ",".join(map(str, descriptors))
    before = (sys.executable, "-I", "-S", "-c", _PLACE, numbers)
    return [*map(os.fsencode, before), *argv]


@asynccontextmanager
async def open_direct_processes(clock: Clock) -> AsyncGenerator[DirectProcesses]:
    """At the end of the block, every process still in its group has ended."""
    processes = DirectProcesses(clock)
    try:
        yield processes
    finally:
        await processes.close()

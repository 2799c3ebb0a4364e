"""Running processes of any kind: the handles, the table that holds them, and their requests.

A subclass of `ProcessTable` starts the processes (`direct.py`, `supervised.py`).
"""

import asyncio
import errno
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Generic, TypeVar

from culm.clock import Clock
from culm.file_limit import file_limit_of_user
from culm.processes.base import (
    KILL_GRACE_S,
    ProcessExit,
    ProcessInfo,
    ProcessRequest,
    ProcessStartFailed,
)
from culm.processes.linux import TOKEN_NAME
from culm.processes.packets import PASSED_MAX, SpawnCommand

DESCRIPTORS_MAX = PASSED_MAX - 2  # Besides the channel and the command.


class HeldProcess(ABC):
    """The part of a `ProcessHandle` that does not depend on how the process was started."""

    def __init__(self, request: ProcessRequest, pid: int, started_s: float) -> None:
        self.request = request
        self.pid = pid
        self.started_s = started_s
        self.exit: ProcessExit | None = None
        self.is_stopping = False
        self._ended = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    @abstractmethod
    async def kill(self, grace_s: float = KILL_GRACE_S) -> ProcessExit: ...

    async def wait(self) -> ProcessExit:
        await self._ended.wait()
        assert self.exit is not None
        return self.exit

    def end(self, exit_: ProcessExit) -> None:
        """Record the end; only the first call has an effect."""
        if self.exit is None:
            self.exit = exit_
            self._ended.set()

    async def _ends_by(self, at_s: float) -> bool:
        try:
            async with asyncio.timeout_at(at_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True


T = TypeVar("T", bound=HeldProcess)


class ProcessTable(Generic[T]):
    """The processes of one client. The part of `Processes` that needs no supervisor."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._held: dict[int, T] = {}  # By a number of the subclass.

    async def end_all(self, workspace_id: str) -> list[int]:
        return await self._end(self._held_for(workspace_id))

    def _held_for(self, workspace_id: str) -> list[T]:
        return [
            process
            for process in self._held.values()
            if process.request.owner.workspace_id == workspace_id
        ]

    async def _end(self, held: Iterable[T]) -> list[int]:
        """Kill processes; return the pids that could not be killed."""
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(process.kill(), name=f"end {process.pid}") for process in held
            ]
        return sorted({pid for task in tasks for pid in task.result().left})

    def _started_s(self, request: ProcessRequest) -> float:
        return request.started_s or self._clock.monotonic_s()

    def _show(self, process: T, pids: list[int], rss_bytes: int) -> ProcessInfo:
        request = process.request
        return ProcessInfo(
            process.pid,
            request.title or " ".join(request.argv),
            request.owner,
            max(0.0, self._clock.monotonic_s() - process.started_s),
            rss_bytes,
            tuple(pids),
            process.is_stopping,
        )


def make_command(request: ProcessRequest, token: str | None) -> SpawnCommand:
    """Raises `ProcessStartFailed` for values no kernel accepts. Sidecars have no token."""
    if not request.argv or not request.argv[0]:
        raise ProcessStartFailed("the command is empty")
    if len(request.descriptors) > DESCRIPTORS_MAX:
        raise ProcessStartFailed(
            f"too many descriptors: at most {DESCRIPTORS_MAX} can be passed on"
        )
    for name in request.env:
        if not name or "=" in name:
            raise ProcessStartFailed(f"invalid environment variable name: {name!r}")
    env = request.env if token is None else {**request.env, TOKEN_NAME: token}
    return SpawnCommand(
        [_encode(argument, "an argument") for argument in request.argv],
        _encode(request.cwd, "the working directory"),
        [_encode(f"{name}={value}", f"the variable {name!r}") for name, value in env.items()],
        file_limit_of_user(),
    )


def _encode(text: str, what: str) -> bytes:
    if "\0" in text:
        raise ProcessStartFailed(f"{what} contains a NUL character")
    try:
        return os.fsencode(text)
    except UnicodeEncodeError as exc:
        raise ProcessStartFailed(f"{what} cannot be encoded") from exc


def describe_failure(request: ProcessRequest, step: str, number: int) -> str:
    """Describe why a start failed. May access the file system."""
    name = request.argv[0]
    reason = os.strerror(number).lower()
    if step == "chdir":
        return _describe_directory(request.cwd, number, reason)
    if step == "fork":
        return f"no further process can be started: {reason}"
    if step != "exec":
        return f"`{name}` could not be prepared: {reason}"
    match number:
        case errno.ENOENT if "/" in name and Path(request.cwd, name).exists():
            return f"`{name}` cannot be executed: the interpreter it names is missing"
        case errno.ENOENT:
            where = "" if "/" in name else " in PATH"
            return f"`{name}` was not found{where}"
        case errno.EACCES:
            return f"`{name}` cannot be executed: permission denied, or it is not executable"
        case errno.E2BIG:
            return f"`{name}` cannot be executed: its arguments and environment are too long"
        case errno.ENOEXEC:
            return f"`{name}` cannot be executed: it is not a program and names no interpreter"
        case _:
            return f"`{name}` cannot be executed: {reason}"


def _describe_directory(cwd: str, number: int, reason: str) -> str:
    match number:
        case errno.ENOENT:
            return f"the working directory {cwd} does not exist"
        case errno.ENOTDIR:
            return f"{cwd} is not a directory"
        case _:
            return f"the working directory {cwd} cannot be entered: {reason}"

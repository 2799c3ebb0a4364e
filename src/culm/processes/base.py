"""Interfaces for starting processes and for ending them, with all their descendants, reliably."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct, field

KILL_GRACE_S = 1.0  # Between SIGTERM and SIGKILL.
KILL_BOUND_S = 4.0  # For a whole kill with its verification; a stopped run has 5 seconds.


class ProcessOwner(Struct, frozen=True):
    """The workspace, session, run and call that a process runs for, shown in `GET …/processes`."""

    workspace_id: str
    kind: str  # call, job, hook, tool, shell, agent
    session_id: str = ""
    run_id: str = ""
    tool_call_id: str = ""


class ProcessRequest(Struct, frozen=True):
    """A process to start."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]  # The complete environment: nothing is inherited.
    owner: ProcessOwner
    # Our descriptors, which become descriptors 0, 1, 2 and up in the process. The caller closes its
    # own copies.
    descriptors: Sequence[int]
    title: str = ""  # The command as displayed to people.
    started_s: float = 0.0  # Monotonic; 0 means the time of the start.


class ProcessExit(Struct, frozen=True):
    """The exit status of a requested process, and the fate of the processes it started."""

    code: int | None  # None if a signal ended it ...
    signal: int | None = None  # ... which is this one.
    swept: int = 0  # Processes it left behind that were killed.
    left: tuple[int, ...] = ()  # Pids that could not be killed in time; they stay listed.
    lost: bool = False  # Its supervisor died, so the exit status is unknown.


class ProcessStartFailed(Exception):
    """The process could not be started. The message gives the reason."""


class ProcessHandle(Protocol):
    """A supervised process with all its descendants."""

    @property
    def pid(self) -> int: ...

    @property
    def request(self) -> ProcessRequest: ...

    async def wait(self) -> ProcessExit:
        """Wait until the process and all its descendants have ended. Several tasks may wait."""
        ...

    async def kill(self, grace_s: float = KILL_GRACE_S) -> ProcessExit:
        """Terminate the whole tree, then kill it, and verify. Takes at most `KILL_BOUND_S`.

        Once begun, the kill continues even if it is no longer awaited. A grace period that would
        not leave time for the verification is shortened.
        """
        ...


class ProcessInfo(Struct, frozen=True):
    """A supervised process as displayed to people."""

    pid: int
    title: str
    owner: ProcessOwner
    age_s: float
    rss_bytes: int  # Sum over the process and its descendants.
    pids: Sequence[int] = field(default_factory=tuple[int, ...])
    stopping: bool = False  # It was killed but has not ended yet.


class WorkerChannel(Struct, frozen=True):
    """A connection by which another process may use our supervisor while that supervisor lives."""

    socket: socket.socket  # To be passed on; the caller closes its own copy.
    process_tag: int
    base: int
    # Set when the peer is gone and every process it had requested has ended.
    over: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerSupervisor(Protocol):
    """The supervisor's services for our own worker processes, which are not commands of a tool."""

    async def start_sidecar(self, request: ProcessRequest) -> None:
        """Start a process that dies with the supervisor. Raises `ProcessStartFailed`.

        Its forks outlive it and are adopted by the supervisor or by us. Its end is not reported:
        the caller detects it by holding the other end of a descriptor that was passed on.
        """
        ...

    async def connect(self) -> WorkerChannel:
        """Open a channel for one more client. Raises `ProcessStartFailed`."""
        ...


class Processes(Protocol):
    """Starts and ends every process that a tool needs."""

    @property
    def worker_supervisor(self) -> WorkerSupervisor | None:
        """The services for workers; None where no supervisor exists."""
        ...

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        """Start a process; raises `ProcessStartFailed`. A canceled start kills the process."""
        ...

    def warm_nowait(self) -> None:
        """Prepare for a process that will be needed soon, without waiting."""
        ...

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        """List the processes of a workspace, including those that could not be ended yet."""
        ...

    async def end_all(self, workspace_id: str) -> list[int]:
        """End all processes of a workspace; return the pids that could not be ended."""
        ...


class NoProcesses:
    """Implements `Processes` without starting any: for simulations and for tools that need none."""

    worker_supervisor = None

    def warm_nowait(self) -> None:
        pass

    async def start(self, request: ProcessRequest) -> ProcessHandle:
        raise ProcessStartFailed("processes are disabled here")

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        return []

    async def end_all(self, workspace_id: str) -> list[int]:
        return []

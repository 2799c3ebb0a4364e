"""The seam towards processes: what is started for whom, and how it is ended for certain."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

KILL_GRACE_S = 1.0  # Between asking a process to end and ending it.
KILL_BOUND_S = 4.0  # All of a kill, with its verification; a stopped run has 5 seconds.


@dataclass(frozen=True, slots=True)
class ProcessOwner:
    """For whom a process runs. Shown in `GET …/processes`."""

    workspace_id: str
    kind: str  # call, job, hook, tool, shell, agent
    session_id: str = ""
    run_id: str = ""
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class ProcessRequest:
    """A process to start."""

    argv: Sequence[str]
    cwd: str
    env: Mapping[str, str]  # All of it: nothing is inherited.
    owner: ProcessOwner
    # Ours, passed on as descriptors 0, 1, 2 and further; the caller closes its own copies.
    descriptors: Sequence[int]
    title: str = ""  # What people are shown; the command as they know it.
    started_s: float = 0.0  # Seconds since 1970; 0 means when it is started.


@dataclass(frozen=True, slots=True)
class ProcessExit:
    """How the process that was ordered ended, and what became of what it had started."""

    code: int | None  # None if a signal ended it ...
    signal: int | None = None  # ... which is this one.
    swept: int = 0  # Processes it left behind, which were ended.
    left: tuple[int, ...] = ()  # Pids that could not be ended in time; they stay listed.
    lost: bool = False  # Its keeper died: how it ended is not known.


class ProcessStartFailed(Exception):
    """The process could not be started. Says why, in words."""


class ProcessHandle(Protocol):
    """A process in custody, with everything that descends from it."""

    @property
    def pid(self) -> int: ...

    @property
    def order(self) -> ProcessRequest: ...

    async def wait(self) -> ProcessExit:
        """Wait until it, and all that descends from it, has ended. May be awaited by several."""
        ...

    async def kill(self, grace_s: float = KILL_GRACE_S) -> ProcessExit:
        """Ask all of it to end, then end it, and verify. At most `KILL_BOUND_S`.

        Once begun it goes on, whether or not it is awaited. A grace that would not leave the
        time to verify is shortened.
        """
        ...


@dataclass(frozen=True, slots=True)
class ProcessInfo:
    """What custody holds, as people see it."""

    pid: int
    title: str
    owner: ProcessOwner
    age_s: float
    rss_bytes: int  # Of it and all that descends from it.
    pids: Sequence[int] = field(default_factory=tuple[int, ...])
    stopping: bool = False  # It was killed, and is not gone yet.


@dataclass(frozen=True, slots=True)
class WorkerChannel:
    """A way for another process to order from our keeper, as long as that lives."""

    socket: socket.socket  # To be passed on; the caller closes its own copy.
    process_tag: int
    base: int
    # Set when whoever had the socket is gone, and with it every process it had ordered.
    over: asyncio.Event = field(default_factory=asyncio.Event)


class WorkerSupervisor(Protocol):
    """What a keeper does for processes of our own, which are in nobody's custody: workers."""

    async def start_sidecar(self, order: ProcessRequest) -> None:
        """Have it started by the keeper, with which it dies; raises `StartFailed`.

        What it forks outlives it, and falls to the keeper or to us. Nothing is told of it: who
        starts one holds the other end of something that it was given.
        """
        ...

    async def connect(self) -> WorkerChannel:
        """Raises `StartFailed`."""
        ...


class Processes(Protocol):
    """Who starts and ends every process a tool needs."""

    @property
    def nursery(self) -> WorkerSupervisor | None:
        """None where there is no keeper."""
        ...

    async def start(self, order: ProcessRequest) -> ProcessHandle:
        """Start it; raises `StartFailed`. If it is cancelled meanwhile, it is killed first."""
        ...

    def warm_nowait(self) -> None:
        """A process will be wanted soon: get ready, without waiting."""
        ...

    async def processes(self, workspace_id: str) -> list[ProcessInfo]:
        """What is held for a workspace, also what could not be ended yet."""
        ...

    async def end_all(self, workspace_id: str) -> list[int]:
        """End everything of a workspace; returns the pids that could not be ended."""
        ...

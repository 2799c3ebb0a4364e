"""The test bed of `fleet.py`: a fleet with real workers, other processes, and their memory."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from msgspec import Raw

from culm.clock import LoopClock
from culm.fleet.executor import Outcome
from culm.fleet.host.caller import DenyAll, RunControl
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.local import open_local_launcher
from culm.fleet.host.pool import PoolBounds
from culm.fleet.host.run_driver import drive
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import PROVISION_VERSION, EchoKind, Identity, Provision
from culm.fleet.transport.base import Link
from culm.fleet.transport.websocket import connect_websocket
from culm.ids import Ids
from culm.processes.client import open_processes

STEP_TIMEOUT_S = 60.0  # The longest single step takes a few seconds.
END_TIMEOUT_S = 20.0
TEXT = "four words come back"
ANSWER_EVENTS = len(TEXT.split()) + 1  # Events: every word, and the completion.


class CountingCallbacks(DenyAll):
    """`HostCallbacks` that record the time of the first event, and count events and gaps."""

    def __init__(self) -> None:
        self.first_ns = 0
        self.events = 0
        self.gaps = 0

    async def on_event(self, event: Raw) -> None:
        if not self.events:
            self.first_ns = time.perf_counter_ns()
        self.events += 1

    async def on_gap(self) -> None:
        self.gaps += 1


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one run."""

    outcome: Outcome
    events: int
    gaps: int
    first_ms: float  # From the assignment to the first event.
    took_ms: float  # And to the end.

    @property
    def is_echo(self) -> bool:
        is_complete = self.outcome.status == "completed" and self.outcome.result == f"echo: {TEXT}"
        return is_complete and self.events == ANSWER_EVENTS


class Bed:
    """A fleet whose workers echo. Made by `open_bed`."""

    def __init__(self, fleet: Fleet, folder: Path) -> None:
        self._fleet = fleet
        self._fabric_dir = str(folder / "fabric")

    @property
    def pids(self) -> list[int]:
        return [worker.pid for worker in self._fleet.workers if worker.pid is not None]

    async def run(self, role: str) -> Answer:
        """Run an echo; a new role needs a new worker."""
        provision = Provision(
            PROVISION_VERSION,
            Identity("child", role=role, depth=1),
            EchoKind(),
            self._fabric_dir,
        )
        callbacks = CountingCallbacks()
        start_ns = time.perf_counter_ns()
        driven = await self._fleet.run(provision, RunSpec(TEXT), callbacks, RunControl())
        return _answer(driven.outcome, callbacks, start_ns)

    async def run_many(self, role: str, runs: int) -> list[Answer]:
        """Start so many runs at once."""
        async with asyncio.timeout(STEP_TIMEOUT_S), asyncio.TaskGroup() as group:
            tasks = [group.create_task(self.run(role)) for _ in range(runs)]
        return [task.result() for task in tasks]


@asynccontextmanager
async def open_bed(folder: Path, idle_max: int) -> AsyncGenerator[Bed]:
    """A fleet with a pool of at most so many idle workers."""
    clock = LoopClock()
    bounds = FleetBounds(pool=PoolBounds(idle_per_key_max=idle_max, idle_max=idle_max))
    async with (
        open_processes(folder / "data", clock, Ids()) as processes,
        open_local_launcher(processes, folder / "fabric", clock) as launcher,
        open_fleet(launcher, clock, bounds) as fleet,
    ):
        yield Bed(fleet, folder)


async def run_on(link: Link, spec: RunSpec) -> Answer:
    """Run over an open link."""
    callbacks = CountingCallbacks()
    start_ns = time.perf_counter_ns()
    async with asyncio.timeout(STEP_TIMEOUT_S):
        driven = await drive(link, spec, callbacks, RunControl(), LoopClock())
    return _answer(driven.outcome, callbacks, start_ns)


async def connect_many(endpoint: str, links: int) -> list[Link]:
    """Connect one after the other: the listen backlog of a worker is limited."""
    return [await connect_websocket(endpoint) for _ in range(links)]


async def run_echoes(links: list[Link]) -> list[Answer]:
    """Start one run on each link at once."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run_on(link, RunSpec(TEXT))) for link in links]
    return [task.result() for task in tasks]


def _answer(outcome: Outcome, callbacks: CountingCallbacks, start_ns: int) -> Answer:
    first_ms = (callbacks.first_ns - start_ns) / 1e6
    took_ms = (time.perf_counter_ns() - start_ns) / 1e6
    return Answer(outcome, callbacks.events, callbacks.gaps, first_ms, took_ms)


# --- other processes


def spawn_bare(processes: int = 1) -> None:
    """Start so many interpreters that do nothing at once, and wait for them.

    With `vfork`, as `subprocess` does: after a fork this process would be slower for a while.
    """
    started = [subprocess.Popen((sys.executable, "-c", "pass")) for _ in range(processes)]
    for process in started:
        process.wait(STEP_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class Serving:
    """A process that accepts assignments."""

    pid: int
    endpoint: str


@asynccontextmanager
async def open_sender() -> AsyncGenerator[Serving]:
    """A worker that sends as many events as requested."""
    async with _open_serving("-m", "bench.fleet_sender") as serving:
        yield serving


@asynccontextmanager
async def open_service(folder: Path) -> AsyncGenerator[Serving]:
    """`culm agent serve`, for many connections at once."""
    options = ("--role", "bench", "--executor", "echo", "--no-auth", "--data-dir", str(folder))
    async with _open_serving("-m", "culm", "agent", "serve", *options) as serving:
        yield serving


@asynccontextmanager
async def _open_serving(*args: str) -> AsyncGenerator[Serving]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *args,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(STEP_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        found = re.search(r"ws://[0-9.:]+", line)
        assert found is not None, line
        yield Serving(process.pid, found[0])
    finally:
        with suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(END_TIMEOUT_S):
            await process.communicate()


# --- memory


@dataclass(frozen=True, slots=True)
class Memory:
    pss_mb: float  # Shared pages are divided among the processes.
    own_mb: float  # Private pages.


def memory_of(pid: int) -> Memory:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    kb = {name: int(value) for name, value in re.findall(r"^(\w+): +(\d+) kB$", text, re.M)}
    return Memory(kb["Pss"] / 1024, (kb["Private_Clean"] + kb["Private_Dirty"]) / 1024)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True

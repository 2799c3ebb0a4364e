"""Host test support: recording callbacks, a driven run, and fake workers."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Raw

from culm.fleet.executor import HostCallFailed, completed
from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.caller import HostCallbacks, RunControl, WorkerAsk
from culm.fleet.host.run_driver import RunResult, drive
from culm.fleet.protocol.frames import (
    Batch,
    Cancel,
    ChildFrame,
    EventBatch,
    EventFrame,
    ParentFrame,
    Qos,
    RunSpec,
    TerminalFrame,
    encode_frame,
    parse_parent_frame,
)
from culm.fleet.provision import NO_LIMITS, EchoKind, Identity, Provision, WorkerLimits
from culm.fleet.transport.base import Link
from culm.fleet.transport.memory import MemoryLink, MemoryListener, memory_pair
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, FakeClock

T = TypeVar("T")
RUN = RunSpec("do it")
DONE = TerminalFrame("completed", result="done")
CLEAN = RunResult(completed("done"), began=True, is_from_worker=True)
OURS = WorkerLimits(host_calls=True)


def token(text: str) -> EventFrame:
    return EventFrame(Raw(b'{"type":"token","content":"%s"}' % text.encode()))


def batch(first: int, qos: Qos, *events: bytes) -> EventBatch:
    last = first + len(events) - 1
    return EventBatch(Batch(first, last, qos, [Raw(one) for one in events], execution_epoch=1))


def provision(child_id: str = "child", depth: int = 1) -> Provision:
    return Provision(2, Identity(child_id, depth=depth), EchoKind(), "/nowhere/fabric")


def raw(value: dict[str, Json]) -> Raw:
    return Raw(encode(value))


async def run_pending(times: int = 30) -> None:
    """Let every ready task run."""
    for _ in range(times):
        await asyncio.sleep(0)


async def in_time(wait: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await wait


class RecordingCallbacks:
    """`HostCallbacks` that record events and asks and answer as the test sets."""

    def __init__(self) -> None:
        self.events: list[str] = []  # Raw events, and `gap`.
        self.asked: list[WorkerAsk] = []
        self.withdrawn = 0  # Asks and calls that were cancelled.
        self.may_continue = asyncio.Event()  # Cleared: the next event waits for it.
        self.may_continue.set()
        self.decide: Callable[[WorkerAsk], Awaitable[bool]] = _denies
        self.handle_call: Callable[[Mapping[str, Json]], Awaitable[Json]] = _fails

    async def on_event(self, event: Raw) -> None:
        await self.may_continue.wait()
        self.events.append(bytes(event).decode())

    async def on_gap(self) -> None:
        self.events.append("gap")

    async def on_ask(self, ask: WorkerAsk) -> bool:
        self.asked.append(ask)
        try:
            return await self.decide(ask)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        try:
            return await self.handle_call(args)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise


async def _denies(ask: WorkerAsk) -> bool:
    return False


async def _fails(args: Mapping[str, Json]) -> Json:
    raise HostCallFailed("it cannot be done")


async def never(_: object) -> bool:
    return await asyncio.get_running_loop().create_future()


# --- one link, whose worker end belongs to the test


@dataclass
class DriveHarness:
    """A run driven over a link in memory; the test plays the worker."""

    clock: FakeClock
    controls: RunControl
    link: MemoryLink  # The worker's end.
    task: asyncio.Task[RunResult]

    async def receive(self) -> ParentFrame:
        data = await in_time(self.link.receive())
        assert data is not None, "the host closed the link"
        return parse_parent_frame(data)

    async def send(self, *frames: ChildFrame) -> None:
        for frame in frames:
            await in_time(self.link.send(encode_frame(frame)))

    async def assert_nothing_sent(self) -> None:
        """Assert that the host has sent nothing."""
        await run_pending()
        no_wait = asyncio.timeout(0)
        try:
            async with no_wait:
                data = await self.link.receive()
        except TimeoutError:
            return
        raise AssertionError(f"the host sent {data!r}")

    async def end(self) -> RunResult:
        return await in_time(self.task)


@asynccontextmanager
async def open_drive_harness(
    callbacks: HostCallbacks,
    controls: RunControl | None = None,
    limits: WorkerLimits = NO_LIMITS,
    spec: RunSpec = RUN,
) -> AsyncGenerator[DriveHarness]:
    """Drive `spec`; nothing of it is left at the end of the block."""
    clock = FakeClock()
    controls = controls or RunControl()
    ours, theirs = memory_pair()
    async with asyncio.TaskGroup() as tasks:
        work = drive(ours, spec, callbacks, controls, clock, limits=limits)
        harness = DriveHarness(clock, controls, theirs, tasks.create_task(work))
        try:
            yield harness
        finally:
            harness.task.cancel()
    assert clock.armed() == 0


# --- workers that are tasks

WorkerScript = Callable[["FakeWorker", Link], Awaitable[None]]  # Behavior on one connection.


class TrackedLink:
    """The host's end of a link; records that the host closed it."""

    def __init__(self, link: MemoryLink) -> None:
        self.link = link
        self.receive = link.receive
        self.room = link.room
        self.send = link.send
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        try:
            await asyncio.sleep(0)
        finally:
            await self.link.close()


@dataclass(eq=False)
class FakeWorker:
    """Implements `Worker`: serves one connection after the other, like a reusable worker."""

    id: str
    provision: Provision
    pid: int | None
    script: WorkerScript
    listener: MemoryListener
    stderr: str = ""
    runs: list[ParentFrame] = field(default_factory=list[ParentFrame])
    task: asyncio.Task[None] | None = None
    links: list["TrackedLink"] = field(default_factory=list["TrackedLink"])
    kills_failing: int = 0
    kill_allowed: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # Cleared: a kill takes longer.

    def __post_init__(self) -> None:
        self.kill_allowed.set()

    @property
    def endpoint(self) -> str:
        return self.listener.endpoint

    @property
    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done()

    async def serve(self) -> None:
        try:
            while True:
                link = await self.listener.accept()
                try:
                    await self.script(self, link)
                finally:
                    await link.close()
        finally:
            self.die()

    def die(self) -> None:
        self.listener.close()
        for link in self.links:
            link.link.cut("the process ended")
        if self.task is not None:
            self.task.cancel()

    async def connect(self) -> Link:
        await asyncio.sleep(0)
        link = TrackedLink(self.listener.connect())
        self.links.append(link)
        return link

    async def kill(self) -> None:
        await asyncio.sleep(0)
        if self.kills_failing:
            self.kills_failing -= 1
            raise OSError("it would not die")
        await self.kill_allowed.wait()
        self.die()
        if self.task is not None:
            await asyncio.wait({self.task})

    async def stderr_tail(self) -> str:
        return self.stderr


async def echo_script(worker: FakeWorker, link: Link) -> None:
    """Echo the assignment and complete; the assignments `fail` and `wait` fail and wait."""
    while (data := await link.receive()) is not None:
        frame = parse_parent_frame(data)
        worker.runs.append(frame)
        match frame:
            case RunSpec(assignment="fail"):
                answers = [TerminalFrame("error", error="the model refused")]
            case RunSpec(assignment=text):
                answers: list[ChildFrame] = [token(text)]
                if text != "wait":
                    answers.append(TerminalFrame("completed", result=text))
            case Cancel():
                answers = [TerminalFrame("cancelled")]
            case _:
                answers = []
        for answer in answers:
            await link.send(encode_frame(answer))


async def late_cancel_script(worker: FakeWorker, link: Link) -> None:
    """Complete the run after its cancel arrives."""
    await link.receive()
    await link.send(encode_frame(token("so far")))
    await link.receive()
    await link.send(encode_frame(DONE))
    await link.receive()


async def silent_script(worker: FakeWorker, link: Link) -> None:
    while (data := await link.receive()) is not None:
        worker.runs.append(parse_parent_frame(data))


async def crash_script(worker: FakeWorker, link: Link) -> None:
    """End the process as soon as it receives a run."""
    await link.receive()
    worker.stderr = "Segmentation fault"
    worker.die()


async def crash_during_run_script(worker: FakeWorker, link: Link) -> None:
    await link.receive()
    await link.send(encode_frame(token("so far")))
    worker.stderr = "out of memory; token=abc"
    await run_pending()
    worker.die()


class FakeLauncher:
    """Implements `Launcher`: each launch makes a fake worker with the next script."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._pids = itertools.count(101)
        self.scripts: list[
            WorkerScript | LaunchFailed
        ] = []  # For the next launches; then `echo_script`.
        self.workers: list[FakeWorker] = []
        self.unfinished_cleanups = 0  # Cancelled launches that have not cleaned up.
        self.launches_allowed = asyncio.Event()  # Cleared: launches wait.
        self.launches_allowed.set()

    @property
    def alive(self) -> list[FakeWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    async def launch(self, provision: Provision) -> FakeWorker:
        script = self.scripts.pop(0) if self.scripts else echo_script
        await asyncio.sleep(0)
        try:
            await self.launches_allowed.wait()
        except asyncio.CancelledError:
            self.unfinished_cleanups += 1
            await run_pending(20)  # A cleanup takes a while and must not be interrupted.
            self.unfinished_cleanups -= 1
            raise
        if isinstance(script, LaunchFailed):
            raise script
        name = provision.identity.child_id
        worker = FakeWorker(name, provision, next(self._pids), script, MemoryListener(name))
        worker.task = self._tasks.create_task(worker.serve(), name=f"worker {name}")
        self.workers.append(worker)
        return worker


@asynccontextmanager
async def open_fake_launcher(
    make: Callable[[asyncio.TaskGroup], FakeLauncher] = FakeLauncher,
) -> AsyncGenerator[FakeLauncher]:
    async with asyncio.TaskGroup() as tasks:
        launcher = make(tasks)
        try:
            yield launcher
        finally:
            for worker in launcher.workers:
                worker.die()

"""Both sides of a parent, for its tests: who oversees a run, and workers that a test plays."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from msgspec import Raw

from culm.fleet.executor import HostCallFailed, completed
from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.callbacks import HostCallbacks, WorkerAsk
from culm.fleet.host.run_control import RunControl
from culm.fleet.host.run_driver import NO_TERMS, HostSettings, RunResult, drive
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
from culm.fleet.provision import EchoKind, Identity, Provision
from culm.fleet.transport.base import Link
from culm.fleet.transport.memory import MemoryLink, MemoryListener, memory_pair
from culm.wire.codec import Json, encode
from tests.support import WAIT_S, FakeClock

T = TypeVar("T")
RUN = RunSpec("do it")
DONE = TerminalFrame("completed", result="done")
CLEAN = RunResult(completed("done"), began=True, is_from_worker=True)
OURS = HostSettings(host_calls=True)


def token(text: str) -> EventFrame:
    return EventFrame(Raw(b'{"type":"token","content":"%s"}' % text.encode()))


def batch(first: int, qos: Qos, *events: bytes) -> EventBatch:
    last = first + len(events) - 1
    return EventBatch(Batch(first, last, qos, [Raw(one) for one in events], execution_epoch=1))


def provision(child_id: str = "child", depth: int = 1) -> Provision:
    return Provision(2, Identity(child_id, depth=depth), EchoKind(), "/nowhere/fabric")


def raw(said: dict[str, Json]) -> Raw:
    return Raw(encode(said))


async def settle(times: int = 30) -> None:
    """Let everything run that can run now."""
    for _ in range(times):
        await asyncio.sleep(0)


async def in_time(wait: Awaitable[T]) -> T:
    async with asyncio.timeout(WAIT_S):
        return await wait


class Witness:
    """An overseer that remembers what it was told, and answers as it was told to."""

    def __init__(self) -> None:
        self.told: list[str] = []  # Events as they were written, and `gap`.
        self.asked: list[WorkerAsk] = []
        self.withdrawn = 0  # Asks and calls that were cancelled.
        self.let_go = asyncio.Event()  # Cleared: the next event waits for it.
        self.let_go.set()
        self.decide: Callable[[WorkerAsk], Awaitable[bool]] = _denies
        self.carry_out: Callable[[Mapping[str, Json]], Awaitable[Json]] = _fails

    async def on_event(self, event: Raw) -> None:
        await self.let_go.wait()
        self.told.append(bytes(event).decode())

    async def on_gap(self) -> None:
        self.told.append("gap")

    async def on_ask(self, ask: WorkerAsk) -> bool:
        self.asked.append(ask)
        try:
            return await self.decide(ask)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        try:
            return await self.carry_out(args)
        except asyncio.CancelledError:
            self.withdrawn += 1
            raise


async def _denies(ask: WorkerAsk) -> bool:
    return False


async def _fails(args: Mapping[str, Json]) -> Json:
    raise HostCallFailed("it cannot be done")


async def never(_: object) -> bool:
    return await asyncio.get_running_loop().create_future()


# --- one link, whose other end the test holds


@dataclass
class Talk:
    """A run that is driven over a link in memory."""

    clock: FakeClock
    controls: RunControl
    link: MemoryLink  # The worker's end.
    task: asyncio.Task[RunResult]

    async def hear(self) -> ParentFrame:
        data = await in_time(self.link.receive())
        assert data is not None, "the parent closed the link"
        return parse_parent_frame(data)

    async def say(self, *frames: ChildFrame) -> None:
        for frame in frames:
            await in_time(self.link.send(encode_frame(frame)))

    async def silence(self) -> None:
        """Show that nothing was sent."""
        await settle()
        hearing = asyncio.timeout(0)
        try:
            async with hearing:
                data = await self.link.receive()
        except TimeoutError:
            return
        raise AssertionError(f"the parent said {data!r}")

    async def end(self) -> RunResult:
        return await in_time(self.task)


@asynccontextmanager
async def open_talk(
    callbacks: HostCallbacks,
    controls: RunControl | None = None,
    terms: HostSettings = NO_TERMS,
    spec: RunSpec = RUN,
) -> AsyncGenerator[Talk]:
    """Have `spec` driven; at the end of the block nothing of it is left."""
    clock = FakeClock()
    controls = controls or RunControl()
    ours, theirs = memory_pair()
    async with asyncio.TaskGroup() as tasks:
        work = drive(ours, spec, callbacks, controls, clock, terms=terms)
        talk = Talk(clock, controls, theirs, tasks.create_task(work))
        try:
            yield talk
        finally:
            talk.task.cancel()
    assert clock.armed() == 0


# --- workers that are tasks

Play = Callable[["Player", Link], Awaitable[None]]  # What a worker does with one connection.


class Handed:
    """A link in the hands of a parent, which has to close it."""

    def __init__(self, link: MemoryLink) -> None:
        self.link = link
        self.receive = link.receive
        self.send = link.send
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True
        try:
            await asyncio.sleep(0)
        finally:
            await self.link.close()


@dataclass(eq=False)
class Player:
    """Implements `Worker`: one connection after the other, as a reusable worker takes them."""

    id: str
    provision: Provision
    pid: int | None
    play: Play
    listener: MemoryListener
    words: str = ""
    runs: list[ParentFrame] = field(default_factory=list[ParentFrame])
    task: asyncio.Task[None] | None = None
    links: list["Handed"] = field(default_factory=list["Handed"])
    kills_failing: int = 0
    mortal: asyncio.Event = field(default_factory=asyncio.Event)  # Cleared: a kill takes longer.

    def __post_init__(self) -> None:
        self.mortal.set()

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
                    await self.play(self, link)
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
        link = Handed(self.listener.connect())
        self.links.append(link)
        return link

    async def kill(self) -> None:
        await asyncio.sleep(0)
        if self.kills_failing:
            self.kills_failing -= 1
            raise OSError("it would not die")
        await self.mortal.wait()
        self.die()
        if self.task is not None:
            await asyncio.wait({self.task})

    async def stderr_tail(self) -> str:
        return self.words


async def echoes(worker: Player, link: Link) -> None:
    """One run: its assignment as an event, and the end. Until it is cancelled if it says so."""
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


async def obeys_too_late(worker: Player, link: Link) -> None:
    """It has done all when it hears that it shall not."""
    await link.receive()
    await link.send(encode_frame(token("so far")))
    await link.receive()
    await link.send(encode_frame(DONE))
    await link.receive()


async def says_nothing(worker: Player, link: Link) -> None:
    while (data := await link.receive()) is not None:
        worker.runs.append(parse_parent_frame(data))


async def dies(worker: Player, link: Link) -> None:
    """As its process would with a run that it cannot bear."""
    await link.receive()
    worker.words = "Segmentation fault"
    worker.die()


async def dies_at_work(worker: Player, link: Link) -> None:
    await link.receive()
    await link.send(encode_frame(token("so far")))
    worker.words = "out of memory; token=abc"
    await settle()
    worker.die()


class Stage:
    """Implements `Launcher`: each launch is a new player, who plays what is next."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._pids = itertools.count(101)
        self.plays: list[Play | LaunchFailed] = []  # For the next launches; then they echo.
        self.players: list[Player] = []
        self.torn = 0  # Launches that were not left to clean up.
        self.doors = asyncio.Event()  # Cleared: launches wait.
        self.doors.set()

    @property
    def alive(self) -> list[Player]:
        return [player for player in self.players if player.is_alive]

    async def launch(self, provision: Provision) -> Player:
        play = self.plays.pop(0) if self.plays else echoes
        await asyncio.sleep(0)
        try:
            await self.doors.wait()
        except asyncio.CancelledError:
            self.torn += 1
            await settle(20)  # To clean up takes a while, and whoever disturbs it is found out.
            self.torn -= 1
            raise
        if isinstance(play, LaunchFailed):
            raise play
        name = provision.identity.child_id
        player = Player(name, provision, next(self._pids), play, MemoryListener(name))
        player.task = self._tasks.create_task(player.serve(), name=f"worker {name}")
        self.players.append(player)
        return player


@asynccontextmanager
async def open_stage(
    make: Callable[[asyncio.TaskGroup], Stage] = Stage,
) -> AsyncGenerator[Stage]:
    async with asyncio.TaskGroup() as tasks:
        stage = make(tasks)
        try:
            yield stage
        finally:
            for player in stage.players:
                player.die()

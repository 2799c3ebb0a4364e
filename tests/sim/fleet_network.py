"""Connections between simulated processes: slow, cut, silent, saying things twice; and a tap.

What a line carries, the real memory link carries. Each end also watches its user.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from culm.fleet.transport.base import ConnectFailed, Link, LinkLost
from culm.fleet.transport.memory import MemoryLink, memory_pair
from tests.sim.fleet_world import FleetWorld, Process

Side = Literal["parent", "worker"]
GARBAGE = (b"", b"{", b"[]", b"\xff", b'{"kind":"gossip"}', b'{"kind":"event","kind":"event"}')
ENDING_S = 9.5  # A grace of 3 s, and 6 s: then the end of a cancelled run is told, or the link cut.
FOR_EVER_S = 1e6
BACKLOG = 8  # Links that nobody has accepted yet.


@dataclass(frozen=True)
class Weather:
    """What a line does to its frames."""

    room: int = 64  # Frames that fit into it, each way.
    delays: tuple[float, ...] = ()
    doubles: float = 0.0  # The share of frames that arrive twice, or thrice.
    cut_after: int = 0  # Frames, of either side; 0: never.
    silent_after: int = 0  # From then on nothing arrives, and nobody is told ...
    is_stuck: bool = False  # ... and whoever sends waits.
    garbled: int = 0  # Which frame arrives as something else; 0: none.


def draw_weather(world: FleetWorld) -> Weather:
    dice = world.dice
    room = dice.choice((2, 64, 64))
    delays = dice.choice(((), (), (0.0, 0.001, 0.03), (0.0, 0.0, 0.5, 4.0)))
    if not world.chance(0.3):
        return Weather(room, delays)
    match dice.randrange(7):
        case 0 | 1:
            return Weather(room, delays, cut_after=dice.randint(1, 14))
        case 2:
            is_stuck = dice.random() < 0.5
            return Weather(room, delays, silent_after=dice.randint(1, 10), is_stuck=is_stuck)
        case 3:
            return Weather(room, delays, garbled=dice.randint(1, 10))
        case _:
            return Weather(room, delays, doubles=dice.choice((0.1, 0.3, 1.0)))


def kind_of(frame: bytes) -> str:
    parts = frame.split(b'"', 4)  # `kind` is the first key.
    return parts[3].decode() if len(parts) == 5 else "garbage"


class Line:
    """One connection between two processes."""

    def __init__(self, world: FleetWorld, parent: Process, worker: Process) -> None:
        self.world = world
        self.weather = draw_weather(world)
        self.number = world.number()
        self.worker = worker
        self.token = ""  # Of the run that it is for, once that was said.
        self._frames = 0
        self._setbacks: list[str] = []
        near, far = memory_pair(self._carry, frames_max=self.weather.room)
        self.parent_end = End(self, near, "parent")
        self.worker_end = End(self, far, "worker")
        self._ends = (self.parent_end, self.worker_end)
        self._is_over = False
        parent.when_gone(partial(self._on_gone, self.parent_end))
        worker.when_gone(partial(self._on_gone, self.worker_end))
        world.lines.append(self)
        world.note("line", self.number, parent.name, worker.name, self.weather)

    @property
    def is_open(self) -> bool:
        """Somebody still holds an end of it."""
        return not all(end.is_closed for end in self._ends)

    def cut(self, why: str) -> None:
        """Both sides see that it broke off."""
        if not self._is_over and not any(end.is_closed for end in self._ends):
            self.hurt(why)
            self.parent_end.link.cut("the network is gone")
        self._is_over = True

    def hurt(self, why: str) -> None:
        """Whoever uses it need not complete; but if nothing was heard yet, it is tried again."""
        if self.parent_end.frames:
            self.world.harm(self.token, why)
        elif why not in self._setbacks:
            self._setbacks.append(why)
            self.world.setback(self.token, why)

    def on_heard(self) -> None:
        """The parent hears something, so it is not tried again: not even if it was on its way."""
        while self._setbacks:
            self.world.harm(self.token, self._setbacks.pop())

    def on_cancel(self) -> None:
        """Of a run that goes on, and of all that wait behind it."""
        if self.worker.is_working:
            self.world.loop.call_later(ENDING_S, self._look_at_end, self.worker_end.runs)

    def _look_at_end(self, runs: int) -> None:
        end = self.worker_end
        is_over = end.is_closed or end.terminals >= runs
        is_able = self.worker.is_alive and not self.worker.was_stopped
        self.world.expect(is_over or not is_able, "line", self.number, "keeps a cancelled run")

    def _on_gone(self, end: "End") -> None:
        """A kernel closes what its process had open; what was sent before may still arrive."""
        if end.is_closed:
            return
        end.is_closed = True
        if not self._is_over:
            self._is_over = True
            if self.world.dice.random() < 0.5:
                self.world.start(end.link.close())
            else:
                end.link.cut("connection reset by peer")

    async def _carry(self, frame: bytes) -> Sequence[bytes]:
        weather, dice = self.weather, self.world.dice
        self._frames += 1
        if self._frames == weather.cut_after:
            self.cut("cut")
            raise LinkLost("the network is gone")
        if weather.delays:
            await asyncio.sleep(dice.choice(weather.delays))
        if 0 < weather.silent_after < self._frames:
            self.hurt("silent")
            await asyncio.sleep(FOR_EVER_S if weather.is_stuck else 0)
            return ()
        if self._frames == weather.garbled:
            self.world.harm(self.token, "garbled")
            return (dice.choice(GARBAGE),)
        if weather.doubles and dice.random() < weather.doubles:
            self.world.note("twice", self.number, frame[:40])
            if b'"kind":"run"' in frame:
                self.world.harm(self.token, "asked for twice")
            return (frame,) * dice.choice((2, 2, 3))
        return (frame,)


class End:
    """Implements `Link`: one end, and what its user says there."""

    def __init__(self, line: Line, link: MemoryLink, side: Side) -> None:
        self.line = line
        self.link = link
        self.side: Side = side
        self.is_closed = False  # By its user, or with it.
        self.kinds: list[str] = []  # Of the frames that were sent from here.
        self.frames = 0  # That were received here.
        self.runs = 0  # Among them.
        self.terminals = 0  # That were sent, and are on their way.
        self._is_sending = False
        self._is_receiving = False

    async def receive(self) -> bytes | None:
        self.line.world.expect(not self._is_receiving, "two read line", self.line.number)
        self._is_receiving = True
        try:
            frame = await self.link.receive()
        finally:
            self._is_receiving = False
        if frame is not None:
            self.frames += 1
            self.runs += b'"kind":"run"' in frame
            self.line.world.note("got", self.line.number, self.side, frame)
            if self.side == "parent":
                self.line.on_heard()
            elif b'"kind":"cancel"' in frame:
                self.line.on_cancel()
        return frame

    async def send(self, frame: bytes) -> None:
        self.line.world.expect(not self._is_sending, "two send on line", self.line.number)
        self._is_sending = True
        self.kinds.append(kind_of(frame))
        try:
            await self.link.send(frame)
            self.terminals += b'"kind":"terminal"' in frame
        finally:
            self._is_sending = False

    async def close(self) -> None:
        if not self.is_closed:
            self.line.world.note("closed", self.line.number, self.side)
        self.is_closed = True
        await self.link.close()


class SimListener:
    """Implements `Listener`, for one worker."""

    def __init__(self, world: FleetWorld, process: Process) -> None:
        self.endpoint = f"memory://{process.name}"
        self.lines: list[Line] = []
        self._world = world
        self._process = process
        self._waiting: asyncio.Queue[Link] = asyncio.Queue(BACKLOG)

    async def accept(self) -> Link:
        return await self._waiting.get()

    def connect(self, parent: Process) -> Line:
        """Raises `ConnectFailed`."""
        if not self._process.is_alive or self._waiting.full():
            raise ConnectFailed("connection refused")
        line = Line(self._world, parent, self._process)
        self.lines.append(line)
        self._waiting.put_nowait(line.worker_end)
        return line

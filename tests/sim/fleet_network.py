"""Connections between simulated processes: slow, cut, silent or repeating; all are recorded.

A line uses the real memory link. Each end also checks its user.
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
ENDING_S = 9.5  # A cancelled run has ended, or its link is cut, after 3 s of grace and 6 s.
FOREVER_S = 1e6
BACKLOG = 8  # Links that are not accepted yet.


@dataclass(frozen=True)
class LinkFaults:
    """Faults of a line."""

    room: int = 64  # Frames that fit into it, each way.
    delays: tuple[float, ...] = ()
    doubles: float = 0.0  # The share of frames that arrive two or three times.
    cut_after: int = 0  # Frames, of either side; 0: never.
    silent_after: int = 0  # From then on nothing arrives, without an error ...
    is_stuck: bool = False  # ... and a send blocks.
    garbled: int = 0  # The number of the corrupted frame; 0: none.


def draw_link_faults(world: FleetWorld) -> LinkFaults:
    dice = world.dice
    room = dice.choice((2, 64, 64))
    delays = dice.choice(((), (), (0.0, 0.001, 0.03), (0.0, 0.0, 0.5, 4.0)))
    if not world.chance(0.3):
        return LinkFaults(room, delays)
    match dice.randrange(7):
        case 0 | 1:
            return LinkFaults(room, delays, cut_after=dice.randint(1, 14))
        case 2:
            is_stuck = dice.random() < 0.5
            return LinkFaults(room, delays, silent_after=dice.randint(1, 10), is_stuck=is_stuck)
        case 3:
            return LinkFaults(room, delays, garbled=dice.randint(1, 10))
        case _:
            return LinkFaults(room, delays, doubles=dice.choice((0.1, 0.3, 1.0)))


def kind_of(frame: bytes) -> str:
    parts = frame.split(b'"', 4)  # `kind` is the first key.
    return parts[3].decode() if len(parts) == 5 else "garbage"


class Line:
    """One connection between two processes."""

    def __init__(self, world: FleetWorld, parent: Process, worker: Process) -> None:
        self.world = world
        self.faults = draw_link_faults(world)
        self.number = world.number()
        self.worker = worker
        self.token = ""  # The token of its run, once it is known.
        self._frames = 0
        self._setbacks: list[str] = []
        near, far = memory_pair(self._carry, frames_max=self.faults.room)
        self.parent_end = End(self, near, "parent")
        self.worker_end = End(self, far, "worker")
        self._ends = (self.parent_end, self.worker_end)
        self._is_over = False
        parent.when_gone(partial(self._on_gone, self.parent_end))
        worker.when_gone(partial(self._on_gone, self.worker_end))
        world.lines.append(self)
        world.note("line", self.number, parent.name, worker.name, self.faults)

    @property
    def is_open(self) -> bool:
        """Return True if an end is still open."""
        return not all(end.is_closed for end in self._ends)

    def cut(self, why: str) -> None:
        """Break the line for both sides."""
        if not self._is_over and not any(end.is_closed for end in self._ends):
            self.hurt(why)
            self.parent_end.link.cut("the network is gone")
        self._is_over = True

    def hurt(self, why: str) -> None:
        """Harm the run of this line; without a received frame it is only a setback."""
        if self.parent_end.frames:
            self.world.harm(self.token, why)
        elif why not in self._setbacks:
            self._setbacks.append(why)
            self.world.setback(self.token, why)

    def on_received(self) -> None:
        """A received frame turns earlier setbacks into harm: the run is not retried."""
        while self._setbacks:
            self.world.harm(self.token, self._setbacks.pop())

    def on_cancel(self) -> None:
        """Check later that the cancelled runs have ended."""
        if self.worker.is_working:
            self.world.loop.call_later(ENDING_S, self._check_end, self.worker_end.runs)

    def _check_end(self, runs: int) -> None:
        end = self.worker_end
        is_over = end.is_closed or end.terminals >= runs
        is_able = self.worker.is_alive and not self.worker.was_stopped
        self.world.expect(is_over or not is_able, "line", self.number, "keeps a cancelled run")

    def _on_gone(self, end: "End") -> None:
        """Close the end of a dead process; earlier frames may still arrive."""
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
        faults, dice = self.faults, self.world.dice
        self._frames += 1
        if self._frames == faults.cut_after:
            self.cut("cut")
            raise LinkLost("the network is gone")
        if faults.delays:
            await asyncio.sleep(dice.choice(faults.delays))
        if 0 < faults.silent_after < self._frames:
            self.hurt("silent")
            await asyncio.sleep(FOREVER_S if faults.is_stuck else 0)
            return ()
        if self._frames == faults.garbled:
            self.world.harm(self.token, "garbled")
            return (dice.choice(GARBAGE),)
        if faults.doubles and dice.random() < faults.doubles:
            self.world.note("twice", self.number, frame[:40])
            if b'"kind":"run"' in frame:
                self.world.harm(self.token, "asked for twice")
            return (frame,) * dice.choice((2, 2, 3))
        return (frame,)


class End:
    """Implements `Link`: one end of a line, which records its frames."""

    def __init__(self, line: Line, link: MemoryLink, side: Side) -> None:
        self.line = line
        self.link = link
        self.side: Side = side
        self.is_closed = False  # By its user, or with it.
        self.kinds: list[str] = []  # Kinds of the frames sent from here.
        self.frames = 0  # Frames received here.
        self.runs = 0  # Run frames received here.
        self.terminals = 0  # Terminals sent from here.
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
                self.line.on_received()
            elif b'"kind":"cancel"' in frame:
                self.line.on_cancel()
        return frame

    @property
    def room(self) -> int:
        return self.link.room

    async def send(self, *frames: bytes) -> None:
        self.line.world.expect(not self._is_sending, "two send on line", self.line.number)
        self._is_sending = True
        try:
            for frame in frames:
                self.kinds.append(kind_of(frame))
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

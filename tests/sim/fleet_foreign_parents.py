"""Foreign parents: they send anything at any time, read slowly, and disconnect abruptly."""

import asyncio
from typing import Any

import msgspec

from culm.fleet.host.dispatch import FleetBounds
from culm.fleet.protocol.frames import (
    ApprovalReply,
    Cancel,
    ParentFrame,
    RunSpec,
    SteerFrame,
    SubAgentReply,
    encode_frame,
)
from culm.fleet.provision import CulmExtension, EchoKind, Identity, Provision
from culm.fleet.transport.base import LinkLost
from tests.sim.fleet_actors import BAD, GOOD
from tests.sim.fleet_executors import ENOUGH
from tests.sim.fleet_network import GARBAGE, End, Line
from tests.sim.fleet_workers import SimLauncher, SimWorker
from tests.sim.fleet_world import FleetWorld, Process, SimRun

KINDS = tuple(kind for kind in GOOD + BAD if kind != "die")


def start_worker(world: FleetWorld) -> SimWorker:
    """Start a worker that ends by itself when it is idle."""
    provision = Provision(
        version=2,
        identity=Identity("w"),
        executor=EchoKind(),
        fabric_dir="/fabric",
        reusable=True,
        culm=CulmExtension(host_calls=True),
    )
    owner = Process(world, "somebody")
    return SimWorker(SimLauncher(owner, FleetBounds()), provision)


class ForeignParent:
    """A foreign parent with one connection."""

    def __init__(self, world: FleetWorld, worker: SimWorker) -> None:
        self.world = world
        self.process = Process(world, f"foreign{world.number()}")
        self.runs: list[str] = []  # Tokens in the order of their run frames.
        self.received: list[dict[str, Any]] = []
        self.line: Line | None = None
        self._worker = worker
        self._dice = world.dice
        self._epoch = self._dice.choice((0, 1))
        self._pace_s = self._dice.choice((0, 0, 0.3, 1e6))  # Between two reads.
        self.process.begin(self._main)

    async def _main(self) -> None:
        await asyncio.sleep(self._dice.choice((0, 1, 20)))
        self.line = self._worker.listener.connect(self.process)
        link = self.line.parent_end
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(link))
            try:
                for _ in range(self._dice.randint(1, 9)):
                    await link.send(self._draw())
                    await asyncio.sleep(self._dice.choice((0, 0, 0.01, 1, 7)))
                if self._dice.random() < 0.7:
                    await link.send(encode_frame(Cancel()))
                    await asyncio.sleep(20)
            except LinkLost:
                pass
            reading.cancel()
        if self._dice.random() < 0.5:
            await link.close()  # Otherwise it leaves without a close.

    async def _read(self, link: End) -> None:
        try:
            while (frame := await link.receive()) is not None:
                self.received.append(msgspec.json.decode(frame))
                await asyncio.sleep(self._pace_s)
        except LinkLost:
            pass

    def _draw(self) -> bytes:
        """Draw a frame, usually a valid one."""
        dice = self._dice
        requests = [one["id"] for one in self.received if "request" in one["kind"]] + [
            "nobody asked"
        ]
        frame: ParentFrame
        match dice.randrange(10) if self.runs else 0:
            case 0 | 1 | 2:
                frame = self._run()
            case 3:
                frame = Cancel()
            case 4 | 5:
                text = dice.choice((ENOUGH, "more"))
                frame = SteerFrame(text, dice.choice(("", f"m{dice.randrange(4)}")))
            case 6 | 7:
                frame = ApprovalReply(dice.choice(requests), approved=dice.random() < 0.5)
            case 8:
                frame = SubAgentReply(dice.choice(requests), dice.choice(({"error": "no"}, 7)))
            case _:
                return dice.choice(GARBAGE)
        return encode_frame(frame)

    def _run(self) -> RunSpec:
        token = f"r{self.world.number()}"
        kind = self._dice.choice(KINDS)
        self.world.runs[token] = SimRun(token, kind, self._epoch, self.process)
        self.runs.append(token)
        size = self._dice.randint(1, 8)
        return RunSpec(f"{kind} {token} {size}", execution_epoch=self._epoch)


# --- checks


def runs_of_a_link_follow_each_other(parent: ForeignParent) -> None:
    """Runs of a link do not overlap, and each has at most one terminal."""
    terminals = 0
    for frame in parent.received:
        if frame["kind"] == "terminal":
            terminals += 1
        events = frame["batch"]["events"] if "batch" in frame else [frame.get("event", {})]
        for token in (event["token"] for event in events if "token" in event):
            place = parent.runs.index(token)
            assert place == terminals, f"{token} talks after {terminals} ends: {parent.runs}"
    assert terminals <= len(parent.runs), f"{terminals} ends of {parent.runs}"


def every_link_is_closed(parent: ForeignParent) -> None:
    """The link is closed, with at most one terminal per received run."""
    line = parent.line
    assert line is not None
    assert not line.is_open, f"line {line.number} is open"
    kinds = line.worker_end.kinds
    assert kinds.count("terminal") <= line.worker_end.runs, f"line {line.number}: {kinds}"


def check_foreign_parents(world: FleetWorld, parents: list[ForeignParent]) -> None:
    assert not world.problems, "; ".join(world.problems)
    for parent in parents:
        runs_of_a_link_follow_each_other(parent)
        every_link_is_closed(parent)
        for token in parent.runs:
            run = world.runs[token]
            assert len(run.executions) <= 1, f"{token} was done twice"
            answered = [name for name, _ in run.received_answers]
            assert len(answered) == len(set(answered)), f"{token} was answered twice: {answered}"
            admitted = [one for one in run.admitted if one[1]]
            assert len(admitted) == len(set(admitted)), f"{token} admits twice: {admitted}"

"""Parents of another make: they say anything at any time, read when they like, and just leave."""

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
    """One that nobody ends: it leaves by itself when nobody comes any more."""
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


class Stranger:
    """One connection, from its beginning to its end."""

    def __init__(self, world: FleetWorld, worker: SimWorker) -> None:
        self.world = world
        self.process = Process(world, f"stranger{world.number()}")
        self.runs: list[str] = []  # Tokens, in the order they were asked for.
        self.heard: list[dict[str, Any]] = []
        self.line: Line | None = None
        self._worker = worker
        self._dice = world.dice
        self._epoch = self._dice.choice((0, 1))
        self._pace_s = self._dice.choice((0, 0, 0.3, 1e6))  # Between two frames that it reads.
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
            await link.close()  # Else without a word.

    async def _read(self, link: End) -> None:
        try:
            while (frame := await link.receive()) is not None:
                self.heard.append(msgspec.json.decode(frame))
                await asyncio.sleep(self._pace_s)
        except LinkLost:
            pass

    def _draw(self) -> bytes:
        """Something to say; mostly it makes sense."""
        dice = self._dice
        requests = [one["id"] for one in self.heard if "request" in one["kind"]] + ["nobody asked"]
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


# --- what must hold


def runs_of_a_link_follow_each_other(stranger: Stranger) -> None:
    """All of one, then its terminal, then the next: also those that were superseded have theirs."""
    terminals = 0
    for frame in stranger.heard:
        if frame["kind"] == "terminal":
            terminals += 1
        events = frame["batch"]["events"] if "batch" in frame else [frame.get("event", {})]
        for token in (event["token"] for event in events if "token" in event):
            place = stranger.runs.index(token)
            assert place == terminals, f"{token} talks after {terminals} ends: {stranger.runs}"
    assert terminals <= len(stranger.runs), f"{terminals} ends of {stranger.runs}"


def nobody_is_left_waiting(stranger: Stranger) -> None:
    """What has arrived has ended, or nobody is there any more; and the link is closed."""
    line = stranger.line
    assert line is not None
    assert not line.is_open, f"line {line.number} is open"
    kinds = line.worker_end.kinds
    assert kinds.count("terminal") <= line.worker_end.runs, f"line {line.number}: {kinds}"


def check_strangers(world: FleetWorld, strangers: list[Stranger]) -> None:
    assert not world.problems, "; ".join(world.problems)
    for stranger in strangers:
        runs_of_a_link_follow_each_other(stranger)
        nobody_is_left_waiting(stranger)
        for token in stranger.runs:
            run = world.runs[token]
            assert len(run.executions) <= 1, f"{token} was done twice"
            heard = [name for name, _ in run.heard]
            assert len(heard) == len(set(heard)), f"{token} was answered twice: {heard}"
            admitted = [one for one in run.admitted if one[1]]
            assert len(admitted) == len(set(admitted)), f"{token} admits twice: {admitted}"

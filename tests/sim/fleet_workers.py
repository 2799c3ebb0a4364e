"""Worker processes, as a parent starts, reaches and ends them; and how that may go wrong.

What a process does is what `culm.fleet.worker.work` does: be found, serve, watch its owner, leave.
"""

import asyncio
from contextlib import suppress
from functools import partial

from culm.fleet.fabric.base import AgentRecord, OwnerProcess, Placed, renewed
from culm.fleet.parent.base import LaunchFailed
from culm.fleet.parent.dispatch import FleetBounds
from culm.fleet.provision import Provision
from culm.fleet.serving.modes import serve_on
from culm.fleet.times import format_time
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.worker.limits import mode_of, serving_terms_of
from culm.fleet.worker.main import LEAVE_S
from culm.fleet.worker.presence import open_presence
from culm.ids import Ids
from tests.sim.fleet_executors import SimExecutor
from tests.sim.fleet_network import SimListener
from tests.sim.fleet_world import CURRENT_RUN, FleetWorld, Process

READY_S = 30.0  # A worker that is not ready by then is given up.


class ProcessFabric:
    """Implements `Fabric`, for one process: the dead write nothing."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._fabric = process.world.fabric

    def publish(self, record: AgentRecord) -> None:
        if self._process.is_alive:
            self._fabric.publish(record)

    def withdraw(self, agent_id: str) -> None:
        if self._process.is_alive:
            self._fabric.withdraw(agent_id)

    def resolve(self, agent_id: str) -> AgentRecord | None:
        return self._fabric.resolve(agent_id)

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        return self._fabric.discover(role=role, label=label)

    def gc(self) -> int:
        return self._fabric.gc()


class SimWorker:
    """Implements `Worker`: a parent's hold on a process."""

    def __init__(self, launcher: "SimLauncher", provision: Provision) -> None:
        self._launcher = launcher
        self._owner = owner = launcher.parent
        self._world = world = owner.world
        self.id = provision.identity.child_id
        self.process = Process(world, f"{self.id}#{world.number()}")
        self.listener = SimListener(world, self.process)
        self.launched_for = CURRENT_RUN.get()
        self.is_ready = False
        self._ready_s = 0.0
        self.news = asyncio.Event()  # It is ready, or gone.
        self.is_wanted = True  # Being launched or connected to.
        self._main_task = self.process.begin(partial(self._main, provision))
        self.process.when_gone(self.news.set)
        owner.when_gone(self._leave)

    @property
    def endpoint(self) -> str:
        return self.listener.endpoint

    @property
    def pid(self) -> int | None:
        return self.process.pid

    @property
    def is_alive(self) -> bool:
        return self.process.is_alive

    @property
    def is_busy(self) -> bool:
        """Some run has it."""
        return self.is_wanted or any(not line.parent_end.is_closed for line in self.listener.lines)

    @property
    def is_found(self) -> bool:
        """By its record; unless it had no time to publish it."""
        record = self._world.fabric.resolve(self.id)
        is_able = self.is_alive and not self.process.was_stopped
        is_due = is_able and self._world.loop.time() > self._ready_s + 1
        return not is_due or (record is not None and record.pid == self.pid)

    async def connect(self) -> Link:
        world, token = self._world, CURRENT_RUN.get()
        self.is_wanted = True
        try:
            await asyncio.sleep(world.dice.choice((0, 0.001, 0.2)))
            if world.chance(0.04):
                raise ConnectFailed("connection refused")
            line = self.listener.connect(self._owner)
        except ConnectFailed:
            if not self.listener.lines:  # Of one that waited in the pool nobody minds it.
                world.setback(token, "a new worker is not reached")
            raise
        finally:
            self.is_wanted = False
        line.token = token
        if self.process.is_stopped:
            line.hurt("its worker is stopped")
        return line.parent_end

    def hurt(self, why: str) -> None:
        """Whoever it works for need not complete."""
        if not self.is_ready:
            self._world.harm(self.launched_for, why)
        for line in self.listener.lines:
            if line.is_open:
                line.hurt(why)

    def strike(self) -> None:
        """kill -9, by somebody else."""
        if self.is_alive:
            self._world.note("kill -9", self.process.name)
            self.hurt("its worker was killed")
            self.process.end()

    async def kill(self) -> None:
        world = self._world
        if not self._launcher.is_closing and world.chance(0.02):
            world.note("not killed", self.process.name)
            raise OSError("it cannot be ended")
        world.note("kill", self.process.name)
        self.process.end()
        try:
            await asyncio.sleep(self._world.dice.choice((0, 0.001, 0.5)))
        finally:
            self._world.fabric.withdraw(self.id)

    async def last_words(self) -> str:
        await asyncio.sleep(self._world.dice.choice((0, 0.1)))
        return "its last words"

    # --- in the process

    async def _main(self, provision: Provision) -> None:
        world, process = self._world, self.process
        await asyncio.sleep(world.dice.choice((0.001, 0.01, 1)))
        self.is_ready = True
        self._ready_s = world.loop.time()
        self.news.set()
        terms = serving_terms_of(provision, process.clock, Ids(world.dice.randrange(1 << 30)))
        make = partial(self._record, provision, world.clock.now_s())
        async with open_presence(ProcessFabric(process), make, process.clock, at_once=False):
            await serve_on(self.listener, SimExecutor(process), mode_of(provision), terms)

    def _leave(self) -> None:
        """Its owner is gone. What does not end in time is ended."""
        self.process.do(self._main_task.cancel)
        self._world.loop.call_later(LEAVE_S, self.process.end)

    def _record(self, provision: Provision, now_s: float) -> AgentRecord:
        record = AgentRecord(
            agent_id=self.id,
            role=provision.identity.role,
            endpoint=self.endpoint,
            pid=self.process.pid,
            started_at=format_time(now_s),
            lease_expires_at="",
            culm=Placed(self.process.pid, "boot", OwnerProcess(self._owner.pid, self._owner.pid)),
        )
        return renewed(record, now_s)


class SimLauncher:
    """Implements `Launcher`, in one parent."""

    def __init__(self, parent: Process, bounds: FleetBounds) -> None:
        self.parent = parent
        self.workers: list[SimWorker] = []
        self.is_closing = False
        self._world = parent.world
        self._bounds = bounds

    async def launch(self, provision: Provision) -> SimWorker:
        world, token = self._world, CURRENT_RUN.get()
        await asyncio.sleep(world.dice.choice((0, 0.001, 0.3)))
        if world.chance(0.03):
            world.harm(token, "no process can be started")
            raise LaunchFailed("there are no more processes")
        worker = SimWorker(self, provision)
        self.workers.append(worker)
        world.note("launch", worker.process.name, "for", token)
        busy = sum(one.is_alive and one.is_busy for one in self.workers)
        world.expect(busy <= self._bounds.runs_max, "too many runs at once:", busy)
        try:
            if world.chance(0.04):
                self._hinder(worker)
            await self._until_ready(worker)
        except BaseException:
            worker.process.end()
            world.fabric.withdraw(worker.id)
            raise
        finally:
            worker.is_wanted = False
        return worker

    def _hinder(self, worker: SimWorker) -> None:
        world = self._world
        if world.dice.random() < 0.5:
            worker.process.stop()
            world.harm(CURRENT_RUN.get(), "a worker that is never ready")
        else:
            world.loop.call_later(world.dice.choice((0, 0.005, 0.5)), worker.strike)

    async def _until_ready(self, worker: SimWorker) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await worker.news.wait()
        if not worker.is_ready:
            raise LaunchFailed("the worker was not ready: its last words")


def end_leftovers(world: FleetWorld) -> None:
    """What a server does at its start, as `culm.fleet.parent.leftovers` does with real ones."""
    processes = {process.pid: process for process in world.processes}
    for record in world.fabric.discover():
        placed = record.culm
        assert placed is not None
        assert placed.owner is not None
        if not processes[placed.owner.pid].is_alive:
            processes[record.pid].end()
            world.fabric.withdraw(record.agent_id)

"""Worker processes as a parent starts, connects and ends them, with faults.

A process does what `culm.fleet.worker.lifecycle` does: register, serve, watch its owner, leave.
"""

import asyncio

from culm.fleet.host.base import LaunchFailed
from culm.fleet.host.dispatch import FleetBounds
from culm.fleet.provision import Provision
from culm.fleet.transport.base import ConnectFailed, Link
from tests.sim.fleet_executors import SimExecutor
from tests.sim.fleet_world import CURRENT_RUN, FleetWorld, Process
from tests.sim.worker_process import WorkerProcess


class SimWorker(WorkerProcess):
    """Implements `Worker`: a parent's handle of a process."""

    STARTING_S = (0.001, 0.01, 1)

    def __init__(self, launcher: "SimLauncher", provision: Provision) -> None:
        super().__init__(launcher.parent, provision)
        self._launcher = launcher
        self.launched_for = CURRENT_RUN.get()
        self.is_wanted = True  # Being launched or connected to.

    @property
    def is_parent_closing(self) -> bool:
        return self._launcher.is_closing

    def make_executor(self, provision: Provision) -> SimExecutor:
        return SimExecutor(self.process)

    @property
    def is_busy(self) -> bool:
        """Return True if a run uses this worker."""
        return self.is_wanted or any(not line.parent_end.is_closed for line in self.listener.lines)

    @property
    def is_found(self) -> bool:
        """Return True if its record is published, or not due yet."""
        record = self._world.discovery.resolve(self.id)
        is_able = self.is_alive and not self.process.was_stopped
        is_due = is_able and self._world.loop.time() > (self.ready_s or 0.0) + 1
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
            if not self.listener.lines:  # For a pooled worker it is not a setback.
                world.setback(token, "a new worker is not reached")
            raise
        finally:
            self.is_wanted = False
        line.token = token
        if self.process.is_stopped:
            line.hurt("its worker is stopped")
        return line.parent_end

    def hurt(self, why: str) -> None:
        """Harm the runs of this worker."""
        if not self.is_ready:
            self._world.harm(self.launched_for, why)
        for line in self.listener.lines:
            if line.is_open:
                line.hurt(why)

    def strike(self) -> None:
        """Kill the process from outside."""
        if self.is_alive:
            self._world.note("kill -9", self.process.name)
            self.hurt("its worker was killed")
            self.process.end()

    async def stderr_tail(self) -> str:
        await asyncio.sleep(self._world.dice.choice((0, 0.1)))
        return "its last words"


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
            await worker.until_ready()
        except BaseException:
            worker.abandon()
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


def end_leftovers(world: FleetWorld) -> None:
    """End orphaned workers at a server start, as `culm.fleet.host.local` does."""
    processes = {process.pid: process for process in world.processes}
    for record in world.discovery.discover():
        placed = record.culm
        assert placed is not None
        assert placed.owner is not None
        if not processes[placed.owner.pid].is_alive:
            processes[record.pid].end()
            world.discovery.withdraw(record.agent_id)

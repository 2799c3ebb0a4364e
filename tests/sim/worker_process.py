"""A worker process of a simulated parent: start, registration, serving and end.

A process does what `culm.fleet.worker.lifecycle` does. Subclasses choose its executor and how a
parent connects to it.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from culm.clock import format_time
from culm.fleet.discovery.base import AgentRecord, OwnerProcess, ProcessPlace, renewed
from culm.fleet.executor import Executor
from culm.fleet.host.base import LaunchFailed
from culm.fleet.provision import Provision, limits_of
from culm.fleet.worker.lifecycle import mode_of, open_registration
from culm.fleet.worker.main import LEAVE_S
from culm.fleet.worker_server.connection import serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids
from tests.sim.fleet_network import SimListener
from tests.sim.fleet_world import Process

READY_S = 30.0  # The time to become ready.


class ProcessDiscovery:
    """Implements `Discovery` for one process: a dead process writes nothing."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._discovery = process.world.discovery

    def publish(self, record: AgentRecord) -> None:
        if self._process.is_alive:
            self._discovery.publish(record)

    def withdraw(self, agent_id: str) -> None:
        if self._process.is_alive:
            self._discovery.withdraw(agent_id)

    def resolve(self, agent_id: str) -> AgentRecord | None:
        return self._discovery.resolve(agent_id)

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        return self._discovery.discover(role=role, label=label)

    def gc(self) -> int:
        return self._discovery.gc()


class WorkerProcess(ABC):
    """A parent's handle of a process; with `connect` and `stderr_tail` it is a `Worker`."""

    STARTING_S: Sequence[float]  # Choices of its start time.

    def __init__(self, owner: Process, provision: Provision) -> None:
        self._owner = owner
        self._world = world = owner.world
        self.id = provision.identity.child_id
        self.process = Process(world, f"{self.id}#{world.number()}")
        self.listener = SimListener(world, self.process)
        self.ready_or_gone = asyncio.Event()  # Set when it is ready or gone.
        self.ready_s: float | None = None  # The time it became ready.
        self._main_task = self.process.begin(partial(self._main, provision))
        self.process.when_gone(self.ready_or_gone.set)
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
    def is_ready(self) -> bool:
        return self.ready_s is not None

    @property
    @abstractmethod
    def is_parent_closing(self) -> bool: ...

    @abstractmethod
    def make_executor(self, provision: Provision) -> Executor: ...

    async def until_ready(self) -> None:
        """Raises `LaunchFailed`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await self.ready_or_gone.wait()
        if not self.is_ready:
            raise LaunchFailed("the worker was not ready: its last words")

    def abandon(self) -> None:
        """End the process of an abandoned launch."""
        self.process.end()
        self._world.discovery.withdraw(self.id)

    async def kill(self) -> None:
        world = self._world
        if not self.is_parent_closing and world.chance(0.02):
            world.note("not killed", self.process.name)
            raise OSError("it cannot be ended")
        world.note("kill", self.process.name)
        self.process.end()
        try:
            await asyncio.sleep(world.dice.choice((0, 0.001, 0.5)))
        finally:
            world.discovery.withdraw(self.id)

    # --- in the process

    async def _main(self, provision: Provision) -> None:
        world, process = self._world, self.process
        await asyncio.sleep(world.dice.choice(self.STARTING_S))
        self.ready_s = world.loop.time()
        self.ready_or_gone.set()
        ids = Ids(world.dice.randrange(1 << 30))
        settings = ServingSettings(process.clock, ids, limits_of(provision))
        make = partial(self._record, provision, world.clock.now_s())
        executor = self.make_executor(provision)
        async with open_registration(ProcessDiscovery(process), make, process.clock, at_once=False):
            await serve_on(self.listener, executor, mode_of(provision), settings)

    def _leave(self) -> None:
        """Leave after the end of the owner; kill the process if it takes too long."""
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
            culm=ProcessPlace(
                self.process.pid, "boot", OwnerProcess(self._owner.pid, self._owner.pid)
            ),
        )
        return renewed(record, now_s)

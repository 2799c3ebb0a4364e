"""Workers of a server with agents: the real turn of a run, with a random model and tools.

A run does what it does in `bamboo_runtime`: its journal, meter, delegation and gate are real. Only
the parts that would touch a disk or a network are simulated.
"""

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from culm.clock import LoopClock
from culm.errors import ModelFailed
from culm.fleet.executor import (
    CANCELLED,
    CancelToken,
    EventSink,
    Outcome,
    RunEnded,
    RunHost,
    SteerInbox,
    failed,
)
from culm.fleet.host.base import LaunchFailed
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from culm.fleet.transport.base import ConnectFailed, Link
from culm.fleet.worker.executors.base import WorkerServices, execution_started
from culm.fleet.worker.executors.runtime_events import EventSender, open_event_sender
from culm.fleet.worker.executors.runtime_gate import ASK_S, RuntimeGate
from culm.fleet.worker.executors.runtime_history import history_from
from culm.fleet.worker.executors.runtime_host import HostDelegation, HostMeter
from culm.fleet.worker.executors.runtime_journal import EventJournal
from culm.fleet.worker.executors.runtime_settings import SingleModel
from culm.fleet.worker.executors.runtime_tools import RuntimeTools
from culm.fleet.worker.executors.runtime_turn import TurnWork, end, run_turn
from culm.ids import Ids, RunId, SessionId
from culm.permission.policy import PolicyInput
from culm.processes.base import NoProcesses
from culm.run.journal import JournalSetting
from culm.run.limits import FREE
from culm.run.loop import ActiveModel
from culm.tools.agent_tools import make_agent_tools
from culm.tools.base import CallRequest, Tool, ToolContext
from culm.tools.files.file_executor import WALL_S, FileExecutor
from culm.tools.files.paths import WorkspacePaths
from culm.wire.config import SelectedModel
from culm.wire.runs import Limits
from tests.sim.runs_outside import WINDOW
from tests.sim.tree_outside import Asker, QuestionTool, TreeModel, TreeTool
from tests.sim.tree_world import Execution, TreeWorld
from tests.sim.worker_process import WorkerProcess

if TYPE_CHECKING:
    from tests.sim.tree_server import Life

FILE_WORK = FileExecutor(LoopClock(), WALL_S)  # Not used here.


async def _no_hooks(_: CallRequest) -> None:
    return None


def _ignore(call: CallRequest, by: str) -> None:
    pass


class TreeExecutor:
    """Implements `Executor`."""

    def __init__(self, worker: "TreeWorker", provision: Provision) -> None:
        self._worker = worker
        self._process = worker.process
        self._world = worker.world
        self._provision = provision
        self._ids = Ids(worker.world.dice.randrange(1 << 30))

    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome:
        run_id, logical = spec.activation_run_id, spec.logical_session
        assert run_id is not None
        assert logical is not None
        worker = self._worker
        worker.run_id = run_id
        number = worker.listener.lines[-1].number
        life = worker.life.number
        self._world.executions.append(Execution(run_id, life, self._process.name, number))
        try:
            async with open_event_sender(events) as sender:
                try:
                    session_id = SessionId(logical.session_id)
                    work = self._work(spec, session_id, sender, steer, cancel, host)
                    begun = execution_started(run_id, session_id, self._process.clock.now_s())
                    await sender.send(begun)
                    return await end(work, await run_turn(work, cancel))
                except ModelFailed as exc:
                    return failed(exc.message)
                except RunEnded:
                    return CANCELLED
        finally:
            worker.run_id = ""

    def _work(
        self,
        spec: RunSpec,
        session_id: SessionId,
        sender: EventSender,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> TurnWork:
        clock, ids, provision = self._process.clock, self._ids, self._provision
        run_id = spec.activation_run_id or ""
        asker = Asker(
            self._worker.life.number,
            run_id,
            provision.identity.depth,
            lambda: self._process.is_alive,
            self._worker.life.paid_by,
        )
        journal = EventJournal(
            sender,
            steer,
            cancel,
            JournalSetting("demo-1", "demo", WINDOW),
            clock,
            ids,
            run_id=RunId(run_id),
            session_id=session_id,
            history=history_from(spec.messages, spec.assignment, session_id),
        )
        context = self._context(run_id)
        policy_input = PolicyInput("/simulated", "/nowhere")
        can = provision.capabilities
        ask_s = provision.culm.ask_s or ASK_S
        model = TreeModel(self._world, lambda _: asker)
        return TurnWork(
            WorkerServices(clock, ids, context.processes, Path("/nowhere")),
            sender,
            journal,
            RuntimeTools(context, self._tools(host, asker)),
            RuntimeGate(host, clock, policy_input, can.is_read_only, _no_hooks, ask_s, _ignore),
            SingleModel(ActiveModel(model, SelectedModel("demo-1", "demo"), FREE, "")),
            Limits(steps=provision.limits.max_rounds or 0),
            HostMeter(host, sender),
        )

    def _context(self, run_id: str) -> ToolContext:
        return ToolContext(
            workspace_id=run_id,
            paths=WorkspacePaths(Path("/simulated")),
            executor=FILE_WORK,
            processes=NoProcesses(),
            store=self._world.bench_store,
            clock=self._process.clock,
            ids=self._ids,
            env=lambda: {},
            outputs=Path("/nowhere"),
        )

    def _tools(self, host: RunHost, asker: Asker) -> dict[str, Tool]:
        """The tools that `bamboo_runtime` offers."""
        provision = self._provision
        can = provision.capabilities
        may_start = can.nested_spawn and provision.identity.depth < can.depth_max
        tools: dict[str, Tool] = {
            **make_agent_tools(HostDelegation(host), may_start=may_start),
            "look": TreeTool(self._world, lambda _: asker, "look", is_free=True, parallel=True),
            "edit": TreeTool(self._world, lambda _: asker, "edit", is_free=False),
        }
        if provision.culm.questions:
            tools["question"] = QuestionTool(self._world)
        disabled = provision.disabled_tools or ()
        return {name: tool for name, tool in tools.items() if name not in disabled}


class TreeWorker(WorkerProcess):
    """Implements `Worker`: a server's handle of a process."""

    STARTING_S = (0.001, 0.01, 0.5)

    def __init__(self, life: "Life", provision: Provision) -> None:
        super().__init__(life.process, provision)
        self.life = life
        self.world: TreeWorld = life.world
        self.run_id = ""  # The id of its current run.

    @property
    def is_parent_closing(self) -> bool:
        return self.life.is_closing

    def make_executor(self, provision: Provision) -> TreeExecutor:
        return TreeExecutor(self, provision)

    async def connect(self) -> Link:
        await asyncio.sleep(self.world.dice.choice((0, 0.001, 0.2)))
        if self.world.chance(0.03):
            raise ConnectFailed("connection refused")
        return self.listener.connect(self.life.process).parent_end

    async def stderr_tail(self) -> str:
        return "its last words"


class TreeLauncher:
    """Implements `Launcher`, for one life of the server."""

    def __init__(self, life: "Life") -> None:
        self._life = life
        self.workers: list[TreeWorker] = []

    async def launch(self, provision: Provision) -> TreeWorker:
        world = self._life.world
        await asyncio.sleep(world.dice.choice((0, 0.001, 0.3)))
        if world.chance(0.03):
            raise LaunchFailed("there are no more processes")
        worker = TreeWorker(self._life, provision)
        self.workers.append(worker)
        try:
            if world.chance(0.04):
                self._hinder(worker)
            await worker.until_ready()
        except BaseException:
            worker.abandon()
            raise
        return worker

    def _hinder(self, worker: TreeWorker) -> None:
        world = self._life.world
        if world.dice.random() < 0.5:
            worker.process.stop()  # It never becomes ready.
        else:
            world.loop.call_later(world.dice.choice((0, 0.005, 0.5)), worker.process.end)

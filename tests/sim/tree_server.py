"""A server with agents and a fleet: killed, stopped and started again, on a disk that survives."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Raw, Struct
from msgspec.structs import replace

from culm.errors import AppError, StoreBusy
from culm.fleet.host.caller import HostCallbacks, RunControl
from culm.fleet.host.dispatch import Fleet, FleetBounds, open_fleet
from culm.fleet.host.pool import PoolBounds
from culm.fleet.host.run_driver import RunResult
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import Provision
from culm.ids import Epoch, Ids, workspace_id_of
from culm.mail.base import PostOffice
from culm.run.live_run import LiveRun
from culm.settings import Settings
from culm.store.base import find_meta, last_seq
from culm.store.memory import MemoryDatabase
from culm.store.sql import QUERIES
from culm.store.store import Store
from culm.store.text_tail import NoSync, TextTail
from culm.wire.workspaces import StoreHealth
from culm.workspace.claims import Created
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace
from tests.sim.fleet_workers import end_leftovers
from tests.sim.fleet_world import Process
from tests.sim.runs_disk import SlowDatabase
from tests.sim.runs_outside import WINDOW
from tests.sim.tree_outside import Asker, QuestionTool, TreeModel, TreeTool
from tests.sim.tree_workers import TreeLauncher
from tests.sim.tree_world import TreeWorld
from tests.support import fixed_origins, ignore_fate, make_services, model_config

T = TypeVar("T")

PATH = Path("/simulated")
BOUNDS = FleetBounds(first_frame_s=20.0, pool=PoolBounds(idle_per_key_max=2, idle_max=3))


DEPTH_MAX = 3
# Nothing detects a silent line: the time limit ends its run.
SETTINGS = Settings(
    abandoned_runs_s=1e6,
    agents_at_once=4,
    agents_children_max=6,
    agents_depth_max=DEPTH_MAX,
    run_wall_s=600.0,
)
ALIVE_EVERY_S = 30.0  # The interval of the alive mark.


class _Used(Struct):
    cost: float


class _Reported(Struct):
    used: _Used


class Gone(Exception):
    """The server is down, or ended before it answered."""


class Life:
    """One server process, from its start to its end."""

    def __init__(
        self, world: TreeWorld, number: int, alive_s: float | None, up: asyncio.Event
    ) -> None:
        self.world = world
        self.number = number
        self.process = Process(world, f"server{number}")
        self.launcher = TreeLauncher(self)
        self.workspace: LiveWorkspace | None = None  # While it answers.
        self.is_closing = False
        self.requests: list[asyncio.Task[None]] = []
        self._up = up
        self._alive_s = alive_s
        self._stopping = asyncio.Event()
        self._ids = Ids(world.dice.randrange(1 << 30))
        self.process.when_gone(self._close)
        self.process.begin(self._main)

    def _close(self) -> None:
        """Stop answering requests."""
        self.workspace = None
        self._up.clear()

    def stop(self) -> None:
        """SIGTERM."""
        self.process.do(self._stopping.set)

    def kill(self) -> None:
        """Kill the server: uncommitted changes are lost."""
        workspace = self.workspace
        if not self.process.is_alive:
            return
        self.world.note("kill -9", self.process.name)
        if workspace is not None:
            self.world.cut |= {(run.id, self.number) for run in workspace.runs.live()}
        self.process.end()
        self.world.file.crash()
        self.world.file.die = None
        if self.world.dice.random() < 0.2:
            self.world.post.lose_power()

    # --- in the process

    async def _main(self) -> None:
        end_leftovers(self.world)
        async with open_fleet(self.launcher, self.process.clock, BOUNDS) as fleet:
            watched_fleet = WatchedFleet(fleet, self)
            try:
                await self._serve(watched_fleet)
            except* StoreBusy:
                pass  # The disk is full: it cannot be opened now.
            self.is_closing = True

    async def _serve(self, fleet: "WatchedFleet") -> None:
        world, clock = self.world, self.process.clock
        connection = world.file.connection
        if find_meta(connection, "epoch") is None:
            connection.execute(QUERIES["set_meta"], ("epoch", self._ids.epoch()))
        epoch = Epoch(find_meta(connection, "epoch") or "")
        database = MemoryDatabase(world.file, clock)
        slow = SlowDatabase(database, world.loop)
        tail = TextTail(self.world.file.tail_files, NoSync(), epoch)
        store = Store(slow, epoch, last_seq(connection), StoreHealth("ok"), tail)
        tools = [
            TreeTool(world, self._asker, "look", is_free=True, parallel=True),
            TreeTool(world, self._asker, "edit", is_free=False),
            QuestionTool(world),
        ]

        def make_post(_: Path) -> PostOffice:
            return world.post

        services = replace(
            make_services(
                clock, self._ids, SETTINGS, lambda _: TreeModel(world, self._asker), *tools
            ),
            fleet=fleet,
            make_post=make_post,
            run_blocking=self._block,
        )
        about = WorkspaceInfo(workspace_id_of(PATH), PATH, str(PATH), PATH)
        origins = fixed_origins(model_config("http://simulated", context_window=WINDOW))
        async with asyncio.TaskGroup() as tasks:
            workspace = LiveWorkspace(about, store, origins, services, tasks, ignore_fate, {})
            await workspace.start(self._alive_s)
            await workspace.agents.start()
            workspace.trim_in_time()
            workspace.lifetime.apply(Created(self._ids.client()))
            self.workspace = workspace
            world.is_shared_run = self.is_shared_run
            self._up.set()
            await self._stopping.wait()
            self._close()
            await workspace.stop()
            # Their ends could not be written: the disk was full.
            world.cut |= {(run.id, self.number) for run in workspace.runs.live()}
            for request in self.requests:
                request.cancel()
            if self.requests:
                await asyncio.wait(self.requests)
        await database.close()

    async def _block(self, job: Callable[[], T]) -> T:
        """Run a blocking job; the process may end before or after it."""
        await asyncio.sleep(self.world.dice.choice((0, 0.0001, 0.01)))
        done = job()
        await asyncio.sleep(self.world.dice.choice((0, 0.0001, 0.01)))
        return done

    # --- queries

    def live_runs(self) -> list[LiveRun]:
        return [] if self.workspace is None else self.workspace.runs.live()

    def _find_run(self, run_id: str) -> LiveRun | None:
        return None if self.workspace is None else self.workspace.runs.find(run_id)

    def is_shared_run(self, run_id: str) -> bool:
        run = self._find_run(run_id)
        return run is not None and run.control.is_shared

    def paid_by(self, run_id: str) -> Sequence[str]:
        """A run and its parents, as far as this server knows them."""
        chain: list[str] = [run_id]
        run = self._find_run(run_id)
        while run is not None and run.duty is not None:
            run = run.duty.works_for
            if run is not None:
                chain.append(run.id)
        return chain

    def _asker(self, session_id: str) -> Asker:
        rows = self.world.rows(
            "SELECT id FROM runs WHERE session_id = ? AND state = 'active'", session_id
        )
        run_id = rows[0]["id"] if len(rows) == 1 else ""
        return Asker(self.number, run_id, 0, lambda: self.process.is_alive, self.paid_by)


class WatchedFleet:
    """A fleet that records the usage reports of its workers."""

    def __init__(self, fleet: Fleet, life: Life) -> None:
        self._fleet = fleet
        self._life = life

    async def run(
        self, provision: Provision, spec: RunSpec, callbacks: HostCallbacks, controls: RunControl
    ) -> RunResult:
        watched_callbacks = UsageCallbacks(callbacks, self._life, spec.activation_run_id or "")
        return await self._fleet.run(provision, spec, watched_callbacks, controls)


class UsageCallbacks:
    """Implements `HostCallbacks`: records usage and forwards everything."""

    def __init__(self, callbacks: HostCallbacks, life: Life, run_id: str) -> None:
        self._life = life
        self._run_id = run_id
        self._callbacks = callbacks
        self.on_gap = callbacks.on_gap
        self.on_ask = callbacks.on_ask
        self.on_call = callbacks.on_call

    async def on_event(self, event: Raw) -> None:
        if b'"usage_reported"' in bytes(event):
            self._note_usage(msgspec.json.decode(event, type=_Reported).used.cost)
        await self._callbacks.on_event(event)

    def _note_usage(self, cost: float) -> None:
        """Record usage that a live run received, which must be counted. Each cost is unique."""
        workspace = self._life.workspace
        run = None if workspace is None else workspace.runs.find(self._run_id)
        if cost and run is not None and run.stop is None:
            for asked in self._life.world.asked:
                is_it = (asked.run_id, asked.life) == (self._run_id, self._life.number)
                if is_it and asked.cost == cost:
                    asked.is_reported = True


class TreeServer:
    """One life after the other."""

    def __init__(self, world: TreeWorld) -> None:
        self.world = world
        self.outages_s: Sequence[float] = (0.01, 0.5, 5.0, 60.0, 700.0)
        self.up = asyncio.Event()
        self.life = Life(world, 1, None, self.up)
        world.file.on_death = lambda: self.life.kill()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            began_s = self.world.clock.now_s()
            await self.life.process.gone.wait()
            seen_s = began_s + (self.world.clock.now_s() - began_s) // ALIVE_EVERY_S * ALIVE_EVERY_S
            await asyncio.sleep(self.world.dice.choice(self.outages_s))
            self.life = Life(self.world, self.life.number + 1, seen_s, self.up)

    async def until_up(self) -> Life:
        while self.life.workspace is None:
            await self.up.wait()
        return self.life

    async def request(
        self, serve: Callable[[LiveWorkspace], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """Serve a client request, which may time out. Raises `AppError`, `Gone`."""
        life = await self.until_up()
        workspace = life.workspace
        assert workspace is not None
        answers: list[T] = []
        errors: list[AppError] = []

        async def answer() -> None:
            try:
                answers.append(await serve(workspace))
            except AppError as exc:
                errors.append(exc)

        task = life.process.start(answer(), "request")
        life.requests.append(task)
        async with asyncio.TaskGroup() as tasks:
            gone = tasks.create_task(life.process.gone.wait())
            done = {task, gone}
            await asyncio.wait(done, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
            gone.cancel()
        if errors:
            raise errors[0]
        if not answers:
            task.cancel()
            raise Gone
        return answers[0]

"""A server with an agent that is killed, stopped and started again, on a disk that survives."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from culm.client.stream import ServerEvent, SseParser
from culm.errors import AppError, StoreBusy
from culm.events.views import Filter
from culm.ids import Epoch, Ids, workspace_id_of
from culm.model.choice import ChosenModel
from culm.services import ServerServices
from culm.settings import Settings
from culm.store.base import find_meta, last_seq
from culm.store.memory import MemoryDatabase
from culm.store.messages import find_message
from culm.store.sql import QUERIES
from culm.store.store import Store
from culm.store.text_tail import NoSync, TextTail
from culm.tools.base import Tool
from culm.wire.codec import decode, encode
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import Message, ToolCallPart, growing_of, text_of
from culm.wire.runs import RunComplete
from culm.wire.workspaces import StoreHealth
from culm.workspace.claims import Created, WorkspaceFate
from culm.workspace.config import ConfigOrigins
from culm.workspace.roots import WorkspaceInfo
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SimClock, SimLoop
from tests.sim.runs_disk import Life, LifeClock, SimFile, SlowDatabase, Tasks
from tests.sim.runs_outside import WINDOW, Question, SimModel, SimTool, Step, World, draw_plan
from tests.sim.world import SimClient, SimServer
from tests.support import fixed_origins, make_services, model_config

T = TypeVar("T")
S = TypeVar("S")

PATH = Path("/simulated")
SETTINGS = Settings(stream_buffer_bytes=4_000, abandoned_runs_s=20.0)
TEARDOWN_S = SETTINGS.teardown_s
ALIVE_EVERY_S = 30.0  # The interval of the alive mark.
OUTAGES_S: Sequence[float] = (0.01, 0.5, 5.0, 60.0, 500.0, 700.0, 9_000.0)
AWAY_S_MAX = 600.0  # Accepted runs resume after an absence of at most this.


class Gone(Exception):
    """The server is down, or the client did not wait for it."""


class Probe:
    """A stream that is read at once."""

    def __init__(self, world: World, workspace: LiveWorkspace) -> None:
        self._world = world
        self._workspace = workspace
        # The rev of every message that was sent, and the text of its parts.
        self.shown: dict[str, tuple[int, dict[int, str]]] = {}

    def write(self, data: bytes) -> None:
        for event in SseParser().feed(data):  # Whole events come at once.
            match event.type:
                case "run_complete":
                    self._completed(event)
                case "call_output":
                    self._put_out(event.read(CallOutput))
                case "message_delta":
                    self._grown(event.read(MessageDelta))
                case "message" | "message_snapshot" if event.op != "deleted":
                    message = event.read(Message)
                    self.shown[message.id] = message.rev, texts_of(message)
                case _:
                    pass

    def _put_out(self, output: CallOutput) -> None:
        token = output.text.split()[0]
        known = self._world.outputs.get(token, "")
        self._world.expect(output.offset == len(known), "output does not continue", output)
        self._world.outputs[token] = known + output.text

    def _grown(self, delta: MessageDelta) -> None:
        rev, texts = self.shown[delta.message_id]
        known = texts.setdefault(delta.part, "")
        fits = rev == delta.rev and delta.offset == len(known)
        self._world.expect(fits, "a delta does not continue the text", delta)
        texts[delta.part] = known + delta.text

    def _completed(self, event: ServerEvent) -> None:
        """INV-40: when its end is published, the run is not live any more."""
        complete = event.read(RunComplete)
        runs = self._workspace.runs
        line = runs.line(complete.session_id)
        live = runs.find(complete.run_id)
        # Otherwise a client is starting it, which will fail because it is not held any more.
        left = live is None or not live.control.accepted.done()
        self._world.expect(left, "published before it left", complete)
        self._world.expect(runs.is_busy(complete.session_id) == bool(line), "busy is wrong")

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


def texts_of(message: Message) -> dict[int, str]:
    """Return the text of each part that keeps it at the end of its message."""
    return {
        n: text_of(part, kind) or ""
        for n, part in enumerate(message.parts)
        if (kind := growing_of(part)) is not None
    }


class RunServer(SimServer):
    """A workspace with an agent, killed, stopped and started again."""

    def __init__(self, loop: SimLoop, world: World) -> None:
        self.loop = loop
        self.clock = SimClock(loop)
        self.ids = Ids(loop.random.randrange(1 << 30))
        self.file: SimFile = SimFile()
        self.workspace: LiveWorkspace | None = None
        self.up = asyncio.Event()
        self.world = world
        self.file.on_death = self.kill
        self.life: Life | None = None
        self.lives = 0
        self.outage_s: float | None = None  # The length of its next outage ...
        self.outages = OUTAGES_S  # ... or one of these.
        self.observers: list[SimClient] = []
        self.alive_s: float | None = None  # Its last alive mark.
        self._probe: Probe | None = None
        self._shown: dict[str, dict[int, str]] = {}  # Text of open messages at the last kill.
        self._over = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self.plan: Callable[[Question], Sequence[Step]] = partial(draw_plan, world)
        self.id = self.ids.client()  # The client that opened it.

    # --- lifecycle

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            while True:
                self._over.clear()
                await self._live()
                outage_s, self.outage_s = self.outage_s, None
                if outage_s is None:
                    outage_s = self.loop.random.choice(self.outages)
                await asyncio.sleep(outage_s)

    async def _live(self) -> None:
        self.lives += 1
        life = self.life = Life(self.lives)
        life.began_s = self.clock.now_s()
        clock = LifeClock(self.loop, life)
        try:
            database = MemoryDatabase(self.file, clock)
            starting = self._spawn(life, self._start(life, clock, database))
            await asyncio.wait({starting})
            if life.dead:
                return
            self.up.set()
            await self._over.wait()
            if not life.dead:
                await self._stop(life, database)
        finally:
            self._note_alive(life)
            self.life = self.workspace = None
            self.up.clear()

    async def _start(self, life: Life, clock: LifeClock, database: MemoryDatabase) -> None:
        connection = self.file.connection
        if find_meta(connection, "epoch") is None:
            connection.execute(QUERIES["set_meta"], ("epoch", self.ids.epoch()))
        epoch = Epoch(find_meta(connection, "epoch") or "")
        slow = SlowDatabase(database, self.loop)
        store = Store(
            slow,
            epoch,
            last_seq(connection),
            StoreHealth("ok"),
            TextTail(self.file.tail_files, NoSync(), epoch),
        )
        services, origins = self._services(life, clock)

        def on_fate(fate: WorkspaceFate) -> None:
            if self.workspace is not None:
                life.abandoned = fate is WorkspaceFate.INTERRUPT
                self.stop(0.01)  # A client opens it again.

        workspace = LiveWorkspace(
            WorkspaceInfo(workspace_id_of(PATH), PATH, str(PATH), PATH),
            store,
            origins,
            services,
            await self._begin_tasks(life),
            on_fate,
            {},
        )
        life.workspace = workspace
        self._probe = Probe(self.world, workspace)
        subscriber = workspace.hub.join(self._probe, "delta", Filter())
        waited, asked = self._waiting(), self._asked()
        try:
            await workspace.start(self.alive_s)
            workspace.trim_in_time()
        except StoreBusy:
            life.dead, self.outage_s = True, 1.0  # The disk is full: it cannot be opened now.
            return
        workspace.hub.flush()
        subscriber.seq = workspace.hub.seq
        workspace.hub.go_live(subscriber)
        self._check_text()
        self._check_asks(workspace, life, asked)
        self._check_started(workspace, waited if life.has_model else set(), set(asked.values()))
        workspace.lifetime.apply(Created(self.id))
        self.workspace = workspace

    async def _begin_tasks(self, life: Life) -> asyncio.TaskGroup:
        life.group = Tasks(lambda error: self.world.problems.append(f"a task died: {error!r}"))
        return await life.group.__aenter__()

    def _waiting(self) -> set[str]:
        """Waiting runs that are not cancelled and not behind an active run."""
        rows = self.file.rows(
            """SELECT id FROM runs WHERE state IN ('accepted', 'queued')
            AND id NOT IN (SELECT run_id FROM cancelled_runs)
            AND session_id NOT IN (SELECT session_id FROM runs WHERE state = 'active')"""
        )
        return {row[0] for row in rows}

    def _asked(self) -> dict[str, str]:
        """Open asks, each with the run that waits for it and for nothing else."""
        # Runs with a call that is approved or started without a result, or refused.
        decided = self.file.rows(
            """SELECT run_id FROM cancelled_runs
            UNION SELECT run_id FROM calls WHERE state = 'started'
            UNION SELECT run_id FROM asks JOIN calls USING (run_id, message_id, call_id)
              WHERE asks.state IN ('allowed', 'answered') AND calls.state = 'known'
            UNION SELECT run_id FROM asks WHERE state IN ('denied', 'expired', 'canceled')"""
        )
        rows = self.file.rows("SELECT id, run_id FROM asks WHERE state = 'open'")
        others = {row["run_id"] for row in decided}
        return {row["id"]: row["run_id"] for row in rows if row["run_id"] not in others}

    def _note_shown(self) -> None:
        """Note the text that was sent of messages that are open and at the same rev."""
        rows = self.file.rows("SELECT id, rev FROM messages WHERE is_open = 1 AND is_summary = 0")
        shown = {} if self._probe is None else self._probe.shown
        open_revs = {row["id"]: row["rev"] for row in rows}
        self._shown = {
            id_: dict(texts) for id_, (rev, texts) in shown.items() if open_revs.get(id_) == rev
        }
        self._probe = None

    def _check_text(self) -> None:
        """Check that every message begins with the text that was sent before the kill."""
        for message_id, texts in self._shown.items():
            row = find_message(message_id)(self.file.connection)
            assert row is not None, "only a summary is deleted"
            message = decode(encode(row), Message)
            stored = texts_of(message)
            for n, text in texts.items():
                if not isinstance(message.parts[n], ToolCallPart):  # Unfinished input is dropped.
                    is_kept = stored.get(n, "").startswith(text)
                    self.world.expect(is_kept, "text is lost", text, stored)
        self._shown = {}

    def _check_asks(self, workspace: LiveWorkspace, life: Life, asked: dict[str, str]) -> None:
        """Check that the next server has the same asks under the same ids."""
        stored = {row["id"] for row in self.file.rows("SELECT id FROM asks WHERE state = 'open'")}
        gate = workspace.gate
        known = {ask.request.id for ask in gate.permissions.all()}
        known |= {ask.request.id for ask in gate.questions.all()}
        self.world.expect(stored == known, "asks after a start", stored, known)
        self.world.expect(stored == set(asked), "an ask is lost, or kept", stored, asked)
        for run_id in asked.values():
            self.world.reentered[run_id].add(life.number)

    def _check_started(self, workspace: LiveWorkspace, waited: set[str], waiting: set[str]) -> None:
        """Check that only runs waiting for a person are active, and that queues match the store."""
        rows = self.file.rows("SELECT id, state FROM runs WHERE state NOT IN ('ended', 'held')")
        stored = {row[0]: row[1] for row in rows}
        shown = {"waiting": "active"}
        live = {run.id: shown.get(run.state, run.state) for run in workspace.runs.live()}
        self.world.expect(stored == live, "after a start", stored, live)
        active = {run_id for run_id, state in stored.items() if state == "active"}
        self.world.expect(active == waiting, "active after a start", active, waiting)
        own = "state NOT IN ('held', 'ended', 'folded')"  # Runs with a turn of their own.
        order = f"SELECT id FROM runs WHERE session_id = ? AND {own}"
        for session_id in {run.session_id for run in workspace.runs.live()}:
            line = [run.id for run in workspace.runs.line(session_id) if run.control.host is None]
            rows = self.file.rows(f"{order} ORDER BY place, seq", session_id)
            self.world.expect(line == [row[0] for row in rows], "another order", line)
        away_s = 0.0 if self.alive_s is None else self.clock.now_s() - self.alive_s
        if away_s > AWAY_S_MAX:
            going = {run_id for run_id, state in live.items() if state not in ("active", "folded")}
            self.world.expect(not going, "it was away for long, and goes on", live)
        elif away_s < AWAY_S_MAX - 1:
            self.world.expect(waited <= set(live), "it was not away for long", waited, live)

    def _services(self, life: Life, clock: LifeClock) -> tuple[ServerServices, ConfigOrigins]:
        def make(_: ChosenModel) -> SimModel:
            return SimModel(self.world, self, life)

        config = model_config("http://simulated", context_window=WINDOW)
        if self.world.faulty and self.loop.random.random() < 0.05:
            config, life.has_model = {}, False  # Its provider was removed.
            self.world.lacked_model = True
        services = make_services(clock, self.ids, SETTINGS, make, *self._tools(life))
        return services, fixed_origins(config)

    def _tools(self, life: Life) -> list[Tool]:
        return [
            SimTool(self.world, self, life, "look", "again", parallel=True),
            SimTool(self.world, self, life, "write"),
            SimTool(self.world, self, life, "send", "never"),
            SimTool(self.world, self, life, "deny"),
            SimTool(self.world, self, life, "stubborn"),
            SimTool(self.world, self, life, "deaf"),
        ]

    # --- ending

    def kill(self) -> None:
        """Kill the server: at once it can neither write nor act."""
        life = self.life
        if life is None or life.dead:
            return
        life.kill()
        self._note_shown()
        self.file.crash()
        self.file.die = None
        self.file.die_in_text = 0
        for observer in self.observers:
            observer.cut()
        self.up.clear()
        self.workspace = None
        self._over.set()

    def stop(self, outage_s: float | None = None) -> None:
        """SIGTERM."""
        if self.life is not None and self.up.is_set():
            self.outage_s = outage_s
            self.up.clear()
            self.workspace = None
            self._over.set()

    async def _stop(self, life: Life, database: MemoryDatabase) -> None:
        async def leave() -> None:
            assert life.workspace is not None
            await life.workspace.stop()
            assert life.group is not None
            await life.group.__aexit__(None, None, None)
            await database.close()
            life.left = True

        began_s, refused = self.loop.time(), self.file.refused
        leaving = self._spawn(life, leave())
        await asyncio.wait({leaving}, timeout=TEARDOWN_S)
        took_s = self.loop.time() - began_s
        self.world.expect(leaving.done(), "it does not leave in time", took_s)
        if not life.left:
            life.kill()
            self.file.crash()
        elif self.file.refused == refused:
            self._check_left(life)
        for observer in self.observers:
            observer.cut()

    def _check_left(self, life: Life) -> None:
        """Check that only runs with open asks are left for the next server."""
        assert life.workspace is not None
        # An answer may come before a resumed run could begin: the next start ends that run.
        unbegun = {run.id: run for run in life.workspace.runs.live() if run.control.turn is None}
        asking = "(SELECT run_id FROM asks WHERE state = 'open')"
        rows = self.file.rows(
            f"""SELECT id, host_id FROM runs WHERE state IN ('active', 'folded')
            AND id NOT IN {asking} AND host_id NOT IN {asking}"""
        )
        left = [row["id"] for row in rows if not {row["id"], row["host_id"]} & set(unbegun)]
        self.world.expect(not left, "left something running", left)
        rows = self.file.rows(
            """SELECT id FROM messages WHERE is_open = 1
            AND id NOT IN (SELECT message_id FROM asks WHERE state = 'open')"""
        )
        reentered = {run.reenters for run in unbegun.values()}
        left = [row["id"] for row in rows if row["id"] not in reentered]
        self.world.expect(not left, "left a message open", left)

    def _note_alive(self, life: Life) -> None:
        beats = (self.clock.now_s() - life.began_s) // ALIVE_EVERY_S
        self.alive_s = life.began_s + beats * ALIVE_EVERY_S

    def _spawn(self, life: Life, work: Coroutine[Any, Any, S]) -> asyncio.Task[S]:
        """Start a task of the server that ends with it."""
        return self._group.create_task(work, context=life.context.copy())

    # --- answering

    async def request(
        self, serve: Callable[[LiveWorkspace], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """Serve a client request, which may time out. Raises `AppError`, `Gone`."""
        life = self.life
        if life is None or self.workspace is None:
            raise Gone
        workspace = self.workspace
        live = len(workspace.runs.live())
        self.world.expect(
            workspace.lifetime.claims.live_runs == live, "live runs are miscounted", live
        )

        async def answer() -> tuple[T | None, AppError | None]:
            try:
                return await serve(workspace), None
            except AppError as exc:
                return None, exc

        task = self._spawn(life, answer())
        await asyncio.wait({task}, timeout=patience_s)
        if not task.done():
            task.cancel()
            raise Gone
        if task.cancelled():
            raise Gone
        result, error = task.result()
        if error is not None:
            raise error
        return result  # pyright: ignore[reportReturnType]

    # --- queries

    def active_run(self, session_id: str) -> str:
        """The active run of a session, if there is exactly one."""
        rows = self.file.rows(
            "SELECT id FROM runs WHERE session_id = ? AND state = 'active'", session_id
        )
        return rows[0][0] if len(rows) == 1 else ""

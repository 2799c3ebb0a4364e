"""A server with an agent that can be killed at any commit, and a world outside that remembers.

The model and the tools belong to the world, not to the server: what they were asked and what they
did survives every crash, so that the end can be compared with it. Whatever a dead server still has
on the loop can neither write nor act.
"""

import asyncio
import random
import sqlite3
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

from culm.client.stream import Lines, Told
from culm.config import Settings
from culm.errors import AppError, ModelFailed, StoreBusy
from culm.events.views import Filter
from culm.ids import Epoch, Ids, SessionId, workspace_id_of
from culm.model.base import (
    CallBegan,
    CallDelta,
    Done,
    ModelEvent,
    ReasoningDelta,
    Request,
    StopReason,
    TextDelta,
    ToolSpec,
    Usage,
)
from culm.model.choice import Chosen
from culm.run.context import SUMMARY_SYSTEM, TITLE_SYSTEM
from culm.store.base import find_meta, last_seq
from culm.store.memory import MemoryDatabase, MemoryFile
from culm.store.sql import QUERIES
from culm.store.store import Store
from culm.tools.base import Call, Result
from culm.wire.agent import RunComplete
from culm.wire.codec import encode
from culm.wire.messages import ToolCallPart, ToolResultPart
from culm.wire.runs import CrashPolicy, Limits
from culm.wire.state import StoreHealth
from culm.workspace.claims import Created
from culm.workspace.workspace import About, Equipment, Workspace
from tests.sim.loop import SimClock, SimLoop
from tests.sim.world import SimClient, SimServer
from tests.support import model_config, no_documents

T = TypeVar("T")
S = TypeVar("S")

PATH = Path("/simulated")
SETTINGS = Settings(stream_buffer_bytes=4_000, abandoned_runs_s=20.0)
WINDOW = 100_000  # Tokens the model's context holds ...
NEARLY_FULL = 90_000  # ... and what an answer says it used to make it nearly full.
TEARDOWN_S = SETTINGS.teardown_s
ALIVE_EVERY_S = 30.0  # How often a server says that it lives.
AWAY_S_MAX = 600.0  # What was accepted goes on by itself after an absence of at most this.
TITLE_COST = 2.0**50  # Unlike any other: a session's cost tells how many titles are in it.
COSTS_MAX = 48  # Each answer costs another power of two, so that a sum tells what is in it.


# It dies before a commit, after it and before anybody hears of it, or when somebody has heard.
Death = Literal["before", "after", "told"]


class Killed(BaseException):
    """The process ends in the middle of what it does."""


class Gone(Exception):
    """The server is not there, or the client did not wait for it."""


# --- a disk that can be the last thing a process sees


Moment = Literal["before", "after"]


def _do_nothing(_: Moment) -> None:
    pass


class _Connection(sqlite3.Connection):
    """Calls `on_commit` around every commit; whoever raises there dies with it."""

    on_commit: "Callable[[Moment], None]" = staticmethod(_do_nothing)

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:  # noqa: ANN401
        if sql != "COMMIT":
            return super().execute(sql, parameters)
        self.on_commit("before")
        cursor = super().execute(sql, parameters)
        self.on_commit("after")
        return cursor


@cache
def _empty() -> MemoryFile:
    return MemoryFile()


class SimFile(MemoryFile):
    """What survives, and the place where a process may die at an exact commit."""

    def __init__(self) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None, factory=_Connection)
        _empty().connection.backup(connection)  # Cheaper than its own migrations.
        self.database = None
        self.is_full = self.is_busy = False
        self.bad: set[int] = set()  # Groups that cannot be committed, by number.
        self.groups = 0  # That were tried ...
        self.refused = 0  # ... and that were not committed, or not even taken.
        self.group_max = 1024
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.on_commit = self._on_commit
        self.connection = connection
        self.commits = 0
        self.die: tuple[int, Death] | None = None  # At which commit.
        self.on_death: Callable[[], None] = lambda: None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def full(self) -> bool:
        """Asked once for each group that is about to be committed."""
        self.groups += 1
        full = self.is_full or self.groups in self.bad
        self.refused += full
        return full

    @property
    def busy(self) -> bool:
        """Asked once for each write."""
        self.refused += self.is_busy
        return self.is_busy

    async def after(self, commits: int, timeout_s: float) -> None:
        """Wait for so many commits, so that what follows comes right behind one."""
        commit: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self.commits + commits, commit))
        await asyncio.wait({commit}, timeout=timeout_s)

    def _on_commit(self, when: Moment) -> None:
        if when == "before":
            self.commits += 1
        if self.die is not None and self.commits >= self.die[0]:
            if self.die[1] == when:
                self.die = None
                self.on_death()
                raise Killed
            if self.die[1] == "told" and when == "after":
                self.die = None
                asyncio.get_running_loop().call_soon(self.on_death)
        if when == "after" and self._waiting:
            due = [commit for number, commit in self._waiting if number <= self.commits]
            self._waiting = [one for one in self._waiting if one[0] > self.commits]
            for commit in due:
                commit.set_result(None)

    def rows(self, sql: str, *values: str | int) -> list[sqlite3.Row]:
        return self.connection.execute(sql, values).fetchall()


class SlowDatabase:
    """Reads that take a while, as threads do."""

    def __init__(self, database: MemoryDatabase, loop: SimLoop) -> None:
        self.submit = database.submit
        self.close = database.close
        self._read = database.read
        self._random = loop.random

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        await asyncio.sleep(self._random.choice((0, 0, 0, 0.0001, 0.0005, 0.01)))
        return await self._read(query)


# --- one life of the server


class SimTask(asyncio.Task[Any]):
    """Hashed by its number, not by its address, so that sets of tasks have one order."""

    number = 0

    def __hash__(self) -> int:
        return self.number


_LIFE: ContextVar["Life | None"] = ContextVar("life", default=None)


def number_tasks(loop: SimLoop) -> None:
    """Let a seed repeat itself even where tasks are in a set, and each life know its tasks."""
    numbers = count(1)

    def make(
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any] | Generator[Any, None, Any],
        **about: Any,  # noqa: ANN401
    ) -> SimTask:
        task = SimTask(coro, loop=loop, **about)
        task.number = next(numbers)
        context: Context | None = about.get("context")
        life = _LIFE.get() if context is None else context.get(_LIFE)
        if life is not None:
            life.tasks[task] = None
            task.add_done_callback(lambda done: life.tasks.pop(done, None))
        return task

    loop.set_task_factory(make)


class Life:
    """One incarnation of the server, from its start to its end, whatever that is.

    Whatever it starts, directly or not, has its context: that is how a kill finds it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.equipped = True  # It has a model.
        self.dead = False  # Killed: what is left of it on the loop must not act.
        self.left = False  # It has closed, and said that nothing of it runs any more.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.streams: Counter[str] = Counter()  # Model streams in flight, by session.
        self.workspace: Workspace | None = None
        self.group: Tasks | None = None
        self.began_s = 0.0
        self.context = copy_context()
        self.context.run(_LIFE.set, self)

    def kill(self) -> None:
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


class Tasks(asyncio.TaskGroup):
    """Says what its tasks died of; nobody waits for those of a killed server."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        super().__init__()
        self._report = on_error

    def create_task(
        self,
        coro: Coroutine[Any, Any, S] | Generator[Any, None, S],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[S]:
        task = super().create_task(coro, name=name, context=context)
        task.add_done_callback(self._died)
        return task

    def _died(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._report(error)


class MortalClock(SimClock):
    """Timers that die with their process; a commit takes no, little or much time."""

    def __init__(self, loop: SimLoop, life: Life) -> None:
        super().__init__(loop)
        self._life = life
        self._draw = loop.random

    def call_later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        if delay_s < 0.001:
            delay_s *= self._draw.choice((0, 1, 1, 1, 20))
        return super().call_later(delay_s, lambda: None if self._life.dead else action())


class Probe:
    """A stream that is read the moment it is told."""

    def __init__(self, world: "World", workspace: Workspace) -> None:
        self._world = world
        self._workspace = workspace

    def write(self, data: bytes) -> None:
        if b'{"type":"run_complete"' in data:  # Whole events come at once, and most do not matter.
            for told in Lines().feed(data):
                if told.type == "run_complete":
                    self._completed(told)

    def _completed(self, told: Told) -> None:
        """INV-40: by the time it is told, the run is not live any more."""
        complete = told.read(RunComplete)
        runs = self._workspace.runs
        line = runs.line(complete.session_id)
        live = runs.find(complete.run_id)
        # Else somebody wishes to start it, who will hear that it is not held any more.
        left = live is None or not live.accepted.done()
        self._world.expect(left, "told before it left", complete)
        self._world.expect(runs.is_busy(complete.session_id) == bool(line), "busy is wrong")

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass


# --- what the world remembers


@dataclass(eq=False)
class Question:
    """One call of the model."""

    n: int
    life: int
    run_id: str
    session_id: str
    kind: Literal["turn", "summary", "title"]
    key: bytes  # The same for the same question.
    read: str  # All text in it.
    said: str = ""  # So far.
    cost: float = 0.0
    tokens: tuple[int, int] = (0, 0)
    full: bool = False  # It said that the context is nearly full: a summary follows.
    calls: dict[str, str] = field(default_factory=dict[str, str])  # Token → complete input.
    state: Literal["open", "done", "transient", "broken"] = "open"
    reason: StopReason | None = None


@dataclass(frozen=True)
class Effect:
    token: str
    run_id: str
    life: int


@dataclass
class Sent:
    """A prompt that somebody has tried to bring."""

    token: str
    session_id: SessionId
    given: str
    text: str
    limits: Limits | None = None
    answered: str = ""  # The run it became, if that was ever said.


@dataclass
class World:
    """Everything outside of the server."""

    loop: SimLoop
    sent: dict[str, Sent] = field(default_factory=dict[str, Sent])  # By token.
    ids: dict[str, set[str]] = field(default_factory=dict[str, set[str]])  # Texts by given id.
    questions: list[Question] = field(default_factory=list[Question])
    effects: list[Effect] = field(default_factory=list[Effect])
    tokens: dict[str, str] = field(default_factory=dict[str, str])  # Of calls → the run's id.
    deleted: set[str] = field(default_factory=set[str])  # Sessions, also if only tried.
    sessions: list[SessionId] = field(default_factory=list[SessionId])
    tried: set[str] = field(default_factory=set[str])  # Runs that a cancel may have covered.
    covered: set[str] = field(default_factory=set[str])  # Runs that an answered cancel saw live.
    sealed: set[str] = field(default_factory=set[str])  # Those of them that it marked.
    cancels: Counter[str] = field(default_factory=Counter[str])  # That had something to cover.
    ordered: set[str] = field(default_factory=set[str])  # Sessions somebody reordered.
    costs: Counter[str] = field(default_factory=Counter[str])  # Questions by session.
    words: dict[str, str] = field(default_factory=dict[str, str])  # What cancels said of runs.
    problems: list[str] = field(default_factory=list[str])
    store_failed: bool = False  # At some time.
    faulty: bool = True  # Models and tools misbehave now and then.
    stubborn: bool = False  # There is a tool that does not stop when it is told to.
    count: int = 0

    @property
    def random(self) -> random.Random:
        return self.loop.random

    def number(self) -> int:
        self.count += 1
        return self.count

    def expect(self, holds: bool, what: str, *about: object) -> None:  # noqa: FBT001
        """As an assertion, from places where one would be swallowed."""
        if not holds:
            self.problems.append(f"at {self.loop.time():.4f}: {what} {about or ''}")

    def on_problem(self, _: object, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            self.problems.append(str(context))

    def cost(self, session_id: str) -> float:
        n = self.costs[session_id]
        self.costs[session_id] += 1
        return 2.0**n if n < COSTS_MAX else 0.0


# --- the model


Step = ModelEvent | float | Exception


class SimModel:
    """Answers as the dice fall, and remembers what it was asked."""

    def __init__(self, world: World, server: "RunServer", life: Life) -> None:
        self._world = world
        self._server = server
        self._life = life

    async def stream(self, request: Request) -> AsyncGenerator[ModelEvent]:
        life, world = self._life, self._world
        if life.dead:
            raise asyncio.CancelledError
        question = self._ask(request)
        if question.kind != "title":
            life.streams[question.session_id] += 1
            one = life.streams[question.session_id] == 1
            world.expect(one, "INV-32: two streams of one session", question)
        try:
            for step in self._server.plan(question):
                if isinstance(step, Exception):
                    is_transient = isinstance(step, ModelFailed) and step.transient
                    question.state = "transient" if is_transient else "broken"
                    raise step
                if isinstance(step, float | int):
                    await asyncio.sleep(step)
                    continue
                if isinstance(step, TextDelta):
                    question.said += step.text
                if isinstance(step, Done):
                    question.state, question.reason = "done", step.reason
                yield step
            if question.state == "open":
                question.state = "broken"
        finally:
            if question.kind != "title":
                life.streams[question.session_id] -= 1

    def _ask(self, request: Request) -> Question:
        world = self._world
        key = encode(request.messages) + request.system.encode()
        session_id = request.messages[0].session_id
        world.expect(not self._life.left, "a server that has left asks", session_id)
        if request.system == TITLE_SYSTEM:
            about = (world.number(), self._life.number, "", session_id)
            question = Question(*about, "title", key, "")
        else:
            name = self._server.active_run(session_id)
            world.expect(name != "", "asked before it was active", session_id)
            about = (world.number(), self._life.number, name, session_id)
            kind = "summary" if request.system == SUMMARY_SYSTEM else "turn"
            read = " ".join(str(message.parts) for message in request.messages)
            question = Question(*about, kind, key, read)
            self._check(question, request)
        world.questions.append(question)
        return question

    def _check(self, question: Question, request: Request) -> None:
        world = self._world
        world.expect(question.run_id not in world.covered, "asked after its cancel", question)
        before = [q for q in world.questions if q.run_id == question.run_id]
        same = [q for q in before if q.key == question.key]
        repeats = all(q.state == "transient" for q in same)
        world.expect(repeats, "the same question twice", question)
        world.expect(all(q.life == question.life for q in before), "asked in two lives", question)
        calls = [
            p.data.id for m in request.messages for p in m.parts if isinstance(p, ToolCallPart)
        ]
        results = [
            p.data.tool_call_id
            for m in request.messages
            for p in m.parts
            if isinstance(p, ToolResultPart)
        ]
        world.expect(calls == results, "INV-82: calls and results differ", calls, results)


# --- the tools


@dataclass
class SimTool:
    """Has an effect, which it notes where no crash reaches; takes a while, and may fail."""

    world: World
    server: "RunServer"
    life: Life
    name: str
    crash: CrashPolicy = "ask"
    parallel: bool = False

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, self.name, {"type": "object"})

    async def run(self, call: Call) -> Result:
        world, life = self.world, self.life
        if life.dead:
            raise asyncio.CancelledError
        assert call.arguments is not None
        token = str(call.arguments["token"])
        run_id = world.tokens[token]
        effect = Effect(token, run_id, life.number)
        world.expect(not life.left, "a server that has left acts", effect)
        world.expect(run_id not in world.covered, "EXC-8: a call after its cancel", effect)
        world.expect(token not in {e.token for e in world.effects}, "EXC-9: acted twice", effect)
        started = self.server.file.rows(
            "SELECT 1 FROM calls WHERE run_id = ? AND call_id = ? AND state = 'started'",
            *(run_id, call.id),
        )
        world.expect(bool(started), "acted before `started` was committed", effect)
        world.effects.append(effect)
        return await self._take_time(token)

    async def _take_time(self, token: str) -> Result:
        world = self.world
        delay_s = world.random.choice((0, 0, 0.0001, 0.05, 1.0, 7.0))
        try:
            await asyncio.sleep(delay_s)
        except asyncio.CancelledError:
            if self.name != "stubborn" or self.life.dead:
                raise
            await asyncio.sleep(world.random.choice((0, 0.5, 4, 8)))
            if self.life.dead:
                raise
            return Result(f"did not stop {token}")
        if self.name == "deny":
            return Result("no", is_error=True, ends_turn="denied")
        if world.faulty and world.random.random() < 0.1:
            raise RuntimeError("the tool broke")
        return Result(f"did {token}")


# --- the server


class RunServer(SimServer):
    """A workspace with an agent, killed, stopped and started again."""

    def __init__(self, loop: SimLoop, world: World) -> None:
        self.loop = loop
        self.clock = SimClock(loop)
        self.ids = Ids(loop.random.randrange(1 << 30))
        self.file: SimFile = SimFile()
        self.workspace: Workspace | None = None
        self.up = asyncio.Event()
        self.file.on_death = self.kill
        self.world = world
        self.life: Life | None = None
        self.lives = 0
        self.outage_s: float | None = None  # How long it stays down the next time ...
        self.outages: Sequence[float] = (
            0.01,
            0.5,
            5.0,
            60.0,
            500.0,
            700.0,
            9_000.0,
        )  # ... or one of these.
        self.observers: list[SimClient] = []
        self.alive_s: float | None = None
        self._over = asyncio.Event()
        self._stopping = False
        self._group = asyncio.TaskGroup()
        self.plan: Callable[[Question], Sequence[Step]] = self.draw_plan
        self.id = self.ids.client()

    # --- being there

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._group:
            while True:
                self._over.clear()
                self._stopping = False
                await self._live()
                outage_s = self.outage_s
                self.outage_s = None
                if outage_s is None:
                    outage_s = self.random.choice(self.outages)
                await asyncio.sleep(outage_s)

    @property
    def random(self) -> random.Random:
        return self.loop.random

    async def _live(self) -> None:
        self.lives += 1
        life = self.life = Life(self.lives)
        life.began_s = self.clock.now_s()
        clock = MortalClock(self.loop, life)
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

    async def _start(self, life: Life, clock: MortalClock, database: MemoryDatabase) -> None:
        connection = self.file.connection
        if find_meta(connection, "epoch") is None:
            connection.execute(QUERIES["set_meta"], ("epoch", self.ids.epoch()))
        epoch = Epoch(find_meta(connection, "epoch") or "")
        slow = SlowDatabase(database, self.loop)
        store = Store(slow, epoch, last_seq(connection), StoreHealth("ok"))
        workspace = Workspace(
            About(workspace_id_of(PATH), PATH, str(PATH), PATH),
            store,
            no_documents(),
            self._equipment(life),
            clock,
            self.ids,
            SETTINGS,
            await self._begin_tasks(life),
        )
        life.workspace = workspace
        subscriber = workspace.hub.join(Probe(self.world, workspace), "delta", Filter())
        waited = self._waiting()
        try:
            await workspace.start(self.alive_s)
        except StoreBusy:
            life.dead, self.outage_s = True, 1.0  # The disk is full; nobody can open it now.
            return
        workspace.hub.flush()
        subscriber.seq = workspace.hub.seq
        workspace.hub.go_live(subscriber)
        self._check_started(workspace, waited if life.equipped else set())
        workspace.claim(Created(self.id))
        workspace.on_fate = lambda _: self.stop(0.01)  # Whoever wants it opens it again.
        self.workspace = life.workspace = workspace

    async def _begin_tasks(self, life: Life) -> asyncio.TaskGroup:
        life.group = Tasks(lambda error: self.world.problems.append(f"a task died: {error!r}"))
        return await life.group.__aenter__()

    def _waiting(self) -> set[str]:
        """Those that nobody cancelled and that wait behind nobody who ran."""
        rows = self.file.rows(
            """SELECT id FROM runs WHERE state IN ('accepted', 'queued')
            AND id NOT IN (SELECT run_id FROM cancelled_runs)
            AND session_id NOT IN (SELECT session_id FROM runs WHERE state = 'active')"""
        )
        return {row[0] for row in rows}

    def _check_started(self, workspace: Workspace, waited: set[str]) -> None:
        """Nothing stays active, and what waits in the store is what waits here."""
        rows = self.file.rows("SELECT id, state FROM runs WHERE state NOT IN ('ended', 'held')")
        stored = {row[0]: row[1] for row in rows}
        live = {run.id: run.state for run in workspace.runs.live()}
        self.world.expect(stored == live, "after a start", stored, live)
        self.world.expect("active" not in stored.values(), "active after a start", stored)
        order = "SELECT id FROM runs WHERE session_id = ? AND state <> 'held' AND state <> 'ended'"
        for session_id in {run.session_id for run in workspace.runs.live()}:
            line = [run.id for run in workspace.runs.line(session_id)]
            rows = self.file.rows(f"{order} ORDER BY place, seq", session_id)
            self.world.expect(line == [row[0] for row in rows], "another order", line)
        away_s = 0.0 if self.alive_s is None else self.clock.now_s() - self.alive_s
        if away_s > AWAY_S_MAX:
            self.world.expect(not live, "it was away for long, and goes on", live)
        elif away_s < AWAY_S_MAX - 1:
            self.world.expect(waited <= set(live), "it was not away for long", waited, live)

    def _equipment(self, life: Life) -> Equipment:
        def make(_: Chosen) -> SimModel:
            return SimModel(self.world, self, life)

        tools = [
            SimTool(self.world, self, life, "look", "again", parallel=True),
            SimTool(self.world, self, life, "write"),
            SimTool(self.world, self, life, "send", "never"),
            SimTool(self.world, self, life, "deny"),
            SimTool(self.world, self, life, "stubborn"),
        ]
        config = model_config("http://simulated", context_window=WINDOW)
        if self.world.faulty and self.random.random() < 0.05:
            config, life.equipped = {}, False  # Somebody took its provider away.
        return Equipment(make, {tool.name: tool for tool in tools}, config)

    # --- ending

    def kill(self) -> None:
        """`kill -9`: in one step it can neither write nor act any more."""
        life = self.life
        if life is None or life.dead:
            return
        life.kill()
        self.file.crash()
        self.file.die = None
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
            rows = self.file.rows("SELECT id FROM runs WHERE state IN ('active', 'folded')")
            self.world.expect(not rows, "left something running", [row[0] for row in rows])
            rows = self.file.rows("SELECT id FROM messages WHERE is_open = 1")
            self.world.expect(not rows, "left a message open", [row[0] for row in rows])
        for observer in self.observers:
            observer.cut()

    def _note_alive(self, life: Life) -> None:
        beats = (self.clock.now_s() - life.began_s) // ALIVE_EVERY_S
        self.alive_s = life.began_s + beats * ALIVE_EVERY_S

    def _spawn(self, life: Life, work: Coroutine[Any, Any, S]) -> asyncio.Task[S]:
        """Work of the server itself: it dies with it."""
        return self._group.create_task(work, context=life.context.copy())

    # --- answering

    async def request(
        self, serve: Callable[[Workspace], Awaitable[T]], *, patience_s: float | None = None
    ) -> T:
        """What a route does for a client, which may not wait for it. Raises `AppError`, `Gone`."""
        life = self.life
        if life is None or self.workspace is None:
            raise Gone
        workspace = self.workspace
        live = len(workspace.runs.live())
        self.world.expect(workspace.claims.live_runs == live, "live runs are miscounted", live)

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

    # --- looking

    def active_run(self, session_id: str) -> str:
        """The one run of a session that may ask a model now."""
        rows = self.file.rows(
            "SELECT id FROM runs WHERE session_id = ? AND state = 'active'", session_id
        )
        return rows[0][0] if len(rows) == 1 else ""

    # --- what the model says

    def draw_plan(self, question: Question) -> Sequence[Step]:
        return draw_plan(self.world, question)


def draw_plan(world: World, question: Question) -> list[Step]:
    """An answer as the dice fall."""
    dice = world.random
    before = sum(q.run_id == question.run_id for q in world.questions)
    roll = dice.random()
    pauses = dice.choice(((0,), (0, 0, 0.0001), (0, 0.01, 0.2), (0.1, 1.0)))
    plan: list[Step] = [dice.choice(pauses)]
    if world.faulty and roll < 0.08:
        return [*plan, *_words(question, dice, pauses), *_failure(dice)]
    if world.faulty and roll < 0.1:
        return [*plan, *_words(question, dice, pauses), 90.0, Done("end_turn")]  # A stall.
    if question.kind == "title":
        done = Done("end_turn", Usage(1, 1, cost=TITLE_COST) if dice.random() < 0.5 else None)
        return [*plan, TextDelta(f"title {question.n}"), done]
    if dice.random() < 0.2:
        plan += [ReasoningDelta("hmm "), dice.choice(pauses), ReasoningDelta("so", "sig")]
    reason: StopReason = "end_turn"
    if question.kind == "turn" and before < 5 and dice.random() < 0.6:
        if dice.random() < 0.5:
            plan += _words(question, dice, pauses)
        plan += _calls(world, question, pauses)
        reason = "tool_use"
    else:
        plan += _words(question, dice, pauses)
    if dice.random() < 0.05:
        reason = dice.choice(("max_tokens", "unknown", "content_filter"))
    usage = None
    if dice.random() < 0.7:
        question.cost = world.cost(question.session_id)
        question.full = dice.random() < 0.08
        used = NEARLY_FULL if question.full else dice.randint(1, 99)
        question.tokens = (used, dice.randint(1, 9))
        usage = Usage(*question.tokens, cost=question.cost)
    return [*plan, Done(reason, usage)]


def _words(question: Question, dice: random.Random, pauses: Sequence[float]) -> list[Step]:
    steps: list[Step] = [TextDelta(f"a{question.n}:")]
    for _ in range(dice.choice((0, 1, 3, 8))):
        steps += [dice.choice(pauses), TextDelta(dice.choice((" wörd", " 🌱", " x" * 60)))]
    return steps


def _calls(world: World, question: Question, pauses: Sequence[float]) -> list[Step]:
    dice = world.random
    names = ["look", "look", "write", "send", "nothing", "deny" if dice.random() < 0.2 else "look"]
    if world.stubborn:
        names += ["stubborn"] * 3
    began: list[Step] = []
    grew: list[Step] = []
    for key in range(dice.choice((1, 1, 2, 3, 7))):
        token = f"t{world.number()}"
        world.tokens[token] = question.run_id
        text = f'{{"token":"{token}"}}'
        if world.faulty and dice.random() < 0.05:
            text = text[:-1]  # Not JSON.
        question.calls[token] = text
        id_ = dice.choice((token, token, token, "", "same"))
        began += [CallBegan(key, id_, dice.choice(names)), dice.choice(pauses)]
        grew += [CallDelta(key, text[:4]), dice.choice(pauses), CallDelta(key, text[4:])]
    return [*began, *grew]


def _failure(dice: random.Random) -> list[Step]:
    match dice.randrange(5):
        case 0:
            return []  # The stream was cut.
        case 1:
            return [ModelFailed("Refused", "the key is not valid")]
        case 2:
            return [RuntimeError("a bug in an adapter")]
        case 3:
            return [ModelFailed("Busy", "come back", transient=True, retry_after_s=0.5)]
        case _:
            return [ModelFailed("Busy", "come back", transient=True)]

"""Processes inside one simulated loop: what a kill ends at once, and a stop holds in its place.

A process is a set of tasks that know each other by their context. One that was killed is never
stepped again: it runs no clean-up and says no goodbye. What it held, others see break off.
"""

import asyncio
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from culm.fleet.discovery.memory import MemoryDiscovery
from culm.fleet.executor import SteerMessage
from culm.fleet.host.run_driver import RunResult
from tests.sim.loop import SimClock, SimLoop
from tests.sim.runs_disk import SimTask

if TYPE_CHECKING:
    from tests.sim.fleet_network import Line

_PROCESS: ContextVar["Process | None"] = ContextVar("process", default=None)
CURRENT_RUN: ContextVar[str] = ContextVar("current_run", default="")  # For whom a parent acts.


class Mortal(Coroutine[Any, Any, Any]):
    """A coroutine that goes on only while its process does."""

    def __init__(self, coro: Coroutine[Any, Any, Any], process: "Process") -> None:
        self._coro = coro
        self._process = process
        self._kept: BaseException | None = None  # Was thrown while the process was held.

    def send(self, value: object) -> object:
        if self._process.is_held:
            return self._process.hold()
        kept, self._kept = self._kept, None
        return self._coro.send(value) if kept is None else self._coro.throw(kept)

    def throw(self, *error: Any) -> object:  # noqa: ANN401
        if self._process.is_held:
            self._kept = error[-1]
            return self._process.hold()
        self._kept = None
        return self._coro.throw(error[-1])

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, None, Any]:
        raise AssertionError("a task steps it")


class Process:
    """A parent or a worker, from its start to its end, whatever that is."""

    def __init__(self, world: "FleetWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.pid = world.number()
        self.is_alive = True
        self.is_stopped = False  # As by SIGSTOP; it may go on.
        self.was_stopped = False
        self.is_working = False  # Of a worker: on some run.
        self.gone = asyncio.Event()  # Its end, as others see it.
        self.tasks: list[asyncio.Task[Any]] = []  # All that it ever had.
        self.left_over: list[asyncio.Task[Any]] = []  # Of bad executors; they end with it.
        self.clock = ProcessClock(world.loop, self)
        self._on_gone: list[Callable[[], None]] = []
        self._held: list[asyncio.Future[None]] = []
        self._late: list[Callable[[], object]] = []
        self._is_buried = False
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        world.processes.append(self)

    def begin(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Have its main task; when that ends, it ends, and leaves nothing behind."""
        return self.start(self._live(main), self.name)

    def start(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.world.tasks.create_task(work, name=name, context=self._context.copy())

    async def _live(self, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
        try:
            await main()
        except Exception as exc:
            self.world.problems.append(f"{self.name} failed: {exc!r}")
        finally:
            if self.is_alive:
                self.world.expect(not self.tasks_left, self.name, "leaves", self.tasks_left)
                self.world.note("exit", self.name)
                self.end()

    @property
    def tasks_left(self) -> list[asyncio.Task[Any]]:
        """What still goes on, besides the one that looks, and what bad executors left behind."""
        known = (asyncio.current_task(), *self.left_over)
        return [task for task in self.tasks if not task.done() and task not in known]

    def when_gone(self, action: Callable[[], None]) -> None:
        """What its kernel does at its end: close, free, tell."""
        self._on_gone.append(action)

    def end(self) -> None:
        """Killed, or returned: none of its tasks goes on, and all that it held is let go."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.gone.set()
        for action in self._on_gone:
            action()

    def stop(self) -> None:
        self.is_stopped = self.was_stopped = True

    def go_on(self) -> None:
        self.is_stopped = False
        if self.is_alive:
            self._release()

    def bury(self) -> None:
        """The world is over: let what is left of a dead one unwind, where nobody sees it."""
        self._is_buried = True
        self._release()
        for task in self.tasks:
            task.cancel()

    @property
    def is_held(self) -> bool:
        return (self.is_stopped or not self.is_alive) and not self._is_buried

    def hold(self) -> asyncio.Future[None]:
        """What a task of it waits for instead of going on."""
        future: asyncio.Future[None] = self.world.loop.create_future()
        future._asyncio_future_blocking = True  # As `await` does.
        self._held.append(future)
        return future

    def do(self, action: Callable[[], object]) -> None:
        """Now; when it goes on, if it is stopped; never, if it is dead."""
        if self.is_stopped:
            self._late.append(action)
        elif self.is_alive:
            action()

    def _release(self) -> None:
        held, self._held = self._held, []
        late, self._late = self._late, []
        for future in held:
            if not future.done():
                future.set_result(None)
        for action in late:
            self.do(action)


class ProcessClock(SimClock):
    """Timers that are stopped and die with their process."""

    def __init__(self, loop: SimLoop, process: Process) -> None:
        super().__init__(loop)
        self._process = process

    def call_later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        return super().call_later(delay_s, lambda: self._process.do(action))


@dataclass
class SimRun:
    """One assignment, and all that became of it."""

    token: str
    kind: str  # Which executor it is for.
    epoch: int
    parent: Process
    # --- as whoever wanted it sees it
    driven: list[RunResult] = field(default_factory=list[RunResult])
    refused: str = ""  # Why there is no outcome.
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gaps: int = 0
    steers: list[SteerMessage] = field(default_factory=list[SteerMessage])  # That were taken.
    back: tuple[SteerMessage, ...] = ()  # What was said in vain.
    answers: dict[str, bool] = field(default_factory=dict[str, bool])  # To its asks.
    slow_answers: set[str] = field(default_factory=set[str])  # Those that come too late.
    is_over: bool = False
    over_s: float = 0.0
    # --- as its executors see it; each execution has a number
    executions: list[int] = field(default_factory=list[int])
    began_s: float = 0.0  # The first of them.
    emitted: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    admitted: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    heard: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    # --- what was done to it on purpose
    harms: list[str] = field(default_factory=list[str])
    setbacks: list[str] = field(default_factory=list[str])  # Before anything had happened.


class FleetWorld:
    def __init__(self, loop: SimLoop) -> None:
        self.loop = loop
        self.dice = loop.random
        self.clock = SimClock(loop)
        self.discovery = MemoryDiscovery(self.clock)
        self.tasks = asyncio.TaskGroup()
        self.processes: list[Process] = []
        self.lines: list[Line] = []
        self.runs: dict[str, SimRun] = {}
        self.problems: list[str] = []
        self._trace: list[tuple[float, tuple[object, ...]]] = []
        self.faulty = loop.random.random() < 0.85
        self._context = copy_context()
        self._numbers = count(1)
        loop.set_exception_handler(self.on_problem)
        number_tasks(loop)

    def number(self) -> int:
        return next(self._numbers)

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """As the world does it: whoever calls this may be dead."""
        self.tasks.create_task(work, context=self._context.copy())

    def note(self, *words: object) -> None:
        self._trace.append((self.loop.time(), words))

    @property
    def trace(self) -> list[str]:
        """All that happened, in words."""
        return [f"{at_s:.6f} {' '.join(map(str, words))}" for at_s, words in self._trace]

    def expect(self, holds: object, *words: object) -> None:
        if not holds:
            self.problems.append(" ".join(map(str, words)))

    def chance(self, share: float) -> bool:
        """Of something bad."""
        return self.faulty and self.dice.random() < share

    def on_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def harm(self, token: str, why: str) -> None:
        """From now on it need not complete."""
        self.note("harm", token, why)
        if token in self.runs:
            self.runs[token].harms.append(why)

    def setback(self, token: str, why: str) -> None:
        """Something failed before a worker began with it: once, it is tried again."""
        self.note("setback", token, why)
        if token in self.runs:
            self.runs[token].setbacks.append(why)


def number_tasks(loop: SimLoop) -> None:
    """Let a seed repeat itself even where tasks are in a set, and each process know its tasks."""
    # Tasks of worlds before may still be in a set that asyncio keeps: no two should be alike.
    numbers = count(loop.random.getrandbits(30) << 24)

    def make(
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        **about: Any,  # noqa: ANN401
    ) -> SimTask:
        context: Context | None = about.get("context")
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        mortal = coro if process is None else Mortal(coro, process)
        task = SimTask(mortal, loop=loop, **about)
        task.number = next(numbers)
        if process is not None:
            process.tasks.append(task)
        return task

    # The type wants generators to be taken, too; nobody here makes a task of one.
    loop.set_task_factory(make)  # pyright: ignore[reportArgumentType]

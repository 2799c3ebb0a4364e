"""Processes inside one simulated loop, which can be killed and stopped.

A process is a set of tasks that share a context. A killed process is never stepped again: it runs
no cleanup and closes nothing itself. Others see its connections break.
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
CURRENT_RUN: ContextVar[str] = ContextVar(
    "current_run", default=""
)  # The run for which a parent acts.


class ProcessCoroutine(Coroutine[Any, Any, Any]):
    """A coroutine that is stepped only while its process runs."""

    def __init__(self, coro: Coroutine[Any, Any, Any], process: "Process") -> None:
        self._coro = coro
        self._process = process
        self._pending_error: BaseException | None = None  # Thrown while the process was suspended.

    def send(self, value: object) -> object:
        if self._process.is_suspended:
            return self._process.suspend()
        pending, self._pending_error = self._pending_error, None
        return self._coro.send(value) if pending is None else self._coro.throw(pending)

    def throw(self, *error: Any) -> object:  # noqa: ANN401
        if self._process.is_suspended:
            self._pending_error = error[-1]
            return self._process.suspend()
        self._pending_error = None
        return self._coro.throw(error[-1])

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, None, Any]:
        raise AssertionError("a task steps it")


class Process:
    """A parent or worker process, from its start to its end."""

    def __init__(self, world: "FleetWorld", name: str) -> None:
        self.world = world
        self.name = name
        self.pid = world.number()
        self.is_alive = True
        self.is_stopped = False  # As by SIGSTOP; it may resume.
        self.was_stopped = False
        self.is_working = False  # A worker with a run.
        self.gone = asyncio.Event()  # Set at its end.
        self.tasks: list[asyncio.Task[Any]] = []  # All tasks it ever had.
        self.left_over: list[
            asyncio.Task[Any]
        ] = []  # Tasks of misbehaving executors; they end with the process.
        self.clock = ProcessClock(world.loop, self)
        self._on_gone: list[Callable[[], None]] = []
        self._suspended: list[asyncio.Future[None]] = []
        self._late: list[Callable[[], object]] = []
        self._is_disposed = False
        self._context = copy_context()
        self._context.run(_PROCESS.set, self)
        world.processes.append(self)

    def begin(self, main: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        """Start the main task; the process ends with it and must leave no task."""
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
        """Running tasks, except the current one and those of misbehaving executors."""
        known = (asyncio.current_task(), *self.left_over)
        return [task for task in self.tasks if not task.done() and task not in known]

    def when_gone(self, action: Callable[[], None]) -> None:
        """Register an action of the kernel at the end of the process."""
        self._on_gone.append(action)

    def end(self) -> None:
        """End the process: its tasks are never stepped again, and its resources are closed."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.gone.set()
        for action in self._on_gone:
            action()

    def stop(self) -> None:
        self.is_stopped = self.was_stopped = True

    def resume(self) -> None:
        self.is_stopped = False
        if self.is_alive:
            self._release()

    def dispose(self) -> None:
        """Unwind the remaining tasks of a dead process after the end of the world."""
        self._is_disposed = True
        self._release()
        for task in self.tasks:
            task.cancel()

    @property
    def is_suspended(self) -> bool:
        return (self.is_stopped or not self.is_alive) and not self._is_disposed

    def suspend(self) -> asyncio.Future[None]:
        """A future that a suspended task waits for."""
        future: asyncio.Future[None] = self.world.loop.create_future()
        future._asyncio_future_blocking = True  # As `await` does.
        self._suspended.append(future)
        return future

    def do(self, action: Callable[[], object]) -> None:
        """Run an action now, after a resume if stopped, or never if dead."""
        if self.is_stopped:
            self._late.append(action)
        elif self.is_alive:
            action()

    def _release(self) -> None:
        suspended, self._suspended = self._suspended, []
        late, self._late = self._late, []
        for future in suspended:
            if not future.done():
                future.set_result(None)
        for action in late:
            self.do(action)


class ProcessClock(SimClock):
    """Timers that stop and end with their process."""

    def __init__(self, loop: SimLoop, process: Process) -> None:
        super().__init__(loop)
        self._process = process

    def call_later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        return super().call_later(delay_s, lambda: self._process.do(action))


@dataclass
class SimRun:
    """One assignment and its recorded history."""

    token: str
    kind: str  # The kind of its executor.
    epoch: int
    parent: Process
    # --- as its client sees it
    driven: list[RunResult] = field(default_factory=list[RunResult])
    refused: str = ""  # The reason for a missing outcome.
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    gaps: int = 0
    steers: list[SteerMessage] = field(default_factory=list[SteerMessage])  # Accepted messages.
    back: tuple[SteerMessage, ...] = ()  # Returned messages.
    answers: dict[str, bool] = field(default_factory=dict[str, bool])  # Answers to its asks.
    slow_answers: set[str] = field(default_factory=set[str])  # Answers that come too late.
    is_over: bool = False
    over_s: float = 0.0
    # --- as its executors see it; each execution has a number
    executions: list[int] = field(default_factory=list[int])
    began_s: float = 0.0  # Start of the first execution.
    emitted: list[tuple[int, int, str]] = field(default_factory=list[tuple[int, int, str]])
    admitted: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    received_answers: list[tuple[str, bool]] = field(default_factory=list[tuple[str, bool]])
    # --- injected faults
    harms: list[str] = field(default_factory=list[str])
    setbacks: list[str] = field(default_factory=list[str])  # Faults before the run began.


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
        """Start a task of the world itself: the caller may be dead."""
        self.tasks.create_task(work, context=self._context.copy())

    def note(self, *parts: object) -> None:
        self._trace.append((self.loop.time(), parts))

    @property
    def trace(self) -> list[str]:
        """The trace as text lines."""
        return [f"{at_s:.6f} {' '.join(map(str, parts))}" for at_s, parts in self._trace]

    def expect(self, holds: object, *parts: object) -> None:
        if not holds:
            self.problems.append(" ".join(map(str, parts)))

    def chance(self, share: float) -> bool:
        """Return True with this probability if faults are on."""
        return self.faulty and self.dice.random() < share

    def on_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.problems.append(f"{context.get('message')}: {context.get('exception')!r}")

    def harm(self, token: str, why: str) -> None:
        """Record a fault after which the run need not complete."""
        self.note("harm", token, why)
        if token in self.runs:
            self.runs[token].harms.append(why)

    def setback(self, token: str, why: str) -> None:
        """Record a fault before the run began: it is retried once."""
        self.note("setback", token, why)
        if token in self.runs:
            self.runs[token].setbacks.append(why)


def number_tasks(loop: SimLoop) -> None:
    """Give tasks a reproducible order in sets, and register each with its process."""
    # Tasks of earlier worlds may still be in a set of asyncio: numbers must not repeat.
    numbers = count(loop.random.getrandbits(30) << 24)

    def make(
        loop: asyncio.AbstractEventLoop,
        coro: Coroutine[Any, Any, Any],
        **about: Any,  # noqa: ANN401
    ) -> SimTask:
        context: Context | None = about.get("context")
        process = _PROCESS.get() if context is None else context.get(_PROCESS)
        wrapped = coro if process is None else ProcessCoroutine(coro, process)
        task = SimTask(wrapped, loop=loop, **about)
        task.number = next(numbers)
        if process is not None:
            process.tasks.append(task)
        return task

    # The type requires generators, too; no task here is made of one.
    loop.set_task_factory(make)  # pyright: ignore[reportArgumentType]

"""A disk that survives processes, which may die at an exact commit.

Everything that a life starts has its context, by which a kill finds it. The rest of a killed life
on the loop can neither write nor act.
"""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context, ContextVar, copy_context
from functools import cache
from itertools import count
from typing import Any, Literal, TypeVar

from culm.store.base import Connection
from culm.store.memory import MemoryDatabase, MemoryFile
from culm.store.text_tail import MemoryTailFile
from culm.workspace.workspace import LiveWorkspace
from tests.sim.loop import SimClock, SimLoop

T = TypeVar("T")
S = TypeVar("S")


# It dies before a commit, after it and before it is announced, or after the announcement.
Death = Literal["before", "after", "announced"]


class Killed(BaseException):
    """The process ends in the middle of an operation."""


# --- the disk


Moment = Literal["before", "after"]


def _do_nothing(_: Moment) -> None:
    pass


class _Connection(Connection):
    """Calls `on_commit` around every commit; an exception there ends the process."""

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


class SimTailFile(MemoryTailFile):
    """A file of the tail on the same disk; a process may die in the middle of a write."""

    def __init__(self, disk: "SimFile") -> None:
        super().__init__()
        self._disk = disk

    def write(self, data: bytes, at: int) -> None:
        self.full = self._disk.is_full
        self._disk.refused += self.full
        if self._disk.die_in_text:
            self._disk.die_in_text -= 1
            if not self._disk.die_in_text:
                super().write(data[: len(data) // 2], at)
                self._disk.on_death()
                raise Killed
        super().write(data, at)


class SimFile(MemoryFile):
    """A file that survives; a process may die at an exact commit."""

    def __init__(self) -> None:
        connection = sqlite3.connect(":memory:", isolation_level=None, factory=_Connection)
        _empty().connection.backup(connection)  # Cheaper than its own migrations.
        self.database = None
        self.is_full = self.is_busy = False
        self.bad: set[int] = set()  # Numbers of groups whose commit fails.
        self.groups = 0  # Attempted groups ...
        self.refused = 0  # ... and refused groups and writes.
        self.group_max = 1024
        connection.row_factory = sqlite3.Row
        connection.execute("PRAGMA foreign_keys = ON")
        connection.on_commit = self._on_commit
        self.connection = connection
        self.commits = 0
        self.die: tuple[int, Death] | None = None  # The commit and the moment of death.
        self.on_death: Callable[[], None] = lambda: None
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.die_in_text = 0  # Dies in the middle of this write to the tail, counted from 1.
        self.tail_files = SimTailFile(self), SimTailFile(self)

    @property
    def full(self) -> bool:
        """Read once for each group that is about to be committed."""
        self.groups += 1
        full = self.is_full or self.groups in self.bad
        self.refused += full
        return full

    @property
    def busy(self) -> bool:
        """Read once for each write."""
        self.refused += self.is_busy
        return self.is_busy

    async def after(self, commits: int, timeout_s: float) -> None:
        """Wait for this many commits; the caller continues right after one."""
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
            if self.die[1] == "announced" and when == "after":
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
    """A database whose reads take a while, as with threads."""

    def __init__(self, database: MemoryDatabase, loop: SimLoop) -> None:
        self.submit = database.submit
        self.close = database.close
        self._read = database.read
        self._random = loop.random

    async def read(self, query: Callable[[Connection], T]) -> T:
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
    """Give tasks a reproducible order in sets, and register each with its life."""
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
    """One server process, from its start to its end.

    Everything that it starts has its context, by which a kill finds it.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_model = True  # It has a model.
        self.dead = False  # Killed: its remaining tasks must not act.
        self.abandoned = False  # Its runs were abandoned for too long.
        self.left = False  # It has closed completely.
        self.tasks: dict[asyncio.Task[Any], None] = {}
        self.streams: Counter[str] = Counter()  # Model streams in flight, by session.
        self.workspace: LiveWorkspace | None = None
        self.group: Tasks | None = None
        self.began_s = 0.0
        self.context = copy_context()
        self.context.run(_LIFE.set, self)

    def kill(self) -> None:
        self.dead = True
        for task in list(self.tasks):
            task.cancel()


class Tasks(asyncio.TaskGroup):
    """A task group that reports errors of its tasks."""

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


class LifeClock(SimClock):
    """Timers that end with their life; a commit takes no, little or much time."""

    def __init__(self, loop: SimLoop, life: Life) -> None:
        super().__init__(loop)
        self._life = life
        self._draw = loop.random

    def call_later(self, delay_s: float, action: Callable[[], None]) -> asyncio.TimerHandle:
        if delay_s < 0.001:
            delay_s *= self._draw.choice((0, 1, 1, 1, 20))
        return super().call_later(delay_s, lambda: None if self._life.dead else action())

"""What is outside of a server with agents, and what must be remembered there through every crash.

A server and its workers are processes of one simulated loop (`fleet_world.py`): one that is killed
is never stepped again. What a model was asked, what a tool did and what people answered is noted
here as it happens; what is wrong at once is noted, too.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from culm.ids import Epoch, LetterId, SessionId
from culm.mail.memory import MemoryPostOffice
from culm.store.memory import MemoryDatabase
from culm.store.store import Store
from culm.wire.state import StoreHealth
from tests.sim.fleet_world import FleetWorld
from tests.sim.loop import SimLoop
from tests.sim.runs_disk import Killed, SimFile


@dataclass(eq=False)
class Asked:
    """One question to a model, of a server or of a worker."""

    run_id: str
    session_id: str
    life: int  # Of the server it was asked for.
    depth: int  # Of the agent; 0 is one that people talk to.
    # The runs that pay for it: it, whom it works for, and so on up, as that server knows them.
    paid_by: Sequence[str]
    cost: float = 0.0  # Another power of two for each of a run, so that a sum tells what is in it.
    tokens: int = 0
    is_done: bool = False  # The whole answer came.
    is_reported: bool = False  # And whoever keeps account has heard what it used.


@dataclass(eq=False)
class Effect:
    """Something a call has done for good."""

    token: str
    session_id: str
    run_id: str


@dataclass(eq=False)
class Execution:
    """One time that a worker began with a run."""

    run_id: str
    life: int
    worker: str
    line: int


@dataclass(eq=False)
class Given:
    """An answer that somebody tried to give."""

    allows: bool
    at_s: float
    text: str = ""  # To a question.


class TreeWorld(FleetWorld):
    """Also has what happened to runs."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        self.file = SimFile()
        self._bench_file = SimFile()
        database = MemoryDatabase(self._bench_file, self.clock)
        self.bench_store = Store(database, Epoch("bench"), 0, StoreHealth("ok"))
        self.post = MemoryPostOffice(self.clock)
        self.letters: dict[LetterId, str] = {}  # That were delivered → to whom.
        self.sessions: list[SessionId] = []  # Those that people began.
        self.deleted: set[str] = set()  # Sessions, also if only tried.
        self.asked: list[Asked] = []
        self.effects: list[Effect] = []
        self.executions: list[Execution] = []
        self.given: dict[str, list[Given]] = defaultdict(list)  # By the id of the ask.
        self.accepted: dict[str, str] = {}  # Runs that somebody was promised → the session.
        self.in_flight: dict[str, set[Asked]] = defaultdict(set)  # By whoever pays.
        self.in_flight_max: dict[tuple[str, int], int] = defaultdict(int)  # In one life.
        self.store_failed = False  # At some time.
        self.rebudgeted: set[str] = set()  # Runs whose limits somebody changed.
        # Whether a run that waits was said to who works there: it is heard, or ends after that one.
        self.is_told: Callable[[str], bool] = lambda _: False
        self.cut: set[tuple[str, int]] = set()  # Runs that a kill cut off, each with the life.

    def rows(self, sql: str, *values: str | int) -> Sequence[Any]:
        return self.file.rows(sql, *values)

    def is_deleted(self, address: str) -> bool:
        """Whether somebody may have deleted what has this mailbox."""
        return not self.rows(
            "SELECT 1 FROM agents WHERE id = ? UNION SELECT 1 FROM sessions WHERE id = ?",
            *(address, address),
        )

    def close(self) -> None:
        self.file.close()
        self._bench_file.close()

    def on_problem(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), Killed):
            super().on_problem(_, context)

    # --- what a model is asked

    def begin(self, asked: Asked) -> None:
        self.asked.append(asked)
        for run_id in asked.paid_by:
            flying = self.in_flight[run_id]
            flying.add(asked)
            key = run_id, asked.life
            self.in_flight_max[key] = max(self.in_flight_max[key], len(flying))

    def finish(self, asked: Asked) -> None:
        for run_id in asked.paid_by:
            self.in_flight[run_id].discard(asked)

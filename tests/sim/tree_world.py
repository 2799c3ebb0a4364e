"""The world outside of a server with agents, with records that survive a crash.

A server and its workers are processes of one simulated loop (`fleet_world.py`). Questions to
models, effects of tools and answers of people are recorded here as they happen, and so are
violations.
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
from culm.store.text_tail import NoSync, TextTail
from culm.wire.workspaces import StoreHealth
from tests.sim.fleet_world import FleetWorld
from tests.sim.loop import SimLoop
from tests.sim.runs_disk import Killed, SimFile


@dataclass(eq=False)
class Asked:
    """One question to a model, from a server or a worker."""

    run_id: str
    session_id: str
    life: int  # The life of its server.
    depth: int  # The depth of the agent; 0 is the top agent.
    # The runs that pay for it: its own run and all parents, as that server knows them.
    paid_by: Sequence[str]
    cost: float = 0.0  # Another power of two for each of a run, so a sum identifies them.
    tokens: int = 0
    is_done: bool = False  # The whole answer came.
    is_reported: bool = False  # Its usage has reached the accounting server.


@dataclass(eq=False)
class Effect:
    """A lasting effect of a call."""

    token: str
    session_id: str
    run_id: str


@dataclass(eq=False)
class Execution:
    """One start of a run in a worker."""

    run_id: str
    life: int
    worker: str
    line: int


@dataclass(eq=False)
class TreeAnswer:
    """An attempt to answer an ask."""

    allows: bool
    at_s: float
    text: str = ""  # The answer to a question.


class TreeWorld(FleetWorld):
    """A fleet world that also records runs, asks and letters."""

    def __init__(self, loop: SimLoop) -> None:
        super().__init__(loop)
        self.file = SimFile()
        self._bench_file = SimFile()
        database = MemoryDatabase(self._bench_file, self.clock)
        epoch = Epoch("bench")
        tail = TextTail(self._bench_file.tail_files, NoSync(), epoch)
        self.bench_store = Store(database, epoch, 0, StoreHealth("ok"), tail)
        self.post = MemoryPostOffice(self.clock)
        self.letters: dict[LetterId, str] = {}  # Delivered letters → recipient.
        self.sessions: list[SessionId] = []  # Sessions created by clients.
        self.deleted: set[str] = set()  # Sessions, also if only tried.
        self.asked: list[Asked] = []
        self.effects: list[Effect] = []
        self.executions: list[Execution] = []
        self.given: dict[str, list[TreeAnswer]] = defaultdict(list)  # By the id of the ask.
        self.accepted: dict[str, str] = {}  # Accepted runs → session.
        self.in_flight: dict[str, set[Asked]] = defaultdict(set)  # By paying run.
        self.in_flight_max: dict[tuple[str, int], int] = defaultdict(int)  # Per run and life.
        self.store_failed = False  # At any time.
        self.rebudgeted: set[str] = set()  # Runs with changed limits.
        # True for a waiting run whose prompt was sent to the active worker of its session.
        self.is_shared_run: Callable[[str], bool] = lambda _: False
        self.cut: set[tuple[str, int]] = set()  # Runs interrupted by a kill, each with its life.

    def rows(self, sql: str, *values: str | int) -> Sequence[Any]:
        return self.file.rows(sql, *values)

    def is_deleted(self, address: str) -> bool:
        """Return True if the owner of this mailbox may be deleted."""
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

    # --- questions to models

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

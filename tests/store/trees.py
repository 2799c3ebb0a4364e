"""A database with agents, written by the same units as in the server."""

from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from culm.ids import AgentId, Ids, RunId, SessionId
from culm.store.agents import NewAgent, add_agent, agents_below, find_agent
from culm.store.base import Connection, Tx, WriteJob, run_group, together
from culm.store.files import prepare_file
from culm.store.runs import NewRun, accept_run, add_run_usage
from culm.store.sessions import add_session, add_usage, delete_session
from culm.store.sql import QUERIES
from culm.store.writer import connect
from culm.wire.runs import Limits, Used

T = TypeVar("T")

TOP = "top"


@dataclass(frozen=True, slots=True)
class Tree:
    """A database with a top session and agents below it."""

    connection: Connection

    @property
    def names(self) -> list[str]:
        return [TOP, *(agent.agent_id for agent in agents_below("")(self.connection))]

    def do(self, unit: Callable[[Tx], T]) -> T:
        job = WriteJob(unit, finish=lambda _: None)
        run_group(self.connection, [job], now=1)
        if job.error is not None:
            raise job.error
        return job.result  # pyright: ignore[reportReturnType] - what the unit returned

    def begin(self) -> None:
        """Create the top session with its run."""
        self.do(together(add_session(SessionId(TOP), "", sessions_max=10**6), _run(TOP)))

    def add(self, name: str, parent: str = TOP) -> None:
        """Create an agent in its own session, with a run for the run of the parent."""
        stored = find_agent(parent)(self.connection)
        above = (parent,) if stored is None else stored.path
        new = agent_named(name, parent, above)
        session = add_session(SessionId(name), "", parent_id=parent, sessions_max=10**6)
        self.do(together(session, add_agent(new), _run(name, parent)))

    def use(self, name: str, tokens: int, cost: float) -> None:
        used = Used(tokens, 1, cost, estimated=False)
        unit = together(add_usage(SessionId(name), used), add_run_usage(RunId(f"r {name}"), used))
        self.do(unit)

    def delete(self, name: str) -> None:
        self.do(delete_session(SessionId(name)))

    def rows(self) -> list[tuple[object, ...]]:
        """All agent rows, and the tree totals of runs."""
        sums = "SELECT id, tree_steps, tree_tokens, tree_cost FROM runs ORDER BY seq"
        found = (*self.connection.execute(QUERIES["all_agents"]), *self.connection.execute(sums))
        # The database derives `shown` from the other columns.
        return [
            tuple(_rounded(row[name]) for name in row.keys() if name != "shown")  # noqa: SIM118
            for row in found
        ]


def _rounded(value: object) -> object:
    return round(value, 6) if isinstance(value, float) else value


def new_run(run_id: str, session_id: str, *, agent_id: str = "", parent_run_id: str = "") -> NewRun:
    """A run with default values for everything else."""
    return NewRun(
        id=RunId(run_id),
        session_id=SessionId(session_id),
        kind="prompt",
        state="accepted",
        run_id_given=False,
        digest="",
        prompt="",
        attachments=(),
        limits=Limits(),
        provider="p",
        model="m",
        agent_id=agent_id,
        parent_run_id=parent_run_id,
    )


def _run(name: str, parent: str = "") -> Callable[[Tx], object]:
    agent_id, above = (name, f"r {parent}") if parent else ("", "")
    return accept_run(new_run(f"r {name}", name, agent_id=agent_id, parent_run_id=above))


def agent_named(name: str, parent: str, above: tuple[str, ...]) -> NewAgent:
    return NewAgent(
        id=AgentId(name),
        session_id=SessionId(name),
        parent_id=parent,
        parent_session_id=parent,
        name=f"the {name}",
        role="worker",
        provider="p",
        model="m",
        terms='{"a":1}',
        depth=len(above),
        path=above,
    )


@contextmanager
def open_tree(file: Path) -> Generator[Tree]:
    """A database in a file, created if necessary; nothing else may write to it."""
    is_new = not file.exists()
    if is_new:
        prepare_file(file, Ids().epoch(), 0)
    with closing(connect(file)) as connection:
        tree = Tree(connection)
        if is_new:
            tree.begin()
        yield tree

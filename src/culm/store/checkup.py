"""A look into a database without a server, and the repair of what can be made anew.

Owns connections that only read. Who else has the file open does not matter for a look; a repair
is for whoever holds the lock of the data directory.
"""

import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from culm.errors import Failed, SchemaTooNew
from culm.store.agents import agent_links, cut_agent, rebuild
from culm.store.base import Connection, Tx, WriteJob, run_group
from culm.store.sql import MIGRATIONS, schema_version
from culm.store.writer import connect

T = TypeVar("T")

BUSY_S = 5.0  # Whoever writes holds the file for one commit.
STEPS = 1_000_000  # Of SQLite's, in some hundredths of a second.
PROBLEMS_MAX = 5  # The first ones say what it is; a damaged file has thousands.
_DERIVED = ("agents", "runs")  # The tables that `rebuild` works on.


class UnreadableDatabase(Failed):
    """The file is not there for us to read, or is no database."""

    code = "store_unreadable"

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"cannot read {path}: {reason}", hint="`culm doctor` says what is wrong with it"
        )


@contextmanager
def open_reader(path: Path) -> Generator[Connection]:
    """One moment of a file, which it cannot change; raises `Unreadable`, also from within."""
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(
            sqlite3.connect(address, uri=True, isolation_level=None, timeout=BUSY_S)
        ) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as exc:
        raise UnreadableDatabase(path, str(exc)) from exc


def read_store(path: Path, query: Callable[[Connection], T]) -> T:
    """Ask one thing; raises `Unreadable`, `SchemaTooNew`, `Failed` if the schema is old."""
    with open_reader(path) as connection:
        found = schema_version(connection)
        if found > len(MIGRATIONS):
            raise SchemaTooNew(str(path), found, len(MIGRATIONS))
        if found < len(MIGRATIONS):
            raise Failed(
                f"{path} was written by an older culm (schema {found} of {len(MIGRATIONS)})",
                hint="open the project once: culm run, or any client",
            )
        try:
            return query(connection)
        except msgspec.ValidationError as exc:
            raise UnreadableDatabase(path, str(exc)) from exc


@dataclass(frozen=True, slots=True)
class DatabaseReport:
    """What was found in a file. What depends on a sound one is empty if it is not."""

    schema: int
    problems: tuple[str, ...] = ()  # As SQLite says it; the first ones.
    agents: int = 0
    wrong: int = 0  # Rows whose derived columns are not what the others say.
    circular: tuple[str, ...] = ()  # Agents that are their own ancestors.
    worktrees: tuple[str, ...] = ()  # Of agents.

    @property
    def is_current(self) -> bool:
        return self.schema == len(MIGRATIONS)


def examine(path: Path, at_work: Callable[[], None] | None = None) -> DatabaseReport:
    """Read all of a file, and call `at_work` now and then meanwhile; raises `Unreadable`."""
    with open_reader(path) as connection:
        _report_progress(connection, at_work)
        schema = schema_version(connection)
        rows = connection.execute(f"PRAGMA integrity_check({PROBLEMS_MAX})").fetchall()
        problems = tuple(str(row[0]) for row in rows if row[0] != "ok")
        if problems or schema != len(MIGRATIONS):
            return DatabaseReport(schema, problems)
        links = agent_links(connection)
        return DatabaseReport(
            schema,
            agents=len(links),
            wrong=_count_wrong(connection),
            circular=circular_in({link.agent_id: link.parent_id for link in links}),
            worktrees=tuple(link.worktree for link in links if link.worktree),
        )


def circular_in(parents: Mapping[str, str]) -> tuple[str, ...]:
    """Who comes back to itself on the way up."""
    return tuple(agent_id for circle in _circles_in(parents) for agent_id in circle)


def _circles_in(parents: Mapping[str, str]) -> Generator[list[str]]:
    """Each row is walked over once."""
    done: set[str] = set()
    for start in parents:
        way: dict[str, None] = {}
        above = start
        while above in parents and above not in done and above not in way:
            way[above] = None
            above = parents[above]
        if above in way:
            names = list(way)
            yield names[names.index(above) :]
        done.update(way)


def _count_wrong(connection: Connection) -> int:
    """How many rows a rebuild would change, tried on copies that hide the tables."""
    for table in _DERIVED:
        connection.execute(f"CREATE TEMP TABLE {table} AS SELECT * FROM main.{table}")
        connection.execute(f"CREATE INDEX temp.{table}_by_id ON {table} (id)")
    return rebuild(Tx(connection, now=0, seq=0))


@dataclass(frozen=True, slots=True)
class RepairReport:
    rows: int  # Whose derived columns were otherwise.
    cut: tuple[str, ...] = ()  # Agents that nobody is above any more.


def _report_progress(connection: sqlite3.Connection, at_work: Callable[[], None] | None) -> None:
    def told() -> int:
        assert at_work is not None, "else it is not called"
        at_work()
        return 0  # Go on.

    connection.set_progress_handler(told if at_work else None, STEPS)


def repair(path: Path, now: int, at_work: Callable[[], None] | None = None) -> RepairReport:
    """Make indices and derived columns anew, and cut what leads back to itself.

    All of it happens, or nothing; `at_work` is called now and then. Raises `Unreadable`,
    `AppError`.
    """
    job = WriteJob(_repair, finish=lambda _: None)
    try:
        with closing(connect(path)) as connection:
            _report_progress(connection, at_work)
            run_group(connection, [job], now)
    except sqlite3.Error as exc:
        raise UnreadableDatabase(path, str(exc)) from exc
    if isinstance(job.error, sqlite3.Error):
        raise UnreadableDatabase(path, str(job.error)) from job.error
    if job.error is not None:
        raise job.error
    assert isinstance(job.result, RepairReport), "what the unit returns"
    return job.result


def _repair(tx: Tx) -> RepairReport:
    # First: what is read below may be found by an index.
    tx.connection.execute("REINDEX")
    parents = {link.agent_id: link.parent_id for link in agent_links(tx.connection)}
    # The rows come in the order they were started in, so this is the one nearest to the top.
    cut = tuple(circle[0] for circle in _circles_in(parents))
    for agent_id in cut:
        cut_agent(tx, agent_id)
    return RepairReport(rebuild(tx), cut)

"""Database files without a server: preparation, inspection and repair.

Inspection uses read-only connections and works while another process has the file open; a repair
requires the lock of the data directory.
"""

import logging
import sqlite3
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from culm.errors import Failed, SchemaTooNew, StoreDamaged
from culm.ids import Epoch
from culm.store.agents import agent_links, cut_agent, rebuild
from culm.store.base import Connection, Tx, WriteJob, find_meta, run_group, store_error
from culm.store.letters import unanswered_senders
from culm.store.runs import count_unfinished
from culm.store.sql import MIGRATIONS, READABLE_FROM, migrate, schema_version
from culm.store.writer import BUSY_S, connect
from culm.wire.workspaces import StoreHealth

log = logging.getLogger(__name__)
T = TypeVar("T")

STEPS = 1_000_000  # Virtual machine steps of SQLite; they take some hundredths of a second.
PROBLEMS_MAX = 5  # The first ones are enough; a damaged file has thousands.
_DERIVED = ("agents", "runs")  # The tables that `rebuild` works on.


def prepare_file(path: Path, epoch: Epoch, now: int) -> StoreHealth:
    """Ensure a valid database with the current schema at `path`; report a replaced file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    health = StoreHealth("ok")
    if path.exists() and (reason := _damage(path)) is not None:
        aside = _move_aside(path, now)
        log.error("database %s is damaged (%s); moved to %s", path, reason, aside)
        health = StoreHealth("replaced", f"damaged ({reason}); the old file is {aside}")
    with closing(connect(path)) as connection:
        migrate(connection, str(path))
        if find_meta(connection, "epoch") is None:
            connection.run("set_meta", "epoch", epoch)
    path.chmod(0o600)
    return health


def has_unfinished_runs(path: Path) -> bool:
    """Return True if a server should open this file for its runs; False if it is unreadable."""
    return _search(path, lambda connection: count_unfinished(connection) > 0, otherwise=False)


def find_unanswered_senders(path: Path, since: int) -> list[str]:
    """The senders that wait for a reply which the last server could not send."""
    return _search(path, unanswered_senders(since), otherwise=[])


def _search(path: Path, query: Callable[[Connection], T], *, otherwise: T) -> T:
    if not path.exists():
        return otherwise
    try:
        with closing(connect(path)) as connection:
            return query(connection)
    except sqlite3.Error as exc:  # For example, an old schema without a table of letters.
        log.info("cannot search %s: %s", path, exc)
        return otherwise


def _damage(path: Path) -> str | None:
    """A description of the damage, or None. A file that was closed cleanly is not checked."""
    has_meta = "SELECT 1 FROM sqlite_master WHERE name = 'meta'"
    try:
        with closing(connect(path)) as connection:
            if connection.execute(has_meta).fetchone() is None:
                return None  # The file is empty, or older than the flag.
            if find_meta(connection, "clean") == "1":
                return None
            found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
            return None if found == "ok" else found
    except sqlite3.DatabaseError as exc:
        # A lock held elsewhere, too many open files, a full disk: none of these is damage.
        if isinstance(store_error(exc), StoreDamaged):
            return str(exc)
        raise


def _move_aside(path: Path, now: int) -> Path:
    aside = path.with_name(f"{path.name}.damaged-{now}")
    while aside.exists():
        aside = aside.with_name(aside.name + "x")
    # The database is last: after an interruption it is still here and will be checked again.
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside


# --- inspection, and repair of indexes and derived columns


class UnreadableDatabase(Failed):
    """The file cannot be read or is not a database."""

    code = "store_unreadable"

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(
            f"cannot read {path}: {reason}", hint="run `culm doctor` to check the file"
        )


@contextmanager
def open_reader(path: Path) -> Generator[Connection]:
    """A read-only snapshot of a file; raises `UnreadableDatabase`, also for errors in the block."""
    try:
        address = f"{path.absolute().as_uri()}?mode=ro"
        with closing(
            sqlite3.connect(address, BUSY_S, isolation_level=None, uri=True, factory=Connection)
        ) as connection:
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA temp_store = MEMORY")
            connection.execute("BEGIN")
            yield connection
    except sqlite3.Error as exc:
        raise UnreadableDatabase(path, str(exc)) from exc


def read_store(path: Path, query: Callable[[Connection], T]) -> T:
    """Run one query; raises `UnreadableDatabase`, `SchemaTooNew`, or `Failed` for an old schema."""
    with open_reader(path) as connection:
        found = schema_version(connection)
        if found > len(MIGRATIONS):
            raise SchemaTooNew(str(path), found, len(MIGRATIONS))
        if found < READABLE_FROM:
            raise Failed(
                f"{path} was written by an older culm (schema {found} of {len(MIGRATIONS)})",
                hint="open the project once: culm run, or any client",
            )
        try:
            return query(connection)
        except msgspec.ValidationError as exc:
            raise UnreadableDatabase(path, str(exc)) from exc


class DatabaseReport(Struct, frozen=True):
    """The result of an inspection. For a damaged or outdated file only the first two are set."""

    schema: int
    problems: tuple[str, ...] = ()  # The first messages of SQLite.
    agents: int = 0
    wrong: int = 0  # Rows with incorrect derived columns.
    circular: tuple[str, ...] = ()  # Agents that are their own ancestors.
    worktrees: tuple[str, ...] = ()  # The worktrees of agents.

    @property
    def is_current(self) -> bool:
        return self.schema == len(MIGRATIONS)


def examine(path: Path, at_work: Callable[[], None] | None = None) -> DatabaseReport:
    """Inspect a whole file; calls `at_work` regularly. Raises `UnreadableDatabase`."""
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
    """The agents that are their own ancestors."""
    return tuple(agent_id for cycle in _cycles_in(parents) for agent_id in cycle)


def _cycles_in(parents: Mapping[str, str]) -> Generator[list[str]]:
    """The cycles of parent links. Each row is visited once."""
    done: set[str] = set()
    for start in parents:
        trail: dict[str, None] = {}
        above = start
        while above in parents and above not in done and above not in trail:
            trail[above] = None
            above = parents[above]
        if above in trail:
            names = list(trail)
            yield names[names.index(above) :]
        done.update(trail)


def _count_wrong(connection: Connection) -> int:
    """The number of rows that a rebuild would change, tried on temporary copies of the tables."""
    for table in _DERIVED:
        connection.execute(f"CREATE TEMP TABLE {table} AS SELECT * FROM main.{table}")
        connection.execute(f"CREATE INDEX temp.{table}_by_id ON {table} (id)")
    return rebuild(Tx(connection, now=0, seq=0))


class RepairReport(Struct, frozen=True):
    rows: int  # Rows with corrected derived columns.
    cut: tuple[str, ...] = ()  # Agents whose parent link was removed.


def _report_progress(connection: Connection, at_work: Callable[[], None] | None) -> None:
    def report() -> int:
        assert at_work is not None, "otherwise no handler is set"
        at_work()
        return 0  # Continue.

    connection.set_progress_handler(report if at_work else None, STEPS)


def repair(path: Path, now: int, at_work: Callable[[], None] | None = None) -> RepairReport:
    """Rebuild indexes and derived columns, and cut cycles of parent links.

    It is one transaction; `at_work` is called regularly. Raises `UnreadableDatabase`, `AppError`.
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
    assert isinstance(job.result, RepairReport), "the result of the unit"
    return job.result


def _repair(tx: Tx) -> RepairReport:
    # First, because the queries below may use an index.
    tx.connection.execute("REINDEX")
    parents = {link.agent_id: link.parent_id for link in agent_links(tx.connection)}
    # Rows are in order of their start, so the first of a cycle was nearest to the top.
    cut = tuple(cycle[0] for cycle in _cycles_in(parents))
    for agent_id in cut:
        cut_agent(tx, agent_id)
    return RepairReport(rebuild(tx), cut)

"""Preparation of a database file: schema, integrity check, moving a damaged file aside."""

import contextlib
import logging
import sqlite3
from pathlib import Path

from culm.errors import StoreDamaged
from culm.ids import Epoch
from culm.store.base import find_meta, store_error
from culm.store.letters import unanswered_senders
from culm.store.runs import count_unfinished
from culm.store.sql import QUERIES, migrate
from culm.store.writer import connect
from culm.wire.workspaces import StoreHealth

log = logging.getLogger(__name__)


def prepare_file(path: Path, epoch: Epoch, now: int) -> StoreHealth:
    """Ensure a valid database with the current schema at `path`; report a replaced file."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    health = StoreHealth("ok")
    if path.exists() and (reason := _damage(path)) is not None:
        aside = _move_aside(path, now)
        log.error("database %s is damaged (%s); moved to %s", path, reason, aside)
        health = StoreHealth("replaced", f"damaged ({reason}); the old file is {aside}")
    connection = connect(path)
    try:
        migrate(connection, str(path))
        if find_meta(connection, "epoch") is None:
            connection.execute(QUERIES["set_meta"], ("epoch", epoch))
    finally:
        connection.close()
    path.chmod(0o600)
    return health


def has_unfinished_runs(path: Path) -> bool:
    """Return True if a server should open this file for its runs; False if it is unreadable."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(connect(path)) as connection:
            return count_unfinished(connection) > 0
    except sqlite3.Error as exc:
        log.info("cannot search %s for runs: %s", path, exc)
        return False


def find_unanswered_senders(path: Path, since: int) -> list[str]:
    """The senders that wait for a reply which the last server could not send."""
    if not path.exists():
        return []
    try:
        with contextlib.closing(connect(path)) as connection:
            return unanswered_senders(connection, since)
    except sqlite3.Error as exc:  # For example, an old schema without a table of letters.
        log.info("cannot search %s for letters: %s", path, exc)
        return []


def _damage(path: Path) -> str | None:
    """A description of the damage, or None. A file that was closed cleanly is not checked."""
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path)
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
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
    finally:
        if connection is not None:
            connection.close()


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

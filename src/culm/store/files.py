"""The file before it is opened: schema, integrity, a damaged one moved aside."""

import contextlib
import logging
import sqlite3
from pathlib import Path

from culm.errors import StoreDamaged
from culm.ids import Epoch
from culm.store.base import find_meta, store_error
from culm.store.letters import askers_left
from culm.store.runs import count_unfinished
from culm.store.sql import QUERIES, migrate
from culm.store.writer import connect
from culm.wire.state import StoreHealth

log = logging.getLogger(__name__)


def prepare_file(path: Path, epoch: Epoch, now: int) -> StoreHealth:
    """Leave a sound database with a current schema at `path`; say if the old one was replaced."""
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
    """Whether a server should open this file by itself; one it cannot read it need not."""
    if not path.exists():
        return False
    try:
        with contextlib.closing(connect(path)) as connection:
            return count_unfinished(connection) > 0
    except sqlite3.Error as exc:
        log.info("not looking for runs in %s: %s", path, exc)
        return False


def find_askers_left(path: Path, since: int) -> list[str]:
    """Who waits for a reply that the last server could not send."""
    if not path.exists():
        return []
    try:
        with contextlib.closing(connect(path)) as connection:
            return askers_left(connection, since)
    except sqlite3.Error as exc:  # Such as one that was never opened since there are letters.
        log.info("not looking for letters in %s: %s", path, exc)
        return []


def _damage(path: Path) -> str | None:
    """What is wrong with the file, looked at only if its last owner did not close it."""
    connection: sqlite3.Connection | None = None
    try:
        connection = connect(path)
        if connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
            return None  # Empty, or from before there was a flag: nothing to doubt.
        if find_meta(connection, "clean") == "1":
            return None
        found: str = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        return None if found == "ok" else found
    except sqlite3.DatabaseError as exc:
        # A lock held elsewhere, too many open files, a disk that is full: none of these is damage.
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
    # The database goes last: if we are cut off in between, it is still there to be found damaged.
    for suffix in ("-wal", "-shm", ""):
        part = path.with_name(path.name + suffix)
        if part.exists():
            part.rename(aside.with_name(aside.name + suffix))
    return aside

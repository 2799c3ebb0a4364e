"""Units and queries over a session's files: the versions it wrote, and what it read when."""

import sqlite3
from collections.abc import Callable

from culm.errors import LimitExceeded, SessionNotFound
from culm.ids import FileId, SessionId
from culm.store.base import Tx
from culm.store.sql import QUERIES
from culm.wire.codec import encode
from culm.wire.files import File

READ_FILES_MAX = 10_000  # Per session; one that reads more does not need to be reminded.


def add_file(
    file_id: FileId, session_id: SessionId, path: str, content: str
) -> Callable[[Tx], File]:
    """Keep what a file holds now as its next version."""

    def unit(tx: Tx) -> File:
        _check_session(tx, session_id)
        file = file_of(tx.run("add_file", file_id, session_id, path, content, tx.now).fetchone())
        tx.tell("file", "created", session_id=session_id, entity_id=file_id, payload=encode(file))
        return file

    return unit


def mark_read(session_id: str, path: str) -> Callable[[Tx], None]:
    def unit(tx: Tx) -> None:
        _check_session(tx, session_id)
        known = tx.run("last_read", session_id, path).fetchone() is not None
        count: int = tx.run("count_read_files", session_id).fetchone()[0]
        if not known and count >= READ_FILES_MAX:
            raise LimitExceeded("files read in this session", READ_FILES_MAX)
        tx.run("mark_read", session_id, path, tx.now)

    return unit


def _check_session(tx: Tx, session_id: str) -> None:
    if tx.run("get_session", session_id).fetchone() is None:
        raise SessionNotFound(session_id)


def files_of_session(session_id: str) -> Callable[[sqlite3.Connection], list[File]]:
    """Every version, by version and then by age."""

    def query(connection: sqlite3.Connection) -> list[File]:
        rows = connection.execute(QUERIES["files_of_session"], (session_id,))
        return [file_of(row) for row in rows]

    return query


def read_files(session_id: str) -> Callable[[sqlite3.Connection], list[str]]:
    """Paths, the last read first."""

    def query(connection: sqlite3.Connection) -> list[str]:
        return [row[0] for row in connection.execute(QUERIES["read_files"], (session_id,))]

    return query


def last_read(session_id: str, path: str) -> Callable[[sqlite3.Connection], int | None]:
    """In Unix seconds, or None if the session never read it."""

    def query(connection: sqlite3.Connection) -> int | None:
        row = connection.execute(QUERIES["last_read"], (session_id, path)).fetchone()
        return None if row is None else int(row[0])

    return query


def file_of(row: sqlite3.Row) -> File:
    return File(
        id=FileId(row["id"]),
        session_id=SessionId(row["session_id"]),
        path=row["path"],
        content=row["content"],
        version=row["version"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )

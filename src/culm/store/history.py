"""Units and queries for a session's files: versions that it wrote, and times of reading."""

import sqlite3
from collections.abc import Callable

from culm.errors import SessionNotFound
from culm.ids import FileId, SessionId
from culm.store.base import Tx
from culm.store.sql import QUERIES
from culm.wire.codec import encode
from culm.wire.messages import File

READ_FILES_MAX = 10_000  # Per session; beyond that the oldest entries are deleted.


def add_file(
    file_id: FileId, session_id: SessionId, path: str, content: str
) -> Callable[[Tx], File]:
    """Store the content of a file as its next version."""

    def unit(tx: Tx) -> File:
        _check_session(tx, session_id)
        # The query returns only the version: a file may be large, and the rest is known.
        added = tx.run("add_file", file_id, session_id, path, content, tx.now).fetchone()
        file = File(file_id, session_id, path, content, added[0], tx.now, tx.now)
        tx.publish(
            "file", "created", session_id=session_id, entity_id=file_id, payload=encode(file)
        )
        return file

    return unit


def add_write(
    file_ids: tuple[FileId, FileId],
    session_id: SessionId,
    path: str,
    contents: tuple[str, str] | None,
    stamp: str,
) -> Callable[[Tx], None]:
    """Store the content that a session found in a file and the one it wrote, and mark it as read.

    The found content becomes a version only if it differs from the session's latest one. Without
    `contents` only the stamp is stored.
    """

    def unit(tx: Tx) -> None:
        _check_session(tx, session_id)
        if contents is not None:
            found, written = contents
            row = tx.run("has_latest_content", session_id, path, found).fetchone()
            if row is None or not row[0]:
                add_file(file_ids[0], session_id, path, found)(tx)
            add_file(file_ids[1], session_id, path, written)(tx)
        mark_read(session_id, path, stamp)(tx)

    return unit


def forget_versions(session_id: str) -> Callable[[Tx], None]:
    """Delete a session's file versions, for a store in memory in which they are never read."""

    def unit(tx: Tx) -> None:
        tx.run("delete_files_of_session", session_id)

    return unit


def mark_read(session_id: str, path: str, stamp: str = "") -> Callable[[Tx], None]:
    """Record that a session has read a file now; `stamp` identifies the content, if known."""

    def unit(tx: Tx) -> None:
        _check_session(tx, session_id)
        known = tx.run("last_read", session_id, path).fetchone() is not None
        count: int = tx.run("count_read_files", session_id).fetchone()[0]
        if not known and count >= READ_FILES_MAX:
            tx.run("forget_first_read", session_id)
        tx.run("mark_read", session_id, path, tx.now, stamp)

    return unit


def _check_session(tx: Tx, session_id: str) -> None:
    if tx.run("get_session", session_id).fetchone() is None:
        raise SessionNotFound(session_id)


def files_of_session(session_id: str) -> Callable[[sqlite3.Connection], list[File]]:
    """Every version of every file, by version and then by age."""

    def query(connection: sqlite3.Connection) -> list[File]:
        rows = connection.execute(QUERIES["files_of_session"], (session_id,))
        return [file_of(row) for row in rows]

    return query


def read_files(session_id: str) -> Callable[[sqlite3.Connection], list[str]]:
    """The paths that a session has read, the last read first."""

    def query(connection: sqlite3.Connection) -> list[str]:
        return [row[0] for row in connection.execute(QUERIES["read_files"], (session_id,))]

    return query


def last_read(session_id: str, path: str) -> Callable[[sqlite3.Connection], int | None]:
    """The time of the last read in Unix seconds, or None if the session never read the file."""

    def query(connection: sqlite3.Connection) -> int | None:
        row = connection.execute(QUERIES["last_read"], (session_id, path)).fetchone()
        return None if row is None else int(row[0])

    return query


def read_stamp(session_id: str, path: str) -> Callable[[sqlite3.Connection], str | None]:
    """The stamp of a file at the last read; empty if unknown, None if it was never read."""

    def query(connection: sqlite3.Connection) -> str | None:
        row = connection.execute(QUERIES["last_read"], (session_id, path)).fetchone()
        return None if row is None else str(row[1])

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

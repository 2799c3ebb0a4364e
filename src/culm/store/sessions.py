"""Units and queries for sessions and their files: versions written, and times of reading.

Each change of a session's row is published.
"""

import sqlite3
from collections.abc import Callable

from culm.errors import LimitExceeded, SessionNotFound
from culm.ids import FileId, SessionId
from culm.store.agents import (
    StoredAgent,
    add_agent_usage,
    delete_agent_of_session,
    publish_agents,
    rebuild,
    tree_of_session,
)
from culm.store.asks import delete_asks_of_session
from culm.store.base import Op, Tx
from culm.store.runs import delete_runs_of_session
from culm.store.sql import QUERIES
from culm.wire.codec import decode, encode
from culm.wire.messages import File, Session, Todo
from culm.wire.runs import Used

READ_FILES_MAX = 10_000  # Per session; beyond that the oldest entries are deleted.


def add_session(
    session_id: SessionId, title: str, *, parent_id: str = "", sessions_max: int
) -> Callable[[Tx], Session]:
    def unit(tx: Tx) -> Session:
        if count_sessions(tx.connection) >= sessions_max:
            raise LimitExceeded("sessions in this workspace", sessions_max)
        row = tx.run("add_session", session_id, parent_id, title, tx.now, tx.now).fetchone()
        return publish_session(tx, "created", row)

    return unit


def rename_session(session_id: SessionId, title: str) -> Callable[[Tx], Session]:
    def unit(tx: Tx) -> Session:
        row = tx.run("rename_session", title, tx.now, session_id).fetchone()
        if row is None:
            raise SessionNotFound(session_id)
        return publish_session(tx, "updated", row)

    return unit


def delete_session(session_id: SessionId) -> Callable[[Tx], list[StoredAgent]]:
    """Delete a session and those of all agents below it, with their messages, files and runs.

    Only the deletions of the sessions and agents are published. Returns the deleted agents.
    """

    def unit(tx: Tx) -> list[StoredAgent]:
        if tx.run("get_session", session_id).fetchone() is None:
            raise SessionNotFound(session_id)
        gone = tree_of_session(tx, session_id)
        below = [agent.agent.session_id for agent in gone if agent.agent.session_id != session_id]
        for one in (*reversed(below), session_id):
            _delete_one(tx, one)
        for recipient in (session_id, *(agent.agent.agent_id for agent in gone)):
            tx.run("delete_letters_to", recipient)
        if gone and gone[0].agent.session_id == session_id and gone[0].agent.parent_id:
            rebuild(tx)  # Subtract the deleted usage from the agents above.
            publish_agents(tx, gone[0].path[:-1])
        return gone

    return unit


def _delete_one(tx: Tx, session_id: SessionId) -> None:
    row = tx.run("get_session", session_id).fetchone()
    if row is None:
        return
    places = (place_of(row["no"], 0), place_of(row["no"] + 1, 0) - 1)
    delete_runs_of_session(tx, session_id)
    delete_asks_of_session(tx, session_id)
    delete_agent_of_session(tx, session_id)
    tx.run("delete_chunks_of_session", *places)
    tx.run("delete_parts_of_session", *places)
    tx.run("delete_messages_of_session", *places)
    tx.run("delete_files_of_session", session_id)
    tx.run("delete_read_files_of_session", session_id)
    tx.run("delete_session", session_id)
    gone = Session(id=session_id, parent_session_id=row["parent_id"])
    tx.publish_deleted("session", session_id=session_id, entity_id=session_id, payload=encode(gone))


def add_usage(session_id: SessionId, used: Used) -> Callable[[Tx], None]:
    """Set the tokens of the latest step and add its cost; tokens that were not counted stay."""

    def unit(tx: Tx) -> None:
        values = (used.prompt_tokens, used.completion_tokens, used.cost, tx.now, session_id)
        _publish_updated(tx, tx.run("add_usage", *values))
        _count_above(tx, session_id, used)

    return unit


def set_summary(session_id: SessionId, message_id: str, used: Used) -> Callable[[Tx], None]:
    """Set the summary that replaces all earlier messages in the model's context."""

    def unit(tx: Tx) -> None:
        values = (message_id, used.completion_tokens, used.cost, tx.now, session_id)
        _publish_updated(tx, tx.run("set_summary", *values))
        _count_above(tx, session_id, used)

    return unit


def sessions_above(session_id: str) -> Callable[[sqlite3.Connection], list[SessionId]]:
    """The sessions of the agents above a session's agent, the nearest first."""

    def query(connection: sqlite3.Connection) -> list[SessionId]:
        rows = connection.execute(QUERIES["sessions_above"], (session_id,))
        return [row["id"] for row in rows]

    return query


def _count_above(tx: Tx, session_id: SessionId, used: Used) -> None:
    """Add the cost of a sub-agent to the agents above it."""
    above = sessions_above(session_id)(tx.connection)
    if used.cost:
        for one in above:
            _publish_updated(tx, tx.run("add_cost", used.cost, tx.now, one))
    add_agent_usage(tx, (session_id, *above), used)


def set_title(
    session_id: SessionId, title: str, *, instead_of: str, cost: float
) -> Callable[[Tx], None]:
    """Set the title unless a person has changed it in the meantime."""

    def unit(tx: Tx) -> None:
        _publish_updated(tx, tx.run("set_title", instead_of, title, cost, tx.now, session_id))

    return unit


def set_todos(session_id: SessionId, todos: list[Todo]) -> Callable[[Tx], list[Todo]]:
    """Replace the list of todos; returns the previous one."""

    def unit(tx: Tx) -> list[Todo]:
        row = tx.run("get_session", session_id).fetchone()
        if row is None:
            raise SessionNotFound(session_id)
        changed = tx.run("set_todos", encode(todos).decode(), tx.now, session_id)
        _publish_updated(tx, changed)
        return session_of(row).todos

    return unit


def _publish_updated(tx: Tx, changed: sqlite3.Cursor) -> None:
    row = changed.fetchone()
    if row is not None:  # Otherwise the session was deleted in the meantime.
        publish_session(tx, "updated", row)


def place_of(session_no: int, seq: int) -> int:
    """The row id of a message. All messages of a session are in one range, in order."""
    return session_no << 32 | seq


def publish_session(tx: Tx, op: Op, row: sqlite3.Row) -> Session:
    session = session_of(row)
    tx.publish("session", op, session_id=session.id, entity_id=session.id, payload=encode(session))
    return session


def session_of(row: sqlite3.Row) -> Session:
    return Session(
        id=SessionId(row["id"]),
        parent_session_id=row["parent_id"],
        title=row["title"],
        message_count=row["message_count"],
        prompt_tokens=row["prompt_tokens"],
        completion_tokens=row["completion_tokens"],
        summary_message_id=row["summary_message_id"],
        cost=float(row["cost"]),  # RETURNING gives a whole REAL as an integer.
        todos=[] if row["todos"] == "[]" else decode(row["todos"], list[Todo]),
        created_at=row["created_at"],
        updated_at=row["updated_at"],
    )


def find_session(session_id: str) -> Callable[[sqlite3.Connection], Session | None]:
    def query(connection: sqlite3.Connection) -> Session | None:
        row = connection.execute(QUERIES["get_session"], (session_id,)).fetchone()
        return None if row is None else session_of(row)

    return query


def count_sessions(connection: sqlite3.Connection) -> int:
    count: int = connection.execute(QUERIES["count_sessions"]).fetchone()[0]
    return count


def top_sessions(connection: sqlite3.Connection) -> list[Session]:
    """The sessions without a parent, the last changed first."""
    return [session_of(row) for row in connection.execute(QUERIES["top_sessions"])]


def all_sessions(connection: sqlite3.Connection) -> list[Session]:
    return [session_of(row) for row in connection.execute(QUERIES["all_sessions"])]


# --- files


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

"""Units and queries for sessions and their files: versions written, and times of reading.

Each change of a session's row is published.
"""

import sqlite3

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
from culm.store.base import Connection, Op, Tx, deferred, read_row
from culm.store.letters import delete_mail_to
from culm.store.runs import delete_runs_of_session
from culm.wire.codec import decode, encode
from culm.wire.messages import File, Session, Todo
from culm.wire.runs import Used

READ_FILES_MAX = 10_000  # Per session; beyond that the oldest entries are deleted.


@deferred
def add_session(
    tx: Tx, session_id: SessionId, title: str, *, parent_id: str = "", sessions_max: int
) -> Session:
    if count_sessions(tx.connection) >= sessions_max:
        raise LimitExceeded("sessions in this workspace", sessions_max)
    row = tx.run("add_session", session_id, parent_id, title, tx.now, tx.now).fetchone()
    return publish_session(tx, "created", row)


@deferred
def rename_session(tx: Tx, session_id: SessionId, title: str) -> Session:
    row = tx.run("rename_session", title, tx.now, session_id).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    return publish_session(tx, "updated", row)


@deferred
def delete_session(tx: Tx, session_id: SessionId) -> list[StoredAgent]:
    """Delete a session and those of all agents below it, with their messages, files and runs.

    Only the deletions of the sessions and agents are published. Earlier events stay in the log
    without their text. Returns the deleted agents.
    """
    _check_session(tx, session_id)
    gone = tree_of_session(tx, session_id)
    below = [agent.agent.session_id for agent in gone if agent.agent.session_id != session_id]
    for one in (*reversed(below), session_id):
        _delete_one(tx, one)
    for recipient in (session_id, *(agent.agent.agent_id for agent in gone)):
        delete_mail_to(tx, recipient)
    if gone and gone[0].agent.session_id == session_id and gone[0].agent.parent_id:
        rebuild(tx)  # Subtract the deleted usage from the agents above.
        publish_agents(tx, gone[0].path[:-1])
    tx.erases = True
    tx.add_rows()
    for one in (*below, session_id):
        tx.run("strip_events_of_session", one)
    return gone


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
    tx.publish("session", "deleted", session_id, session_id, encode(gone))


@deferred
def add_usage(tx: Tx, session_id: SessionId, used: Used) -> None:
    """Set the tokens of the latest step and add its cost; tokens that were not counted stay."""
    tokens = used.prompt_tokens, used.completion_tokens
    _publish_updated(tx, tx.run("add_usage", *tokens, used.cost, tx.now, session_id))
    _count_above(tx, session_id, used)


@deferred
def set_summary(tx: Tx, session_id: SessionId, message_id: str, used: Used) -> None:
    """Set the summary that replaces all earlier messages in the model's context."""
    values = (message_id, used.completion_tokens, used.cost, tx.now, session_id)
    _publish_updated(tx, tx.run("set_summary", *values))
    _count_above(tx, session_id, used)


@deferred
def sessions_above(connection: Connection, session_id: str) -> list[SessionId]:
    """The sessions of the agents above a session's agent, the nearest first."""
    rows = connection.run("sessions_above", session_id)
    return [row["id"] for row in rows]


def _count_above(tx: Tx, session_id: SessionId, used: Used) -> None:
    """Add the cost of a sub-agent to the agents above it."""
    above = sessions_above(session_id)(tx.connection)
    if used.cost:
        for one in above:
            _publish_updated(tx, tx.run("add_cost", used.cost, tx.now, one))
    add_agent_usage(tx, (session_id, *above), used)


@deferred
def set_title(tx: Tx, session_id: SessionId, title: str, *, instead_of: str, cost: float) -> None:
    """Set the title unless a person has changed it in the meantime."""
    _publish_updated(tx, tx.run("set_title", instead_of, title, cost, tx.now, session_id))


@deferred
def set_todos(tx: Tx, session_id: SessionId, todos: list[Todo]) -> list[Todo]:
    """Replace the list of todos; returns the previous one."""
    row = tx.run("get_session", session_id).fetchone()
    if row is None:
        raise SessionNotFound(session_id)
    changed = tx.run("set_todos", encode(todos).decode(), tx.now, session_id)
    _publish_updated(tx, changed)
    return session_of(row).todos


def _publish_updated(tx: Tx, changed: sqlite3.Cursor) -> None:
    row = changed.fetchone()
    if row is not None:  # Otherwise the session was deleted in the meantime.
        publish_session(tx, "updated", row)


def place_of(session_no: int, seq: int) -> int:
    """The row id of a message. All messages of a session are in one range, in order."""
    return session_no << 32 | seq


def publish_session(tx: Tx, op: Op, row: sqlite3.Row) -> Session:
    session = session_of(row)
    tx.publish("session", op, session.id, session.id, encode(session), in_table=True)
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


@deferred
def find_session(connection: Connection, session_id: str) -> Session | None:
    row = connection.run("get_session", session_id).fetchone()
    return None if row is None else session_of(row)


def count_sessions(connection: Connection) -> int:
    count: int = connection.run("count_sessions").fetchone()[0]
    return count


def top_sessions(connection: Connection) -> list[Session]:
    """The sessions without a parent, the last changed first."""
    return [session_of(row) for row in connection.run("top_sessions")]


def all_sessions(connection: Connection) -> list[Session]:
    return [session_of(row) for row in connection.run("all_sessions")]


# --- files


@deferred
def add_file(tx: Tx, file_id: FileId, session_id: SessionId, path: str, content: str) -> File:
    """Store the content of a file as its next version."""
    _check_session(tx, session_id)
    # The query returns only the version: a file may be large, and the rest is known.
    added = tx.run("add_file", file_id, session_id, path, content, tx.now).fetchone()
    file = File(file_id, session_id, path, content, added[0], tx.now, tx.now)
    tx.publish("file", "created", session_id, file_id, encode(file), in_table=True)
    return file


@deferred
def add_write(
    tx: Tx,
    file_ids: tuple[FileId, FileId],
    session_id: SessionId,
    path: str,
    contents: tuple[str, str] | None,
    stamp: str,
) -> None:
    """Store the content that a session found in a file and the one it wrote, and mark it as read.

    The found content becomes a version only if it differs from the session's latest one. Without
    `contents` only the stamp is stored.
    """
    if contents is not None:
        found, written = contents
        row = tx.run("has_latest_content", session_id, path, found).fetchone()
        if row is None or not row[0]:
            add_file(file_ids[0], session_id, path, found)(tx)
        add_file(file_ids[1], session_id, path, written)(tx)
    mark_read(session_id, path, stamp)(tx)


@deferred
def forget_versions(tx: Tx, session_id: str) -> None:
    """Delete a session's file versions, for a store in memory in which they are never read."""
    tx.run("delete_files_of_session", session_id)


@deferred
def mark_read(tx: Tx, session_id: str, path: str, stamp: str = "") -> None:
    """Record that a session has read a file now; `stamp` identifies the content, if known."""
    _check_session(tx, session_id)
    known = tx.run("last_read", session_id, path).fetchone() is not None
    count: int = tx.run("count_read_files", session_id).fetchone()[0]
    if not known and count >= READ_FILES_MAX:
        tx.run("forget_first_read", session_id)
    tx.run("mark_read", session_id, path, tx.now, stamp)


def _check_session(tx: Tx, session_id: str) -> None:
    if tx.run("get_session", session_id).fetchone() is None:
        raise SessionNotFound(session_id)


@deferred
def files_of_session(connection: Connection, session_id: str) -> list[File]:
    """Every version of every file, by version and then by age."""
    return [read_row(row, File) for row in connection.run("files_of_session", session_id)]


@deferred
def read_files(connection: Connection, session_id: str) -> list[str]:
    """The paths that a session has read, the last read first."""
    return [row[0] for row in connection.run("read_files", session_id)]


@deferred
def last_read(connection: Connection, session_id: str, path: str) -> int | None:
    """The time of the last read in Unix seconds, or None if the session never read the file."""
    row = connection.run("last_read", session_id, path).fetchone()
    return None if row is None else int(row[0])


@deferred
def read_stamp(connection: Connection, session_id: str, path: str) -> str | None:
    """The stamp of a file at the last read; empty if unknown, None if it was never read."""
    row = connection.run("last_read", session_id, path).fetchone()
    return None if row is None else str(row[1])


@deferred
def find_file(connection: Connection, file_id: str) -> File | None:
    row = connection.run("get_file", file_id).fetchone()
    return None if row is None else read_row(row, File)

"""Units and queries for messages, their large parts, and the text chunks of open messages."""

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from msgspec import Raw

from culm.errors import MessageNotFound, SessionNotFound
from culm.ids import MessageId, SessionId
from culm.store.base import Connection, Op, Tx, deferred
from culm.store.sessions import find_session, place_of, publish_session
from culm.store.sql import QUERIES
from culm.store.text_tail import TailRecord
from culm.wire.codec import decode, encode
from culm.wire.messages import (
    Finish,
    FinishPart,
    GoneMessage,
    Growing,
    Message,
    Part,
    RawMessage,
    Session,
    ToolCallPart,
    append_text,
    close_parts,
    growing_of,
    text_of,
)
from culm.wire.runs import INTERRUPTED, finish_of

LARGE_BYTES = 8 << 10  # Larger parts are stored separately: a listing of small rows is fast.
PLACE_END = (1 << 63) - 1  # Greater than the place of any message.
PROMPTS_MAX = 2000  # The prompt history is for the Up key, not an archive.


class TextChunk(NamedTuple):
    message_id: MessageId
    rev: int
    part: int
    pos: int
    kind: Growing
    text: str


class CapturedMessage(NamedTuple):
    """A copy of a message to store and publish; the message itself may grow in the meantime."""

    id: MessageId
    session_id: SessionId
    row: tuple[str | int, ...]  # role, model, provider, is_summary, created_at, run_id
    parts: str  # JSON; null where the part is large
    large: list[tuple[int, str]]
    rev: int
    updated_at: int
    payload: bytes


def capture(message: Message) -> CapturedMessage:
    bodies = [encode(part) for part in message.parts]
    large = [(n, body.decode()) for n, body in enumerate(bodies) if len(body) > LARGE_BYTES]
    for n, _ in large:
        bodies[n] = b"null"
    row = (
        message.role,
        message.model,
        message.provider,
        message.is_summary_message,
        message.created_at,
        message.run_id,
    )
    return CapturedMessage(
        id=message.id,
        session_id=message.session_id,
        row=row,
        parts=f"[{b','.join(bodies).decode()}]",
        large=large,
        rev=message.rev,
        updated_at=message.updated_at,
        payload=encode(message),
    )


@deferred
def add_message(tx: Tx, message: CapturedMessage, *, is_open: bool) -> None:
    """Add a message at the end of its session, and publish the changed session after it."""
    session = tx.run("next_message", tx.now, message.session_id).fetchone()
    if session is None:
        raise SessionNotFound(message.session_id)
    tx.run(
        "add_message",
        place_of(session["no"], session["next_seq"] - 1),
        message.id,
        *message.row,
        message.parts,
        len(message.large),
        message.rev,
        is_open,
        message.updated_at,
    )
    _put_parts(tx, message)
    _publish(tx, message, "created")
    publish_session(tx, "updated", session)


@deferred
def save_message(tx: Tx, message: CapturedMessage, *, is_open: bool) -> None:
    """Store an open message as a whole and delete its chunks. Raises `MessageNotFound`."""
    changed = tx.run(
        "save_message",
        *message.row[1:3],  # A fallback model may have taken over.
        message.parts,
        len(message.large),
        message.rev,
        is_open,
        message.updated_at,
        message.id,
    )
    if changed.rowcount == 0:
        raise MessageNotFound(message.id)  # It was deleted in the meantime.
    tx.run("delete_parts", message.id)
    tx.run("delete_chunks", message.id)
    _put_parts(tx, message)
    _publish(tx, message, "updated")


@deferred
def add_chunks(tx: Tx, chunks: list[TextChunk]) -> None:
    """Store open text. Chunks for a message that has ended or has another rev are dropped."""
    for message_id, rev, part, pos, kind, text in chunks:
        if tx.run("is_open_at", message_id, rev).fetchone() is not None:
            tx.run("add_chunk", message_id, part, pos, kind, text)


@deferred
def restore_text(tx: Tx, records: Iterable[TailRecord]) -> None:
    """Store the text of a tail that its open messages do not have yet."""
    by_message: dict[MessageId, list[TailRecord]] = {}
    for record in records:
        if not record.call_id:
            by_message.setdefault(record.message_id, []).append(record)
    for message_id, texts in by_message.items():
        row = tx.run("get_message", message_id).fetchone()
        if row is not None and row["is_open"]:
            parts = _load(tx, row).parts
            present = [text for text in texts if text.rev == row["rev"]]
            add_chunks(missing_text(message_id, row["rev"], parts, present))(tx)


def missing_text(
    message_id: MessageId, rev: int, parts: Sequence[Part], records: Iterable[TailRecord]
) -> list[TextChunk]:
    """Return the text after the end of each part. A record after a gap is ignored.

    The records may come in any order.
    """
    kinds: list[Growing | None] = [growing_of(part) for part in parts]
    known = [len(text_of(p, k) or "") if k else 0 for p, k in zip(parts, kinds, strict=True)]
    is_final = [isinstance(part, ToolCallPart) and part.data.finished for part in parts]
    ends = list(known)
    pieces: list[list[str]] = [[] for _ in parts]
    for record in sorted(records, key=lambda one: (one.part, one.offset)):
        n = record.part
        if n == len(kinds) and record.offset == 0:
            kinds.append(record.kind)
            known.append(0)
            is_final.append(False)
            ends.append(0)
            pieces.append([])
        # The input of a finished call may differ from the text that it grew by.
        if n < len(kinds) and kinds[n] == record.kind and not is_final[n]:
            new = ends[n] - record.offset
            if 0 <= new < len(record.text):
                pieces[n].append(record.text[new:])
                ends[n] = record.offset + len(record.text)
    return [
        TextChunk(message_id, rev, n, start, kind, "".join(added))
        for n, (start, kind, added) in enumerate(zip(known, kinds, pieces, strict=True))
        if kind is not None and added
    ]


@deferred
def delete_message(tx: Tx, message_id: MessageId) -> None:
    row = tx.run("delete_message", message_id).fetchone()
    if row is None:
        raise MessageNotFound(message_id)
    tx.run("delete_parts", message_id)
    tx.run("delete_chunks", message_id)
    tx.erases = True
    session = tx.run("one_message_less", tx.now, row[0]).fetchone()
    gone = GoneMessage(id=message_id, session_id=session["id"])
    tx.publish("message", "deleted", session["id"], message_id, encode(gone))
    publish_session(tx, "updated", session)


def close_open_messages(tx: Tx, *, but: Collection[MessageId] = ()) -> int:
    """After an unclean end, close each open message as interrupted, with its stored text."""
    rows = [row for row in tx.run("open_messages").fetchall() if row["id"] not in but]
    for row in rows:
        close_message(tx, _load(tx, row), finish_of(INTERRUPTED, tx.now))
    return len(rows)


def close_message(tx: Tx, message: Message, finish: Finish) -> Message:
    """Close an open message that has no writer."""
    close_parts(message.parts, tx.now)
    message.parts.append(FinishPart(finish))
    message.rev += 1
    message.updated_at = tx.now
    save_message(capture(message), is_open=False)(tx)
    return message


@deferred
def close_message_of(tx: Tx, session_id: str, finish: Finish) -> None:
    """Close the open message of a session, if it has one without a writer."""
    message = find_open_message(tx, session_id)
    if message is not None:
        close_message(tx, message, finish)


def find_open_message(tx: Tx, session_id: str) -> Message | None:
    row = tx.run("open_message_of_session", session_id).fetchone()
    return None if row is None else _load(tx, row)


def find_last_message(tx: Tx, session_id: str) -> Message | None:
    row = tx.run("last_message_of_session", session_id).fetchone()
    return None if row is None else _load(tx, row)


def count_answers(tx: Tx, run_id: str, session_id: str) -> int:
    """Return the number of answers and summaries that a run has begun in its session."""
    count: int = tx.run("answers_of_run", session_id, run_id).fetchone()[0]
    return count


def _load(tx: Tx, row: Sequence[Any]) -> Message:
    return decode(encode(load_message(tx.connection, row)), Message)


@deferred
def find_message(connection: Connection, message_id: str) -> RawMessage | None:
    row = connection.run("get_message", message_id).fetchone()
    return None if row is None else load_message(connection, row)


@deferred
def conversation(connection: Connection, session_id: str) -> tuple[Session, list[Message]] | None:
    """A session and its messages since the summary; None if the session does not exist."""
    session = find_session(session_id)(connection)
    if session is None:
        return None
    rows = messages_since_summary(session_id)(connection)
    return session, [decode(encode(row), Message) for row in rows]


@deferred
def messages_since_summary(connection: Connection, session_id: str) -> list[RawMessage]:
    session = find_session(session_id)(connection)
    if session is not None and session.summary_message_id:
        return _listing("messages_from", session.summary_message_id)(connection)
    return messages_of_session(session_id)(connection)


@deferred
def messages_of_session(
    connection: Connection, session_id: str, limit: int | None = None, before: str = ""
) -> list[RawMessage]:
    """All messages of a session, or the last `limit`, or those before one of them.

    Raises `MessageNotFound` if the session does not have that one.
    """
    end = PLACE_END
    if before:
        row = connection.run("place_of_message", before, session_id).fetchone()
        if row is None:
            raise MessageNotFound(before, hint="start again with the last page, without before")
        end = row[0]
    rows = _listing("messages_of_session", session_id, end, -1 if limit is None else limit)
    return rows(connection)[::-1]


def user_messages_of_session(session_id: str) -> Callable[[Connection], list[RawMessage]]:
    return _listing("user_messages_of_session", session_id, PROMPTS_MAX)


def user_messages(connection: Connection) -> list[RawMessage]:
    return _listing("user_messages", PROMPTS_MAX)(connection)


def all_messages(limit: int) -> Callable[[Connection], list[RawMessage]]:
    return _listing("all_messages", limit)


def load_message(connection: Connection, row: Sequence[Any]) -> RawMessage:
    """The message with its large parts inserted and, while it is open, its chunks appended."""
    (id_, role, session_id, parts, model, provider, created_at, updated_at, is_summary, rev,
     run_id, large, is_open, *_) = row  # fmt: skip
    if large:
        parts = _join(parts, connection.run("parts_of", id_))
    if is_open:
        parts = _merge_chunks(parts, connection.run("chunks_of", id_))
    return RawMessage(
        id_, role, session_id, Raw(parts), model, provider, created_at, updated_at,
        bool(is_summary), rev, run_id,
    )  # fmt: skip


@deferred
def _listing(connection: Connection, name: str, *values: str | int) -> list[RawMessage]:
    rows = connection.cursor()
    rows.row_factory = None  # Plain tuples are faster, and a listing has thousands.
    return [load_message(connection, row) for row in rows.execute(QUERIES[name], values)]


def _publish(tx: Tx, message: CapturedMessage, op: Op) -> None:
    tx.publish("message", op, message.session_id, message.id, message.payload, in_table=True)


def _put_parts(tx: Tx, message: CapturedMessage) -> None:
    for n, body in message.large:
        tx.run("add_part", message.id, n, body)


def _join(parts: str, large: Iterable[tuple[int, str]]) -> str:
    bodies = decode(parts, list[Raw])
    for n, body in large:
        bodies[n] = Raw(body)
    return encode(bodies).decode()


def _merge_chunks(parts: str, chunks: Iterable[tuple[int, int, Growing, str]]) -> str:
    known = decode(parts, list[Part])
    for part, pos, kind, text in chunks:
        # A chunk after a gap is ignored; the text before the gap is valid.
        append_text(known, part, kind, pos, text)
    return encode(known).decode()

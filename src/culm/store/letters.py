"""Units and queries for letters: the delivery state of each letter that the server has seen."""

import sqlite3
from typing import NamedTuple

from culm.ids import LetterId, RunId
from culm.store.base import Connection, Op, Tx, deferred, read_row
from culm.wire.agents import LetterShown
from culm.wire.codec import encode


@deferred
def add_letter(tx: Tx, letter: LetterShown, *, run_id: str) -> bool:
    """Add a delivered letter and the run that will read it; False if the letter is known."""
    row = tx.run(
        "add_letter",
        *(letter.letter_id, letter.from_, letter.to, letter.kind, "delivered"),
        *(letter.correlation_id, run_id, letter.created_at or tx.now, tx.now),
    ).fetchone()
    return _publish(tx, "created", row)


def admit_letters(tx: Tx, run_id: RunId) -> None:
    """Mark the letters of a run as read, when it starts or is folded into a turn."""
    for row in tx.run("admit_letters_of_run", tx.now, run_id).fetchall():
        _publish(tx, "updated", row)


def has_letter(connection: Connection, run_id: str) -> bool:
    return connection.run("letter_of_run", run_id).fetchone() is not None


@deferred
def close_letter(tx: Tx, letter_id: LetterId, *, expired: bool) -> bool:
    """Close a letter that nobody will read: it has expired, or its recipient is gone."""
    state = "expired" if expired else "dead"
    row = tx.run("set_letter_state", state, tx.now, letter_id, "delivered").fetchone()
    return _publish(tx, "updated", row)


@deferred
def answer_letter(tx: Tx, letter_id: str, answer_id: LetterId, *, by: str = "") -> bool:
    """Record a delivered reply; False if there was one already, or `by` is not the recipient."""
    row = tx.run("answer_letter", answer_id, tx.now, letter_id, by).fetchone()
    return _publish(tx, "updated", row)


def delete_mail_to(tx: Tx, address: str) -> None:
    """Delete the letters to a deleted session or agent; its mailbox must be removed then."""
    tx.run("delete_letters_to", address)
    tx.run("add_deleted_mailbox", address)


def deleted_mailboxes(connection: Connection) -> list[str]:
    return [row["address"] for row in connection.run("deleted_mailboxes")]


@deferred
def forget_deleted_mailbox(tx: Tx, address: str) -> None:
    """Note that the mailbox is removed."""
    tx.run("forget_deleted_mailbox", address)


@deferred
def find_letter(connection: Connection, letter_id: str) -> LetterShown | None:
    row = connection.run("get_letter", letter_id).fetchone()
    return None if row is None else letter_of(row)


@deferred
def list_letters(connection: Connection, agent_id: str, limit: int) -> list[LetterShown]:
    """The letters from or to an agent, or all if `agent_id` is empty, the latest first."""
    return [letter_of(row) for row in connection.run("letters", agent_id, limit)]


class UnansweredAsk(NamedTuple):
    """An `ask` letter without a reply, whose run has ended."""

    no: int  # Its number among all letters.
    letter: LetterShown
    outcome: str  # The outcome of the run.


@deferred
def unanswered_asks(
    connection: Connection, since: int, after: int, limit: int
) -> list[UnansweredAsk]:
    """The first unanswered asks after letter number `after` that changed after `since`.

    Asks of senders that no longer exist are left out.
    """
    rows = connection.run("unanswered_asks", since, after, limit)
    return [UnansweredAsk(row["no"], letter_of(row), row["outcome"] or "?") for row in rows]


@deferred
def unanswered_senders(connection: Connection, since: int) -> list[str]:
    """The senders of unanswered asks."""
    return [row["sender"] for row in connection.run("askers_left", since)]


def letter_of(row: sqlite3.Row) -> LetterShown:
    others = {"letter_id": row["id"], "from_": row["sender"], "to": row["recipient"]}
    return read_row(row, LetterShown, **others)


def _publish(tx: Tx, op: Op, row: sqlite3.Row | None) -> bool:
    """Publish a changed letter; False if none has changed."""
    if row is not None:
        tx.publish("letter_changed", op, "", row["id"], encode(letter_of(row)))
    return row is not None

"""Units and queries for letters: the delivery state of each letter that the server has seen."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from culm.ids import LetterId, RunId
from culm.store.base import Op, Tx
from culm.store.sql import QUERIES
from culm.wire.agents import LetterShown
from culm.wire.codec import encode


def add_letter(letter: LetterShown, *, run_id: str) -> Callable[[Tx], bool]:
    """Add a delivered letter and the run that will read it; False if the letter is known."""

    def unit(tx: Tx) -> bool:
        row = tx.run(
            "add_letter",
            *(letter.letter_id, letter.from_, letter.to, letter.kind, "delivered"),
            *(letter.correlation_id, run_id, letter.created_at or tx.now, tx.now),
        ).fetchone()
        if row is not None:
            _publish(tx, "created", row)
        return row is not None

    return unit


def admit_letters(tx: Tx, run_id: RunId) -> None:
    """Mark the letters of a run as read, when it starts or is folded into a turn."""
    for row in tx.run("admit_letters_of_run", tx.now, run_id).fetchall():
        _publish(tx, "updated", row)


def has_letter(connection: sqlite3.Connection, run_id: str) -> bool:
    return connection.execute(QUERIES["letter_of_run"], (run_id,)).fetchone() is not None


def close_letter(letter_id: LetterId, *, expired: bool) -> Callable[[Tx], bool]:
    """Close a letter that nobody will read: it has expired, or its recipient is gone."""

    def unit(tx: Tx) -> bool:
        state = "expired" if expired else "dead"
        row = tx.run("set_letter_state", state, tx.now, letter_id, "delivered").fetchone()
        if row is not None:
            _publish(tx, "updated", row)
        return row is not None

    return unit


def answer_letter(letter_id: str, answer_id: LetterId, *, by: str = "") -> Callable[[Tx], bool]:
    """Record a delivered reply; False if there was one already, or `by` is not the recipient."""

    def unit(tx: Tx) -> bool:
        row = tx.run("answer_letter", answer_id, tx.now, letter_id, by).fetchone()
        if row is not None:
            _publish(tx, "updated", row)
        return row is not None

    return unit


def find_letter(letter_id: str) -> Callable[[sqlite3.Connection], LetterShown | None]:
    def query(connection: sqlite3.Connection) -> LetterShown | None:
        row = connection.execute(QUERIES["get_letter"], (letter_id,)).fetchone()
        return None if row is None else letter_of(row)

    return query


def list_letters(agent_id: str, limit: int) -> Callable[[sqlite3.Connection], list[LetterShown]]:
    """The letters from or to an agent, or all if `agent_id` is empty, the latest first."""

    def query(connection: sqlite3.Connection) -> list[LetterShown]:
        return [letter_of(row) for row in connection.execute(QUERIES["letters"], (agent_id, limit))]

    return query


class UnansweredAsk(NamedTuple):
    """An `ask` letter without a reply, whose run has ended."""

    no: int  # Its number among all letters.
    letter: LetterShown
    outcome: str  # The outcome of the run.


def unanswered_asks(
    since: int, after: int, limit: int
) -> Callable[[sqlite3.Connection], list[UnansweredAsk]]:
    """The first unanswered asks after letter number `after` that changed after `since`.

    Asks of senders that no longer exist are left out.
    """

    def query(connection: sqlite3.Connection) -> list[UnansweredAsk]:
        rows = connection.execute(QUERIES["unanswered_asks"], (since, after, limit))
        return [UnansweredAsk(row["no"], letter_of(row), row["outcome"] or "?") for row in rows]

    return query


def unanswered_senders(connection: sqlite3.Connection, since: int) -> list[str]:
    """The senders of unanswered asks."""
    return [row["sender"] for row in connection.execute(QUERIES["askers_left"], (since,))]


def letter_of(row: sqlite3.Row) -> LetterShown:
    return LetterShown(
        letter_id=row["id"],
        from_=row["sender"],
        to=row["recipient"],
        kind=row["kind"],
        state=row["state"],
        correlation_id=row["correlation_id"],
        answer_id=row["answer_id"],
        run_id=row["run_id"],
        created_at=row["created_at"],
        changed_at=row["changed_at"],
    )


def _publish(tx: Tx, op: Op, row: sqlite3.Row) -> None:
    letter = letter_of(row)
    tx.publish(
        "letter_changed",
        op,
        session_id="",
        entity_id=letter.letter_id,
        payload=encode(letter),
        stored=True,
    )

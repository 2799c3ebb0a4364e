"""Units and queries over letters: what a sender may ask about one that the server has seen."""

import sqlite3
from collections.abc import Callable
from typing import NamedTuple

from culm.ids import LetterId, RunId
from culm.store.base import Op, Tx
from culm.store.sql import QUERIES
from culm.wire.agents import LetterShown
from culm.wire.codec import encode


def add_letter(letter: LetterShown, *, run_id: str) -> Callable[[Tx], bool]:
    """Note one that lies in a mailbox, and the run that will bring it; False if it was known."""

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
    """The run that brings them has begun, or has joined a turn."""
    for row in tx.run("admit_letters_of_run", tx.now, run_id).fetchall():
        _publish(tx, "updated", row)


def brings_letter(connection: sqlite3.Connection, run_id: str) -> bool:
    return connection.execute(QUERIES["letter_of_run"], (run_id,)).fetchone() is not None


def close_letter(letter_id: LetterId, *, expired: bool) -> Callable[[Tx], bool]:
    """Nobody will read it: its time is over, or its recipient is gone."""

    def unit(tx: Tx) -> bool:
        state = "expired" if expired else "dead"
        row = tx.run("set_letter_state", state, tx.now, letter_id, "delivered").fetchone()
        if row is not None:
            _publish(tx, "updated", row)
        return row is not None

    return unit


def answer_letter(letter_id: str, answer_id: LetterId, *, by: str = "") -> Callable[[Tx], bool]:
    """A reply to it was delivered; False if there was one before, or it was not asked of `by`."""

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
    """From it or to it, the latest first; all if it is empty."""

    def query(connection: sqlite3.Connection) -> list[LetterShown]:
        return [letter_of(row) for row in connection.execute(QUERIES["letters"], (agent_id, limit))]

    return query


class UnansweredAsk(NamedTuple):
    """One that was read in a run which has ended, and got no reply."""

    no: int  # Its place among all letters.
    letter: LetterShown
    outcome: str  # How the run ended.


def unanswered_asks(
    since: int, after: int, limit: int
) -> Callable[[sqlite3.Connection], list[UnansweredAsk]]:
    """The first behind the letter with the number `after`, whose asker may still be there."""

    def query(connection: sqlite3.Connection) -> list[UnansweredAsk]:
        rows = connection.execute(QUERIES["unanswered_asks"], (since, after, limit))
        return [UnansweredAsk(row["no"], letter_of(row), row["outcome"] or "?") for row in rows]

    return query


def askers_left(connection: sqlite3.Connection, since: int) -> list[str]:
    """Who waits for the replies to these."""
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

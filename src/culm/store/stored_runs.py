"""Complete stored runs, for a server that continues the work of an earlier one."""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple, cast

from culm.ids import RunId, SessionId
from culm.store.agents import find_agent
from culm.store.base import Tx
from culm.store.letters import has_letter
from culm.store.runs import run_of
from culm.store.sql import QUERIES
from culm.wire.asks import Approve, parse_approve
from culm.wire.codec import Json, decode
from culm.wire.runs import Attachment, Limits, Run


class BudgetScope(NamedTuple):
    """A run above another: the limits of its tree, and the usage so far."""

    run_id: RunId
    limits: Limits
    steps: int
    tokens: int
    cost: float


class StoredRun(NamedTuple):
    """A run with the fields that are not sent to clients."""

    run: Run
    digest: str
    limits: Limits
    cancelled: bool
    headless: bool
    approve: Approve | None
    path: tuple[str, ...] = ()  # Agent ids, from the top down to the one that executes the run.
    above: tuple[SessionId, ...] = ()  # The sessions of the agents above it.
    bounds: tuple[BudgetScope, ...] = ()  # The budgets of the runs above it, the nearest first.
    is_letter: bool = False  # Its prompt is a letter.


class RunBody(NamedTuple):
    """The full prompt with its attachments."""

    prompt: str
    attachments: list[Attachment]


def unfinished_runs(tx: Tx) -> list[StoredRun]:
    """The runs that an earlier server did not finish, by session in queue order."""
    return [_stored_of(tx.connection, row) for row in tx.run("unfinished_runs").fetchall()]


def find_stored(connection: sqlite3.Connection, run_id: str) -> StoredRun | None:
    row = connection.execute(QUERIES["get_run"], (run_id,)).fetchone()
    return None if row is None else _stored_of(connection, row)


def body_of(connection: sqlite3.Connection, run_id: str) -> RunBody:
    """The body of a run that has not started. Afterwards its user message has the content."""
    row = connection.execute(QUERIES["get_body"], (run_id,)).fetchone()
    if row is None:
        return RunBody("", [])
    return RunBody(row["prompt"], decode(row["attachments"], list[Attachment]))


def _stored_of(connection: sqlite3.Connection, row: sqlite3.Row) -> StoredRun:
    cancels = connection.execute(QUERIES["is_cancelled"], (row["id"],))
    agent = find_agent(row["agent_id"])(connection) if row["agent_id"] else None
    above = connection.execute(QUERIES["sessions_above"], (row["session_id"],)).fetchall()
    return StoredRun(
        run=run_of(row),
        digest=row["digest"],
        limits=decode(row["limits"], Limits),
        cancelled=cancels.fetchone() is not None,
        headless=bool(row["headless"]),
        approve=parse_approve(cast("Json", decode(row["approve"], object))),
        path=() if agent is None else agent.path,
        above=tuple(one["id"] for one in reversed(above)),
        bounds=tuple(_bounds_of(connection, row)),
        is_letter=has_letter(connection, row["id"]),
    )


def _bounds_of(connection: sqlite3.Connection, row: sqlite3.Row) -> Iterator[BudgetScope]:
    seen = {row["id"]}  # Damaged rows may form a cycle.
    above: str = row["parent_run_id"]
    while above and above not in seen:
        seen.add(above)
        found = connection.execute(QUERIES["get_run"], (above,)).fetchone()
        if found is None:
            return
        used = found["tree_steps"], found["tree_tokens"], float(found["tree_cost"])
        yield BudgetScope(found["id"], decode(found["limits"], Limits), *used)
        above = found["parent_run_id"]

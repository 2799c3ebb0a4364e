"""Runs with all that is stored of them: for who goes on with what another server has left."""

import sqlite3
from collections.abc import Iterator
from typing import NamedTuple, cast

from culm.ids import RunId, SessionId
from culm.store.agents import find_agent
from culm.store.base import Tx
from culm.store.letters import brings_letter
from culm.store.runs import run_of
from culm.store.sql import QUERIES
from culm.wire.agent import Attachment
from culm.wire.codec import Json, decode
from culm.wire.rules import Approve, parse_approve
from culm.wire.runs import Limits, Run


class BudgetScope(NamedTuple):
    """A run for which another works: what it may use up with its tree, and what it has."""

    run_id: RunId
    limits: Limits
    steps: int
    tokens: int
    cost: float


class StoredRun(NamedTuple):
    """A run with what clients are not shown of it."""

    run: Run
    digest: str
    limits: Limits
    cancelled: bool
    headless: bool
    approve: Approve | None
    path: tuple[str, ...] = ()  # Of agents, from the top down to the one that does it ...
    above: tuple[SessionId, ...] = ()  # ... and the sessions of those before it.
    bounds: tuple[BudgetScope, ...] = ()  # Of the runs it works for, the nearest first.
    is_letter: bool = False  # It brings one.


class RunBody(NamedTuple):
    """What was asked, in full."""

    prompt: str
    attachments: list[Attachment]


def unfinished_runs(tx: Tx) -> list[StoredRun]:
    """What was left behind, each session's in the order of its queue."""
    return [_stored_of(tx.connection, row) for row in tx.run("unfinished_runs").fetchall()]


def find_stored(connection: sqlite3.Connection, run_id: str) -> StoredRun | None:
    row = connection.execute(QUERIES["get_run"], (run_id,)).fetchone()
    return None if row is None else _stored_of(connection, row)


def body_of(connection: sqlite3.Connection, run_id: str) -> RunBody:
    """Until it starts; from then on its user message has it."""
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
        is_letter=brings_letter(connection, row["id"]),
    )


def _bounds_of(connection: sqlite3.Connection, row: sqlite3.Row) -> Iterator[BudgetScope]:
    seen = {row["id"]}  # Rows that somebody else wrote may lead back to themselves.
    above: str = row["parent_run_id"]
    while above and above not in seen:
        seen.add(above)
        found = connection.execute(QUERIES["get_run"], (above,)).fetchone()
        if found is None:
            return
        used = found["tree_steps"], found["tree_tokens"], float(found["tree_cost"])
        yield BudgetScope(found["id"], decode(found["limits"], Limits), *used)
        above = found["parent_run_id"]

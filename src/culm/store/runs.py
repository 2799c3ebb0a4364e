"""Units and queries for runs, their cancels, their calls and their usage.

`run/` decides about the transitions between states.
"""

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeVar, cast

from msgspec import Struct
from msgspec.structs import replace

from culm.errors import RunIdReused, RunNotHeld, RunStarted, SessionNotFound
from culm.ids import CancelId, LetterId, MessageId, RunId, SessionId
from culm.store.agents import assign_agent, begin_agent, end_agent, find_agent
from culm.store.asks import close_asks_of_run
from culm.store.base import Connection, Op, Tx, Unit, deferred, read_row
from culm.store.letters import admit_letters, close_letter, has_letter
from culm.wire.asks import Approve, parse_approve
from culm.wire.codec import Json, decode, encode
from culm.wire.runs import (
    CANCELED,
    HEAD_CHARS,
    Attachment,
    CancelChanged,
    CancelledRun,
    CancelTarget,
    CrashPolicy,
    DayUsage,
    Ending,
    Kind,
    Limits,
    ModelUsage,
    QueueChanged,
    QueuedPrompt,
    Run,
    SessionUsage,
    Settled,
    State,
    Stats,
    Usage,
    Used,
    agent_event_of,
    changed_of,
    run_complete_of,
    settled_by,
)

MODELS_SHOWN = 100
DAYS_SHOWN = 366
SESSIONS_SHOWN = 10
DAY_S = 86_400

U = TypeVar("U", bound=Usage)


class NewRun(Struct, frozen=True):
    """An accepted run, to be stored."""

    id: RunId
    session_id: SessionId
    kind: Kind
    state: Literal["accepted", "queued"]
    run_id_given: bool
    digest: str
    prompt: str
    attachments: Sequence[Attachment]
    limits: Limits
    provider: str
    model: str
    headless: bool = False
    approve: Approve | None = None
    agent_id: str = ""
    parent_run_id: str = ""
    detached: bool = False


# --- the life cycle of a run


@deferred
def accept_run(tx: Tx, new: NewRun, before: Unit | None = None) -> int | None:
    """Add a run, after the unit `before`; returns its number, or None if the run is known.

    Raises `SessionNotFound`, `RunIdReused`.
    """
    if before is not None:
        before(tx)
    known = tx.run("get_run", new.id).fetchone()
    if known is not None:
        if known["digest"] != new.digest:
            raise RunIdReused(new.id)
        return None
    if tx.run("get_session", new.session_id).fetchone() is None:
        raise SessionNotFound(new.session_id)
    row = tx.run(
        "add_run",
        *(new.id, new.session_id, new.kind, new.state, new.run_id_given, new.digest),
        *(new.prompt[:HEAD_CHARS], encode(new.limits).decode(), new.provider, new.model),
        *(tx.now, _next_position(tx, new.session_id)),
        *(new.headless, encode(new.approve).decode()),
        *(new.agent_id, new.parent_run_id, new.detached),
    ).fetchone()
    tx.run("add_body", new.id, new.prompt, encode(new.attachments).decode())
    assign_agent(tx, new.agent_id, new.id)
    run = _publish_run(tx, row, "created")
    if new.state == "queued":
        _publish_queue(tx, new.session_id)
    return run.seq


@deferred
def start_run(tx: Tx, run_id: RunId, *, was_queued: bool) -> None:
    run = _publish_run(tx, tx.run("start_run", tx.now, run_id).fetchone())
    tx.run("delete_body", run_id)
    begin_agent(tx, run.agent_id, run_id)
    admit_letters(tx, run_id)
    if was_queued:
        _publish_queue(tx, run.session_id)


@deferred
def fold_runs(tx: Tx, run_ids: Iterable[RunId], host_id: RunId) -> None:
    """Fold queued runs into the turn of another run."""
    run: Run | None = None
    for run_id in run_ids:
        run = _publish_run(tx, tx.run("fold_run", host_id, tx.now, run_id).fetchone())
        tx.run("delete_body", run_id)
        admit_letters(tx, run_id)
    if run is not None:
        _publish_queue(tx, run.session_id)


@deferred
def end_run(
    tx: Tx,
    run_id: RunId,
    ending: Ending,
    *,
    message_id: str = "",
    text: str = "",
    settled: Settled | None = None,
    left: Sequence[int] = (),
) -> None:
    """End a run and those folded into it, publish the end, and settle the cancels that cover them.

    For a run that has ended already, this changes nothing.
    """
    hosted: list[RunId] = [row["id"] for row in tx.run("folded_runs", run_id)]
    row = tx.run("get_run", run_id).fetchone()
    was_queued: bool = row is not None and row["state"] == "queued"
    _end_one(tx, run_id, ending, message_id, text, with_event=True)
    for one in hosted:  # They shared one turn, so only one `agent_event` is published.
        _end_one(tx, one, ending, message_id, text, with_event=False)
    if row is not None and was_queued:
        _publish_queue(tx, row["session_id"])
    for one in (run_id, *hosted):
        _settle(tx, one, settled or settled_by(ending.outcome), left)


@deferred
def unless_ended(tx: Tx, run_id: RunId, unit: Unit) -> None:
    """Run `unit`, which belongs to the end of a run, only if the run has not ended."""
    row = tx.run("get_run", run_id).fetchone()
    if row is not None and row["state"] != "ended":
        unit(tx)


def _end_one(
    tx: Tx, run_id: RunId, ending: Ending, message_id: str, text: str, *, with_event: bool
) -> None:
    values = (ending.outcome, ending.title, ending.details, message_id, tx.now, run_id)
    row = tx.run("end_run", *values).fetchone()
    if row is None:
        return
    run = _publish_run(tx, row)
    close_asks_of_run(tx, run_id)
    end_agent(tx, run.agent_id, run_id, ending)
    tx.run("delete_body", run_id)
    session = tx.run("get_session", run.session_id).fetchone()
    title = "" if session is None else session["title"]
    event = agent_event_of(ending, run.session_id, run_id, title)
    if event is not None and with_event:
        _publish(tx, "agent_event", "created", run, encode(event))
    complete = run_complete_of(ending, run.session_id, run_id, message_id, text)
    without_text = encode(replace(complete, text=""))  # A replay reads it from the message.
    _publish(tx, "run_complete", "updated", run, encode(complete), logged=without_text)


@deferred
def hold_run(tx: Tx, run_id: RunId, reason: str) -> None:
    """Hold a run before it has started."""
    before = tx.run("get_run", run_id).fetchone()
    run = _publish_run(tx, tx.run("hold_run", reason, run_id).fetchone())
    if before["state"] == "queued":
        _publish_queue(tx, run.session_id)


@deferred
def release_run(
    tx: Tx, run_id: RunId, session_id: SessionId, state: Literal["accepted", "queued"]
) -> int | None:
    """Put a held run at the end of the queue; raises `RunNotHeld`."""
    _check_held(tx, run_id)
    row = tx.run("release_run", state, _next_position(tx, session_id), run_id).fetchone()
    run = _publish_run(tx, row)
    if state == "queued":
        _publish_queue(tx, session_id)
    return run.seq


@deferred
def drop_run(tx: Tx, run_id: RunId) -> None:
    """End a held run; raises `RunNotHeld`."""
    _check_held(tx, run_id)
    end_run(run_id, CANCELED)(tx)


def _check_held(tx: Tx, run_id: RunId) -> None:
    row = tx.run("get_run", run_id).fetchone()
    if row is None or row["state"] != "held":
        raise RunNotHeld(run_id, "gone" if row is None else row["state"])


def _next_position(tx: Tx, session_id: SessionId) -> int:
    position: int = tx.run("next_place", session_id).fetchone()[0]
    return position


@deferred
def add_run_usage(tx: Tx, run_id: RunId, used: Used) -> None:
    """Add usage to a run and to the trees that contain it."""
    tokens = used.prompt_tokens, used.completion_tokens
    tx.run("count_on_run", *tokens, used.cost, used.estimated, run_id)
    tx.run("count_on_tree", 1, sum(tokens), used.cost, run_id)


@deferred
def set_limits(tx: Tx, run_id: RunId, limits: Limits) -> None:
    """Change the limits of a run and its tree."""
    tx.run("set_limits", encode(limits).decode(), run_id)


@deferred
def set_run_model(tx: Tx, run_id: RunId, provider_id: str, model_id: str) -> None:
    """Record that another model answers than the one selected at acceptance."""
    tx.run("name_model", provider_id, model_id, run_id)


# --- the queue


@deferred
def edit_prompt(tx: Tx, run_id: RunId, prompt: str) -> None:
    row = tx.run("edit_run", prompt[:HEAD_CHARS], run_id).fetchone()
    if row is None:
        raise RunStarted(run_id)
    tx.run("edit_body", prompt, run_id)
    _publish_queue(tx, row["session_id"])


@deferred
def order_queue(tx: Tx, session_id: SessionId, run_ids: Sequence[RunId]) -> None:
    for position, run_id in enumerate(run_ids, start=_next_position(tx, session_id)):
        tx.run("place_run", position, run_id)
    _publish_queue(tx, session_id)


# --- cancels


@deferred
def add_cancel(
    tx: Tx,
    cancel_id: CancelId,
    session_id: SessionId,
    target: CancelTarget,
    run_ids: Sequence[RunId],
) -> list[RunId]:
    """Record a cancel. Queued runs end here and are returned."""
    rows = [tx.run("get_run", run_id).fetchone() for run_id in run_ids]
    # Unknown runs were refused. Held runs are not cancelled: a person starts or drops them.
    known = [row for row in rows if row is not None and row["state"] != "held"]
    if not known:
        return []
    tx.run("add_cancel", cancel_id, session_id, target, tx.now)
    for row in known:
        tx.run("add_cancelled_run", cancel_id, row["id"])
    _publish_cancel(tx, cancel_id)
    waiting = [row for row in known if row["state"] == "queued"]
    queued: list[RunId] = [row["id"] for row in waiting]
    for run_id in queued:
        _end_one(tx, run_id, CANCELED, "", "", with_event=True)
        tx.run("settle_cancelled_run", "canceled", "[]", run_id)
    for changed in dict.fromkeys(row["session_id"] for row in waiting):
        _publish_queue(tx, changed)
    over = [row for row in known if row["state"] == "ended"]
    for row in over:
        tx.run("settle_cancelled_run", settled_by(row["outcome"]), "[]", row["id"])
    if queued or over:
        _publish_cancel(tx, cancel_id)
    return queued


@deferred
def expire_run(tx: Tx, run_id: RunId, cancel_id: CancelId) -> bool:
    """Cancel a queued run whose letter has expired; False if the run is no longer queued."""
    row = tx.run("get_run", run_id).fetchone()
    if row is None or row["state"] != "queued":
        return False
    close_letter(LetterId(run_id), expired=True)(tx)
    add_cancel(cancel_id, row["session_id"], "run", [run_id])(tx)
    return True


def _settle(tx: Tx, run_id: RunId, settled: Settled, left: Sequence[int]) -> None:
    for row in tx.run("settle_cancelled_run", settled, encode(left).decode(), run_id).fetchall():
        _publish_cancel(tx, row["cancel_id"])


def _publish_cancel(tx: Tx, cancel_id: CancelId) -> None:
    cancel = tx.run("get_cancel", cancel_id).fetchone()
    runs = [
        CancelledRun(run_id, settled, decode(pids, list[int]))
        for run_id, settled, pids in tx.run("runs_of_cancel", cancel_id)
    ]
    changed = CancelChanged(
        cancel_id=cancel_id,
        session_id=cancel["session_id"],
        target=cancel["target"],
        state="settled" if all(run.settled for run in runs) else "requested",
        runs=runs,
    )
    tx.publish("cancel_changed", "updated", changed.session_id, cancel_id, encode(changed))


# --- reading


def run_of(row: sqlite3.Row) -> Run:
    return read_row(
        row,
        Run,
        run_id_given=bool(row["given"]),
        host_run_id=row["host_id"],
        cost=float(row["cost"]),
        estimated=bool(row["estimated"]),
        is_detached=bool(row["detached"]),
        tree_cost=float(row["tree_cost"]),
    )


@deferred
def find_run(connection: Connection, run_id: str) -> Run | None:
    row = connection.run("get_run", run_id).fetchone()
    return None if row is None else run_of(row)


@deferred
def list_runs(
    connection: Connection, session_id: str, state: State | Literal[""], limit: int
) -> list[Run]:
    """The runs of a session in a state, or all, the latest first."""
    return [*map(run_of, connection.run("runs", session_id, state, limit))]


def open_runs(connection: Connection) -> list[Run]:
    """The runs that have not ended, including held ones, by session in queue order."""
    return [run_of(row) for row in connection.run("unfinished_runs")]


def count_unfinished(connection: Connection) -> int:
    count: int = connection.run("count_unfinished_runs").fetchone()[0]
    return count


def delete_runs_of_session(tx: Tx, session_id: SessionId) -> None:
    """Delete the runs of a session. Held runs end first, so that every run has an end."""
    for row in tx.run("held_runs_of_session", session_id).fetchall():
        end_run(row["id"], CANCELED)(tx)
    tx.run("delete_calls_of_session", session_id)
    tx.run("delete_cancelled_runs_of_session", session_id)
    tx.run("delete_cancels_of_session", session_id)
    tx.run("delete_bodies_of_session", session_id)
    tx.run("delete_runs_of_session", session_id)


# --- calls: known, started, answered


class KnownCall(NamedTuple):
    crash: CrashPolicy
    state: Literal["known", "started", "answered"]


@deferred
def add_calls(
    tx: Tx, run_id: RunId, message_id: MessageId, calls: Iterable[tuple[str, str, str]]
) -> None:
    """Add the calls of a message (id, name, crash policy) before the first of them starts."""
    for no, (call_id, name, crash) in enumerate(calls):
        tx.run("add_call", message_id, call_id, no, run_id, name, crash)


@deferred
def set_call_state(
    tx: Tx, message_id: MessageId, call_id: str, state: Literal["started", "answered"]
) -> None:
    tx.run("set_call_state", state, message_id, call_id)


def calls_of_message(tx: Tx, message_id: MessageId) -> dict[str, KnownCall]:
    rows = tx.run("calls_of_message", message_id)
    return {row["call_id"]: KnownCall(row["crash"], row["state"]) for row in rows}


# --- usage statistics, added up by the database, because clients do not read all runs


def since_of(days: int, now_s: float, utc_offset_s: int) -> int:
    """The start of the first of `days` days, including today, in a time zone; 0 for no limit."""
    if not days:
        return 0
    today = (int(now_s) + utc_offset_s) // DAY_S
    return max((today - days + 1) * DAY_S - utc_offset_s, 0)


@deferred
def stats_since(connection: Connection, since: int, utc_offset_s: int) -> Stats:
    def read(name: str, kind: type[U], *values: int) -> list[U]:
        rows = connection.run(name, since, *values)
        return [usage_of(row, kind) for row in rows]

    return Stats(
        since=since,
        total=read("usage", Usage)[0],
        models=read("usage_by_model", ModelUsage, MODELS_SHOWN),
        days=read("usage_by_day", DayUsage, utc_offset_s, DAYS_SHOWN),
        sessions=read("usage_by_session", SessionUsage, SESSIONS_SHOWN),
    )


def usage_of(row: sqlite3.Row, kind: type[U]) -> U:
    usage = kind(**{name: row[name] for name in kind.__struct_fields__})
    usage.cost = float(usage.cost)  # The sum of no rows is an integer.
    return usage


# --- publishing


def _publish(
    tx: Tx, type_: str, op: Op, run: Run, payload: bytes, logged: bytes | None = None
) -> None:
    tx.publish(type_, op, run.session_id, run.id, payload, logged=logged)


def _publish_run(tx: Tx, row: sqlite3.Row | None, op: Op = "updated") -> Run:
    if row is None:
        raise RunStarted("that was to be changed")
    run = run_of(row)
    _publish(tx, "run_changed", op, run, encode(changed_of(run)))
    return run


def _publish_queue(tx: Tx, session_id: SessionId) -> None:
    rows = tx.run("queued_runs", session_id)
    items = [QueuedPrompt(row["id"], row["prompt"]) for row in rows]
    payload = encode(QueueChanged(session_id, items))
    tx.publish("queue_changed", "updated", session_id, session_id, payload)


# --- complete stored runs, for a server that continues the work of an earlier one


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


def find_stored(connection: Connection, run_id: str) -> StoredRun | None:
    row = connection.run("get_run", run_id).fetchone()
    return None if row is None else _stored_of(connection, row)


def body_of(connection: Connection, run_id: str) -> RunBody:
    """The body of a run that has not started. Afterwards its user message has the content."""
    row = connection.run("get_body", run_id).fetchone()
    if row is None:
        return RunBody("", [])
    return RunBody(row["prompt"], decode(row["attachments"], list[Attachment]))


def _stored_of(connection: Connection, row: sqlite3.Row) -> StoredRun:
    cancels = connection.run("is_cancelled", row["id"])
    agent = find_agent(row["agent_id"])(connection) if row["agent_id"] else None
    above = connection.run("sessions_above", row["session_id"]).fetchall()
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


def _bounds_of(connection: Connection, row: sqlite3.Row) -> Iterator[BudgetScope]:
    seen = {row["id"]}  # Damaged rows may form a cycle.
    above: str = row["parent_run_id"]
    while above and above not in seen:
        seen.add(above)
        found = connection.run("get_run", above).fetchone()
        if found is None:
            return
        used = found["tree_steps"], found["tree_tokens"], float(found["tree_cost"])
        yield BudgetScope(found["id"], decode(found["limits"], Limits), *used)
        above = found["parent_run_id"]

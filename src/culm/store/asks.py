"""Units and queries for permission requests, questions and grants."""

import sqlite3
from typing import NamedTuple, cast

from culm.ids import AskId, GrantId, SessionId
from culm.store.base import Connection, Op, Tx, deferred, read_row
from culm.wire.asks import (
    Ask,
    AskChanged,
    AskState,
    Grant,
    PermissionNotification,
    PermissionRequest,
    QuestionChanged,
    QuestionNotification,
    QuestionRequest,
    R,
    SkipChanged,
)
from culm.wire.codec import decode, encode

AnyAsk = Ask[PermissionRequest] | Ask[QuestionRequest]


def kind_of(request: type[PermissionRequest] | type[QuestionRequest]) -> str:
    return "permission" if request is PermissionRequest else "question"


@deferred
def open_ask(tx: Tx, ask: Ask[R], *, instead_of: AskId | None = None) -> None:
    """Open an ask. An outdated ask for the same call, `instead_of`, is withdrawn."""
    if instead_of is not None:
        close_ask(instead_of, "withdrawn")(tx)
    request = ask.request
    row = tx.run(
        "add_ask",
        *(request.id, kind_of(type(request)), request.session_id, ask.run_id),
        *(ask.message_id, request.tool_call_id, encode(request).decode(), ask.digest),
        *(encode(ask.grains).decode(), ask.why, ask.deadline, tx.now),
        encode(ask.agent_path).decode(),
    ).fetchone()
    _publish(tx, ask_of(row), "created")


@deferred
def close_ask(
    tx: Tx, ask_id: AskId, state: AskState, *, by: str = "", grant: Grant | None = None
) -> bool:
    """Close an ask and add the grant of its answer, if any; False if it was not open.

    The `params` of a closed permission request are not kept, because they may contain whole files.
    The message and the file history contain the result.
    """
    row = tx.run("close_ask", state, by, tx.now, ask_id).fetchone()
    if row is None:
        return False
    _publish(tx, ask_of(row), "updated")
    if grant is not None:
        _add_grant(tx, grant)
    return True


def close_asks_of_run(tx: Tx, run_id: str) -> None:
    """Close the open asks of a run that has ended."""
    for row in tx.run("close_asks_of_run", tx.now, run_id).fetchall():
        _publish(tx, ask_of(row), "updated")


def open_asks_of_run(tx: Tx, run_id: str) -> list[AnyAsk]:
    return [ask_of(row) for row in tx.run("open_asks_of_run", run_id).fetchall()]


def has_decided_ask(tx: Tx, message_id: str) -> bool:
    """Return True if a call of this message was denied, or was allowed and has not started.

    A denial ends the turn. An allowed call is not asked about again.
    """
    return tx.run("decided_ask", message_id).fetchone() is not None


class RefusedAsk(NamedTuple):
    """An ask that a person refused, or that nobody answered in time."""

    call_id: str
    kind: str
    state: AskState


def refused_asks(tx: Tx, message_id: str) -> list[RefusedAsk]:
    return [RefusedAsk(*row) for row in tx.run("refused_asks", message_id).fetchall()]


@deferred
def list_asks(
    connection: Connection, request: type[R], session_id: str, state: str, limit: int
) -> list[Ask[R]]:
    """The asks of a kind, by session and state, the latest first."""
    values = (kind_of(request), session_id, state, limit)
    asks = [ask_of(row) for row in connection.run("asks", *values)]
    return cast("list[Ask[R]]", asks)  # The query selects the kind.


def ask_of(row: sqlite3.Row) -> AnyAsk:
    if row["kind"] == "permission":
        return _ask_of(row, PermissionRequest)
    return _ask_of(row, QuestionRequest)


def _ask_of(row: sqlite3.Row, kind: type[R]) -> Ask[R]:
    return Ask(
        decode(row["request"], kind),
        run_id=row["run_id"],
        message_id=row["message_id"],
        digest=row["digest"],
        grains=decode(row["grains"], list[str]),
        why=row["why"],
        deadline=row["deadline"],
        state=row["state"],
        by=row["answered_by"],
        created_at=row["created_at"],
        closed_at=row["closed_at"],
        agent_path=decode(row["agent_path"], list[str]),
    )


def changed_ask(ask: AnyAsk) -> AskChanged | QuestionChanged:
    """The event for a change of an ask, without the request itself."""
    request = ask.request
    if isinstance(request, QuestionRequest):
        return QuestionChanged(
            batch_id=AskId(request.id),
            session_id=SessionId(request.session_id),
            run_id=ask.run_id,
            tool_call_id=request.tool_call_id,
            state=ask.state,
            by=ask.by,
            agent_path=ask.agent_path,
        )
    return AskChanged(
        ask_id=AskId(request.id),
        session_id=SessionId(request.session_id),
        run_id=ask.run_id,
        tool_call_id=request.tool_call_id,
        tool_name=request.tool_name,
        action=request.action,
        description=request.description,
        digest=ask.digest,
        state=ask.state,
        deadline=ask.deadline,
        by=ask.by,
        agent_path=ask.agent_path,
    )


def _publish(tx: Tx, ask: AnyAsk, op: Op) -> None:
    request = ask.request
    ids = request.session_id, request.id
    changed = encode(changed_ask(ask))
    # Closed asks are also published as Crush's notification. It is stored, so that dialogs close
    # in clients that have fallen behind, too.
    if isinstance(request, QuestionRequest):
        tx.publish("question_changed", op, *ids, changed)
        if ask.state != "open":
            closes = encode(QuestionNotification(request.id))
            tx.publish("question_batch_notification", "created", *ids, closes)
        return
    tx.publish("ask_changed", op, *ids, changed)
    if ask.state != "open":
        granted = ask.state == "allowed"
        closes = PermissionNotification(
            request.tool_call_id,
            granted=granted,
            denied=not granted,
            session_id=request.session_id,
        )
        tx.publish("permission_notification", "created", *ids, encode(closes))


# --- grants


def _add_grant(tx: Tx, grant: Grant) -> None:
    grant.created_at = tx.now
    tx.run(
        "add_grant",
        *(grant.id, grant.scope, grant.session_id, grant.tool_name, grant.action),
        *(encode(grant.grains).decode(), grant.ask_id, grant.by, tx.now),
    )
    _publish_grant(tx, grant, "created")


@deferred
def delete_grant(tx: Tx, grant_id: GrantId) -> bool:
    """Revoke a grant; False if it does not exist."""
    row = tx.run("delete_grant", grant_id).fetchone()
    if row is None:
        return False
    _publish_grant(tx, grant_of(row), "deleted")
    return True


def _publish_grant(tx: Tx, grant: Grant, op: Op) -> None:
    tx.publish("grant_changed", op, grant.session_id, grant.id, encode(grant))


def all_grants(connection: Connection) -> list[Grant]:
    return [grant_of(row) for row in connection.run("grants")]


def grant_of(row: sqlite3.Row) -> Grant:
    grains = decode(row["grains"], list[str])
    return read_row(row, Grant, tool_name=row["tool"], grains=grains, by=row["granted_by"])


def delete_asks_of_session(tx: Tx, session_id: str) -> None:
    tx.run("delete_asks_of_session", session_id)
    tx.run("delete_grants_of_session", session_id)


# --- skip mode


@deferred
def publish_skip(tx: Tx, changed: SkipChanged) -> None:
    """Publish a change of skip mode. The mode ends with the server, so no table has it."""
    session_id = changed.session_id
    tx.publish("skip_changed", "updated", session_id, session_id, encode(changed))

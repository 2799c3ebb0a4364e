"""Units and queries for permission requests, questions and grants."""

import sqlite3
from collections.abc import Callable
from typing import cast

from culm.ids import AskId, GrantId, SessionId
from culm.store.base import Op, Tx
from culm.store.sql import QUERIES
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


def open_ask(ask: Ask[R], *, instead_of: AskId | None = None) -> Callable[[Tx], None]:
    """Open an ask. An outdated ask for the same call, `instead_of`, is withdrawn."""

    def unit(tx: Tx) -> None:
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

    return unit


def close_ask(
    ask_id: AskId, state: AskState, *, by: str = "", grant: Grant | None = None
) -> Callable[[Tx], bool]:
    """Close an ask and add the grant of its answer, if any; False if it was not open.

    The `params` of a closed permission request are not kept, because they may contain whole files.
    The message and the file history contain the result.
    """

    def unit(tx: Tx) -> bool:
        row = tx.run("close_ask", state, by, tx.now, ask_id).fetchone()
        if row is None:
            return False
        _publish(tx, ask_of(row), "updated")
        if grant is not None:
            _add_grant(tx, grant)
        return True

    return unit


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


def list_asks(
    request: type[R], session_id: str, state: str, limit: int
) -> Callable[[sqlite3.Connection], list[Ask[R]]]:
    """The asks of a kind, by session and state, the latest first."""

    def query(connection: sqlite3.Connection) -> list[Ask[R]]:
        values = (kind_of(request), session_id, state, limit)
        asks = [ask_of(row) for row in connection.execute(QUERIES["asks"], values)]
        return cast("list[Ask[R]]", asks)  # The query selects the kind.

    return query


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
    changed = changed_ask(ask)
    type_ = "ask_changed" if isinstance(changed, AskChanged) else "question_changed"
    _publish_stored(tx, ask, type_, op, encode(changed))
    if ask.state == "open":
        return
    # Stored, so that dialogs also close in clients that have fallen behind.
    if isinstance(ask.request, QuestionRequest):
        closes = encode(QuestionNotification(ask.request.id))
        _publish_stored(tx, ask, "question_batch_notification", "created", closes)
    else:
        granted = ask.state == "allowed"
        closes = encode(
            PermissionNotification(
                ask.request.tool_call_id,
                granted=granted,
                denied=not granted,
                session_id=ask.request.session_id,
            )
        )
        _publish_stored(tx, ask, "permission_notification", "created", closes)


def _publish_stored(tx: Tx, ask: AnyAsk, type_: str, op: Op, payload: bytes) -> None:
    _publish_of(tx, type_, op, ask.request.session_id, ask.request.id, payload)


def _publish_of(
    tx: Tx, type_: str, op: Op, session_id: str, entity_id: str, payload: bytes
) -> None:
    tx.publish(type_, op, session_id=session_id, entity_id=entity_id, payload=payload, stored=True)


# --- grants


def _add_grant(tx: Tx, grant: Grant) -> None:
    grant.created_at = tx.now
    tx.run(
        "add_grant",
        *(grant.id, grant.scope, grant.session_id, grant.tool_name, grant.action),
        *(encode(grant.grains).decode(), grant.ask_id, grant.by, tx.now),
    )
    _publish_grant(tx, grant, "created")


def delete_grant(grant_id: GrantId) -> Callable[[Tx], bool]:
    """Revoke a grant; False if it does not exist."""

    def unit(tx: Tx) -> bool:
        row = tx.run("delete_grant", grant_id).fetchone()
        if row is None:
            return False
        _publish_grant(tx, grant_of(row), "deleted")
        return True

    return unit


def _publish_grant(tx: Tx, grant: Grant, op: Op) -> None:
    _publish_of(tx, "grant_changed", op, grant.session_id, grant.id, encode(grant))


def all_grants(connection: sqlite3.Connection) -> list[Grant]:
    return [grant_of(row) for row in connection.execute(QUERIES["grants"])]


def grant_of(row: sqlite3.Row) -> Grant:
    return Grant(
        id=row["id"],
        scope=row["scope"],
        session_id=row["session_id"],
        tool_name=row["tool"],
        action=row["action"],
        grains=decode(row["grains"], list[str]),
        ask_id=row["ask_id"],
        by=row["granted_by"],
        created_at=row["created_at"],
    )


def delete_asks_of_session(tx: Tx, session_id: str) -> None:
    tx.run("delete_asks_of_session", session_id)
    tx.run("delete_grants_of_session", session_id)


# --- skip mode


def publish_skip(changed: SkipChanged) -> Callable[[Tx], None]:
    """Publish a change of skip mode. The mode ends with the server, so no table has it."""

    def unit(tx: Tx) -> None:
        session_id = changed.session_id
        _publish_of(tx, "skip_changed", "updated", session_id, session_id, encode(changed))

    return unit

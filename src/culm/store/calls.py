"""Units and queries over the calls of answers: known, started, answered."""

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from culm.ids import MessageId, RunId
from culm.store.base import Tx
from culm.wire.runs import CrashPolicy


class KnownCall(NamedTuple):
    crash: CrashPolicy
    state: Literal["known", "started", "answered"]


def add_calls(
    run_id: RunId, message_id: MessageId, calls: Iterable[tuple[str, str, str]]
) -> Callable[[Tx], None]:
    """Know the calls of a message (id, name, crash policy) before the first of them starts."""

    def unit(tx: Tx) -> None:
        for no, (call_id, name, crash) in enumerate(calls):
            tx.run("add_call", message_id, call_id, no, run_id, name, crash)

    return unit


def set_call_state(
    message_id: MessageId, call_id: str, state: Literal["started", "answered"]
) -> Callable[[Tx], None]:
    def unit(tx: Tx) -> None:
        tx.run("set_call_state", state, message_id, call_id)

    return unit


def calls_of_message(tx: Tx, message_id: MessageId) -> dict[str, KnownCall]:
    rows = tx.run("calls_of_message", message_id)
    return {row["call_id"]: KnownCall(row["crash"], row["state"]) for row in rows}

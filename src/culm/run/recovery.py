"""Recovery at startup: every run that the last server left unfinished gets a correct record.

Runs in one transaction, before anything is published. Nothing is executed here: runs that may
continue are returned, the others end or are held, and each open call gets a result.
"""

from collections.abc import Callable, Mapping
from typing import assert_never

from msgspec import Struct

from culm.ids import Ids, MessageId, RunId, SessionId
from culm.permission.gate import DECLINED, refusal_text
from culm.run.context import history_of
from culm.run.limits import Price, estimate
from culm.run.live_run import RunRequest
from culm.run.rules import (
    CrashedRun,
    EndRun,
    HoldRun,
    ResumeRun,
    fate_after_crash,
    unanswered_call_text,
)
from culm.store.agents import end_lost_agents
from culm.store.asks import AnyAsk, has_decided_ask, open_asks_of_run, refused_asks
from culm.store.base import Tx
from culm.store.letters import admit_letters
from culm.store.messages import (
    add_message,
    capture,
    close_message,
    close_open_messages,
    conversation,
    count_answers,
    delete_message,
    find_last_message,
    find_open_message,
)
from culm.store.runs import (
    RunBody,
    StoredRun,
    add_run_usage,
    body_of,
    calls_of_message,
    end_run,
    hold_run,
    set_call_state,
    unfinished_runs,
)
from culm.store.sessions import add_usage
from culm.store.text_tail import ShownOutput
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Role,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import Ending, Outcome, Run, finish_of

_FIRST = {"active": 0, "folded": 1}
# The output of calls that clients were shown, by the ids of the message and the call.
Outputs = Mapping[tuple[MessageId, str], ShownOutput]
# The reason that a provider's model cannot be used now; empty if it can.
WhyNot = Callable[[str, str], str]
PriceFinder = Callable[[str, str], Price]  # By provider and model.


class RecoveryReport(Struct, frozen=True):
    resumed: list[tuple[StoredRun, RunBody]]
    # Resumed runs that wait for a person, with their open answers.
    reentered: dict[RunId, MessageId]
    asks: list[AnyAsk]  # The asks that those runs wait for.
    held: list[Run]  # All held runs, including earlier ones.
    ended: int


def recover(
    away_s: float,
    away_s_max: float,
    why_not: WhyNot,
    find_price: PriceFinder,
    ids: Ids,
    outputs: Outputs,
) -> Callable[[Tx], RecoveryReport]:
    """Decide about every unfinished run."""

    def unit(tx: Tx) -> RecoveryReport:
        left = unfinished_runs(tx)
        # Active runs first: runs that share their turns or wait behind them depend on their end.
        left.sort(key=lambda one: _FIRST.get(one.run.state, len(_FIRST)))
        interrupted: set[SessionId] = set()
        resumed: list[RunId] = []
        reentered: dict[RunId, MessageId] = {}
        asks: list[AnyAsk] = []
        gone: set[str] = set()
        for one in left:
            run = one.run
            if run.host_run_id in gone:
                continue  # It shared the turn of a run that has ended, and ended with it.
            waits_in = _find_waiting(tx, run)
            fate = fate_after_crash(
                CrashedRun(
                    state=run.state,
                    cancelled=one.cancelled,
                    waits=waits_in is not None or run.host_run_id in reentered,
                    refused=_find_refusal(tx, run),
                    is_waited_for=bool(run.parent_run_id) and not run.is_detached,
                    is_letter=one.is_letter,
                    behind_interrupted=run.session_id in interrupted,
                    unusable=why_not(run.provider, run.model),
                    away_s=away_s,
                    away_s_max=away_s_max,
                )
            )
            match fate:
                case None:
                    pass
                case ResumeRun():
                    resumed.append(run.id)
                    if waits_in is not None:
                        reentered[run.id] = waits_in
                        asks += open_asks_of_run(tx, run.id)
                case HoldRun(reason=reason):
                    hold_run(run.id, reason)(tx)
                case EndRun(ending=ending):
                    if run.state == "active":
                        _count_unreported(tx, run, find_price)
                    _end(tx, one, ending, ids, outputs)
                    gone.add(run.id)
                    if ending.outcome == "interrupted":
                        interrupted.add(run.session_id)
                case _:
                    assert_never(fate)
        # Only foreign writers could have left others.
        close_open_messages(tx, but=reentered.values())
        end_lost_agents(tx)
        # Read again: usage that was counted here applies to the limits of the others.
        now = {one.run.id: one for one in unfinished_runs(tx)}
        held = [one.run for one in now.values() if one.run.state == "held"]
        continued = [(now[run_id], body_of(tx.connection, run_id)) for run_id in resumed]
        return RecoveryReport(continued, reentered, asks, held, len(gone))

    return unit


def _find_waiting(tx: Tx, run: Run) -> MessageId | None:
    """Return the open answer of a run that waits for a person only, or None.

    One of its calls has an open ask, no call has started without a stored result, and no other ask
    was decided at the last moment.
    """
    # An agent's worker process is gone, and with it the state of its turn.
    if run.agent_id or run.state != "active" or not open_asks_of_run(tx, run.id):
        return None
    message = find_open_message(tx, run.session_id)
    if message is None:
        return None
    states = [call.state for call in calls_of_message(tx, message.id).values()]
    return None if "started" in states or has_decided_ask(tx, message.id) else message.id


def _find_refusal(tx: Tx, run: Run) -> Outcome | None:
    """Return how the answer of a person, which counted before the crash, ends the turn."""
    message = find_open_message(tx, run.session_id) if run.state == "active" else None
    refused = {} if message is None else _refusals(tx, run, message.id)
    if not refused:
        return None
    return "denied" if DECLINED not in refused.values() else "end_turn"


def _refusals(tx: Tx, run: Run, message_id: MessageId) -> dict[str, str]:
    """Return the refused calls of an answer, each with the result for the model."""
    return {
        ask.call_id: DECLINED if ask.kind == "question" else refusal_text(ask.state)
        for ask in refused_asks(tx, message_id)
        # An agent reads that nobody answered, and continues.
        if not (run.agent_id and ask.state == "expired")
    }


def _count_unreported(tx: Tx, run: Run, find_price: PriceFinder) -> None:
    """Estimate the usage of the request that was open at the crash, if there was one."""
    message = find_open_message(tx, run.session_id)
    if message is None or run.steps >= count_answers(tx, run.id, run.session_id):
        return  # The usage of an answer is stored with its calls, or else with its end.
    found = conversation(run.session_id)(tx.connection)
    assert found is not None, "the session of a run exists"
    session, messages = found
    asked = [one for one in messages if one.id != message.id]
    price = find_price(run.provider, run.model)
    used = estimate(history_of(asked, session.summary_message_id), message.parts, price)
    add_usage(run.session_id, used)(tx)
    add_run_usage(run.id, used)(tx)


def _end(tx: Tx, one: StoredRun, ending: Ending, ids: Ids, outputs: Outputs) -> None:
    """End a run like `TurnJournal.end`, from the stored state."""
    run = one.run
    answer: Message | None = None
    if run.state == "active":
        answer = _close(tx, one, ending, ids, outputs)
    elif run.state == "accepted" and run.kind == "prompt":
        asked = RunRequest("prompt", *body_of(tx.connection, run.id))
        _add(tx, ids, run, "user", asked.parts(), Finish("stop", 0))
        admit_letters(tx, run.id)
        _add_answer(tx, ids, one, ending)
    end_run(
        run.id,
        ending,
        message_id="" if answer is None else answer.id,
        text="" if answer is None else full_text(answer.parts),
    )(tx)


def _close(tx: Tx, one: StoredRun, ending: Ending, ids: Ids, outputs: Outputs) -> Message | None:
    """Store the ending in the conversation; return the last answer."""
    session_id = one.run.session_id
    message = find_open_message(tx, session_id)
    if message is not None and message.is_summary_message:
        delete_message(message.id)(tx)
        message = None
    if message is None:
        if one.run.kind == "summary":
            return None  # It has no answer to store the ending in.
        last = find_last_message(tx, session_id)
        if last is not None and _is_final(last):
            return last
        return _add_answer(tx, ids, one, ending)
    calls = calls_of_message(tx, message.id)
    refused = _refusals(tx, one.run, message.id)
    for part in message.parts:
        if not isinstance(part, ToolCallPart):
            continue
        known = calls.get(part.data.id)
        if known is not None and known.state == "answered":
            continue
        started = known.crash if known is not None and known.state == "started" else None
        shown = outputs.get((message.id, part.data.id))
        text = refused.get(part.data.id) or unanswered_call_text(ending, started, shown)
        result = ToolResult(part.data.id, part.data.name, text, is_error=True)
        _add(tx, ids, one.run, "tool", [ToolResultPart(result)], Finish("stop", 0))
        set_call_state(message.id, part.data.id, "answered")(tx)
    return close_message(tx, message, finish_of(ending, tx.now))


def _is_final(message: Message) -> bool:
    reasons = [part.data.reason for part in message.parts if isinstance(part, FinishPart)]
    return message.role == "assistant" and reasons != ["tool_use"]


def _add_answer(tx: Tx, ids: Ids, one: StoredRun, ending: Ending) -> Message:
    finish = finish_of(ending, tx.now)
    run = one.run
    return _add(tx, ids, run, "assistant", [], finish, run.model, run.provider)


def _add(
    tx: Tx,
    ids: Ids,
    run: Run,
    role: Role,
    parts: list[Part],
    finish: Finish,
    model: str = "",
    provider: str = "",
) -> Message:
    message = Message(
        ids.message(),
        role,
        run.session_id,
        [*parts, FinishPart(finish)],
        model,
        provider,
        created_at=tx.now,
        updated_at=tx.now,
        run_id=run.id,
    )
    add_message(capture(message), is_open=False)(tx)
    return message

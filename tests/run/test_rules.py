"""The tables of docs/contract/runs.md, row by row."""

from dataclasses import dataclass
from typing import Literal, get_args

import pytest

from culm.ids import SessionId
from culm.run import rules
from culm.run.rules import CrashedRun, EndRun, HoldRun, ResumeRun, fate_after_crash
from culm.store.text_tail import ShownOutput
from culm.wire.runs import (
    CANCELED,
    INTERRUPTED,
    CrashPolicy,
    Ending,
    Kind,
    Outcome,
    State,
    agent_event_of,
    finish_of,
)
from culm.wire.runs import run_complete_of as complete_of
from tests.support import contract

SESSION = SessionId("s")
AWAY_S_MAX = 600.0


@dataclass
class FakeRun:
    state: State = "queued"
    kind: Kind = "prompt"
    given: bool = False
    stop: rules.Stop | None = None
    cancelled: bool = False
    asked_of: tuple[object, ...] = ("provider", "model", None)
    joins: bool = False


def test_run_is_queued_when_others_are_live() -> None:
    assert rules.state_at_acceptance([]) == "accepted"
    assert rules.state_at_acceptance([FakeRun("active")]) == "queued"


@contract("EXC-10")
def test_first_waiting_run_has_the_next_turn() -> None:
    first, second = FakeRun("queued", given=True), FakeRun("queued")
    assert rules.next_run([FakeRun("folded"), FakeRun("ending"), first, second]) is first
    assert rules.next_run([]) is None


@contract("INV-34", "INV-35")
@pytest.mark.parametrize(
    ("run", "host", "folds"),
    [
        (FakeRun(), FakeRun("active"), True),
        (FakeRun(given=True), FakeRun("active"), False),
        (FakeRun(stop="canceled"), FakeRun("active"), False),
        (FakeRun(kind="summary"), FakeRun("active"), False),
        (FakeRun(), FakeRun("active", kind="summary"), False),
        (FakeRun("folded"), FakeRun("active"), False),
        (FakeRun(asked_of=("provider", "other", None)), FakeRun("active"), False),
        (FakeRun(asked_of=("provider", "model", "allow")), FakeRun("active"), False),
        (FakeRun(asked_of=("provider", "other", "deny"), joins=True), FakeRun("active"), True),
    ],
)
def test_queued_prompt_folds_unless_its_caller_gave_an_id(
    run: FakeRun, host: FakeRun, *, folds: bool
) -> None:
    assert rules.folds(run, host) is folds


@contract("INV-50")
def test_cancel_covers_runs_no_earlier_cancel_covered() -> None:
    assert rules.covers(FakeRun("active"))
    assert rules.covers(FakeRun("ending", stop="store")), "it may be found again by a restart"
    assert not rules.covers(FakeRun("active", stop="canceled", cancelled=True))


def test_only_runs_that_started_or_were_next_leave_messages() -> None:
    leaves = [state for state in get_args(State) if rules.leaves_rows(state)]
    assert leaves == ["accepted", "active", "waiting", "ending", "folded", "ended"]


def test_cancel_has_one_result_per_run() -> None:
    assert rules.settled_by(CANCELED, stopped=True) == "canceled"
    assert rules.settled_by(Ending("end_turn"), stopped=True) == "finished_first"
    assert rules.settled_by(CANCELED, stopped=False) == "not_stopped"


def crashed(
    state: State,
    *,
    cancelled: bool = False,
    waits: bool = False,
    waited_for: bool = False,
    letter: bool = False,
    behind: bool = False,
    unusable: str = "",
    away_s: float = 0.0,
    refused: Outcome | None = None,
) -> CrashedRun:
    return CrashedRun(
        state, cancelled, waits, refused, waited_for, letter, behind, unusable, away_s, AWAY_S_MAX
    )


@contract("EXC-16")
@pytest.mark.parametrize(
    ("run", "fate"),
    [
        (crashed("held"), None),
        (crashed("held", cancelled=True), None),
        (crashed("active"), EndRun(INTERRUPTED)),
        (crashed("folded"), EndRun(INTERRUPTED)),
        (crashed("active", refused="denied"), EndRun(Ending("denied"))),
        (crashed("active", refused="end_turn"), EndRun(Ending("end_turn"))),
        (crashed("active", refused="denied", cancelled=True), EndRun(CANCELED)),
        (crashed("active", waits=True), ResumeRun()),
        (crashed("folded", waits=True, away_s=1e9, unusable="no key"), ResumeRun()),
        (crashed("active", waits=True, cancelled=True), EndRun(CANCELED)),
        (crashed("active", cancelled=True), EndRun(CANCELED)),
        (crashed("accepted", cancelled=True), EndRun(CANCELED)),
        (crashed("queued", cancelled=True, behind=True, away_s=1e9), EndRun(CANCELED)),
        (crashed("accepted"), ResumeRun()),
        (crashed("accepted", waited_for=True), EndRun(INTERRUPTED)),
        (crashed("queued", letter=True, behind=True, away_s=1e9), ResumeRun()),
        (crashed("queued", letter=True, unusable="no key"), HoldRun("no key")),
        (crashed("queued", waited_for=True, cancelled=True), EndRun(CANCELED)),
        (crashed("queued", away_s=AWAY_S_MAX), ResumeRun()),
        (crashed("queued", behind=True), HoldRun(rules.BEHIND_INTERRUPTED)),
        (crashed("accepted", unusable="no key"), HoldRun("no key")),
        (crashed("accepted", away_s=660), HoldRun("the server was away for 11 min")),
        (crashed("accepted", away_s=7200), HoldRun("the server was away for 2.0 h")),
    ],
)
def test_each_crashed_run_has_one_fate(
    run: CrashedRun, fate: EndRun | HoldRun | ResumeRun | None
) -> None:
    assert fate_after_crash(run) == fate


@contract("EXC-16")
def test_interrupted_call_text_depends_on_state_and_crash_policy() -> None:
    texts = {
        (state, crash): rules.interrupted_call_text(state, crash)
        for state in get_args(Literal["known", "started"])
        for crash in get_args(CrashPolicy)
    }
    assert len(set(texts.values())) == 4  # Not started is one; started differs by policy.
    assert "safe to repeat" in texts["started", "again"]
    assert "Do not repeat" in texts["started", "never"]
    for crash in get_args(CrashPolicy):
        assert rules.unanswered_call_text(INTERRUPTED, crash) == texts["started", crash]
    assert rules.unanswered_call_text(INTERRUPTED, None) == texts["known", "again"]


def test_started_call_is_never_described_as_not_run() -> None:
    for outcome in get_args(Outcome):
        assert "Not run" not in rules.unanswered_call_text(Ending(outcome), "never")


@contract("EXC-26")
@pytest.mark.parametrize(
    ("output", "before"), [("half a li", "half a li\n"), ("one\n", "one\n"), ("", "")]
)
def test_shown_output_precedes_the_reason_unless_a_person_cancelled(
    output: str, before: str
) -> None:
    shown = ShownOutput(output, len(output))
    reason = rules.unanswered_call_text(INTERRUPTED, "ask")
    assert rules.unanswered_call_text(INTERRUPTED, "ask", shown) == before + reason
    canceled = Ending("canceled")
    text = rules.unanswered_call_text(canceled, "ask", shown)
    assert text == rules.unanswered_call_text(canceled, "ask")


@contract("EXC-23", "INV-39", "INV-42")
@pytest.mark.parametrize(
    ("outcome", "reason", "event", "culm_reason"),
    [
        ("end_turn", "end_turn", "agent_finished", ""),
        ("max_tokens", "max_tokens", "agent_finished", ""),
        ("canceled", "canceled", None, ""),
        ("denied", "end_turn", "agent_finished", "denied"),
        ("error", "error", "error", ""),
        ("budget", "error", "error", "budget"),
        ("loop", "error", "error", "loop"),
        ("interrupted", "error", "error", "interrupted"),
    ],
)
def test_each_outcome_maps_to_a_crush_reason_and_a_culm_reason(
    outcome: Outcome, reason: str, event: str | None, culm_reason: str
) -> None:
    ending = Ending(outcome, "Title", "details")
    finish = finish_of(ending, 7)
    assert (finish.reason, finish.time, finish.culm_reason) == (reason, 7, culm_reason)
    agent_event = agent_event_of(ending, SESSION, "r", "t")
    assert (agent_event.type if agent_event else None) == event
    complete = complete_of(ending, SESSION, "r", "m", "text")
    assert complete.cancelled is (outcome == "canceled")
    assert complete.error == ("Title: details" if event == "error" else "")
    assert complete.culm_reason == culm_reason

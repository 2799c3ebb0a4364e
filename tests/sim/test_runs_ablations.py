"""Each safeguard of runs, switched off: the simulation must detect it."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from culm.errors import StoreClosed
from culm.ids import RunId, SessionId
from culm.run import journal, recovery, rules, runs
from culm.run.draft import Draft, PendingWrites
from culm.run.journal import TurnJournal
from culm.run.live_run import LiveRun
from culm.run.messages import Messages
from culm.run.runs import Runs
from culm.store import runs as store_runs
from culm.store.base import Tx, Unit
from culm.store.messages import CapturedMessage, capture
from culm.store.runs import KnownCall
from culm.store.sql import QUERIES
from culm.store.text_tail import TailRecord, TextTail
from culm.tools.base import CallRequest
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import Message
from culm.wire.runs import Ending
from tests.sim.ablations import Ablation, do_nothing, is_detected, is_found, name_of, searches
from tests.sim.loop import simulate
from tests.sim.test_crashes import (
    Faults,
    Script,
    a_cancel_before_the_start,
    a_cancel_during_a_deaf_call,
    a_cancel_during_a_stubborn_call,
    a_turn,
    crashes,
    full_disks,
    long_crashes,
    survives,
)
from tests.sim.test_runs import one_world

fate_after_crash = rules.fate_after_crash


# --- ablations


def recovery_does_not_look_at_cancels(patch: pytest.MonkeyPatch) -> None:
    def careless(run: rules.CrashedRun) -> object:
        return fate_after_crash(run._replace(cancelled=False))

    patch.setattr(recovery, "fate_after_crash", careless)


def recovery_resumes_active_runs(patch: pytest.MonkeyPatch) -> None:
    def careless(run: rules.CrashedRun) -> object:
        return fate_after_crash(run._replace(state="accepted"))

    patch.setattr(recovery, "fate_after_crash", careless)


def recovery_leaves_calls_without_results(patch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> dict[str, object]:
        return defaultdict(lambda: KnownCall("again", "answered"))

    patch.setattr(recovery, "calls_of_message", none)


def a_long_absence_does_not_matter(patch: pytest.MonkeyPatch) -> None:
    def careless(run: rules.CrashedRun) -> object:
        return fate_after_crash(run._replace(away_s=0.0))

    patch.setattr(recovery, "fate_after_crash", careless)


def a_cancel_is_not_written(patch: pytest.MonkeyPatch) -> None:
    def nothing(*_: object) -> Callable[[Tx], list[str]]:
        return lambda tx: []

    patch.setattr(runs, "add_cancel", nothing)


def a_cancel_covers_the_session_for_ever(patch: pytest.MonkeyPatch) -> None:
    careless = """SELECT 1 FROM cancels JOIN runs USING (session_id) WHERE runs.id = ?"""
    patch.setitem(QUERIES, "is_cancelled", careless)


def cancel_skips_stopping_runs(patch: pytest.MonkeyPatch) -> None:
    def careless(run: LiveRun) -> bool:
        return run.stop is None

    patch.setattr(rules, "covers", careless)


def a_cancel_does_not_reach_the_turn(patch: pytest.MonkeyPatch) -> None:
    def mark_only(_: Runs, run: LiveRun, why: rules.Stop) -> None:
        run.control.stop = why

    patch.setattr(Runs, "_stop", mark_only)
    patch.setattr(TurnJournal, "_check_going", do_nothing)


def a_cancel_is_written_again_and_again(patch: pytest.MonkeyPatch) -> None:
    def careless(_: LiveRun) -> bool:
        return True

    patch.setattr(rules, "covers", careless)


def prompts_are_answered_before_they_are_stored(patch: pytest.MonkeyPatch) -> None:
    accept = Runs.accept

    def hasty(self: Runs, *args: Any, **kwargs: Any) -> LiveRun:  # noqa: ANN401
        run = accept(self, *args, **kwargs)
        if not run.control.accepted.done():
            run.control.accepted = asyncio.get_running_loop().create_future()
            run.control.accepted.set_result(0)
        return run

    patch.setattr(Runs, "accept", hasty)


def calls_start_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    async def hasty(self: TurnJournal, call: CallRequest) -> None:
        self._calls.started.add(call.id)  # pyright: ignore[reportPrivateUsage]

    patch.setattr(TurnJournal, "start_call", hasty)


def model_is_asked_before_it_is_stored(patch: pytest.MonkeyPatch) -> None:
    begin_step = TurnJournal.begin_step

    async def hasty(self: TurnJournal) -> list[Message]:
        step = asyncio.get_running_loop().create_task(begin_step(self))
        await asyncio.sleep(0)
        step.cancel()
        return self.history

    patch.setattr(TurnJournal, "begin_step", hasty)


def an_end_is_tried_once(patch: pytest.MonkeyPatch) -> None:
    async def give_up(*_: object) -> None:
        raise StoreClosed

    patch.setattr(journal, "pause", give_up)


def end_does_not_wait_for_pending_writes(patch: pytest.MonkeyPatch) -> None:
    async def at_once(_: PendingWrites) -> None:
        await asyncio.sleep(0)

    patch.setattr(PendingWrites, "wait", at_once)


def end_is_not_published(patch: pytest.MonkeyPatch) -> None:
    publish = store_runs._publish  # pyright: ignore[reportPrivateUsage]

    def silent(tx: Tx, type_: str, *about: Any, **rest: Any) -> None:  # noqa: ANN401
        if type_ != "run_complete":
            publish(tx, type_, *about, **rest)

    patch.setattr(store_runs, "_publish", silent)


def ended_run_ends_again(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(QUERIES, "end_run", QUERIES["end_run"].replace("AND state <> 'ended'", ""))
    end_writes_rows_of_an_ended_run(patch)


def end_writes_rows_of_an_ended_run(patch: pytest.MonkeyPatch) -> None:
    def always(_: RunId, unit: Unit) -> Unit:
        return unit

    patch.setattr(journal, "unless_ended", always)


def end_is_published_before_it_is_applied(patch: pytest.MonkeyPatch) -> None:
    on_ended = Runs.on_ended

    def late(self: Runs, run: LiveRun, ending: Ending, answer: str = "") -> None:
        asyncio.get_running_loop().call_soon(on_ended, self, run, ending, answer)

    patch.setattr(Runs, "on_ended", late)


def given_ids_are_folded(patch: pytest.MonkeyPatch) -> None:
    def always(run: LiveRun, host: LiveRun) -> bool:
        return run.state == "queued" and run.stop is None and host.kind == run.kind == "prompt"

    patch.setattr(rules, "folds", always)


def a_run_joins_itself(patch: pytest.MonkeyPatch) -> None:
    def all_of(self: Runs, host: LiveRun) -> list[LiveRun]:
        return [run for run in self.line(host.session_id) if rules.folds(run, host)]

    patch.setattr(Runs, "joining", all_of)


def folded_runs_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(QUERIES, "folded_runs", QUERIES["folded_runs"] + " LIMIT 0")


def the_last_comes_first(patch: pytest.MonkeyPatch) -> None:
    next_run = rules.next_run
    patch.setattr(rules, "next_run", lambda line: next_run(line[::-1]))  # pyright: ignore[reportUnknownLambdaType, reportUnknownArgumentType]


def two_turns_at_once(patch: pytest.MonkeyPatch) -> None:
    async def eager(self: Runs, session_id: SessionId) -> None:
        async with asyncio.TaskGroup() as turns:
            for run in self.line(session_id):
                turns.create_task(self._carry_out(run))  # pyright: ignore[reportPrivateUsage]
        del self._workers[session_id]  # pyright: ignore[reportPrivateUsage]

    patch.setattr(Runs, "_work", eager)


def a_stubborn_tool_keeps_its_turn_going(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnJournal, "_check_going", do_nothing)


def abandoned_turn_continues(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnJournal, "_check_going", do_nothing)
    patch.setattr(TurnJournal, "_check_open", do_nothing)


def nothing_is_counted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TurnJournal, "_usage", do_nothing)


def usage_is_counted_twice(patch: pytest.MonkeyPatch) -> None:
    twice = QUERIES["count_on_run"].replace("cost = cost + ?", "cost = cost + 2 * ?")
    patch.setitem(QUERIES, "count_on_run", twice)


def any_run_can_be_released(patch: pytest.MonkeyPatch) -> None:
    careless = QUERIES["release_run"].replace("AND state = 'held'", "")
    patch.setitem(QUERIES, "release_run", careless)
    patch.setattr(store_runs, "_check_held", do_nothing)


def closing_starts_queued_runs(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Runs, "_closing", property(lambda _: False, do_nothing), raising=False)


def recovery_writes_without_a_run_id(patch: pytest.MonkeyPatch) -> None:
    def nameless(message: Message) -> CapturedMessage:
        message.run_id = ""
        return capture(message)

    patch.setattr(recovery, "capture", nameless)


def open_text_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TextTail, "write", do_nothing)


def tail_is_emptied_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    maintain = TextTail.maintain

    def hasty(self: TextTail, _: int | None) -> bool:
        return maintain(self, None)

    patch.setattr(TextTail, "maintain", hasty)


def unrecorded_text_is_sent(patch: pytest.MonkeyPatch) -> None:
    record = Messages.record

    def careless(self: Messages, deltas: Sequence[MessageDelta]) -> bool:
        record(self, deltas)
        return True

    patch.setattr(Messages, "record", careless)


def output_is_not_recorded(patch: pytest.MonkeyPatch) -> None:
    write = TextTail.write

    def forgetful(self: TextTail, texts: Iterable[MessageDelta | TailRecord]) -> None:
        write(self, [one for one in texts if isinstance(one, MessageDelta)])

    patch.setattr(TextTail, "write", forgetful)


def output_is_emptied_before_the_result(patch: pytest.MonkeyPatch) -> None:
    record_output = Messages.record_output

    def hasty(self: Messages, draft: Draft, call_id: str, text: str) -> CallOutput | None:
        output = record_output(self, draft, call_id, text)
        draft.outputs.clear()
        return output

    patch.setattr(Messages, "record_output", hasty)


# Each with a seed that detects it.
DRAWN: tuple[tuple[Ablation, int], ...] = (
    (recovery_resumes_active_runs, 1),
    (recovery_leaves_calls_without_results, 11),
    (recovery_writes_without_a_run_id, 32),
    (a_long_absence_does_not_matter, 1),
    (a_cancel_is_not_written, 25),
    (a_cancel_covers_the_session_for_ever, 3),
    (a_cancel_does_not_reach_the_turn, 2),
    (a_cancel_is_written_again_and_again, 14),
    (prompts_are_answered_before_they_are_stored, 0),
    (calls_start_before_it_is_stored, 1),
    (model_is_asked_before_it_is_stored, 1),
    (an_end_is_tried_once, 9),
    (end_does_not_wait_for_pending_writes, 3),
    (end_is_not_published, 0),
    (ended_run_ends_again, 4),
    (end_is_published_before_it_is_applied, 2),
    (given_ids_are_folded, 2),
    (a_run_joins_itself, 2),
    (folded_runs_are_forgotten, 2),
    (the_last_comes_first, 3),
    (two_turns_at_once, 2),
    (nothing_is_counted, 1),
    (usage_is_counted_twice, 1),
    (closing_starts_queued_runs, 29),
    (open_text_is_not_recorded, 1),
    (tail_is_emptied_before_the_commit, 4),
    (unrecorded_text_is_sent, 250),
    (output_is_not_recorded, 10),
    (output_is_emptied_before_the_result, 1),
)
# Too rare for a hundred random worlds.
ENUMERATED: tuple[tuple[Ablation, Script, Faults], ...] = (
    (recovery_does_not_look_at_cancels, a_cancel_before_the_start, crashes),
    (cancel_skips_stopping_runs, a_turn, full_disks),
    (a_stubborn_tool_keeps_its_turn_going, a_cancel_during_a_stubborn_call, crashes),
    (abandoned_turn_continues, a_cancel_during_a_deaf_call, crashes),
    (any_run_can_be_released, a_turn, long_crashes),
)


@searches
@pytest.mark.parametrize(("ablation", "seed"), DRAWN, ids=name_of)
def test_simulation_detects_a_disabled_safeguard(
    ablation: Ablation, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ablation(monkeypatch)
    assert is_found(partial(simulate, scenario=one_world), seed)


@pytest.mark.parametrize(("ablation", "script", "faults"), ENUMERATED, ids=name_of)
def test_enumerated_faults_detect_a_disabled_safeguard(
    ablation: Ablation,
    script: Script,
    faults: Faults,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ablation(monkeypatch)
    assert is_detected(partial(survives, script, faults))

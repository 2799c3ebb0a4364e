"""Invariants at the end of a world of runs: one function per promise.

`World` records what happened outside, `Final` has what is stored.
"""

from collections import Counter
from itertools import pairwise

from culm.ids import MessageId
from culm.wire.messages import (
    BinaryPart,
    FinishPart,
    Message,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
    full_text,
)
from culm.wire.runs import Ending, Limits, Run, changed_of, finish_of
from tests.sim.runs_actors import Observer, has_file
from tests.sim.runs_final import Final, finish_in
from tests.sim.runs_outside import TITLE_COST, Question
from tests.sim.runs_turns import (
    folded_runs_end_with_their_host,
    messages_name_their_run,
    queues_go_in_order,
    turns_are_in_order,
    turns_do_not_mix,
    turns_do_not_overlap,
)
from tests.sim.runs_world import RunServer

# --- runs


def nothing_answered_is_lost(final: Final) -> None:
    """INV-29, EXC-16: an answered prompt exists, and has ended or is held for a person."""
    for sent in final.world.sent.values():
        if sent.answered and sent.session_id not in final.world.deleted:
            assert sent.answered in final.runs, f"lost: {sent}"
            stored = final.prompts[sent.answered]
            assert stored.split()[0] == sent.token, f"{stored} instead of {sent}"


def nothing_is_live(final: Final) -> None:
    """EXC-1: every queue reaches its end; a held run has a reason."""
    for run in final.runs.values():
        assert run.state in ("ended", "held"), f"still live: {run}"
        assert run.state != "held" or run.title, f"held without a reason: {run}"
        assert run.state != "ended" or run.outcome, f"ended without an outcome: {run}"
    workspace = final.server.workspace
    assert workspace is not None
    assert workspace.runs.live() == []
    assert workspace.lifetime.claims.live_runs == 0
    assert not any(workspace.runs.is_busy(session.id) for session in final.sessions)


def every_run_is_completed_once(final: Final) -> None:
    """INV-36, EXC-12: one `run_complete` for every run that ended, none for another."""
    published = Counter(event.run_id for event in final.log if event.complete is not None)
    accepted = set(final.history)
    assert set(published) <= accepted, "a run that was never accepted is complete"
    for run_id in accepted:
        ended = final.history[run_id][-1].state == "ended"
        assert published[run_id] == (1 if ended else 0), (
            f"{run_id} completed {published[run_id]} times"
        )
        if run_id in final.runs:
            assert final.history[run_id][-1].state == final.runs[run_id].state


def nothing_follows_the_end(final: Final) -> None:
    """INV-37: the end of a run is its last event and names its last message."""
    ended: set[str] = set()
    for event in final.log:
        if event.changed is not None:
            assert event.run_id not in ended, f"{event.run_id} changed after its end"
        if event.complete is not None:
            ended.add(event.run_id)
            run = final.runs.get(event.run_id)
            if run is None:
                continue
            complete = event.complete
            assert complete.message_id == run.message_id
            assert complete.cancelled == (run.outcome == "canceled")
            assert bool(complete.error) == (
                run.outcome in ("error", "budget", "loop", "interrupted")
            ), complete
            if run.message_id:
                messages = {m.id: m for m in final.messages[run.session_id]}
                assert run.message_id in {*messages}, f"{run} names a message that is not there"
                answer = messages[complete.message_id]  # pyright: ignore[reportArgumentType]
                assert answer.role == "assistant", f"{run} names a message of role {answer.role}"
                assert not complete.text, "the log repeats the text of a message"


def messages_end_before_their_run(final: Final) -> None:
    """INV-37: nothing of a turn is written after its `run_complete`."""
    written = {event.run_id: event.seq for event in final.log if event.type == "message"}
    completed = {event.run_id: event.seq for event in final.log if event.complete is not None}
    for run in final.runs.values():
        if run.kind == "summary" or run.state != "ended":
            continue
        messages = final.messages[run.session_id]
        for first in final.prompt_positions(run.id):
            for n, message in enumerate(messages[first:]):
                if n and message.role == "user":
                    break
                # A summary may be a run of its own.
                assert message.is_summary_message or written[message.id] < completed[run.id], (
                    f"{message} after {run}"
                )


def failures_are_published_as_errors(final: Final) -> None:
    """INV-39, INV-42: an `error` for what failed, nothing for what was cancelled."""
    published = Counter((e.run_id, e.event.type) for e in final.log if e.event is not None)
    for run in final.runs.values():
        if run.state != "ended" or run.host_run_id:
            continue
        failed = run.outcome in ("error", "budget", "loop", "interrupted")
        fine = not failed and run.outcome != "canceled"
        assert published[run.id, "error"] == failed, run
        assert published[run.id, "agent_finished"] == fine, run


def cancels_end_settled(final: Final) -> None:
    """The last published state of a cancel is `settled`."""
    last = {event.cancel.cancel_id: event for event in final.log if event.cancel is not None}
    for event in last.values():
        assert event.cancel is not None
        gone = event.session_id in final.world.deleted
        assert gone or event.cancel.state == "settled", event.cancel


def only_the_cancelled_are_cancelled(final: Final) -> None:
    """INV-48, INV-44: no cancel ends a run that did not exist when it came."""
    world = final.world
    for run in final.runs.values():
        if run.outcome == "canceled":
            assert {run.id, run.host_run_id} & world.tried, f"nobody cancelled {run}"
        if run.id in world.sealed:
            assert run.state == "ended", f"cancelled and held: {run}"
            assert run.outcome != "interrupted", f"a cancel was answered and is lost: {run}"
            if not final.was(run.id, "active") and not final.was(run.id, "folded"):
                assert run.outcome in ("canceled", "error"), f"cancelled before it began: {run}"


def cancels_are_settled_once(final: Final) -> None:
    """INV-44, INV-50: a cancel that covers nothing new leaves no row; each run has one result."""
    rows = final.server.file.rows("SELECT session_id FROM cancels")
    for session_id, count in Counter(row[0] for row in rows).items():
        assert count <= final.world.cancels[session_id], "a cancel without effect left a row"
    settled = final.server.file.rows("SELECT run_id, settled FROM cancelled_runs")
    assert max(Counter(row[0] for row in settled).values(), default=0) <= 1, "covered twice"
    for run_id, result in settled:
        run = final.runs[run_id]
        assert result, f"a cancel of {run} is not settled"
        if result != "not_stopped":
            assert result == ("canceled" if run.outcome == "canceled" else "finished_first"), run
    for run_id, result in final.world.cancel_results.items():
        if result == "canceled" and run_id in final.runs:
            assert final.runs[run_id].outcome == "canceled"


# --- messages


def conversations_are_closed(final: Final) -> None:
    """EXC-16: no message stays open, and each has a finish part."""
    assert final.server.file.rows("SELECT id FROM messages WHERE is_open = 1") == []
    assert final.server.file.rows("SELECT message_id FROM chunks") == []
    for messages in final.messages.values():
        for message in messages:
            finishes = [part for part in message.parts if isinstance(part, FinishPart)]
            assert len(finishes) == 1, f"{message} has {len(finishes)} ends"
            for part in message.parts:
                assert not isinstance(part, ToolCallPart) or part.data.finished


def every_call_has_one_result(final: Final) -> None:
    """INV-57: in every conversation, whatever became of the run."""
    for messages in final.messages.values():
        calls: list[str] = []
        results: list[str] = []
        for message in messages:
            if message.role == "assistant":
                assert sorted(results) == sorted(calls), f"before {message}: {calls}, {results}"
                calls = [p.data.id for p in message.parts if isinstance(p, ToolCallPart)]
                results = []
            results += [r.tool_call_id for r in results_in(message)]
        assert sorted(results) == sorted(calls), f"at the end: {calls}, {results}"


def results_in(message: Message) -> list[ToolResult]:
    return [part.data for part in message.parts if isinstance(part, ToolResultPart)]


def prompts_are_stored_once(final: Final) -> None:
    """INV-43, INV-56: one user message for a started run, none for a run that only waited."""
    for run in final.runs.values():
        if run.kind == "summary":
            continue
        positions = final.prompt_positions(run.id)
        last = final.last_before_end(run.id)
        if last in ("active", "folded"):
            assert len(positions) == 1, f"{run} is stored {len(positions)} times"
            messages = final.messages[run.session_id]
            parts = messages[positions[0]].parts
            assert full_text(parts) == final.prompts[run.id]
            files = sum(isinstance(part, BinaryPart) for part in parts)
            assert files == has_file(final.prompts[run.id].split()[0]), f"{run}: {parts}"
        elif run.state == "held" or (last != "accepted" and run.outcome == "canceled"):
            assert positions == [], f"{run} only waited, and is stored"
        else:
            assert len(positions) == 1, f"{run} never began, and is stored {len(positions)} times"
            answer = final.messages[run.session_id][positions[0] + 1]
            assert answer.role == "assistant"
            finish = finish_in(answer)
            assert finish is not None
            assert answer.parts == [FinishPart(finish)], f"{run}: {answer}"
            assert finish.reason == _reason(run), f"{run}: {answer}"


def _reason(run: Run) -> str:
    assert run.outcome is not None
    return finish_of(Ending(run.outcome), 0).reason


def answers_match_the_outcome(final: Final) -> None:
    """`end_turn` is recorded only for a complete answer of the model."""
    for run in final.runs.values():
        if not final.was(run.id, "active") or run.state != "ended" or run.kind == "summary":
            continue
        messages = {m.id: m for m in final.messages[run.session_id]}
        assert run.message_id, f"{run} has no answer"
        answer = messages[run.message_id]  # pyright: ignore[reportArgumentType]
        finish = finish_in(answer)
        assert finish is not None
        asked = [q for q in final.world.questions if q.run_id == run.id and q.kind == "turn"]
        if run.outcome in ("end_turn", "max_tokens"):
            last = asked[-1]
            assert last.state == "done", f"{run} ended before the model did: {last}"
            assert full_text(answer.parts) == last.text
            assert finish.reason in (run.outcome, "unknown", "content_filter")
        elif finish.reason != _reason(run):
            # Its last answer was complete; the summary after it was ended.
            last = asked[-1]
            assert (last.state, last.full) == ("done", True), f"{run}: {finish}"


def ends_have_a_cause(final: Final) -> None:
    """Every failure of a run has a cause in the world."""
    world = final.world
    broken = {q.run_id for q in world.questions if q.state != "done"}
    acted = {effect.run_id for effect in world.effects}
    for run in final.runs.values():
        host = run.host_run_id or run.id
        match run.outcome:
            case "error" if run.title == "Nothing can be stored":
                assert world.store_failed, f"{run} failed by itself"
            case "error":
                alone = world.lacked_model and world.reentered.get(host)  # There was no model.
                assert host in broken or alone, f"{run} failed by itself"
            case "interrupted":
                assert final.server.lives > 1, run
            case "denied":
                assert host in acted | final.refused, run
            case "loop":
                raise AssertionError(run)
            case _:
                pass


def texts_are_what_was_streamed(final: Final) -> None:
    """The stored text of an answer is a prefix of the streamed text."""
    streamed = {f"a{q.n}": q.text for q in final.world.questions}
    for messages in final.messages.values():
        for message in messages:
            text = full_text(message.parts)
            if message.role == "assistant" and text:
                assert streamed[text.partition(":")[0]].startswith(text), f"{message}"


def results_match_effects(final: Final) -> None:
    """EXC-9, EXC-26: a result matches whether the effect happened, and has all shown output."""
    acted = Counter(effect.token for effect in final.world.effects)
    assert max(acted.values(), default=0) <= 1, f"acted twice: {acted}"
    for messages in final.messages.values():
        inputs: dict[str, str] = {}
        for message in messages:
            for part in message.parts:
                if isinstance(part, ToolCallPart):
                    inputs[part.data.id] = part.data.input
            for result in results_in(message):
                token = inputs[result.tool_call_id].partition('"token":"')[2].rstrip('"}')
                if token and acted[token]:
                    assert not result.content.startswith("Not run"), f"{token} did run: {result}"
                if "Interrupted:" in result.content or "Stopped:" in result.content:
                    shown = final.world.outputs.get(token, "")
                    assert result.content.startswith(shown), f"{shown!r} is lost: {result}"
                if result.content.startswith(("did ", "did not stop ")):
                    assert acted[result.content.split()[-1]], f"{result} did not happen"


# --- usage and limits


def costs_add_up(final: Final) -> None:
    """EXC-18: the cost of a session is that of its runs and titles, each counted once."""
    for session in final.sessions:
        runs = [run for run in final.runs.values() if run.session_id == session.id]
        titles, rest = divmod(session.cost, TITLE_COST)
        asked = [q for q in final.world.questions if q.session_id == session.id]
        assert titles <= sum(q.kind == "title" for q in asked)
        assert rest == sum(run.cost for run in runs), f"{session} and its runs differ"
        for run in runs:
            mine = [q for q in asked if q.run_id == run.id and q.cost]
            # The usage of a step is lost if the server stopped while waiting in it.
            _check_cost(run, mine, is_whole=not final.world.reentered.get(run.id))


def _check_cost(run: Run, asked: list[Question], *, is_whole: bool) -> None:
    costs = {int(q.cost) for q in asked if q.state == "done"}
    counted = {1 << bit for bit in range(64) if int(run.cost) >> bit & 1}
    assert counted <= costs, f"{run} counted what it did not use: {counted - costs}"
    if run.outcome in ("end_turn", "max_tokens") and is_whole:
        assert counted == costs, f"{run} did not count {costs - counted}"
    if not asked:
        return  # None of its questions has a cost to identify it.
    tokens = [q.tokens for q in asked if int(q.cost) in counted]
    sums = (sum(t[0] for t in tokens), sum(t[1] for t in tokens))
    used = (run.prompt_tokens, run.completion_tokens)
    assert used == sums or (run.estimated and used > sums), f"{run} counted {used}, not {sums}"


def limits_are_kept(final: Final) -> None:
    """A run makes no more steps than allowed, and `budget` occurs only with a limit."""
    for sent in final.world.sent.values():
        run = final.runs.get(sent.answered)
        if run is None or sent.limits is None:
            continue
        asked = [q for q in final.world.questions if q.run_id == run.id and q.kind == "turn"]
        done = sum(q.state == "done" for q in asked)
        assert not sent.limits.steps or done <= sent.limits.steps, f"{run}: {asked}"
        if run.outcome == "budget" and not run.host_run_id:
            assert sent.limits != Limits(), f"{run} had no limit"


def nothing_is_orphaned(final: Final) -> None:
    """Rows of a removed run or session are removed with it."""
    for table in ("calls", "cancelled_runs"):
        query = f"SELECT run_id FROM {table} WHERE run_id NOT IN (SELECT id FROM runs)"
        assert final.server.file.rows(query) == [], table
    assert {run.session_id for run in final.runs.values()} <= {s.id for s in final.sessions}


def folded_prompts_are_read(final: Final) -> None:
    """INV-35: the model read every prompt that joined a successful turn."""
    for run in final.runs.values():
        if run.outcome == "end_turn" and run.kind == "prompt":
            token = final.prompts[run.id].split()[0]
            host = run.host_run_id or run.id
            asked = [q for q in final.world.questions if q.run_id == host]
            assert any(f"'{token} " in q.read for q in asked), f"nobody read {run}"


# --- observers


def observers_end_with_what_is_stored(final: Final, observers: list[Observer]) -> None:
    """INV-65, EXC-13: an observer that resumed by cursor has every run and its one end."""
    stored = {m.id: m for messages in final.messages.values() for m in messages}
    sessions = {session.id: session for session in final.sessions}
    for observer in observers:
        assert observer.mirror.messages == stored
        assert observer.mirror.sessions == sessions
        assert observer.mirror.runs == {
            run.id: changed_of(run) for run in final.runs.values() if run.state != "ended"
        }
        assert observer.mirror.queue == {}, "everything has come to rest"
        assert observer.mirror.agents == {}
        ends = Counter(complete.run_id for complete in observer.completed)
        assert max(ends.values(), default=0) <= 1, "completed twice"
        completes = {event.run_id for event in final.log if event.complete is not None}
        assert set(ends) == completes, "a run's end was not published"
        for complete in observer.completed:
            if (answer := stored.get(MessageId(complete.message_id))) is not None:
                assert full_text(answer.parts) == complete.text
        for run in final.runs.values():
            known = observer.runs[run.id]
            assert (known.state, known.outcome) == (run.state, run.outcome)
        for session_id, queue in observer.queues.items():
            assert session_id in final.world.deleted or queue.items == [], f"{queue}"


CHECKS = (
    nothing_answered_is_lost,
    nothing_is_live,
    every_run_is_completed_once,
    nothing_follows_the_end,
    messages_end_before_their_run,
    failures_are_published_as_errors,
    cancels_end_settled,
    turns_do_not_overlap,
    turns_are_in_order,
    queues_go_in_order,
    turns_do_not_mix,
    folded_runs_end_with_their_host,
    messages_name_their_run,
    only_the_cancelled_are_cancelled,
    cancels_are_settled_once,
    conversations_are_closed,
    every_call_has_one_result,
    prompts_are_stored_once,
    answers_match_the_outcome,
    ends_have_a_cause,
    texts_are_what_was_streamed,
    results_match_effects,
    costs_add_up,
    limits_are_kept,
    nothing_is_orphaned,
    folded_prompts_are_read,
)


def check_all(server: RunServer, observers: list[Observer]) -> None:
    final = Final(server)
    for check in CHECKS:
        check(final)
    observers_end_with_what_is_stored(final, observers)


def log_arrives_in_order(observers: list[Observer]) -> None:
    for observer in observers:
        numbers = [int(cursor.rpartition(".")[2]) for cursor in observer.seen]
        assert all(a < b for a, b in pairwise(numbers)), "an event came twice or out of order"

"""Invariants of turns: one at a time, in order, with their own messages.

`runs_checks.py` has the other invariants.
"""

from collections import defaultdict
from itertools import groupby

from culm.ids import MessageId, RunId
from culm.wire.messages import full_text
from tests.sim.runs_final import Final


def turns_do_not_overlap(final: Final) -> None:
    """EXC-11, INV-32: a turn begins after the end of the previous one was published."""
    active: dict[str, str] = {}
    for event in final.log:
        if event.changed is not None and event.changed.state == "active":
            other = active.get(event.session_id)
            assert other is None, f"{event.run_id} began before the end of {other}"
            active[event.session_id] = event.run_id
        if event.complete is not None and active.get(event.session_id) == event.run_id:
            del active[event.session_id]


def turns_are_in_order(final: Final) -> None:
    """EXC-10: turns begin in the order of acceptance, unless a person changed it."""
    begun: dict[str, list[int]] = defaultdict(list)
    for event in final.log:
        changed = event.changed
        if changed is None or changed.state != "active" or final.was(event.run_id, "held"):
            continue
        if event.session_id not in final.world.ordered:
            begun[event.session_id].append(changed.seq)
    for session_id, numbers in begun.items():
        assert numbers == sorted(numbers), f"{session_id}: {numbers}"


def queues_go_in_order(final: Final) -> None:
    """EXC-10, EXC-20: a run that leaves the queue for a turn was published as its first."""
    queues: dict[str, list[RunId]] = defaultdict(list)
    states: dict[str, str] = {}
    for event in final.log:
        if event.queue is not None:
            queues[event.session_id] = event.queue
        if event.changed is not None:
            state = event.changed.state
            # The log of a deleted session does not contain its prompts.
            is_kept = event.session_id not in final.world.deleted
            if state == "active" and states[event.run_id] == "queued" and is_kept:
                first = queues[event.session_id][:1]
                assert first == [event.run_id], f"{event.run_id} before {first}"
            states[event.run_id] = state
    for session_id, queue in queues.items():
        assert queue == [] or session_id in final.world.deleted, f"{queue} still waits"


def turns_do_not_mix(final: Final) -> None:
    """INV-34: a turn contains only its own prompt and those that joined."""
    for run in final.runs.values():
        if run.kind == "summary" or not final.was(run.id, "active") or run.state != "ended":
            continue
        messages = final.messages[run.session_id]
        first = final.prompt_positions(run.id)[0]
        last = [message.id for message in messages].index(MessageId(run.message_id))
        tokens = {
            final.prompts[other.id].split()[0]
            for other in final.runs.values()
            if run.id in (other.id, other.host_run_id)
        }
        for message in messages[first : last + 1]:
            if message.role == "user":
                assert full_text(message.parts).split()[0] in tokens, f"{message} in {run}"


def folded_runs_end_with_their_host(final: Final) -> None:
    """INV-35: a folded run has its host's end, published right after it."""
    completes = [event for event in final.log if event.complete is not None]
    place = {event.run_id: n for n, event in enumerate(completes)}
    for run in final.runs.values():
        if not final.was(run.id, "folded"):
            assert not run.host_run_id
            continue
        assert not run.run_id_given, f"folded although its id was given: {run}"
        host = final.runs[run.host_run_id]
        same = (run.outcome, run.message_id, run.title) == (
            host.outcome,
            host.message_id,
            host.title,
        )
        assert same, f"{run} differs from {host}"
        between = completes[place[host.id] + 1 : place[run.id]]
        assert place[host.id] < place[run.id], f"{run.id} ends before its host"
        assert all(final.runs[e.run_id].host_run_id == host.id for e in between)


def messages_name_their_run(final: Final) -> None:
    """EXC-25: every message of a turn has the run id of the turn, and no other message has."""
    asked = {f"a{q.n}": q.run_id for q in final.world.questions}
    for session_id, messages in final.messages.items():
        turns = [run_id for run_id, _ in groupby(messages, lambda message: message.run_id)]
        assert len(turns) == len(set(turns)), f"{turns} come back in {session_id}"
        for message in messages:
            run = final.runs[message.run_id]
            assert (run.session_id, run.host_run_id) == (session_id, ""), f"{message} in {run}"
            text = full_text(message.parts)
            if message.role == "assistant" and text:
                assert asked[text.partition(":")[0]] == run.id, f"{message} was not asked by {run}"
    for run in final.runs.values():
        turn = run.host_run_id or run.id
        messages = final.messages[run.session_id]
        places = final.prompt_positions(run.id) if run.kind == "prompt" else []
        found = [messages[n] for n in places] + [m for m in messages if m.id == run.message_id]
        assert {message.run_id for message in found} <= {turn}, f"{found} in {run}"

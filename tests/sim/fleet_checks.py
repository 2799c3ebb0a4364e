"""Invariants of a fleet at the end of a world: one function per promise."""

from collections import Counter, defaultdict

from tests.sim.fleet_actors import FIRST_FRAME_S
from tests.sim.fleet_network import Line
from tests.sim.fleet_world import FleetWorld, SimRun
from tests.sim.worker_process import READY_S

LOSSY = ("token", "runner_progress")
ENDS_WELL = frozenset(("echo", "mute", "slow", "flood", "ask", "call", "steer", "cling"))


def is_unharmed(run: SimRun) -> bool:
    """Return True if the run was not harmed, or only so that a retry repairs it."""
    return not run.harms and len(run.setbacks) < 2


def every_run_ends_once(world: FleetWorld) -> None:
    """Every run ends once, unless its parent was killed."""
    for run in world.runs.values():
        ends = len(run.driven) + bool(run.refused)
        killed = "its parent was killed" in run.harms
        assert ends == 1 or (killed and ends == 0), f"{run.token} ended {ends} times"


def unharmed_runs_complete(world: FleetWorld) -> None:
    """Every unharmed run completes with its own result."""
    for run in world.runs.values():
        if not is_unharmed(run) or run.kind not in ENDS_WELL:
            continue
        assert not run.refused, f"{run.token} was refused: {run.refused}"
        outcome = run.driven[0].outcome
        is_own = (outcome.status, outcome.result) == ("completed", f"{run.kind}: {run.token}")
        assert is_own, f"{run.token} came out as {outcome}"


def outcomes_are_genuine(world: FleetWorld) -> None:
    """A result comes from the executor; only a harmed run is reported as cancelled."""
    for run in world.runs.values():
        for driven in run.driven:
            outcome = driven.outcome
            if outcome.status == "completed":
                assert outcome.result == f"{run.kind}: {run.token}", f"{run.token}: {outcome}"
            if outcome.status == "cancelled":
                assert run.harms or run.setbacks, f"{run.token}: {outcome}"
        if run.kind in ("crash", "die", "hang") and is_unharmed(run):
            assert run.driven[0].outcome.status == "error", f"{run.token}: {run.driven}"


def events_arrive_in_order(world: FleetWorld) -> None:
    """Events of one execution arrive once. Repeats are visible only without numbers."""
    for run in world.runs.values():
        received = [(event["by"], event["n"]) for event in run.events if "by" in event]
        assert len({by for by, _ in received}) <= 1, (
            f"{run.token} receives two executions: {received}"
        )
        if run.epoch == 0:
            received = [
                one for at, one in enumerate(received) if at == 0 or received[at - 1] != one
            ]
        assert received == sorted(set(received)), f"{run.token} receives out of order: {received}"


def a_clean_end_has_all_events(world: FleetWorld) -> None:
    """All durable events arrive before a clean terminal; lossy ones may be missing."""
    for run in world.runs.values():
        if (
            not run.driven
            or not run.driven[0].is_from_worker
            or run.driven[0].outcome.status == "error"
        ):
            continue
        received = {(event["by"], event["n"]) for event in run.events if "by" in event}
        by = {number for number, _ in received}
        emitted = [one for one in run.emitted if one[0] in by]
        missing = [one for one in emitted if one[:2] not in received]
        durable = [one for one in missing if run.epoch == 0 or one[2] not in LOSSY]
        assert not durable, f"{run.token} never received {durable}"
        assert not missing or run.gaps, f"{run.token} got no notice of a gap: {missing}"


def approvals_come_from_a_person(world: FleetWorld) -> None:
    """An ask is answered once; an approval was given by a person, in time."""
    for run in world.runs.values():
        answered = Counter(name for name, _ in run.received_answers)
        assert max(answered.values(), default=0) <= 1, f"{run.token} was answered twice: {answered}"
        for name, approved in run.received_answers:
            assert not approved or run.answers.get(name), f"{name} was allowed by nobody"
            if is_unharmed(run) and not run.setbacks and name in run.answers:
                late = name in run.slow_answers
                given = run.answers[name]
                assert late or approved == given, f"{name} was answered with {given}"


def steering_arrives_once_or_is_returned(world: FleetWorld) -> None:
    for run in world.runs.values():
        admitted = Counter(one for one in run.admitted if one[1])
        assert max(admitted.values(), default=0) <= 1, f"{run.token} admits twice: {admitted}"
        if not run.is_over:
            continue
        for driven in run.driven:
            assert driven.unadmitted == run.back, f"{run.token} has back {run.back}: {driven}"
        back = Counter(steer.id for steer in run.back)
        arrived = {steer_id for _, steer_id in run.admitted}
        is_sure = len(run.executions) == 1 and bool(run.driven) and run.driven[0].is_from_worker
        for steer in (one for one in run.steers if one.id):
            assert back[steer.id] <= 1, f"{run.token} has back twice: {steer}"
            assert steer.id in arrived or back[steer.id], f"{run.token} lost {steer}"
            is_both = steer.id in arrived and back[steer.id]
            assert not (is_sure and is_both), f"{run.token} arrived and came back: {steer}"


def limits_are_reported(world: FleetWorld) -> None:
    """A limited run fails only by its limit."""
    for run in world.runs.values():
        if run.harms == ["limited"] and not run.setbacks and run.kind in ENDS_WELL:
            outcome = run.driven[0].outcome
            is_limit = (outcome.error or "").startswith("limit:run_timeout:")
            assert is_limit or outcome.status == "completed", f"{run.token}: {outcome}"


def workers_keep_to_the_protocol(world: FleetWorld) -> None:
    """At most one terminal per run on the wire, and no frame of a run after it."""
    for line in world.lines:
        asked = line.parent_end.kinds.count("run")
        assert asked <= 1, f"line {line.number} carries {asked} runs"
        runs = line.worker_end.runs
        kinds = line.worker_end.kinds
        assert kinds.count("terminal") <= runs, f"line {line.number}: {kinds}"
        if runs == 1 and "terminal" in kinds:
            after = kinds[kinds.index("terminal") + 1 :]
            assert not after, f"line {line.number}, after the terminal: {after}"


def only_silent_workers_are_retried(world: FleetWorld) -> None:
    lines: dict[str, list[Line]] = defaultdict(list)
    for line in world.lines:
        if "run" in line.parent_end.kinds:
            lines[line.token].append(line)
    for token, tried in lines.items():
        assert len(tried) <= 2, f"{token} was tried {len(tried)} times"
        begun = [line.parent_end.frames for line in tried[:-1] if line.parent_end.frames]
        assert not begun, f"{token} had begun, and was retried"


def hanging_runs_are_abandoned(world: FleetWorld) -> None:
    """A hanging run is abandoned after two silent workers and a launch."""
    for run in world.runs.values():
        if run.kind == "hang" and run.executions and not run.parent.was_stopped and run.is_over:
            took_s = run.over_s - run.began_s
            assert took_s < 2 * FIRST_FRAME_S + READY_S + 10, f"{run.token} took {took_s:g} s"


def only_clean_workers_are_reused(world: FleetWorld) -> None:
    last_of_run = {line.token: line for line in world.lines}
    last_of_worker = {line.worker: line for line in world.lines}
    for line in world.lines:
        if line is last_of_worker[line.worker]:
            continue
        run = world.runs[line.token]
        is_clean = line is last_of_run[line.token] and bool(run.driven)
        is_clean = is_clean and run.driven[0].outcome.status == "completed"
        assert is_clean, f"{line.worker.name} was used again after {run.token}: {run.driven}"


def nothing_is_left(world: FleetWorld) -> None:
    alive = [process.name for process in world.processes if process.is_alive]
    assert not alive, f"still there: {alive}"
    found = world.discovery.discover()
    assert not found, f"still to be found: {found}"
    is_open = [line.number for line in world.lines if line.is_open]
    assert not is_open, f"still open: {is_open}"


CHECKS = (
    every_run_ends_once,
    unharmed_runs_complete,
    outcomes_are_genuine,
    events_arrive_in_order,
    a_clean_end_has_all_events,
    approvals_come_from_a_person,
    steering_arrives_once_or_is_returned,
    limits_are_reported,
    workers_keep_to_the_protocol,
    only_silent_workers_are_retried,
    hanging_runs_are_abandoned,
    only_clean_workers_are_reused,
    nothing_is_left,
)


def check_fleet(world: FleetWorld) -> None:
    assert not world.problems, "; ".join(world.problems)
    for check in CHECKS:
        check(world)

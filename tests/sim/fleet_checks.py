"""What must hold of a fleet when the dust has settled: each promise a function over the world."""

from collections import Counter, defaultdict

from tests.sim.fleet_actors import FIRST_FRAME_S
from tests.sim.fleet_network import Line
from tests.sim.fleet_world import FleetWorld, SimRun
from tests.sim.worker_process import READY_S

LOSSY = ("token", "runner_progress")
ENDS_WELL = frozenset(("echo", "mute", "slow", "flood", "ask", "call", "steer", "cling"))


def is_spared(run: SimRun) -> bool:
    """Nothing was done to it, or only what another worker makes good."""
    return not run.harms and len(run.setbacks) < 2


def every_run_ends_once(world: FleetWorld) -> None:
    """Unless its parent died, in which case nobody is there who could be told."""
    for run in world.runs.values():
        ends = len(run.driven) + bool(run.refused)
        killed = "its parent was killed" in run.harms
        assert ends == 1 or (killed and ends == 0), f"{run.token} ended {ends} times"


def spared_runs_complete(world: FleetWorld) -> None:
    """What happens to others does not matter: each has its own result."""
    for run in world.runs.values():
        if not is_spared(run) or run.kind not in ENDS_WELL:
            continue
        assert not run.refused, f"{run.token} was refused: {run.refused}"
        outcome = run.driven[0].outcome
        is_own = (outcome.status, outcome.result) == ("completed", f"{run.kind}: {run.token}")
        assert is_own, f"{run.token} came out as {outcome}"


def nothing_is_made_up(world: FleetWorld) -> None:
    """A result is the executor's; who was not cancelled is not said to be."""
    for run in world.runs.values():
        for driven in run.driven:
            outcome = driven.outcome
            if outcome.status == "completed":
                assert outcome.result == f"{run.kind}: {run.token}", f"{run.token}: {outcome}"
            if outcome.status == "cancelled":
                assert run.harms or run.setbacks, f"{run.token}: {outcome}"
        if run.kind in ("crash", "die", "hang") and is_spared(run):
            assert run.driven[0].outcome.status == "error", f"{run.token}: {run.driven}"


def events_are_told_in_order(world: FleetWorld) -> None:
    """Of one execution, each once. Doubled frames show only where nothing numbers them."""
    for run in world.runs.values():
        told = [(event["by"], event["n"]) for event in run.events if "by" in event]
        assert len({by for by, _ in told}) <= 1, f"{run.token} hears two executions: {told}"
        if run.epoch == 0:
            told = [one for at, one in enumerate(told) if at == 0 or told[at - 1] != one]
        assert told == sorted(set(told)), f"{run.token} hears out of order: {told}"


def a_clean_end_has_all_events(world: FleetWorld) -> None:
    """What an executor was allowed to say arrives before a terminal; the lossy may be missing."""
    for run in world.runs.values():
        if (
            not run.driven
            or not run.driven[0].is_from_worker
            or run.driven[0].outcome.status == "error"
        ):
            continue
        told = {(event["by"], event["n"]) for event in run.events if "by" in event}
        by = {number for number, _ in told}
        emitted = [one for one in run.emitted if one[0] in by]
        missing = [one for one in emitted if one[:2] not in told]
        durable = [one for one in missing if run.epoch == 0 or one[2] not in LOSSY]
        assert not durable, f"{run.token} never heard {durable}"
        assert not missing or run.gaps, f"{run.token} was not told of a gap: {missing}"


def nothing_is_allowed_by_nobody(world: FleetWorld) -> None:
    """An ask is answered once; a yes was somebody's yes, and not one that came too late."""
    for run in world.runs.values():
        heard = Counter(name for name, _ in run.heard)
        assert max(heard.values(), default=0) <= 1, f"{run.token} was answered twice: {heard}"
        for name, approved in run.heard:
            assert not approved or run.answers.get(name), f"{name} was allowed by nobody"
            if is_spared(run) and not run.setbacks and name in run.answers:
                late = name in run.slow_answers
                said = run.answers[name]
                assert late or approved == said, f"{name} was answered with {said}"


def steering_arrives_once_or_comes_back(world: FleetWorld) -> None:
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


def limits_are_told(world: FleetWorld) -> None:
    """What would end well fails by its limit only."""
    for run in world.runs.values():
        if run.harms == ["limited"] and not run.setbacks and run.kind in ENDS_WELL:
            outcome = run.driven[0].outcome
            is_limit = (outcome.error or "").startswith("limit:run_timeout:")
            assert is_limit or outcome.status == "completed", f"{run.token}: {outcome}"


def workers_keep_to_the_protocol(world: FleetWorld) -> None:
    """On the wire: a terminal for each run at most, and nothing of a run after its terminal."""
    for line in world.lines:
        asked = line.parent_end.kinds.count("run")
        assert asked <= 1, f"line {line.number} carries {asked} runs"
        runs = line.worker_end.runs
        kinds = line.worker_end.kinds
        assert kinds.count("terminal") <= runs, f"line {line.number}: {kinds}"
        if runs == 1 and "terminal" in kinds:
            after = kinds[kinds.index("terminal") + 1 :]
            assert not after, f"line {line.number}, after the terminal: {after}"


def only_the_unheard_is_tried_again(world: FleetWorld) -> None:
    lines: dict[str, list[Line]] = defaultdict(list)
    for line in world.lines:
        if "run" in line.parent_end.kinds:
            lines[line.token].append(line)
    for token, tried in lines.items():
        assert len(tried) <= 2, f"{token} was tried {len(tried)} times"
        heard = [line.parent_end.frames for line in tried[:-1] if line.parent_end.frames]
        assert not heard, f"{token} was heard, and tried again"


def who_hangs_is_given_up(world: FleetWorld) -> None:
    """Twice a worker may say nothing; what is launched in between takes its time, too."""
    for run in world.runs.values():
        if run.kind == "hang" and run.executions and not run.parent.was_stopped and run.is_over:
            took_s = run.over_s - run.began_s
            assert took_s < 2 * FIRST_FRAME_S + READY_S + 10, f"{run.token} took {took_s:g} s"


def only_a_clean_worker_is_used_again(world: FleetWorld) -> None:
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
    spared_runs_complete,
    nothing_is_made_up,
    events_are_told_in_order,
    a_clean_end_has_all_events,
    nothing_is_allowed_by_nobody,
    steering_arrives_once_or_comes_back,
    limits_are_told,
    workers_keep_to_the_protocol,
    only_the_unheard_is_tried_again,
    who_hangs_is_given_up,
    only_a_clean_worker_is_used_again,
    nothing_is_left,
)


def check_fleet(world: FleetWorld) -> None:
    assert not world.problems, "; ".join(world.problems)
    for check in CHECKS:
        check(world)

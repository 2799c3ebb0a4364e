"""Invariants of agents: at every commit, and at the end of a world.

`TreeWorld` records what happened outside; the stored rows are compared with it.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from culm.mail.base import LetterState, NoMailbox
from culm.store.agents import rebuild
from culm.store.base import Tx
from culm.store.messages import all_messages
from culm.wire.agents import outcome_of_run
from culm.wire.codec import decode, encode
from culm.wire.messages import FinishPart, Message, ToolCallPart, ToolResultPart, full_text
from culm.wire.runs import Limits
from tests.sim.tree_server import BOUNDS, DEPTH_MAX, TreeServer
from tests.sim.tree_world import Asked, TreeWorld
from tests.store.log_mirror import LogMirror

# --- at any moment

# Invalid states, each with a query that finds it.
NEVER: dict[str, str] = {
    "an agent works without a run": """SELECT id, run_id FROM agents WHERE state = 'running'
        AND NOT EXISTS (SELECT 1 FROM runs WHERE id = agents.run_id AND state = 'active')""",
    "an agent has ended, and its run goes on": """SELECT id, outcome FROM agents
        WHERE state = 'ended'
        AND EXISTS (SELECT 1 FROM runs WHERE agent_id = agents.id AND state = 'active')""",
    "an agent's end says nothing": """SELECT id, state, outcome, pid, waiting_for FROM agents
        WHERE (state = 'ended') <> (outcome IS NOT NULL)
        OR state = 'ended' AND (pid <> 0 OR waiting_for <> '')""",
    "an agent is too deep": f"SELECT id, path FROM agents WHERE depth > {DEPTH_MAX}",
    "a run's end says nothing": """SELECT id, state, outcome FROM runs
        WHERE (state = 'ended') <> (outcome IS NOT NULL)""",
    "a message does not say in whose turn it stands": """SELECT m.id, m.role, m.run_id
        FROM messages m JOIN sessions s ON s.no = m.place >> 32 WHERE NOT EXISTS (
        SELECT 1 FROM runs WHERE id = m.run_id AND session_id = s.id
        AND host_id = '' AND state IN ('active', 'ended'))""",
    "somebody is asked for a run that has ended": """SELECT asks.id, run_id FROM asks
        JOIN runs ON runs.id = run_id WHERE asks.state = 'open' AND runs.state = 'ended'""",
}
ORPHANS = """SELECT child.id, child.state, parent.id, parent.outcome FROM runs child
    JOIN runs parent ON parent.id = child.parent_run_id
    WHERE child.detached = 0 AND parent.state = 'ended'
    AND child.state NOT IN ('ended', 'folded')"""  # A folded run continues with its host.

DERIVED = """SELECT id, depth, path, children, cost, tokens FROM agents
    UNION ALL SELECT id, 0, '', tree_steps, tree_cost, tree_tokens FROM runs"""


async def check_always(world: TreeWorld) -> None:
    """Check the store after random commits, until cancelled."""
    mirrored = LogMirror()
    while True:
        await world.file.after(world.dice.randint(1, 12), timeout_s=60.0)
        check_now(world)
        otherwise = mirrored.check(world.file.connection)
        world.expect(not otherwise, "a client that received everything has", otherwise)


def check_now(world: TreeWorld) -> None:
    for what, query in NEVER.items():
        found = [tuple(row) for row in world.rows(query)]
        world.expect(not found, what, found)
    if not world.store_failed:  # Otherwise ends are written when the disk recovers.
        orphans = [tuple(row) for row in world.rows(ORPHANS) if not world.is_shared_run(row[0])]
        world.expect(not orphans, "it is waited for by nobody:", orphans)
    otherwise = _rebuilt(world)
    world.expect(not otherwise, "what is derived would be otherwise if made anew:", otherwise)
    _check_sessions(world)


def _rebuilt(world: TreeWorld) -> list[tuple[Any, ...]]:
    """Rows whose derived values differ after a rebuild, before and after."""
    connection = world.file.connection
    connection.execute("BEGIN")
    try:
        before = [tuple(row) for row in world.rows(DERIVED)]
        if not rebuild(Tx(connection, 0, 0)):
            return []
        after = [tuple(row) for row in world.rows(DERIVED)]
        return [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    finally:
        connection.execute("ROLLBACK")


def _check_sessions(world: TreeWorld) -> None:
    """Check that the cost of a session is that of its runs and its descendants."""
    own: dict[str, float] = defaultdict(float)
    for row in world.rows("SELECT session_id, cost FROM runs"):
        own[row["session_id"]] += row["cost"]
    sessions = {row["id"]: row for row in world.rows("SELECT id, parent_id, cost FROM sessions")}
    sums = dict.fromkeys(sessions, 0.0)
    for session_id in sessions:
        above = session_id
        while above in sessions:
            sums[above] += own[session_id]
            above = sessions[above]["parent_id"]
    for session_id, cost in sums.items():
        stored: float = sessions[session_id]["cost"]
        # The cost of a deleted session stays in its ancestors.
        is_right = stored >= cost if world.deleted else stored == cost
        world.expect(is_right, "a session's cost:", session_id, stored, "instead of", cost)


# --- at the end


def check_tree(server: TreeServer) -> None:
    world = server.world
    check_now(world)
    assert not world.problems, world.problems
    alive = [worker.id for worker in server.life.launcher.workers if worker.is_alive]
    assert len(alive) <= BOUNDS.pool.idle_max, f"nobody works, and there are {alive}"
    for check in CHECKS:
        check(world)


def everything_has_ended(world: TreeWorld) -> None:
    """Every run has one published end; every agent ends like its latest run."""
    completions = Counter(
        row["entity_id"]
        for row in world.rows("SELECT entity_id FROM events WHERE type = 'run_complete'")
    )
    runs = {row["id"]: row for row in world.rows("SELECT id, state, outcome, title FROM runs")}
    for run_id, run in runs.items():
        assert run["state"] in ("ended", "held"), f"still live: {tuple(run)}"
        assert completions[run_id] == (run["state"] == "ended"), (
            f"completed {completions[run_id]} times: {run_id}"
        )
    assert max(completions.values(), default=0) <= 1, completions
    held = "SELECT agent_id FROM runs WHERE state = 'held'"
    for agent in world.rows(f"SELECT * FROM agents WHERE id NOT IN ({held})"):
        assert agent["state"] == "ended", f"still there: {tuple(agent)}"
        latest = runs.get(agent["run_id"])
        if latest is not None:
            outcome = outcome_of_run(latest["outcome"])
            assert agent["outcome"] == outcome, f"{agent['id']}: {agent['outcome']}, {outcome}"
    assert world.rows("SELECT id FROM asks WHERE state = 'open'") == []
    sessions = {row["id"] for row in world.rows("SELECT id FROM sessions")}
    for run_id, session_id in world.accepted.items():
        assert run_id in runs or session_id not in sessions, f"{run_id} was promised, and is lost"


def asks_name_their_agent(world: TreeWorld) -> None:
    """Every ask contains the path of its agent."""
    for row in world.rows(
        """SELECT asks.id, agent_path, coalesce(path, '[]') AS path FROM asks
        JOIN runs ON runs.id = asks.run_id LEFT JOIN agents ON agents.id = runs.agent_id"""
    ):
        # An ancestor may have been deleted since.
        is_right = row["agent_path"] == row["path"] or world.deleted
        assert is_right, f"ask {row['id']} comes from {row['path']}: {row['agent_path']}"


def conversations_are_closed(world: TreeWorld) -> None:
    """No message stays open, and every call has one result."""
    assert world.rows("SELECT id FROM messages WHERE is_open = 1") == []
    for messages in read_messages(world).values():
        calls: list[str] = []
        results: list[str] = []
        for message in messages:
            finishes = [part for part in message.parts if isinstance(part, FinishPart)]
            assert len(finishes) == 1, f"{message} has {len(finishes)} ends"
            if message.role == "assistant":
                assert sorted(results) == sorted(calls), f"before {message}: {calls}, {results}"
                calls = [p.data.id for p in message.parts if isinstance(p, ToolCallPart)]
                results = []
            parts = (part for part in message.parts if isinstance(part, ToolResultPart))
            results += [part.data.tool_call_id for part in parts]
        assert sorted(results) == sorted(calls), f"at the end: {calls}, {results}"


def read_messages(world: TreeWorld) -> dict[str, list[Message]]:
    found: dict[str, list[Message]] = defaultdict(list)
    for raw in all_messages(1 << 30)(world.file.connection):
        found[raw.session_id].append(decode(encode(raw), Message))
    return found


def costs_are_those_of_reported_calls(world: TreeWorld) -> None:
    """Each reported answer is counted once; of those interrupted by a crash some are."""
    asked_of: dict[str, list[Asked]] = defaultdict(list)
    for asked in world.asked:
        asked_of[asked.run_id].append(asked)
    for run in world.rows("SELECT id, cost, outcome FROM runs"):
        answers = [asked for asked in asked_of[run["id"]] if asked.is_done]
        may = sum(int(asked.cost) for asked in answers)
        sure = [a for a in answers if a.is_reported and (a.run_id, a.life) not in world.cut]
        must = sum(int(asked.cost) for asked in sure)
        stored = int(run["cost"])
        is_right = not stored & ~may and not must & ~stored
        assert is_right, f"{tuple(run)} costs {stored:b}; {must:b} was reported, {may:b} was used"


def budgets_hold(world: TreeWorld) -> None:
    """No budget is exceeded by more than the calls in flight."""
    paid: dict[tuple[str, int], list[int]] = defaultdict(list)
    for asked in world.asked:
        for run_id in asked.paid_by if asked.is_reported else ():
            paid[run_id, asked.life].append(asked.tokens)
    limits = {row["id"]: decode(row["limits"], Limits) for row in _runs(world)}
    for (run_id, life), tokens in paid.items():
        limit = limits.get(run_id)
        if limit is None or run_id in world.rebudgeted:
            continue
        beyond = sum(sorted(tokens)[-world.in_flight_max[run_id, life] :])
        about = f"{run_id} had {limit}, and used {tokens} with {beyond} in flight"
        assert not limit.tokens or sum(tokens) <= limit.tokens + beyond, about
        assert not limit.steps or len(tokens) <= limit.steps, about


def _runs(world: TreeWorld) -> Sequence[Any]:
    return world.rows("SELECT id, limits FROM runs")


def no_assignment_is_begun_again(world: TreeWorld) -> None:
    """A run is retried only if its first worker sent no frame, and never after a crash."""
    lines = {line.number: line for line in world.lines}
    for run_id in {one.run_id for one in world.executions}:
        tries = [one for one in world.executions if one.run_id == run_id]
        assert len({one.life for one in tries}) == 1, f"{run_id} is begun in two lives: {tries}"
        before = {one.line for one in tries} - {tries[-1].line}  # A line may repeat every frame.
        begun = [line for line in before if lines[line].parent_end.frames]
        assert not begun, f"{run_id} is begun again: {tries}"


def texts_are_stored_once(world: TreeWorld) -> None:
    """A prompt, message or assignment is in a conversation at most once."""
    for messages in read_messages(world).values():
        texts = [full_text(message.parts) for message in messages if message.role == "user"]
        tokens = Counter(text.split()[0] for text in texts if text[:1] in "pw" and "." in text)
        assert max(tokens.values(), default=0) <= 1, tokens


def no_letter_is_lost(world: TreeWorld) -> None:
    """Each letter is admitted once, or in its mailbox, or dead with a receipt."""
    read = Counter[str]()
    for messages in read_messages(world).values():
        texts = (full_text(message.parts) for message in messages if message.role == "user")
        read.update(text.split()[1] for text in texts if text.startswith("[Letter "))
    rows = world.rows("SELECT id, recipient, state FROM letters")
    receipts = {row["id"]: row["state"] for row in rows}
    sent = {
        row["id"]: row["recipient"] for row in rows
    } | world.letters  # Including letters of agents.
    for letter_id, to in sent.items():
        assert read[letter_id] <= 1, f"{letter_id} is admitted {read[letter_id]} times"
        if read[letter_id]:
            receipt = receipts[letter_id]
            assert receipt in ("admitted", "answered"), f"{letter_id} is read, and is {receipt}"
            continue
        if world.is_deleted(to):
            continue
        place = _find(world, to, letter_id)
        receipt = receipts.get(letter_id)
        is_dead = place is LetterState.DEAD and receipt in ("dead", "expired")
        waits = place in (LetterState.DELIVERED, LetterState.CLAIMED) and receipt in (
            None,
            "delivered",
        )
        assert is_dead or waits, f"{letter_id} to {to} is lost: {place}, {receipt}"


def _find(world: TreeWorld, address: str, letter_id: str) -> LetterState | None:
    try:
        return world.post.open(address).find(letter_id)
    except NoMailbox:
        return None


CHECKS = (
    everything_has_ended,
    asks_name_their_agent,
    conversations_are_closed,
    costs_are_those_of_reported_calls,
    budgets_hold,
    no_assignment_is_begun_again,
    texts_are_stored_once,
    no_letter_is_lost,
)

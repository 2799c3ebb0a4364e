"""Units and queries for agents. The state of an agent follows its runs, in their transactions.

Depth, path, number of children and usage of the tree are derived: `rebuild` recomputes them from
the parent links of the rows and from the usage of the runs.
"""

import sqlite3
from collections.abc import Iterable

from msgspec import Raw, Struct, field

from culm.errors import AgentNotFound
from culm.ids import AgentId, RunId, SessionId
from culm.store.base import Connection, Op, Tx, deferred
from culm.wire.agents import Agent, RawAgent, Waiting, outcome_of_run
from culm.wire.codec import decode, encode
from culm.wire.runs import CANCELED, Ending, Limits, Used, error_text

CUT_OFF = "its answer reached the most tokens that its model says at once"
REASON_CHARS_MAX = 500  # Every event of the agent contains it; the session has the full text.


class NewAgent(Struct, frozen=True):
    id: AgentId
    session_id: SessionId
    parent_id: str
    parent_session_id: str
    name: str
    role: str
    provider: str
    model: str
    terms: str  # JSON that the store does not interpret.
    budget: Limits = field(default_factory=Limits)
    is_detached: bool = False
    is_read_only: bool = False
    worktree: str = ""
    branch: str = ""
    depth: int = 1  # The main agent of a session has depth 0.
    path: tuple[str, ...] = ()  # Agent ids, from the top down to its parent.


class StoredAgent(Struct, frozen=True):
    """An agent with the fields that are not sent to clients."""

    agent: Agent
    path: tuple[str, ...]  # Agent ids, from the top down to itself.
    terms: str


# --- the life cycle of an agent


@deferred
def add_agent(tx: Tx, new: NewAgent) -> None:
    """Add an agent without its session and its first run."""
    path = encode((*new.path, new.id)).decode()
    row = tx.run(
        "add_agent",
        *(new.id, new.session_id, new.parent_id, new.parent_session_id, new.name, new.role),
        *(new.provider, new.model, new.terms, encode(new.budget).decode()),
        *(new.is_detached, new.is_read_only, new.worktree, new.branch, tx.now),
        *(new.depth, path),
    ).fetchone()
    _publish_changed(tx, tx.run("one_child_more", new.parent_id))
    _publish(tx, "agent_started", "created", row)


def assign_agent(tx: Tx, agent_id: str, run_id: RunId) -> None:
    """Make an accepted run the current one of its agent, unless the agent is running already."""
    _publish_changed(tx, tx.run("take_up_agent", run_id, agent_id))


def begin_agent(tx: Tx, agent_id: str, run_id: RunId) -> None:
    _publish_changed(tx, tx.run("begin_agent", run_id, tx.now, agent_id))


def end_agent(tx: Tx, agent_id: str, run_id: RunId, ending: Ending) -> None:
    """End an agent if this was its current run; the end of another run does not end it."""
    outcome = outcome_of_run(ending.outcome)
    reason = _reason_of(ending)[:REASON_CHARS_MAX]
    row = tx.run("end_agent", outcome, reason, tx.now, agent_id, run_id).fetchone()
    if row is not None:
        _publish(tx, "agent_ended", "updated", row)


def _reason_of(ending: Ending) -> str:
    """Details beyond the outcome. A cancel has none: its title names a user, who may not exist."""
    if ending.outcome == "max_tokens":
        return CUT_OFF
    if ending == CANCELED or outcome_of_run(ending.outcome) == "completed":
        return ""
    if ending.title.lower() == ending.outcome:
        return ending.details
    return error_text(ending)


def end_lost_agents(tx: Tx) -> None:
    """After a crash, end the agents that have no unfinished run."""
    for row in tx.run("rest_agents").fetchall():
        _publish(tx, "agent_changed", "updated", row)
    for row in tx.run("end_lost_agents", tx.now).fetchall():
        _publish(tx, "agent_ended", "updated", row)


@deferred
def set_agent_activity(tx: Tx, agent_id: str, *, waiting_for: Waiting, pid: int) -> None:
    """Set the reason why an agent waits, and the process id of its worker."""
    _publish_changed(tx, tx.run("note_agent", waiting_for, pid, agent_id))


@deferred
def set_budget(tx: Tx, agent_id: str, budget: Limits) -> Agent:
    """Set the limits of an agent; raises `AgentNotFound`."""
    row = tx.run("set_budget", encode(budget).decode(), agent_id).fetchone()
    if row is None:
        raise AgentNotFound(agent_id)
    _publish(tx, "agent_changed", "updated", row)
    return agent_of(row)


@deferred
def set_worktree(tx: Tx, agent_id: str, *, worktree: str, branch: str, terms: str) -> None:
    """Set the worktree of an agent; empty if it has none."""
    _publish_changed(tx, tx.run("set_worktree", worktree, branch, terms, agent_id))


def add_agent_usage(tx: Tx, session_ids: Iterable[str], used: Used) -> None:
    """Add usage to the agents of these sessions."""
    tokens = used.prompt_tokens + used.completion_tokens
    for session_id in session_ids:
        _publish_changed(tx, tx.run("count_on_agent", used.cost, tokens, session_id))


def delete_agent_of_session(tx: Tx, session_id: str) -> None:
    row = tx.run("delete_agent_of_session", session_id).fetchone()
    if row is not None:
        _publish_changed(tx, tx.run("one_child_less", row["parent_id"]))
        _publish(tx, "agent_ended", "deleted", row)


def publish_agents(tx: Tx, agent_ids: Iterable[str]) -> None:
    """Publish the state of existing agents, after a rebuild of derived columns."""
    for agent_id in agent_ids:
        _publish_changed(tx, tx.run("get_agent", agent_id))


def tree_of_session(tx: Tx, session_id: str) -> list[StoredAgent]:
    """The sub-agent of a session, if it has one, and all agents below."""
    own = tx.run("agent_of_session", session_id).fetchall()
    top = own[0]["id"] if own else session_id
    return [stored_agent_of(row) for row in (*own, *tx.run("agents_below", top).fetchall())]


def _publish_changed(tx: Tx, changed: sqlite3.Cursor) -> None:
    row = changed.fetchone()
    if row is not None:
        _publish(tx, "agent_changed", "updated", row)


def _publish(tx: Tx, type_: str, op: Op, row: sqlite3.Row) -> None:
    tx.publish(type_, op, row["session_id"], row["id"], row["shown"].encode())


# --- reading


def agent_of(row: sqlite3.Row) -> Agent:
    return decode(row["shown"], Agent)


def stored_agent_of(row: sqlite3.Row) -> StoredAgent:
    return StoredAgent(agent_of(row), tuple(decode(row["path"], list[str])), row["terms"])


@deferred
def find_agent(connection: Connection, agent_id: str) -> StoredAgent | None:
    """Find an agent by its id or by that of its session."""
    for name in ("get_agent", "agent_of_session"):
        row = connection.run(name, agent_id).fetchone()
        if row is not None:
            return stored_agent_of(row)
    return None


@deferred
def children_of(connection: Connection, parent_id: str) -> list[Agent]:
    return [agent_of(row) for row in connection.run("agents_of_parent", parent_id)]


@deferred
def shown_below(connection: Connection, agent_id: str) -> list[RawAgent]:
    """All agents below one, or all agents if `agent_id` is empty, in order of their start."""
    if not agent_id:
        rows = connection.run("all_agents_shown")
    else:
        rows = connection.run("agents_below_shown", *_below(connection, agent_id))
    return [RawAgent(Raw(row[0].encode())) for row in rows]


def _below(connection: Connection, agent_id: str) -> tuple[str, str]:
    """The range of paths of all agents below one: those that start with its own path."""
    row = connection.run("get_agent", agent_id).fetchone()
    own: str = encode([agent_id]).decode() if row is None else row["path"]
    prefix = own.removesuffix("]")
    return f"{prefix},", f"{prefix}-"  # `-` is the next character after a comma.


@deferred
def agents_below(connection: Connection, agent_id: str) -> list[Agent]:
    """The agents of `shown_below`, decoded."""
    return [decode(one, Agent) for one in shown_below(agent_id)(connection)]


class AgentLink(Struct, frozen=True):
    """The columns of an agent that are not derived."""

    agent_id: str
    parent_id: str
    worktree: str


def agent_links(connection: Connection) -> list[AgentLink]:
    """The links of all agents, even with damaged derived columns, in order of their start."""
    return [AgentLink(*row) for row in connection.run("agent_links")]


def agents_in_worktrees(connection: Connection) -> list[str]:
    """The ids of agents with a worktree of their own, the latest first."""
    return [row["id"] for row in connection.run("agents_in_worktrees")]


@deferred
def worktrees_around(connection: Connection, agent_id: str) -> list[str]:
    """The ids of an agent and those above it that have a worktree; it works in one of these."""
    return [row["id"] for row in connection.run("worktrees_around_agent", agent_id)]


@deferred
def find_to_sweep(connection: Connection, agent_id: str) -> StoredAgent | None:
    """An agent that has a worktree, if it and all below it have ended."""
    row = connection.run("agent_to_sweep", agent_id).fetchone()
    return None if row is None else stored_agent_of(row)


def agents_at_work(connection: Connection) -> list[Agent]:
    """The agents that have not ended."""
    return [agent_of(row) for row in connection.run("agents_at_work")]


# --- derived columns


def cut_agent(tx: Tx, agent_id: str) -> None:
    """Remove the parent of an agent. `rebuild` must follow, for the derived columns."""
    tx.run("cut_session_of_agent", agent_id)
    tx.run("cut_agent", agent_id)


class _Derived(Struct):
    parent_id: str
    children: int = 0
    cost: float = 0.0
    tokens: int = 0
    path: tuple[str, ...] = ()


def rebuild(tx: Tx) -> int:
    """Recompute every derived column; returns the number of changed rows."""
    rows = tx.run("all_agents").fetchall()
    agents = {row["id"]: _Derived(row["parent_id"]) for row in rows}
    by_session = {row["session_id"]: row["id"] for row in rows}
    for agent_id, derived in agents.items():
        derived.path = _path_of(agents, agent_id)
        if derived.parent_id in agents:
            agents[derived.parent_id].children += 1
    runs = tx.run("runs_for_rebuild").fetchall()
    for run in runs:
        agent_id = by_session.get(run["session_id"], "")
        for above in agents[agent_id].path if agent_id else ():
            if above in agents:
                agents[above].cost += run["cost"]
                agents[above].tokens += run["tokens"]
    changed = sum(_save_agent(tx, row, agents) for row in rows)
    return changed + _rebuild_runs(tx, runs)


def _path_of(agents: dict[str, _Derived], agent_id: str) -> tuple[str, ...]:
    """Agent ids from the top down. A cycle is cut where it closes."""
    path: list[str] = []
    above = agent_id
    while above and above not in path:
        path.append(above)
        above = agents[above].parent_id if above in agents else ""
    return tuple(reversed(path))


def _save_agent(tx: Tx, row: sqlite3.Row, agents: dict[str, _Derived]) -> bool:
    derived = agents[row["id"]]
    depth = sum(above in agents for above in derived.path)
    path = encode(derived.path).decode()
    now = (depth, path, derived.children, derived.cost, derived.tokens)
    was = tuple(row[name] for name in ("depth", "path", "children", "cost", "tokens"))
    if _is_same(was, now):
        return False
    tx.run("set_derived_of_agent", *now, row["id"])
    return True


def _rebuild_runs(tx: Tx, runs: list[sqlite3.Row]) -> int:
    totals = {run["id"]: (0, 0, 0.0) for run in runs}
    parents = {run["id"]: run["parent_run_id"] for run in runs}
    for run in runs:
        above, seen = run["id"], set[str]()
        while above in totals and above not in seen:
            seen.add(above)
            steps, tokens, cost = totals[above]
            totals[above] = steps + run["steps"], tokens + run["tokens"], cost + run["cost"]
            above = parents[above]
    changed = 0
    for run in runs:
        was = run["tree_steps"], run["tree_tokens"], run["tree_cost"]
        if not _is_same(was, totals[run["id"]]):
            tx.run("set_derived_of_run", *totals[run["id"]], run["id"])
            changed += 1
    return changed


def _is_same(was: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Compare values; floats with a tolerance, because sums depend on the order of addition."""
    return all(
        abs(a - b) < 1e-9 if isinstance(a, float) and isinstance(b, float) else a == b
        for a, b in zip(was, now, strict=True)
    )

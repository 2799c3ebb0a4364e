"""Agents in the store: queries use indexes, and derived columns can be rebuilt."""

import random
import re
import sqlite3
from collections.abc import Generator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from culm.ids import AgentId, RunId, SessionId
from culm.store.agents import (
    StoredAgent,
    agents_at_work,
    agents_below,
    begin_agent,
    children_of,
    end_lost_agents,
    find_agent,
    rebuild,
    set_agent_activity,
    set_budget,
)
from culm.store.base import Tx
from culm.store.files import RepairReport, circular_in, examine, repair
from culm.store.memory import MemoryFile
from culm.store.runs import find_run
from culm.store.sessions import find_session
from culm.store.sql import QUERIES
from culm.store.writer import connect
from culm.wire.agents import Agent
from culm.wire.runs import Limits
from tests.store.log_mirror import LogMirror
from tests.store.trees import TOP, Tree, open_tree
from tests.support import contract

DERIVED = "depth path children cost tokens"


@pytest.fixture
def tree() -> Generator[Tree]:
    file = MemoryFile()
    tree = Tree(file.connection)
    tree.begin()
    yield tree
    file.close()


INDEXED_QUERIES = (
    "get_agent", "agent_of_session", "agents_of_parent", "agents_below", "agents_at_work",
    "one_child_more", "one_child_less", "take_up_agent", "begin_agent", "end_agent", "note_agent",
    "set_budget", "set_worktree", "delete_agent_of_session", "sessions_above", "count_on_agent",
    "count_on_tree", "get_letter", "set_letter_state", "answer_letter", "admit_letters_of_run",
    "worktrees_around_agent", "agent_to_sweep",
)  # fmt: skip


@contract("FLEET-63")
@pytest.mark.parametrize("name", INDEXED_QUERIES)
def test_agent_query_uses_an_index(tree: Tree, name: str) -> None:
    query = QUERIES[name]
    wanted = len(set(re.findall(r"\?\d+", query))) or query.count("?")
    plan = tree.connection.execute(f"EXPLAIN QUERY PLAN {query}", [None] * wanted).fetchall()
    details = [str(row["detail"]) for row in plan]
    # A recursive query may scan its own results, but no table.
    tables = r"SCAN (agents|own|other|runs|r|letters|sessions|s)( USING COVERING INDEX \w+)?"
    assert not [one for one in details if re.fullmatch(tables, one)]


@contract("FLEET-62", "FLEET-63")
def test_agent_reads_as_written_and_is_unknown_after_its_deletion(
    tree: Tree,
) -> None:
    tree.add("a")
    tree.add("b", "a")
    tree.add("c", "a")
    b = Agent(
        agent_id=AgentId("b"),
        parent_id="a",
        session_id=SessionId("b"),
        parent_session_id="a",
        depth=2,
        name="the b",
        role="worker",
        provider="p",
        model="m",
        run_id="r b",
        created_at=1,
    )
    stored = StoredAgent(b, (TOP, "a", "b"), '{"a":1}')
    assert find_agent("b")(tree.connection) == stored
    budget = Limits(steps=3)
    tree.do(set_budget("b", budget))
    tree.do(lambda tx: begin_agent(tx, "b", RunId("r b")))
    changed = find_agent("b")(tree.connection)
    assert changed is not None
    assert (changed.agent.budget, changed.agent.state) == (budget, "running")
    assert [one.agent_id for one in children_of("a")(tree.connection)] == ["b", "c"]
    assert [one.agent_id for one in agents_below("")(tree.connection)] == ["a", "b", "c"]
    tree.delete("b")
    assert find_agent("b")(tree.connection) is None
    assert [one.agent_id for one in children_of("a")(tree.connection)] == ["c"]
    assert [one.agent_id for one in agents_below(TOP)(tree.connection)] == ["a", "c"]
    assert find_agent("nobody")(tree.connection) is None


def _grow(tree: Tree, seed: int) -> None:
    """Add, use and delete agents in an order given by the seed."""
    chance = random.Random(seed)
    for number in range(60):
        names = tree.names
        match chance.randrange(8):
            case 0 | 1 | 2:
                tree.add(f"a{number}", chance.choice(names))
            case 3 if len(names) > 3:
                tree.delete(chance.choice(names[1:]))
            case _:
                tree.use(chance.choice(names), chance.randrange(100), chance.random())


@contract("FLEET-64", "FLEET-65")
@pytest.mark.parametrize("seed", range(8))
def test_rebuild_restores_the_derived_columns_after_any_damage(tree: Tree, seed: int) -> None:
    _grow(tree, seed)
    kept = tree.rows()
    assert tree.do(rebuild) == 0
    # As if the index had been deleted ...
    tree.connection.execute(
        "UPDATE agents SET depth = 9, path = '[]', children = 7, cost = 5, tokens = 3"
    )
    tree.connection.execute("UPDATE runs SET tree_steps = 99, tree_tokens = 99, tree_cost = 99")
    assert tree.do(rebuild) == len(kept)
    assert tree.rows() == kept
    # ... or half of it written.
    for column in DERIVED.split():
        tree.connection.execute(f"UPDATE agents SET {column} = '[7]' WHERE no % 2")
        wrong = tree.do(rebuild)
        assert (wrong, tree.rows()) == (sum(_is_odd(row) for row in kept), kept)


def _is_odd(row: tuple[object, ...]) -> bool:
    """Return True for an agent row with an odd number; the row of a run begins with its id."""
    return isinstance(row[0], int) and row[0] % 2 == 1


def test_failed_rebuild_changes_nothing(tree: Tree) -> None:
    for name in ("a", "b", "c"):
        tree.add(name)
    tree.connection.execute("UPDATE agents SET depth = 9")
    before = tree.rows()

    def broken(tx: Tx) -> None:
        rebuild(tx)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        tree.do(broken)
    assert tree.rows() == before


def test_deleting_an_agent_deletes_its_children_and_their_usage(
    tree: Tree,
) -> None:
    for name, parent in (("a", TOP), ("b", "a"), ("c", "b"), ("d", "a")):
        tree.add(name, parent)
        tree.use(name, 10, 0.5)
    tree.delete("b")
    a, d = agents_below("")(tree.connection)
    assert [(one.agent_id, one.children, one.cost) for one in (a, d)] == [
        ("a", 1, 1),
        ("d", 0, 0.5),
    ]
    assert (find_session("c")(tree.connection), find_run("r c")(tree.connection)) == (None, None)
    assert tree.do(rebuild) == 0


@contract("EXC-13")
def test_log_mirror_follows_agent_usage_when_agents_are_deleted(
    tree: Tree,
) -> None:
    log_mirror = LogMirror()
    assert log_mirror.check(tree.connection) == []
    for name, parent in (("a", TOP), ("b", "a"), ("c", "b"), ("d", "c")):
        tree.add(name, parent)
        tree.use(name, 10, 0.5)
    assert log_mirror.check(tree.connection) == []
    tree.delete("c")
    assert log_mirror.check(tree.connection) == []


@contract("EXC-13")
def test_log_mirror_knows_that_no_worker_survived_a_crash(tree: Tree) -> None:
    tree.add("a")
    tree.do(set_agent_activity("a", waiting_for="ask", pid=7))
    log_mirror = LogMirror()
    assert log_mirror.check(tree.connection) == []
    tree.do(end_lost_agents)
    (a,) = agents_at_work(tree.connection)
    assert (a.waiting_for, a.pid) == ("", 0)
    assert log_mirror.check(tree.connection) == []


@contract("FLEET-P12")
def test_any_depth_is_stored_and_cycles_are_cut_and_reported(
    tree: Tree,
) -> None:
    names = [TOP, *(f"d{number}" for number in range(60))]
    for parent, name in pairwise(names):
        tree.add(name, parent)
    tree.use("d59", 5, 1.0)
    deepest = find_agent("d59")(tree.connection)
    assert deepest is not None
    assert (deepest.agent.depth, deepest.path) == (60, tuple(names))
    assert len(agents_below("d0")(tree.connection)) == 59
    assert tree.do(rebuild) == 0
    # The server never writes this.
    tree.connection.execute("UPDATE agents SET parent_id = 'd59' WHERE id = 'd57'")
    assert tree.do(rebuild) > 0
    cut = find_agent("d58")(tree.connection)
    assert cut is not None
    assert cut.path == ("d59", "d57", "d58")
    assert tree.do(rebuild) == 0
    agents = agents_below("")(tree.connection)
    assert len(agents) == 60
    found = circular_in({one.agent_id: one.parent_id for one in agents})
    assert sorted(found) == ["d57", "d58", "d59"]


def test_only_agents_inside_a_cycle_are_circular() -> None:
    assert circular_in({}) == ()
    assert circular_in({"a": "top", "b": "a", "c": "gone"}) == ()
    assert circular_in({"x": "x", "tail": "x"}) == ("x",)
    assert sorted(circular_in({"tail": "a", "a": "b", "b": "a", "more": "tail"})) == ["a", "b"]


@contract("FLEET-P12")
def test_corrupt_index_is_reported_and_rebuilt(tmp_path: Path) -> None:
    file = tmp_path / "culm.db"
    with open_tree(file) as tree:
        tree.add("a")
    (hidden,) = _change_schema(file, "SELECT * FROM sqlite_master WHERE name = 'agents_of_parent'")
    _change_schema(file, "DELETE FROM sqlite_master WHERE name = 'agents_of_parent'")
    with open_tree(file) as tree:
        tree.add("b", "a")  # The index is not updated.
    _change_schema(file, "INSERT INTO sqlite_master VALUES (?, ?, ?, ?, ?)", hidden)
    damaged = examine(file)
    assert "agents_of_parent" in damaged.problems[0]
    assert repair(file, now=2) == RepairReport(0)
    assert examine(file) == replace(damaged, problems=(), agents=2)
    with open_tree(file) as tree:
        assert [one.agent_id for one in children_of("a")(tree.connection)] == ["b"]


def _change_schema(
    file: Path, change: str, values: tuple[object, ...] = ()
) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(file, isolation_level=None)) as connection:
        connection.execute("PRAGMA writable_schema = ON")
        return connection.execute(change, values).fetchall()


def test_examine_changes_nothing_and_repair_restores_derived_columns(tmp_path: Path) -> None:
    file = tmp_path / "culm.db"
    with open_tree(file) as tree:
        tree.add("a")
        tree.use("a", 10, 0.5)
        kept = tree.rows()
        tree.connection.execute("UPDATE agents SET children = 7")
        damaged = tree.rows()
        found = examine(file)
        assert (found.agents, found.wrong, found.circular) == (1, 1, ())
        assert tree.rows() == damaged
    assert repair(file, now=2) == RepairReport(1)
    assert examine(file) == replace(found, wrong=0)
    with closing(connect(file)) as connection:
        assert Tree(connection).rows() == kept

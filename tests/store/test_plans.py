"""Query plans: the queries of every run use indexes."""

import re

import pytest

from culm.store.memory import MemoryFile
from culm.store.sql import QUERIES

TURN_QUERIES = (
    "get_run", "start_run", "fold_run", "end_run", "folded_runs", "queued_runs", "next_place",
    "hold_run", "release_run", "held_runs_of_session", "unfinished_runs", "count_unfinished_runs",
    "is_cancelled", "settle_cancelled_run", "runs_of_cancel", "calls_of_message", "set_call_state",
    "get_body", "delete_body", "count_on_run", "edit_run", "place_run", "messages_from",
    "open_message_of_session", "last_message_of_session", "answers_of_run", "messages_of_session",
    "place_of_message",
)  # fmt: skip


@pytest.mark.parametrize("name", TURN_QUERIES)
def test_no_query_of_a_running_turn_scans_a_whole_table(name: str) -> None:
    file = MemoryFile()
    query = QUERIES[name]
    wanted = len(set(re.findall(r"\?\d+", query))) or query.count("?")
    rows = file.connection.execute(f"EXPLAIN QUERY PLAN {query}", [None] * wanted)
    for row in rows.fetchall():
        detail = str(row["detail"])
        scans = detail.startswith("SCAN") and "INDEX" not in detail
        assert not scans or "CONSTANT" in detail, detail
    file.close()

"""Targets of `culm stop` and `culm steer` are found by their names."""

import pytest

from culm.cli.names import NamedItem, NamedTargets
from culm.errors import InvalidRequest, NotFound
from tests.cli.commands.test_ps import run_of


def test_active_target_wins_over_ended_unless_the_whole_id_is_given() -> None:
    runs = [run_of("ab"), run_of("abc", state="ended"), run_of("x", state="ended")]
    runs[1].prompt = runs[0].prompt
    named = [
        *(NamedItem("run", run.id, run.prompt) for run in runs),
        NamedItem("session", "s", "Talk"),
    ]
    short = {one.id: one.id for one in named}
    targets = NamedTargets(named, {run.id: run for run in runs}, {}, short)
    assert [targets.get(text).id for text in ("a", "do ab", "abc", "x", "talk")] == [
        "ab",
        "ab",
        "abc",
        "x",
        "s",
    ]
    with pytest.raises(NotFound, match="no run or session is named zzz"):
        targets.get("zzz")
    runs[1].state = "active"
    with pytest.raises(InvalidRequest, match=r"'a' is ambiguous \(2 matches\)"):
        targets.get("a")

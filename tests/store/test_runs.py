"""Usage statistics: the database counts every run once."""

from collections.abc import Generator

import pytest

from culm.store.memory import MemoryFile
from culm.store.runs import DAY_S, SESSIONS_SHOWN, since_of, stats_since
from culm.wire.runs import DayUsage, ModelUsage, SessionUsage, Stats, Usage

NOON = 1_800_014_400  # Of 2027-01-15, in UTC.


class UsageDatabase:
    """A database with sessions and runs inserted by hand."""

    def __init__(self, file: MemoryFile) -> None:
        self._connection = file.connection
        self._count = 0

    def session(self, session_id: str, parent_id: str = "") -> None:
        self._connection.execute(
            "INSERT INTO sessions (id, parent_id, title, created_at, updated_at)"
            " VALUES (?, ?, ?, 0, 0)",
            (session_id, parent_id, f"about {session_id}"),
        )

    def run(
        self,
        session_id: str,
        at: int = NOON,
        *,
        model: str = "small",
        cost: float = 1.0,
        host: str = "",
        began: bool = True,
        estimated: bool = False,
    ) -> None:
        self._count += 1
        self._connection.execute(
            "INSERT INTO runs (id, session_id, kind, state, given, digest, prompt, provider, model,"
            " created_at, started_at, host_id, prompt_tokens, completion_tokens, cost, tree_cost,"
            " estimated) VALUES (?, ?, 'prompt', 'ended', 0, '', '', 'demo', ?, ?, ?, ?, 10, 2, ?,"
            " 99, ?)",
            (f"r{self._count}", session_id, model, at, began, host, cost, estimated),
        )

    def stats(self, since: int = 0, utc_offset_s: int = 0) -> Stats:
        return stats_since(since, utc_offset_s)(self._connection)


@pytest.fixture
def usage() -> Generator[UsageDatabase]:
    file = MemoryFile()
    yield UsageDatabase(file)
    file.close()


def test_stats_without_runs_are_empty(usage: UsageDatabase) -> None:
    assert usage.stats() == Stats(0, Usage(), [], [], [])


def test_agent_runs_are_counted_once_in_their_top_session(usage: UsageDatabase) -> None:
    usage.session("top")
    usage.session("below", "top")
    usage.session("lower", "below")
    usage.session("other")
    usage.run("top")
    usage.run("below", cost=2.0, model="large")
    usage.run("lower", estimated=True)
    usage.run("other", NOON - DAY_S, cost=0.5)
    usage.run("gone", cost=0.25)  # Its session is unknown.
    assert usage.stats() == Stats(
        since=0,
        total=Usage(5, 50, 10, 4.75, 1),
        models=[
            ModelUsage(4, 40, 8, 2.75, 1, provider="demo", model="small"),
            ModelUsage(1, 10, 2, 2.0, 0, provider="demo", model="large"),
        ],
        days=[
            DayUsage(4, 40, 8, 4.25, 1, day="2027-01-15"),
            DayUsage(1, 10, 2, 0.5, 0, day="2027-01-14"),
        ],
        sessions=[
            SessionUsage(3, 30, 6, 4.0, 1, session_id="top", title="about top"),
            SessionUsage(1, 10, 2, 0.5, 0, session_id="other", title="about other"),
            SessionUsage(1, 10, 2, 0.25, 0, session_id="gone", title=""),
        ],
    )


def test_unstarted_and_folded_runs_are_not_counted(usage: UsageDatabase) -> None:
    usage.run("s")
    usage.run("s", host="r1")
    usage.run("s", began=False)
    assert usage.stats().total.runs == 1


def test_days_follow_the_requested_utc_offset(usage: UsageDatabase) -> None:
    midnight = NOON // DAY_S * DAY_S
    usage.run("s", midnight - 1)
    usage.run("s", midnight)
    assert [one.day for one in usage.stats().days] == ["2027-01-15", "2027-01-14"]
    assert [one.day for one in usage.stats(utc_offset_s=-3600).days] == ["2027-01-14"]
    assert usage.stats(midnight).total.runs == 1


def test_only_the_costliest_sessions_are_listed(usage: UsageDatabase) -> None:
    for n in range(SESSIONS_SHOWN + 5):
        usage.run(f"s{n}", cost=float(n))
    assert [one.cost for one in usage.stats().sessions] == [14.0 - n for n in range(10)]
    assert usage.stats().total.runs == 15


@pytest.mark.parametrize(
    ("days", "offset_s", "since"),
    [
        (0, 0, 0),
        (1, 0, NOON // DAY_S * DAY_S),
        (2, 0, (NOON // DAY_S - 1) * DAY_S),
        (1, 3600, NOON // DAY_S * DAY_S - 3600),
        (1, 13 * 3600, (NOON // DAY_S + 1) * DAY_S - 13 * 3600),
        (36_600, 0, 0),
    ],
)
def test_period_of_days_starts_at_midnight(days: int, offset_s: int, since: int) -> None:
    assert since_of(days, NOON, offset_s) == since

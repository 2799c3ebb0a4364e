"""What was used is added up by the database: every run once, however many there are."""

from collections.abc import Generator

import pytest

from culm.store.memory import MemoryFile
from culm.store.stats import DAY_S, SESSIONS_SHOWN, since_of, stats_since
from culm.wire.stats import DayUsage, ModelUsage, SessionUsage, Stats, Usage

NOON = 1_800_014_400  # Of 2027-01-15, in UTC.


class Book:
    """A database in which sessions and runs are noted by hand."""

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
def book() -> Generator[Book]:
    file = MemoryFile()
    yield Book(file)
    file.close()


def test_where_nothing_ran_nothing_was_used(book: Book) -> None:
    assert book.stats() == Stats(0, Usage(), [], [], [])


def test_runs_of_agents_are_counted_once_and_in_the_session_they_work_for(book: Book) -> None:
    book.session("top")
    book.session("below", "top")
    book.session("lower", "below")
    book.session("other")
    book.run("top")
    book.run("below", cost=2.0, model="large")
    book.run("lower", estimated=True)
    book.run("other", NOON - DAY_S, cost=0.5)
    book.run("gone", cost=0.25)  # Nobody knows its session.
    assert book.stats() == Stats(
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


def test_what_never_began_or_was_folded_into_another_is_no_run(book: Book) -> None:
    book.run("s")
    book.run("s", host="r1")
    book.run("s", began=False)
    assert book.stats().total.runs == 1


def test_days_are_those_of_the_clock_that_was_asked_for(book: Book) -> None:
    midnight = NOON // DAY_S * DAY_S
    book.run("s", midnight - 1)
    book.run("s", midnight)
    assert [one.day for one in book.stats().days] == ["2027-01-15", "2027-01-14"]
    assert [one.day for one in book.stats(utc_offset_s=-3600).days] == ["2027-01-14"]
    assert book.stats(midnight).total.runs == 1


def test_the_costliest_sessions_are_listed_and_no_more(book: Book) -> None:
    for n in range(SESSIONS_SHOWN + 5):
        book.run(f"s{n}", cost=float(n))
    assert [one.cost for one in book.stats().sessions] == [14.0 - n for n in range(10)]
    assert book.stats().total.runs == 15


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
def test_so_many_days_begin_with_a_day(days: int, offset_s: int, since: int) -> None:
    assert since_of(days, NOON, offset_s) == since

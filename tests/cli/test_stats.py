"""`culm stats`: lines that line up, and what is estimated is marked."""

from culm.cli.render.cells import cells_of
from culm.cli.stats import stats_lines
from culm.cli.stats_command import DAYS_MAX
from culm.wire import queries
from culm.wire.stats import DayUsage, ModelUsage, SessionUsage, Stats, Usage
from tests.cli.conftest import Desk

USED = (2, 12_345, 10, 0.5)
FOUND = Stats(
    since=0,
    total=Usage(3, 12_400, 11, 0.5, 1),
    models=[
        ModelUsage(*USED, 0, provider="demo", model="demo-1"),
        ModelUsage(1, 55, 1, 0.0, 1, provider="offline", model="offline"),
    ],
    days=[DayUsage(3, 12_400, 11, 0.5, 1, day="2027-01-15")],
    sessions=[SessionUsage(*USED, 0, session_id="abcdefghij", title="Plums \x1b[2J")],
)

SHOWN = """\
runs    input  output     cost  model
   2   12,345      10  $0.5000  demo/demo-1
   1      ~55      ~1  $0.0000  offline/offline
   3  ~12,400     ~11  $0.5000  in all, in 30 days

runs    input  output     cost  day
   3  ~12,400     ~11  $0.5000  2027-01-15

runs   input  output     cost  costliest sessions
   2  12,345      10  $0.5000  abcdefgh Plums \\x1b[2J

~ estimated: no provider has counted it"""


def test_what_was_used_is_told_by_model_day_and_session() -> None:
    assert "\n".join(stats_lines(FOUND, 30, None)) == SHOWN


def test_no_table_is_wider_than_its_terminal() -> None:
    assert max(map(cells_of, stats_lines(FOUND, 30, 40))) <= 40


def test_a_span_that_is_none_is_told_before_a_server_is_asked(desk: Desk) -> None:
    assert DAYS_MAX == queries.DAYS_MAX
    said = desk.culm("stats", "--days", "-1")
    assert (said.status, said.out) == (2, "")
    assert "--days" in said.err

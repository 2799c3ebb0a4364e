"""`culm stats`: aligned tables with estimates marked."""

from culm.cli.commands.stats import stats_lines
from culm.cli.render.text import cells_of
from culm.wire.runs import DayUsage, ModelUsage, SessionUsage, Stats, Usage
from tests.cli.conftest import CliHarness

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
   3  ~12,400     ~11  $0.5000  total, in 30 days

runs    input  output     cost  day
   3  ~12,400     ~11  $0.5000  2027-01-15

runs   input  output     cost  costliest sessions
   2  12,345      10  $0.5000  abcdefgh Plums \\x1b[2J

~ estimated: no provider has counted it"""


def test_usage_is_listed_by_model_day_and_session() -> None:
    assert "\n".join(stats_lines(FOUND, 30, None)) == SHOWN


def test_stats_line_is_never_wider_than_the_terminal() -> None:
    assert max(map(cells_of, stats_lines(FOUND, 30, 40))) <= 40


def test_invalid_days_is_a_usage_error(cli: CliHarness) -> None:
    result = cli.culm("stats", "--days", "-1")
    assert (result.status, result.out) == (2, "")
    assert "--days" in result.err

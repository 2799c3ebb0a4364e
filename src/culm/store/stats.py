"""What runs have used up, added by the database: there may be more of them than a client reads."""

import sqlite3
from collections.abc import Callable
from typing import TypeVar

from culm.store.sql import QUERIES
from culm.wire.stats import DayUsage, ModelUsage, SessionUsage, Stats, Usage

MODELS_SHOWN = 100
DAYS_SHOWN = 366
SESSIONS_SHOWN = 10
DAY_S = 86_400

U = TypeVar("U", bound=Usage)


def since_of(days: int, now_s: float, utc_offset_s: int) -> int:
    """When the first of so many days began, today included, by a clock so far ahead of UTC."""
    if not days:
        return 0
    today = (int(now_s) + utc_offset_s) // DAY_S
    return max((today - days + 1) * DAY_S - utc_offset_s, 0)


def stats_since(since: int, utc_offset_s: int) -> Callable[[sqlite3.Connection], Stats]:
    def query(connection: sqlite3.Connection) -> Stats:
        def read(name: str, kind: type[U], *values: int) -> list[U]:
            rows = connection.execute(QUERIES[name], (since, *values))
            return [usage_of(row, kind) for row in rows]

        return Stats(
            since=since,
            total=read("usage", Usage)[0],
            models=read("usage_by_model", ModelUsage, MODELS_SHOWN),
            days=read("usage_by_day", DayUsage, utc_offset_s, DAYS_SHOWN),
            sessions=read("usage_by_session", SessionUsage, SESSIONS_SHOWN),
        )

    return query


def usage_of(row: sqlite3.Row, kind: type[U]) -> U:
    """A row whose columns are the fields of that kind."""
    usage = kind(**{name: row[name] for name in kind.__struct_fields__})
    usage.cost = float(usage.cost)  # A sum of nothing is an integer.
    return usage

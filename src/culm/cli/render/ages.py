"""How long ago something was, as people say it. Pure."""

from datetime import UTC, datetime

MINUTE_S, HOUR_S, DAY_S = 60, 3600, 86_400
DAYS_MAX = 30  # Older than this a date says more.


def ago_text(at: int, now_s: float) -> str:
    """A moment, seen from now; one that is still to come, by another clock, is now."""
    age_s = int(now_s) - at
    if age_s < MINUTE_S:
        return "now"
    if age_s < HOUR_S:
        return f"{age_s // MINUTE_S} min ago"
    if age_s < DAY_S:
        return f"{age_s // HOUR_S} h ago"
    if age_s < DAYS_MAX * DAY_S:
        return f"{age_s // DAY_S} d ago"
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d}"

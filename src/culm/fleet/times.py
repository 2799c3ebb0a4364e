"""Times on this wire: RFC 3339, in UTC."""

from datetime import UTC, datetime


def format_time(at_s: float) -> str:
    """To the millisecond, with a `Z`."""
    text = datetime.fromtimestamp(at_s, UTC).isoformat(timespec="milliseconds")
    return text.replace("+00:00", "Z")


def parse_time(text: str) -> float | None:
    """Seconds since 1970; None if it is no such time."""
    try:
        found = datetime.fromisoformat(text.upper())  # RFC 3339 lets `t` and `z` be small.
        return found.timestamp() if found.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None

"""What runs have used up: by model, by day, by session. Each run is counted once."""

from msgspec import Struct


class Usage(Struct):
    """Of some runs, without what those that work for them have used."""

    runs: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0  # USD.
    estimated_runs: int = 0  # So many of them have tokens that no provider has counted.


class ModelUsage(Usage):
    provider: str = ""
    model: str = ""


class DayUsage(Usage):
    day: str = ""  # As 2026-01-31, by the clock that was asked for.


class SessionUsage(Usage):
    """With all its agents, whose sessions are not listed by themselves."""

    session_id: str = ""
    title: str = ""


class Stats(Struct):
    """Of runs that have begun, in sessions that are still there."""

    since: int  # In Unix seconds; 0 if it is all there is.
    total: Usage
    models: list[ModelUsage]  # The costliest first, and no more than the server shows.
    days: list[DayUsage]  # The latest first; days without a run are left out.
    sessions: list[SessionUsage]  # The costliest.

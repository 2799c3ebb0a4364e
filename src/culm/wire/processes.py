"""Processes that were started for a workspace, as people see them."""

from msgspec import Struct, field


class Process(Struct):
    """One that was ordered, with everything that descends from it."""

    pid: int
    command: str
    kind: str  # For what: call, job, hook, tool, shell, agent (its worktree), worker (all of it).
    session_id: str
    run_id: str
    tool_call_id: str
    age_s: float
    rss_bytes: int
    pids: list[int] = field(default_factory=list[int])
    stopping: bool = False  # It was told to end, and has not yet.

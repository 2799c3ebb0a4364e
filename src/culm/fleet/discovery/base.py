"""Interface of worker discovery: which worker serves at which endpoint, while its lease lasts.

A record is a worker's description of itself. It never contains a token.
"""

from collections.abc import Iterable
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from culm.clock import format_time, parse_time
from culm.processes.linux import is_alive, read_world_id

LEASE_S: Final = 60.0
RENEW_S: Final = 20.0  # Two renewals may be missed before a worker is considered dead.


class OwnerProcess(Struct, frozen=True):
    """The process that a worker must not outlive; the start time guards against pid reuse."""

    pid: int
    start_ticks: int


class ProcessPlace(Struct, frozen=True):
    """Our own extension: identifies the process, so that the next server can find leftovers."""

    start_ticks: int
    world: str  # The scope in which its pid is unique.
    owner: OwnerProcess | None = None


class AgentRecord(Struct, frozen=True, kw_only=True):
    """A worker's description of itself."""

    agent_id: str
    role: str
    labels: list[str] = []
    endpoint: str
    pid: int
    version: str = ""
    started_at: str  # Times are RFC 3339, kept as they were written.
    lease_expires_at: str
    culm: ProcessPlace | None = None


class Discovery(Protocol):
    """Blocks on disk access. An id that is not a safe name raises `UnsafeName`."""

    def publish(self, record: AgentRecord) -> None:
        """Publish a record or renew its lease; raises OSError."""
        ...

    def withdraw(self, agent_id: str) -> None:
        """Remove a record, which need not exist. Raises OSError."""
        ...

    def resolve(self, agent_id: str) -> AgentRecord | None:
        """Return None if the id is unknown or its lease has expired."""
        ...

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        """Return all records with a valid lease, by id, optionally of one role or label."""
        ...

    def gc(self) -> int:
        """Remove dead and unreadable records; return how many."""
        ...


def is_live(record: AgentRecord, now_s: float) -> bool:
    expires_s = parse_time(record.lease_expires_at)
    return expires_s is not None and expires_s > now_s


def is_over(record: AgentRecord, now_s: float) -> bool:
    """Return True if the record will not be renewed.

    A worker that only slept through its lease renews it, and keeps its token.
    """
    return not is_live(record, now_s) and not is_running(record)


def is_running(record: AgentRecord) -> bool:
    """Return True if the process is known to be alive; False for workers that are not ours."""
    placed = record.culm
    if placed is None or placed.world != read_world_id():
        return False
    return is_alive(record.pid, placed.start_ticks)


def renewed(record: AgentRecord, now_s: float) -> AgentRecord:
    return replace(record, lease_expires_at=format_time(now_s + LEASE_S))


def select(
    records: Iterable[AgentRecord], now_s: float, *, role: str = "", label: str = ""
) -> list[AgentRecord]:
    """Return the records with a valid lease, optionally of one role or label."""
    return [
        record
        for record in records
        if is_live(record, now_s)
        and role in ("", record.role)
        and (not label or label in record.labels)
    ]

"""The seam towards the fabric: who serves where, for as long as its lease runs.

A record is what a worker says of itself. It never holds a token.
"""

from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from culm.fleet.times import format_time, parse_time
from culm.processes.linux import is_alive, read_world_id

LEASE_S: Final = 60.0
RENEW_S: Final = 20.0  # Two renewals may be missed before anybody takes a worker for dead.


class OwnerProcess(Struct, frozen=True):
    """The process that a worker must not outlive, told apart from a later one with its pid."""

    pid: int
    start_ticks: int


class ProcessPlace(Struct, frozen=True):
    """Ours alone: which process it is, so that the next server can find what the last one left."""

    start_ticks: int
    world: str  # Where its pids mean something.
    owner: OwnerProcess | None = None


class AgentRecord(Struct, frozen=True, kw_only=True):
    """What a worker says of itself."""

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
    """Blocks as the disk does. An id that is no safe name raises `UnsafeName`."""

    def publish(self, record: AgentRecord) -> None:
        """Announce it, or renew its lease; raises OSError."""
        ...

    def withdraw(self, agent_id: str) -> None:
        """It is gone. That nobody knew it is fine. Raises OSError."""
        ...

    def resolve(self, agent_id: str) -> AgentRecord | None:
        """None if nobody has that id, or its lease has run out."""
        ...

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        """All whose lease runs, by id; of a role, with a label, if one is given."""
        ...

    def gc(self) -> int:
        """Remove what is over or cannot be read; returns how many records that were."""
        ...


def is_live(record: AgentRecord, now_s: float) -> bool:
    expires_s = parse_time(record.lease_expires_at)
    return expires_s is not None and expires_s > now_s


def is_over(record: AgentRecord, now_s: float) -> bool:
    """Whether nobody will renew it. Who only slept through its lease will, and keeps its token."""
    return not is_live(record, now_s) and not is_running(record)


def is_running(record: AgentRecord) -> bool:
    """Whether the process that wrote it is known to be there; never of a worker not of ours."""
    placed = record.culm
    if placed is None or placed.world != read_world_id():
        return False
    return is_alive(record.pid, placed.start_ticks)


def renewed(record: AgentRecord, now_s: float) -> AgentRecord:
    return replace(record, lease_expires_at=format_time(now_s + LEASE_S))


def is_wanted(record: AgentRecord, role: str, label: str) -> bool:
    return role in ("", record.role) and (not label or label in record.labels)

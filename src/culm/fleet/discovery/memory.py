"""In-memory discovery, for simulations and within one process."""

from culm.clock import Clock
from culm.files import check_name
from culm.fleet.discovery.base import AgentRecord, is_live, is_over, select


class MemoryDiscovery:
    """Implements `Discovery`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._records: dict[str, AgentRecord] = {}

    def publish(self, record: AgentRecord) -> None:
        self._records[check_name(record.agent_id)] = record

    def withdraw(self, agent_id: str) -> None:
        self._records.pop(check_name(agent_id), None)

    def resolve(self, agent_id: str) -> AgentRecord | None:
        found = self._records.get(check_name(agent_id))
        return found if found is not None and is_live(found, self._clock.now_s()) else None

    def discover(self, *, role: str = "", label: str = "") -> list[AgentRecord]:
        records = (record for _, record in sorted(self._records.items()))
        return select(records, self._clock.now_s(), role=role, label=label)

    def gc(self) -> int:
        now_s = self._clock.now_s()
        dead = [one for one, record in self._records.items() if is_over(record, now_s)]
        for agent_id in dead:
            del self._records[agent_id]
        return len(dead)

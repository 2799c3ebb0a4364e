"""The seam towards whoever gave an assignment: what it is told while a run goes on, and asked."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import Raw

from culm.fleet.executor import HostCallFailed
from culm.fleet.times import parse_time
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True)
class WorkerAsk:
    """What a worker wants to be allowed. All of it is the worker's word."""

    tool_name: str
    permission: str
    resource: str
    question: str
    deadline_s: float | None  # Seconds since 1970: when nobody has answered by then, it is denied.
    body: Mapping[str, Json]  # As it was sent.


class HostCallbacks(Protocol):
    async def on_event(self, event: Raw) -> None:
        """One event, in order. While this waits, the worker is not read."""
        ...

    async def on_gap(self) -> None:
        """Events that only grew a text, or repeated a state, were dropped on the way."""
        ...

    async def on_ask(self, ask: WorkerAsk) -> bool:
        """Whether a call may go ahead. Cancelled when the run ends first, which denies it.

        Raises `NotAsked` if nobody can be asked, or nobody has decided.
        """
        ...

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        """Do a host call; raises `CallFailed`. Cancelled when the run ends first."""
        ...


class DenyAll:
    """An overseer that looks away: it allows nothing, and does nothing."""

    async def on_event(self, event: Raw) -> None:
        pass

    async def on_gap(self) -> None:
        pass

    async def on_ask(self, ask: WorkerAsk) -> bool:
        return False

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        raise HostCallFailed("nobody is here to do it")


def parse_ask(body: Mapping[str, Json]) -> WorkerAsk:
    """What is missing, or is no text, is empty. One field has two names; the usual one counts."""

    def text(name: str) -> str:
        value = body.get(name)
        return value if isinstance(value, str) else ""

    return WorkerAsk(
        tool_name=text("tool_name"),
        permission=text("permission") or text("permission_type"),
        resource=text("resource"),
        question=text("question"),
        deadline_s=parse_time(text("deadline")),
        body=body,
    )

"""Interface to the sender of an assignment: events, asks and host calls while a run goes on."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from msgspec import Raw

from culm.clock import parse_time
from culm.fleet.executor import HostCallFailed
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True)
class WorkerAsk:
    """A worker's request for approval. All of its fields are claims of the worker."""

    tool_name: str
    permission: str
    resource: str
    question: str
    deadline_s: float | None  # Seconds since 1970; without an answer by then, it is denied.
    body: Mapping[str, Json]  # As it was sent.


class HostCallbacks(Protocol):
    async def on_event(self, event: Raw) -> None:
        """Handle one event, in order. Meanwhile the worker's frames are not read."""
        ...

    async def on_gap(self) -> None:
        """Events that only extend a text or repeat a state were dropped on the way."""
        ...

    async def on_ask(self, ask: WorkerAsk) -> bool:
        """Decide about a call. Canceled when the run ends first, which denies it.

        Raises `ApprovalUnavailable` if nobody can be asked, or nobody has decided.
        """
        ...

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        """Carry out a host call; raises `HostCallFailed`. Canceled when the run ends first."""
        ...


class DenyAll:
    """Callbacks that allow nothing and do nothing."""

    async def on_event(self, event: Raw) -> None:
        pass

    async def on_gap(self) -> None:
        pass

    async def on_ask(self, ask: WorkerAsk) -> bool:
        return False

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        raise HostCallFailed("host calls are not supported here")


def parse_ask(body: Mapping[str, Json]) -> WorkerAsk:
    """Read an ask; fields that are missing or not text are empty.

    One field has two names; `permission` takes precedence.
    """

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

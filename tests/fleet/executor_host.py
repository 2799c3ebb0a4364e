"""Executor test support: a host that records events."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from culm.fleet.executor import Executor, Outcome, SteerMessage
from culm.fleet.protocol.frames import RunSpec
from culm.wire.codec import Json
from tests.support import WAIT_S


@dataclass
class RecordingHost:
    """Implements `EventSink`, `SteerInbox`, `CancelToken` and `RunHost`."""

    events: list[Mapping[str, Json]] = field(default_factory=list[Mapping[str, Json]])
    got_event: asyncio.Event = field(
        default_factory=asyncio.Event
    )  # An event after `execution_started`.
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)
    takes_calls: bool = False

    async def emit(self, event: Mapping[str, Json]) -> None:
        self.events.append(event)
        if event["type"] != "execution_started":
            self.got_event.set()

    async def next(self) -> SteerMessage:
        raise AssertionError("nobody steers here")

    def take_nowait(self) -> list[SteerMessage]:
        return []

    def is_set(self) -> bool:
        return self.cancelled.is_set()

    async def wait(self) -> None:
        await self.cancelled.wait()

    async def ask(self, body: Mapping[str, Json]) -> bool:
        raise AssertionError("nobody is to be asked here")

    async def call(self, args: Mapping[str, Json], tool_call_id: str = "") -> Json:
        raise AssertionError("nobody takes calls here")

    async def run(self, executor: Executor, assignment: str) -> Outcome:
        async with asyncio.timeout(WAIT_S):
            return await executor.run(RunSpec(assignment), self, self, self, self)

    @property
    def text(self) -> str:
        return "".join(event["content"] for event in self.events if event["type"] == "token")

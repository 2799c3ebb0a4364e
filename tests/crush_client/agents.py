"""A server with an agent on a scripted model, and the events that a Crush client gets from it.

Owns the model and the server. The tests check what a TUI shows.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from culm.model.base import ToolSpec
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, Script
from culm.tools.base import CallPlan, CallRequest, CallResult, free_plan
from culm.wire.runs import CrashPolicy
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.events import Sleep, parse_line
from tests.crush_client.screen import Event
from tests.crush_client.servers import open_flow, project, startup_for
from tests.crush_client.startup import Project, Startup
from tests.crush_client.strict import anomalies
from tests.crush_client.types import part_type
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.support import WAIT_S, model_config

TITLE = b"Write a title"  # In every request for a title, and in no other.
GREETING = Reply(text="Greeting", hold_after=0)  # Held until a test releases it.


@dataclass(eq=False)
class Gate:
    """A tool that returns when a test opens it, or when it is canceled."""

    name: str = "wait"
    parallel: bool = False
    crash: CrashPolicy = "ask"
    entered: asyncio.Event = field(default_factory=asyncio.Event)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def spec(self) -> ToolSpec:
        return ToolSpec(self.name, "Waits.", {"type": "object"})

    async def prepare(self, call: CallRequest) -> CallPlan:
        return free_plan(call, lambda _: self.run(call))

    async def run(self, call: CallRequest) -> CallResult:
        self.entered.set()
        await self.opened.wait()
        return CallResult("waited", metadata='{"output":"waited"}')


@dataclass
class Agent:
    """A server with an agent. Created by `open_agent`."""

    flow: FlowServer
    model: ModelServer
    gate: Gate
    _requests_awaited: int = 0

    @property
    def project(self) -> Project:
        return project(self.flow)

    @property
    def startup(self) -> Startup:
        return startup_for(self.flow.url, self.flow.folder)

    async def model_request(self) -> int:
        """Wait for the next model request that is not for a title; returns its number."""
        self._requests_awaited += 1
        number = self._requests_awaited
        await until(lambda: len(self._request_numbers(titles=False)) >= number)
        return self._request_numbers(titles=False)[number - 1]

    async def title_request(self) -> int:
        await until(lambda: bool(self._request_numbers(titles=True)))
        return self._request_numbers(titles=True)[0]

    def _request_numbers(self, *, titles: bool) -> list[int]:
        return [seen.n for seen in self.model.requests if (TITLE in seen.raw) is titles]


@asynccontextmanager
async def open_agent(
    folder: Path,
    kind: str,
    *replies: Reply,
    title: Reply = GREETING,
    rules: Iterable[ReplyRule] = (),
    host: str = "",
    has_real_tools: bool = False,
) -> AsyncGenerator[Agent]:
    """Serve an agent whose model gives these replies in order, and no more."""
    gate = Gate()
    tools = None if has_real_tools else {gate.name: gate}
    script = Script([*replies], [ReplyRule(TITLE.decode(), title), *rules])
    async with (
        asyncio.timeout(WAIT_S),
        open_model_server(script) as model,
        open_flow(folder, kind, host=host, config=model_config(model.url), tools=tools) as flow,
    ):
        yield Agent(flow, model, gate)


@asynccontextmanager
async def open_attached(
    agent: Agent, *, session: str = "", continue_last: bool = False, sleep: Sleep = asyncio.sleep
) -> AsyncGenerator[Tui]:
    """Open a TUI with a connected stream."""
    async with open_tui(
        agent.project, agent.startup, session=session, continue_last=continue_last, sleep=sleep
    ) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        yield tui


# --- received events


def events_of(tui: Tui) -> list[Event]:
    return [event for line in tui.events.lines if (event := parse_line(line)) is not None]


def summary_of(event: Event) -> str:
    """A short description of an event: its type, operation and finish reason."""
    payload = event.payload
    match event.type:
        case "message":
            parts = payload.records("parts")
            ends = [p.text("reason") for p in parts if part_type(p) == "finish"]
            return " ".join(["message", event.op, payload.text("role"), *ends])
        case "agent_event":
            return payload.text("type")
        case "run_complete":
            return "run_complete cancelled" if payload.flag("cancelled") else "run_complete"
        case _:
            return f"{event.type} {event.op}"


def event_summaries(tui: Tui) -> list[str]:
    return [summary_of(event) for event in events_of(tui)]


def conversation(tui: Tui) -> list[tuple[str, str, str]]:
    """The conversation on the screen: role, text and finish reason of each message."""
    return [(item.role, item.text, item.finish) for item in tui.screen.items.values()]


def finishes(tui: Tui) -> list[str]:
    """The finish reason of each message on the screen; empty for an open one."""
    return [item.finish for item in tui.screen.items.values()]


async def until_turn_ended(tui: Tui, *, finish: str = "end_turn") -> None:
    """Wait until the last answer has this finish reason; then the agent is idle.

    After a cancel no other event says so: the client polls again with its next tick.
    """

    await tui.until(lambda: finishes(tui)[-1:] == [finish])
    await tui.polling.agent()
    assert not tui.screen.is_busy


def assert_no_errors(*tuis: Tui) -> None:
    """Check that the client knows every event and that none of its calls failed."""
    for tui in tuis:
        assert [(found, line) for line in tui.events.lines if (found := anomalies(line))] == []
        assert (tui.calls.log, tui.screen.toasts) == ([], [])

"""A server with an agent that asks a scripted model, and what a Crush client is told of its runs.

Owns the model beside the server. What a TUI makes of it is the tests' to say.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from culm.model.base import ToolSpec
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Rule, Script
from culm.tools.base import CallPlan, CallRequest, CallResult, free_plan
from culm.wire.runs import CrashPolicy
from tests.crush_client.client import Tui, open_tui
from tests.crush_client.events import Sleep, parse_line
from tests.crush_client.screen import Event
from tests.crush_client.servers import open_flow, project, startup_for
from tests.crush_client.startup import Project, Startup
from tests.crush_client.strict import surprises
from tests.crush_client.types import part_type
from tests.flow.conftest import FlowServer
from tests.flow.drive import until
from tests.support import WAIT_S, model_config

TITLE = b"Write a title"  # In every request for one, and in no other.
GREETING = Reply(text="Greeting", hold_after=0)  # Not before a test lets it, or never.


@dataclass(eq=False)
class Gate:
    """A tool that answers once it is let, or is cancelled."""

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
    """Made by `open_agent`."""

    flow: FlowServer
    model: ModelServer
    gate: Gate
    _questions: int = 0

    @property
    def project(self) -> Project:
        return project(self.flow)

    @property
    def startup(self) -> Startup:
        return startup_for(self.flow.url, self.flow.folder)

    async def question(self) -> int:
        """Wait for the model's next question that is not for a title; returns its number."""
        self._questions += 1
        wanted = self._questions
        await until(lambda: len(self._asked(titles=False)) >= wanted)
        return self._asked(titles=False)[wanted - 1]

    async def title(self) -> int:
        await until(lambda: bool(self._asked(titles=True)))
        return self._asked(titles=True)[0]

    def _asked(self, *, titles: bool) -> list[int]:
        return [seen.n for seen in self.model.requests if (TITLE in seen.raw) is titles]


@asynccontextmanager
async def open_agent(
    folder: Path,
    kind: str,
    *replies: Reply,
    title: Reply = GREETING,
    rules: Iterable[Rule] = (),
    host: str = "",
    has_real_tools: bool = False,
) -> AsyncGenerator[Agent]:
    """The model gives these replies in order, and nothing after them."""
    gate = Gate()
    tools = None if has_real_tools else {gate.name: gate}
    script = Script([*replies], [Rule(TITLE.decode(), title), *rules])
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
    """A TUI whose stream is open."""
    async with open_tui(
        agent.project, agent.startup, session=session, continue_last=continue_last, sleep=sleep
    ) as tui:
        await tui.events.until(lambda: tui.events.connections == 1)
        yield tui


# --- what it was told


def events_of(tui: Tui) -> list[Event]:
    return [event for line in tui.events.lines if (event := parse_line(line)) is not None]


def words_of(event: Event) -> str:
    """An event in a few words: what it is, what happened to it, and how it ends."""
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


def told(tui: Tui) -> list[str]:
    return [words_of(event) for event in events_of(tui)]


def said(tui: Tui) -> list[tuple[str, str, str]]:
    """The conversation as it is on the screen: role, text, how it ended."""
    return [(item.role, item.text, item.finish) for item in tui.screen.items.values()]


def finishes(tui: Tui) -> list[str]:
    """How each message on the screen has ended; empty for one that is open."""
    return [item.finish for item in tui.screen.items.values()]


async def until_over(tui: Tui, *, finish: str = "end_turn") -> None:
    """Wait until the last answer has ended so; from then on nobody is busy.

    After a cancel nothing else says so: the client asks again with its next tick.
    """

    await tui.until(lambda: finishes(tui)[-1:] == [finish])
    await tui.polling.agent()
    assert not tui.screen.is_busy


def assert_flawless(*tuis: Tui) -> None:
    """Every event was one the client knows, and no call of it failed."""
    for tui in tuis:
        assert [(odd, line) for line in tui.events.lines if (odd := surprises(line))] == []
        assert (tui.calls.log, tui.screen.toasts) == ([], [])

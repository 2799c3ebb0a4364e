"""The status of a tree at one moment, read from its mirror."""

import msgspec

from culm.cli.terminal.status_area import AgentStatus, RunStatus, UsageSummary, call_text
from culm.client.stream import ServerEvent
from culm.client.tree import SessionTree
from culm.ids import AgentId, MessageId, RunId, SessionId
from culm.tools.registry import SPECS
from culm.wire.agents import Agent, AgentState, Waiting
from culm.wire.codec import encode
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Session,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from culm.wire.runs import RunChanged, State

TOOLS = {spec.name: spec.info() for spec in SPECS}

TOP = SessionId("top")
OURS = RunId("ours")
NOW_S = 107.5


class SummaryHarness:
    """A tree that receives events, and a usage summary of it."""

    def __init__(self, state: State = "active", *, tokens: int = 0, cost: float = 0.0) -> None:
        self.tree = SessionTree(TOP, OURS)
        self._seq = 0
        self.set_usage(tokens, 0, cost)
        self.summary = UsageSummary(self.tree, OURS, 100.0, TOOLS)
        self.apply("run_changed", RunChanged(OURS, TOP, state, 1, run_id_given=True))

    def apply(self, type_: str, payload: msgspec.Struct) -> None:
        self._seq += 1
        self.tree.apply(
            ServerEvent(type_, "updated", msgspec.Raw(encode(payload)), f"e.{self._seq}")
        )

    def set_usage(self, prompt: int, completion: int, cost: float) -> None:
        self.apply("session", Session(TOP, "", "t", 0, prompt, completion, cost=cost))

    def answer(self, name: str, *calls: str, session: str = TOP, is_whole: bool = True) -> None:
        parts: list[Part] = [
            ToolCallPart(ToolCall(call, "bash", f'{{"command":"{call}"}}', finished=is_whole))
            for call in calls
        ]
        if is_whole:
            parts.append(FinishPart(Finish("tool_use", 1)))
        session_id = SessionId(session)
        message = Message(MessageId(name), "assistant", session_id, parts, "m", "p")
        self.apply("message", message)

    def result(self, call: str) -> None:
        parts: list[Part] = [ToolResultPart(ToolResult(call, "bash", "done"))]
        self.apply("message", Message(MessageId(f"r-{call}"), "tool", TOP, parts))

    def agent(
        self,
        name: str,
        *,
        above: str = TOP,
        state: AgentState = "running",
        waits: Waiting = "",
        tokens: int = 0,
    ) -> None:
        session_id = SessionId(f"s-{name}")
        agent = Agent(AgentId(name), "", session_id, above, name=name, state=state)
        agent.tokens, agent.waiting_for = tokens, waits
        known = session_id in self.tree.branches
        self.apply("agent_changed" if known else "agent_started", agent)

    def status(self) -> RunStatus:
        return self.summary.status(NOW_S)


def test_call_is_active_until_it_has_a_result() -> None:
    harness = SummaryHarness()
    assert harness.status() == RunStatus("", 7.5, calls=[], state="asks the model", agents=[])
    harness.answer("1", is_whole=False)
    assert (harness.status().model, harness.status().state) == ("p/m", "thinks")
    harness.answer("1", "make", is_whole=False)
    assert (harness.status().calls, harness.status().state) == ([], "writes")
    harness.answer("1", "make", "ls")
    assert harness.status().calls == ["bash make", "bash ls"]
    harness.result("make")
    assert harness.status().calls == ["bash ls"]
    harness.result("ls")
    assert (harness.status().calls, harness.status().state) == ([], "asks the model")


def test_agent_call_is_shown_without_its_arguments() -> None:
    call = ToolCall("c", "agent", '{"prompt":"mend it"}', finished=True)
    assert call_text(call, TOOLS) == "agent"


def test_calls_of_another_run_are_not_shown() -> None:
    harness = SummaryHarness("queued")
    harness.answer("1", "make")
    assert (harness.status().calls, harness.status().state) == ([], "waits for its turn")


def test_only_usage_of_the_run_itself_is_counted() -> None:
    harness = SummaryHarness(tokens=5000, cost=1.5)
    assert (harness.status().tokens, harness.status().cost) == (0, 0)
    for prompt in (
        5100,
        5200,
    ):  # A session has the usage of its latest step, with the whole context.
        harness.set_usage(prompt, 10, 1.75)
        harness.summary.count()
    assert (harness.status().tokens, harness.status().cost) == (10_320, 0.25)


def test_usage_of_an_ended_agent_is_still_counted() -> None:
    harness = SummaryHarness()
    harness.agent("one")
    harness.agent("below", above="s-one")
    harness.summary.count()
    harness.agent("one", tokens=300)  # Including the tokens of the agent below.
    harness.agent("below", above="s-one", tokens=200)
    assert harness.status().tokens == 300
    harness.agent("one", state="ended", tokens=400)
    harness.summary.count()
    harness.tree.drop(SessionId("s-one"))
    assert harness.status().tokens == 400
    assert [agent.label for agent in harness.status().agents] == ["below"]


def test_agents_are_listed_below_their_parents() -> None:
    harness = SummaryHarness()
    harness.agent("a", tokens=5)
    harness.agent("b", state="pending")
    harness.agent("a1", above="s-a", waits="ask")
    harness.agent("a2", above="s-a1", waits="agents")
    harness.agent("c")
    harness.agent("d", waits="agents")
    harness.answer("x", "make", session="s-a")
    harness.answer("y", "agent", session="s-d")
    assert harness.status().agents == [
        AgentStatus("a", "bash make", 5),
        AgentStatus("a1", "waits for permission", depth=1),
        AgentStatus("a2", "waits for its agents", depth=2),
        AgentStatus("b", "starts"),
        AgentStatus("c", "asks the model"),
        AgentStatus("d", "bash agent"),
    ]


def test_agents_with_the_same_name_are_numbered() -> None:
    harness = SummaryHarness()
    for name in ("1", "2"):
        agent = Agent(AgentId(name), "", SessionId(f"s-{name}"), TOP, name="same", state="running")
        harness.apply("agent_started", agent)
    assert [agent.label for agent in harness.status().agents] == ["same", "same 2"]

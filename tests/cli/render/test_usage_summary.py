"""What a tree does at one moment, read from its mirror."""

import msgspec

from culm.cli.render.usage_summary import UsageSummary, call_text
from culm.cli.terminal.status_lines import AgentStatus, RunStatus
from culm.client.stream import ServerEvent
from culm.client.tree import SessionTree
from culm.ids import AgentId, MessageId, RunId, SessionId
from culm.wire.agents import Agent, AgentState, Waiting
from culm.wire.codec import encode
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from culm.wire.runs import RunChanged, State
from culm.wire.sessions import Session

TOP = SessionId("top")
OURS = RunId("ours")
NOW_S = 107.5


class Stage:
    """A tree that is told events, and a meter that looks at it."""

    def __init__(self, state: State = "active", *, tokens: int = 0, cost: float = 0.0) -> None:
        self.tree = SessionTree(TOP, OURS)
        self._seq = 0
        self.used(tokens, 0, cost)
        self.meter = UsageSummary(self.tree, OURS, 100.0)
        self.tell("run_changed", RunChanged(OURS, TOP, state, 1, run_id_given=True))

    def tell(self, type_: str, payload: msgspec.Struct) -> None:
        self._seq += 1
        self.tree.apply(
            ServerEvent(type_, "updated", msgspec.Raw(encode(payload)), f"e.{self._seq}")
        )

    def used(self, prompt: int, completion: int, cost: float) -> None:
        self.tell("session", Session(TOP, "", "t", 0, prompt, completion, cost=cost))

    def answer(self, name: str, *calls: str, session: str = TOP, is_whole: bool = True) -> None:
        parts: list[Part] = [
            ToolCallPart(ToolCall(call, "bash", f'{{"command":"{call}"}}', finished=is_whole))
            for call in calls
        ]
        if is_whole:
            parts.append(FinishPart(Finish("tool_use", 1)))
        session_id = SessionId(session)
        message = Message(MessageId(name), "assistant", session_id, parts, "m", "p")
        self.tell("message", message)

    def result(self, call: str) -> None:
        parts: list[Part] = [ToolResultPart(ToolResult(call, "bash", "done"))]
        self.tell("message", Message(MessageId(f"r-{call}"), "tool", TOP, parts))

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
        self.tell("agent_changed" if known else "agent_started", agent)

    def doing(self) -> RunStatus:
        return self.meter.doing(NOW_S)


def test_calls_go_on_until_they_have_a_result() -> None:
    stage = Stage()
    assert stage.doing() == RunStatus("", 7.5, calls=[], state="asks the model", agents=[])
    stage.answer("1", is_whole=False)
    assert (stage.doing().model, stage.doing().state) == ("p/m", "thinks")
    stage.answer("1", "make", is_whole=False)
    assert (stage.doing().calls, stage.doing().state) == ([], "writes")
    stage.answer("1", "make", "ls")
    assert stage.doing().calls == ["bash make", "bash ls"]
    stage.result("make")
    assert stage.doing().calls == ["bash ls"]
    stage.result("ls")
    assert (stage.doing().calls, stage.doing().state) == ([], "asks the model")


def test_a_call_that_starts_agents_leaves_the_room_to_them() -> None:
    call = ToolCall("c", "agent", '{"prompt":"mend it"}', finished=True)
    assert call_text(call) == "agent"


def test_what_another_run_does_is_not_told_as_ours() -> None:
    stage = Stage("queued")
    stage.answer("1", "make")
    assert (stage.doing().calls, stage.doing().state) == ([], "waits for its turn")


def test_only_what_the_run_itself_uses_is_counted() -> None:
    stage = Stage(tokens=5000, cost=1.5)
    assert (stage.doing().tokens, stage.doing().cost) == (0, 0)
    for prompt in (5100, 5200):  # A session knows its latest step, with all that was said before.
        stage.used(prompt, 10, 1.75)
        stage.meter.count()
    assert (stage.doing().tokens, stage.doing().cost) == (10_320, 0.25)


def test_an_agent_that_has_ended_is_still_counted() -> None:
    stage = Stage()
    stage.agent("one")
    stage.agent("below", above="s-one")
    stage.meter.count()
    stage.agent("one", tokens=300)  # With those of the one below.
    stage.agent("below", above="s-one", tokens=200)
    assert stage.doing().tokens == 300
    stage.agent("one", state="ended", tokens=400)
    stage.meter.count()
    stage.tree.drop(SessionId("s-one"))
    assert stage.doing().tokens == 400
    assert [agent.label for agent in stage.doing().agents] == ["below"]


def test_agents_stand_below_those_they_work_for() -> None:
    stage = Stage()
    stage.agent("a", tokens=5)
    stage.agent("b", state="pending")
    stage.agent("a1", above="s-a", waits="ask")
    stage.agent("a2", above="s-a1", waits="agents")
    stage.agent("c")
    stage.agent("d", waits="agents")
    stage.answer("x", "make", session="s-a")
    stage.answer("y", "agent", session="s-d")
    assert stage.doing().agents == [
        AgentStatus("a", "bash make", 5),
        AgentStatus("a1", "waits for permission", depth=1),
        AgentStatus("a2", "waits for its agents", depth=2),
        AgentStatus("b", "starts"),
        AgentStatus("c", "asks the model"),
        AgentStatus("d", "bash agent"),
    ]


def test_agents_of_one_name_are_told_apart() -> None:
    stage = Stage()
    for name in ("1", "2"):
        agent = Agent(AgentId(name), "", SessionId(f"s-{name}"), TOP, name="same", state="running")
        stage.tell("agent_started", agent)
    assert [agent.label for agent in stage.doing().agents] == ["same", "same 2"]

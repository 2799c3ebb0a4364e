"""Incremental views: a new state of a run and its agents shows only its additions."""

from msgspec.structs import replace

from culm.cli.render.incremental_view import RunView, TreeView
from culm.client.mirror import Mirror
from culm.client.tree import AgentBranch, SessionTree
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged
from culm.wire.messages import (
    Finish,
    FinishPart,
    Message,
    Part,
    Text,
    TextPart,
    ToolCall,
    ToolCallPart,
    ToolResult,
    ToolResultPart,
)
from culm.wire.runs import Run, RunChanged, State


class RecordingRenderer:
    """A renderer that records its calls."""

    def __init__(self, name: str = "") -> None:
        self.seen: list[tuple[str, str]] = []
        self._name = name

    def user_message(self, message_id: MessageId, text: str) -> None:
        self.seen.append((f"{self._name}user", text))

    def text(self, message_id: MessageId, text: str) -> None:
        self.seen.append((f"{self._name}text {message_id}", text))

    def restarted(self, message_id: MessageId) -> None:
        self.seen.append(("again", message_id))

    def call(self, call: ToolCall) -> None:
        self.seen.append((f"{self._name}call", call.name))

    def output(self, call_id: str, text: str) -> None:
        self.seen.append((f"output {call_id}", text))

    def result(self, result: ToolResult) -> None:
        self.seen.append((f"{self._name}result", result.content))

    def allowed(self, call: ToolCall) -> None:
        self.seen.append((f"{self._name}allowed", call.name))

    def ask(self, ask: AskChanged) -> None:
        self.seen.append((f"{self._name}ask", ask.description))

    def answered(self, ask: AskChanged, *, by_us: bool) -> None:
        self.seen.append((f"{self._name}answered", f"{ask.state} {by_us}"))

    def note(self, text: str) -> None:
        self.seen.append(("note", text))

    def agent(self, agent: Agent) -> "RecordingRenderer":
        renderer = RecordingRenderer(f"{agent.name}: ")
        renderer.seen = self.seen
        return renderer

    def started(self, agent: Agent) -> None:
        self.seen.append((f"{self._name}started", agent.state))

    def ended(self, agent: Agent) -> None:
        self.seen.append((f"{self._name}ended", agent.outcome or ""))

    def end(self, run: Run, text: str, agents: int = 0) -> None:
        self.seen.append(("end", text))


def answer(
    name: str, text: str, *, rev: int = 0, finished: bool = False, run_id: str = "ours"
) -> Message:
    parts: list[Part] = [TextPart(Text(text))]
    if finished:
        parts.append(FinishPart(Finish("end_turn", 1)))
    return Message(MessageId(name), "assistant", SESSION, parts, rev=rev, run_id=run_id)


SESSION = SessionId("s")
OURS = RunId("ours")


def show(renderer: RecordingRenderer, *states: tuple[State, list[Message]]) -> list[bool]:
    """Show the run in each state in turn; messages add up."""
    mirror = Mirror()
    shown = RunView(renderer, OURS)
    live: list[bool] = []
    for state, messages in states:
        mirror.runs.clear()
        if state != "ended":
            mirror.runs[OURS] = RunChanged(OURS, SESSION, state, 1, run_id_given=True)
        for message in messages:
            mirror.put_message(message)
        live.append(shown.show(mirror))
    return live


def test_growing_text_is_shown_once() -> None:
    renderer = RecordingRenderer()
    over = show(
        renderer,
        ("active", [answer("1", "One")]),
        ("active", [answer("1", "One, two")]),
        ("active", [answer("1", "One, two", rev=1, finished=True)]),
        ("active", [answer("2", "Three")]),
        ("ended", [answer("2", "Three", rev=1, finished=True)]),
    )
    assert renderer.seen == [("text 1", "One"), ("text 1", ", two"), ("text 2", "Three")]
    assert over == [False, False, False, False, True]


def test_restarted_answer_is_shown_again_from_the_start() -> None:
    renderer = RecordingRenderer()
    show(
        renderer,
        ("active", [answer("1", "One, tw")]),
        ("active", [answer("1", "Two", rev=1)]),
        ("active", [answer("1", "Two, three", rev=2, finished=True)]),
    )
    assert renderer.seen == [
        ("text 1", "One, tw"),
        ("again", "1"),
        ("text 1", "Two"),
        ("text 1", ", three"),
    ]


def test_text_lost_in_a_crash_is_noted_and_not_repeated() -> None:
    renderer = RecordingRenderer()
    show(
        renderer,
        ("active", [answer("1", "One, two")]),
        ("ended", [answer("1", "One", rev=1, finished=True)]),
    )
    assert renderer.seen == [("text 1", "One, two"), ("note", "(the last 5 characters were lost)")]


def test_messages_of_other_runs_are_not_shown_while_queued() -> None:
    renderer = RecordingRenderer()
    show(
        renderer,
        ("queued", [answer("1", "Theirs", run_id="theirs")]),
        ("active", [answer("1", "Theirs.", finished=True, run_id="theirs"), answer("2", "Ours")]),
    )
    assert renderer.seen == [("text 2", "Ours")]


def test_call_output_and_asks_are_shown_before_the_result() -> None:
    renderer, mirror = RecordingRenderer(), Mirror()
    shown = RunView(renderer, OURS, "me")
    mirror.runs[OURS] = RunChanged(OURS, SESSION, "active", 1, run_id_given=True)
    parts = [ToolCallPart(ToolCall(name, name, "{}", finished=True)) for name in ("a", "b")]
    mirror.put_message(Message(MessageId("1"), "assistant", SESSION, list(parts), run_id=OURS))
    mirror.outputs["a"] = "on"
    shown.show(mirror)
    mirror.outputs["a"] = "one\n"
    mirror.granted["b"] = None
    ask = AskChanged(AskId("x"), SESSION, OURS, "a", "a", "execute", "Do a", "", "open")
    mirror.asks[ask.ask_id] = ask
    shown.show(mirror)
    mirror.asks[ask.ask_id] = replace(ask, state="allowed", by="me")
    mirror.granted["a"] = None
    results: list[Part] = [ToolResultPart(ToolResult(name, name, name)) for name in ("a", "b")]
    mirror.put_message(Message(MessageId("2"), "tool", SESSION, results, run_id=OURS))
    shown.show(mirror)
    assert renderer.seen == [
        *(("call", "a"), ("call", "b"), ("output a", "on")),
        *(("ask", "Do a"), ("allowed", "b"), ("output a", "e\n")),
        *(("answered", "allowed True"), ("result", "a"), ("result", "b")),
    ]


# --- with agents


def calling(session_id: SessionId, name: str) -> Message:
    parts: list[Part] = [ToolCallPart(ToolCall("c", name, "{}", finished=True))]
    return Message(MessageId(f"{session_id} 1"), "assistant", session_id, parts, run_id=OURS)


def result(session_id: SessionId, content: str) -> Message:
    parts: list[Part] = [ToolResultPart(ToolResult("c", "agent", content))]
    return Message(MessageId(f"{session_id} 2"), "tool", session_id, parts, run_id=OURS)


def put(tree: SessionTree, agent: Agent, *messages: Message) -> None:
    branch = tree.branches.setdefault(agent.session_id, AgentBranch(agent))
    branch.agent = agent
    tree.touched[agent.session_id] = None
    for message in messages:
        tree.put_message(message)


def test_agents_are_shown_between_their_call_and_its_result() -> None:
    renderer, tree = RecordingRenderer(), SessionTree(SESSION, OURS)
    shown = TreeView(renderer, OURS, tree, "me")
    outer = Agent(AgentId("o"), "s", SessionId("so"), name="outer")
    inner = Agent(AgentId("i"), "o", SessionId("si"), name="inner")
    # Everything arrives before the first `show`.
    tree.runs[OURS] = RunChanged(OURS, SESSION, "active", 1, run_id_given=True)
    tree.put_message(calling(SESSION, "agent"))
    put(tree, outer, calling(outer.session_id, "agent"))
    looking = answer("words", "I look.", finished=True)
    put(tree, replace(inner, state="ended", outcome="error"), replace(looking, session_id="si"))
    put(tree, outer, result(outer.session_id, "inner failed"))
    tree.put_message(result(SESSION, "outer did"))
    assert not shown.show(tree)
    assert renderer.seen == [
        *(("call", "agent"), ("outer: started", "pending"), ("outer: call", "agent")),
        *(("inner: started", "ended"), ("inner: text words", "I look."), ("inner: ended", "error")),
        *(("outer: result", "inner failed"), ("result", "outer did")),
    ]
    assert ([agent.name for agent in shown.running_agents()], shown.agents) == (["outer"], 2)


def test_resumed_agent_is_shown_again_without_its_earlier_text() -> None:
    renderer, tree = RecordingRenderer(), SessionTree(SESSION, OURS)
    shown = TreeView(renderer, OURS, tree)
    agent = Agent(AgentId("a"), "s", SessionId("sa"), name="a")
    ended = replace(agent, state="ended", outcome="completed")
    first = replace(answer("1", "One.", finished=True), session_id=agent.session_id)
    second = replace(answer("2", "Two.", finished=True), session_id=agent.session_id)
    put(tree, agent)
    shown.show(tree)
    put(tree, ended, first)
    shown.show(tree)
    assert tree.branches == {}
    # The whole session is loaded again, after a gap in the events.
    put(tree, ended, first, second)
    shown.show_all()
    assert renderer.seen == [
        *(("a: started", "pending"), ("a: text 1", "One."), ("a: ended", "completed")),
        *(("a: started", "ended"), ("a: text 2", "Two."), ("a: ended", "completed")),
    ]
    assert shown.agents == 1


def test_ask_of_an_agent_is_shown_for_any_of_its_runs() -> None:
    renderer, tree = RecordingRenderer(), SessionTree(SESSION, OURS)
    shown = TreeView(renderer, OURS, tree, "me")
    agent = Agent(AgentId("a"), "s", SessionId("sa"), name="a", state="running")
    put(tree, agent)
    mirror = tree.branches[agent.session_id].mirror
    ask = AskChanged(
        *(AskId("x"), agent.session_id, RunId("its"), "c", "bash", "execute", "Do it", ""),
        state="open",
    )
    for state in (ask, replace(ask, state="denied", by="other")):
        mirror.asks[ask.ask_id] = state
        put(tree, agent)
        shown.show(tree)
    assert renderer.seen == [
        *(("a: started", "running"), ("a: ask", "Do it"), ("a: answered", "denied False")),
    ]

"""A session tree: the events of a run and of its agents."""

import asyncio
from pathlib import Path

import msgspec
from msgspec.structs import replace

from culm.client.mirror import DeltaGap
from culm.client.stream import ServerEvent
from culm.client.tree import SessionTree, load_tree, open_tree
from culm.ids import AgentId, AskId, MessageId, RunId, SessionId
from culm.wire.agents import Agent
from culm.wire.asks import AskChanged, PermissionNotification, QuestionChanged
from culm.wire.codec import encode
from culm.wire.events import CallOutput, MessageDelta
from culm.wire.messages import Message, Session, Text, TextPart, full_text
from culm.wire.runs import RunChanged, State
from culm.wire.workspaces import Snapshot, StoreHealth
from tests.flow.agents_harness import held, open_agents, start, talk
from tests.support import WAIT_S

TOP = SessionId("top")
OURS = RunId("ours")
GRANTED = PermissionNotification("d", granted=True, session_id="s-one")


class TreeHarness:
    """Applies numbered events to a tree."""

    def __init__(self, state: State = "active") -> None:
        self.tree = SessionTree(TOP, OURS)
        self._seq = 0
        self.run(state)

    def apply(self, type_: str, payload: msgspec.Struct, op: str = "updated") -> DeltaGap | None:
        self._seq += 1
        return self.tree.apply(
            ServerEvent(type_, op, msgspec.Raw(encode(payload)), f"e.{self._seq}")
        )

    def run(self, state: State) -> None:
        self.apply("run_changed", RunChanged(OURS, TOP, state, 1, run_id_given=True))

    def agent(self, agent: Agent, type_: str = "agent_started") -> None:
        self.apply(type_, agent)

    def names(self) -> list[str]:
        return [branch.agent.name for branch in self.tree.branches.values()]


def agent(name: str, above: str = TOP) -> Agent:
    session_id = SessionId(f"s-{name}")
    parent = above.removeprefix("s-")
    return Agent(AgentId(name), parent, session_id, parent_session_id=above, name=name)


def message(session_id: str, text: str, name: str = "m") -> Message:
    return Message(MessageId(name), "assistant", SessionId(session_id), [TextPart(Text(text))])


def ask_event(session_id: str, name: str = "ask", run_id: str = "theirs") -> AskChanged:
    return AskChanged(
        *(AskId(name), SessionId(session_id), RunId(run_id), "c", "bash", "execute", "Do", ""),
        state="open",
    )


def test_only_agents_of_the_run_are_followed_at_any_depth() -> None:
    harness = TreeHarness("queued")
    harness.agent(agent("before"))  # An agent of the run ahead in the queue.
    harness.run("active")
    harness.agent(agent("one"))
    harness.agent(agent("below", "s-one"))
    harness.agent(agent("deep", "s-below"))
    harness.agent(agent("theirs", "elsewhere"))
    harness.agent(replace(agent("earlier"), state="running"), "agent_changed")
    harness.agent(replace(agent("gone"), state="ended"), "agent_changed")
    assert harness.names() == ["one", "below", "deep"]
    assert harness.tree.agent_names([TOP, "one", "deep", "0123456789"]) == [
        "one",
        "deep",
        "01234567",
    ]


def test_sessions_with_equal_call_ids_have_separate_state() -> None:
    harness = TreeHarness()
    harness.agent(agent("one"))
    for session_id in (TOP, "s-one", "elsewhere"):
        assert harness.apply("message", message(session_id, "", f"m-{session_id}")) is None
        delta = MessageDelta(
            MessageId(f"m-{session_id}"), SessionId(session_id), 0, 0, "text", 0, session_id
        )
        assert harness.apply("message_delta", delta) is None
        harness.apply("call_output", CallOutput(SessionId(session_id), "c", 0, f"out {session_id}"))
        harness.apply("permission_notification", PermissionNotification("c", session_id=session_id))
        harness.apply("session", Session(SessionId(session_id)))
    harness.apply("permission_notification", GRANTED)
    tree = harness.tree
    branch = tree.branches[SessionId("s-one")].mirror
    assert [full_text(one.parts) for one in tree.messages.values()] == [TOP]
    assert [full_text(one.parts) for one in branch.messages.values()] == ["s-one"]
    assert (tree.outputs, branch.outputs) == ({"c": "out top"}, {"c": "out s-one"})
    assert (tree.granted, branch.granted) == ({}, {"d": None})
    assert list(tree.sessions) == [TOP]


def test_gap_in_the_text_of_an_agent_is_filled_in_its_branch() -> None:
    harness = TreeHarness()
    harness.agent(agent("one"))
    harness.tree.touched.clear()
    delta = MessageDelta(MessageId("m"), SessionId("s-one"), 1, 0, "text", 4, "more")
    assert harness.apply("message_delta", delta) == DeltaGap(SessionId("s-one"), MessageId("m"))
    harness.tree.put_message(message("s-one", "all more"))
    harness.tree.put_message(message("elsewhere", "theirs"))
    assert list(harness.tree.touched) == ["s-one"]
    assert (len(harness.tree.branches[SessionId("s-one")].mirror.messages)) == 1
    assert harness.tree.messages == {}


def test_dropped_agent_returns_when_it_is_resumed() -> None:
    harness = TreeHarness()
    one = agent("one")
    harness.agent(one)
    harness.agent(replace(one, state="ended"), "agent_ended")
    harness.tree.drop(one.session_id)
    harness.agent(replace(one, state="ended", tokens=5), "agent_changed")
    assert (harness.names(), list(harness.tree.touched)) == ([], [])
    harness.agent(replace(one, state="pending"), "agent_changed")
    assert harness.names() == ["one"]
    harness.apply("agent_ended", replace(one, state="running"), "deleted")
    assert harness.tree.branches[one.session_id].agent.state == "ended"


def test_asks_of_the_tree_are_open_until_answered_or_dropped() -> None:
    harness = TreeHarness()
    one, two = agent("one"), agent("two")
    harness.agent(one)
    harness.agent(two)
    own = ask_event(TOP, "own", OURS)
    form = QuestionChanged(AskId("form"), two.session_id, RunId("r"), "c", "open")
    for ask in (
        own,
        ask_event(TOP, "other"),
        ask_event(one.session_id),
        ask_event("elsewhere", "theirs"),
    ):
        harness.apply("ask_changed", ask)
    harness.apply("question_changed", form)
    tree = harness.tree
    assert list(tree.all_asks()) == [own, ask_event(one.session_id), form]
    assert [tree.is_closed(ask) for ask in (own, ask_event(one.session_id), form)] == [False] * 3
    harness.apply("ask_changed", replace(ask_event(one.session_id), state="allowed"))
    harness.apply("ask_changed", replace(own, state="expired"))
    tree.drop(two.session_id)
    assert [tree.is_closed(ask) for ask in (own, ask_event(one.session_id), form)] == [True] * 3


def test_reload_after_an_event_gap_adds_new_agents() -> None:
    harness = TreeHarness()
    one = agent("one")
    harness.agent(one)
    harness.apply("message", message(one.session_id, "old"))
    harness.apply("ask_changed", ask_event(one.session_id))
    tree = harness.tree
    detached = replace(agent("detached"), is_detached=True, state="running")
    now = [replace(one, state="ended"), agent("new"), agent("below", "s-new"), detached]
    assert tree.add_agents(now)
    assert not tree.add_agents(now)
    assert tree.session_ids() == [TOP, "s-one", "s-new", "s-below"]
    messages = [message(TOP, "top"), message("s-one", "whole"), message("s-new", "new")]
    tree.load(Snapshot("e.9", [], messages, [], [], [], StoreHealth("ok")))
    kept = [
        [full_text(one.parts) for one in mirror.messages.values()]
        for mirror in (tree, *(branch.mirror for branch in tree.branches.values()))
    ]
    assert kept == [["top"], ["whole"], ["new"], []]
    assert list(tree.touched) == ["s-one", "s-new", "s-below"]
    # Its state comes with the new stream; until then it counts as open.
    assert not tree.is_closed(ask_event(one.session_id))


async def test_late_and_early_followers_have_the_same_tree(
    tmp_path: Path,
) -> None:
    nested = (talk("@lead", start("@ann: go")), talk("@ann", start("@bob: go")))
    async with (
        open_agents(tmp_path, *nested, talk("@bob", held("I looked."))) as agents,
        asyncio.timeout(WAIT_S),
        open_tree(agents.remote, agents.session_id, OURS) as (follower, stayed),
    ):
        await follower.connected()
        away = SessionTree(agents.session_id, OURS)
        await load_tree(agents.remote, away)
        await agents.prompt("@lead: go", run_id=OURS)
        seen = await agents.until_asked_by("@bob")
        await agents.until_agent("@bob", lambda one: one.state == "running")
        await load_tree(agents.remote, away)
        await follower.until(
            lambda _: len(stayed.branches) == 2 and state_of(away) == state_of(stayed)
        )
        agents.release(seen)
        await agents.received.complete(OURS)
        await load_tree(agents.remote, away)
        await follower.until(lambda _: state_of(away) == state_of(stayed))
        (*_, bob) = stayed.branches.values()
        assert (bob.agent.outcome, bob.agent.depth) == ("completed", 2)
        assert [full_text(one.parts) for one in bob.mirror.messages.values()][-1] == "I looked."


def state_of(tree: SessionTree) -> list[object]:
    branches = tree.branches.values()
    return [
        (one.agent.name, one.agent.state, list(one.mirror.messages.values())) for one in branches
    ]

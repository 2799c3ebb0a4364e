"""Which of a workspace's events belong to a run and to those who work for it."""

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
from culm.wire.messages import Message, Text, TextPart, full_text
from culm.wire.runs import RunChanged, State
from culm.wire.sessions import Session
from culm.wire.state import Snapshot, StoreHealth
from tests.flow.agents_stage import held, open_agents, start, talk
from tests.support import WAIT_S

TOP = SessionId("top")
OURS = RunId("ours")
GRANTED = PermissionNotification("d", granted=True, session_id="s-one")


class Teller:
    """Tells a tree events, numbered as a log does."""

    def __init__(self, state: State = "active") -> None:
        self.tree = SessionTree(TOP, OURS)
        self._seq = 0
        self.run(state)

    def tell(self, type_: str, payload: msgspec.Struct, op: str = "updated") -> DeltaGap | None:
        self._seq += 1
        return self.tree.apply(
            ServerEvent(type_, op, msgspec.Raw(encode(payload)), f"e.{self._seq}")
        )

    def run(self, state: State) -> None:
        self.tell("run_changed", RunChanged(OURS, TOP, state, 1, run_id_given=True))

    def agent(self, agent: Agent, type_: str = "agent_started") -> None:
        self.tell(type_, agent)

    def names(self) -> list[str]:
        return [branch.agent.name for branch in self.tree.branches.values()]


def agent(name: str, above: str = TOP) -> Agent:
    session_id = SessionId(f"s-{name}")
    parent = above.removeprefix("s-")
    return Agent(AgentId(name), parent, session_id, parent_session_id=above, name=name)


def said(session_id: str, text: str, name: str = "m") -> Message:
    return Message(MessageId(name), "assistant", SessionId(session_id), [TextPart(Text(text))])


def asked(session_id: str, name: str = "ask", run_id: str = "theirs") -> AskChanged:
    return AskChanged(
        *(AskId(name), SessionId(session_id), RunId(run_id), "c", "bash", "execute", "Do", ""),
        state="open",
    )


def test_agents_of_the_run_are_followed_at_any_depth_and_no_others() -> None:
    teller = Teller("queued")
    teller.agent(agent("before"))  # Of the run that this one waits for.
    teller.run("active")
    teller.agent(agent("one"))
    teller.agent(agent("below", "s-one"))
    teller.agent(agent("deep", "s-below"))
    teller.agent(agent("theirs", "elsewhere"))
    teller.agent(replace(agent("earlier"), state="running"), "agent_changed")
    teller.agent(replace(agent("gone"), state="ended"), "agent_changed")
    assert teller.names() == ["one", "below", "deep"]
    assert teller.tree.titles([TOP, "one", "deep", "0123456789"]) == ["one", "deep", "01234567"]


def test_each_session_has_its_own_state_though_ids_of_calls_are_the_same() -> None:
    teller = Teller()
    teller.agent(agent("one"))
    for session_id in (TOP, "s-one", "elsewhere"):
        assert teller.tell("message", said(session_id, "", f"m-{session_id}")) is None
        delta = MessageDelta(
            MessageId(f"m-{session_id}"), SessionId(session_id), 0, 0, "text", 0, session_id
        )
        assert teller.tell("message_delta", delta) is None
        teller.tell("call_output", CallOutput(SessionId(session_id), "c", 0, f"out {session_id}"))
        teller.tell("permission_notification", PermissionNotification("c", session_id=session_id))
        teller.tell("session", Session(SessionId(session_id)))
    teller.tell("permission_notification", GRANTED)
    tree = teller.tree
    branch = tree.branches[SessionId("s-one")].mirror
    assert [full_text(one.parts) for one in tree.messages.values()] == [TOP]
    assert [full_text(one.parts) for one in branch.messages.values()] == ["s-one"]
    assert (tree.outputs, branch.outputs) == ({"c": "out top"}, {"c": "out s-one"})
    assert (tree.granted, branch.granted) == ({}, {"d": None})
    assert list(tree.sessions) == [TOP]


def test_a_gap_in_an_agents_text_is_filled_where_it_belongs() -> None:
    teller = Teller()
    teller.agent(agent("one"))
    teller.tree.touched.clear()
    delta = MessageDelta(MessageId("m"), SessionId("s-one"), 1, 0, "text", 4, "more")
    assert teller.tell("message_delta", delta) == DeltaGap(SessionId("s-one"), MessageId("m"))
    teller.tree.put_message(said("s-one", "all more"))
    teller.tree.put_message(said("elsewhere", "theirs"))
    assert list(teller.tree.touched) == ["s-one"]
    assert (len(teller.tree.branches[SessionId("s-one")].mirror.messages)) == 1
    assert teller.tree.messages == {}


def test_an_agent_that_was_dropped_comes_again_when_it_is_given_more() -> None:
    teller = Teller()
    one = agent("one")
    teller.agent(one)
    teller.agent(replace(one, state="ended"), "agent_ended")
    teller.tree.drop(one.session_id)
    teller.agent(replace(one, state="ended", tokens=5), "agent_changed")
    assert (teller.names(), list(teller.tree.touched)) == ([], [])
    teller.agent(replace(one, state="pending"), "agent_changed")
    assert teller.names() == ["one"]
    teller.tell("agent_ended", replace(one, state="running"), "deleted")
    assert teller.tree.branches[one.session_id].agent.state == "ended"


def test_what_is_asked_is_of_the_run_and_its_agents_until_it_is_answered_or_they_are_gone() -> None:
    teller = Teller()
    one, two = agent("one"), agent("two")
    teller.agent(one)
    teller.agent(two)
    own = asked(TOP, "own", OURS)
    form = QuestionChanged(AskId("form"), two.session_id, RunId("r"), "c", "open")
    for ask in (own, asked(TOP, "other"), asked(one.session_id), asked("elsewhere", "theirs")):
        teller.tell("ask_changed", ask)
    teller.tell("question_changed", form)
    tree = teller.tree
    assert list(tree.asked()) == [own, asked(one.session_id), form]
    assert [tree.is_closed(ask) for ask in (own, asked(one.session_id), form)] == [False] * 3
    teller.tell("ask_changed", replace(asked(one.session_id), state="allowed"))
    teller.tell("ask_changed", replace(own, state="expired"))
    tree.drop(two.session_id)
    assert [tree.is_closed(ask) for ask in (own, asked(one.session_id), form)] == [True] * 3


def test_after_a_gap_in_the_events_it_has_those_who_started_meanwhile() -> None:
    teller = Teller()
    one = agent("one")
    teller.agent(one)
    teller.tell("message", said(one.session_id, "old"))
    teller.tell("ask_changed", asked(one.session_id))
    tree = teller.tree
    detached = replace(agent("detached"), is_detached=True, state="running")
    now = [replace(one, state="ended"), agent("new"), agent("below", "s-new"), detached]
    assert tree.adopt(now)
    assert not tree.adopt(now)
    assert tree.names() == [TOP, "s-one", "s-new", "s-below"]
    messages = [said(TOP, "top"), said("s-one", "whole"), said("s-new", "new")]
    tree.load(Snapshot("e.9", [], messages, [], [], [], StoreHealth("ok")))
    kept = [
        [full_text(one.parts) for one in mirror.messages.values()]
        for mirror in (tree, *(branch.mirror for branch in tree.branches.values()))
    ]
    assert kept == [["top"], ["whole"], ["new"], []]
    assert list(tree.touched) == ["s-one", "s-new", "s-below"]
    # Whether it is still open is told when the stream begins; until then it is.
    assert not tree.is_closed(asked(one.session_id))


async def test_who_followed_a_run_and_who_missed_its_beginning_have_the_same_tree(
    tmp_path: Path,
) -> None:
    nested = (talk("@lead", start("@ann: go")), talk("@ann", start("@bob: go")))
    async with (
        open_agents(tmp_path, *nested, talk("@bob", held("I looked."))) as stage,
        asyncio.timeout(WAIT_S),
        open_tree(stage.remote, stage.session_id, OURS) as (follower, stayed),
    ):
        await follower.connected()
        away = SessionTree(stage.session_id, OURS)
        await load_tree(stage.remote, away)
        await stage.prompt("@lead: go", run_id=OURS)
        seen = await stage.asked_by("@bob")
        await stage.when("@bob", lambda one: one.state == "running")
        await load_tree(stage.remote, away)
        await follower.until(
            lambda _: len(stayed.branches) == 2 and state_of(away) == state_of(stayed)
        )
        stage.release(seen)
        await stage.heard.complete(OURS)
        await load_tree(stage.remote, away)
        await follower.until(lambda _: state_of(away) == state_of(stayed))
        (*_, bob) = stayed.branches.values()
        assert (bob.agent.outcome, bob.agent.depth) == ("completed", 2)
        assert [full_text(one.parts) for one in bob.mirror.messages.values()][-1] == "I looked."


def state_of(tree: SessionTree) -> list[object]:
    branches = tree.branches.values()
    return [
        (one.agent.name, one.agent.state, list(one.mirror.messages.values())) for one in branches
    ]

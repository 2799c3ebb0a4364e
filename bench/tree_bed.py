"""What `tree.py` measures with: a server with a scripted model, one client, and what that hears."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from bench.fleet_bed import Memory, memory_of
from bench.runs_bed import SETTLE_S
from bench.runs_client import (
    Asker,
    Desk,
    Heard,
    Stream,
    completes,
    frames,
    open_desk,
    open_stream,
)
from bench.runs_host import CONFIG, OURS, TITLES, Candidate, Cores, Place, Served, parse_url, start
from bench.traffic import cpu_s
from culm.testing.script import Reply, Rule, Script, ScriptedCall
from culm.wire.agents import Agent
from culm.wire.codec import Json

WAIT_S = 240.0  # For one tree, on a busy machine.
POLL_S = 0.5
# Trees are as wide as they are asked for here, and all of an agent's children work at once.
SETTINGS = '"agents_at_once": 1000, "agents_children_max": 1000, "run_steps_max": 100'
NOTES = "notes.txt"
OFFLINE: dict[str, Json] = {"prompt": f"read {NOTES}", "model": "offline/offline"}
LEAF = "Say something."
Moment = Literal["told", "heard", "spoke"]
TOKEN = b"tok"  # How a scripted token begins.


# --- what models say


def leading(who: str, assignments: Sequence[dict[str, Json]]) -> list[Rule]:
    """In the conversation that begins with this word: one call for all of them, then an answer."""
    call = ScriptedCall(name="agent", input={"assignments": list(assignments)})
    return [
        Rule(when=who, reply=Reply(calls=[call]), times=1),
        Rule(when=who, reply=Reply(text="Done.")),
    ]


def tree_rules(who: str, widths: Sequence[int]) -> list[Rule]:
    """A tree below whoever begins with this word: so many children each, level by level.

    A conversation contains the words of those it started, so that who starts others comes first.
    """
    names = [f"{who[:-1]}.{n}:" for n in range(widths[0])]
    if len(widths) == 1:
        return leading(who, [{"prompt": LEAF} for _ in names])
    rules = leading(who, [{"prompt": f"{name} have it done"} for name in names])
    for name in names:
        rules += tree_rules(name, widths[1:])
    return rules


def levels_of(widths: Sequence[int]) -> list[int]:
    """How many agents such a tree has at each depth."""
    levels = [1]
    for width in widths:
        levels.append(levels[-1] * width)
    return levels[1:]


def script_of(rules: Sequence[Rule], leaf: Reply) -> Script:
    titles = [Rule(when=words, reply=Reply(text="A title")) for words in TITLES]
    return Script(rules=[*titles, *rules], otherwise=leaf)


# --- what a client hears


@dataclass(slots=True)
class Life:
    """When a client was told what of one agent, in ns; 0: never."""

    told: int = 0  # Anything at all.
    begun: int = 0  # It is at work ...
    heard: int = 0  # ... its worker is there ...
    spoke: int = 0  # ... and has said or called something.
    ended: int = 0
    outcome: str = ""
    pid: int = 0
    tokens: int = 0  # In pieces, as they came.


@dataclass(slots=True)
class Ran:
    """One prompt, and the tree that came of it."""

    cpu_s: float  # Of the server, until it was at rest again.
    wall_s: float
    called: int = 0  # The first agents were wanted.
    answered: int = 0  # And their results were there.
    lives: dict[str, Life] = field(default_factory=dict[str, Life])  # By session.
    deltas: int = 0
    texts: Counter[str] = field(default_factory=Counter[str])  # What the runs said at their ends.

    @property
    def tokens(self) -> int:
        return sum(life.tokens for life in self.lives.values())

    def last_s(self, moment: Moment) -> float:
        """From the call until a client had been told so of every agent."""
        return (max(getattr(life, moment) for life in self.lives.values()) - self.called) / 1e9

    @property
    def call_s(self) -> float:
        return (self.answered - self.called) / 1e9

    @property
    def slowest_s(self) -> float:
        """Of the agents, from the beginning of their turns."""
        return max(life.ended - life.begun for life in self.lives.values()) / 1e9

    @property
    def pids(self) -> set[int]:
        return {life.pid for life in self.lives.values() if life.pid}


class _Inner(Struct):
    payload: Raw


class _Envelope(Struct):
    type: str
    payload: _Inner


class _Said(Struct):
    """A message, or a piece of one."""

    session_id: str


_envelopes = msgspec.json.Decoder(_Envelope)
_agents = msgspec.json.Decoder(Agent)
_listing = msgspec.json.Decoder(list[Agent])
_said = msgspec.json.Decoder(_Said)


def _told_in(heard: Sequence[Heard]) -> Iterator[tuple[int, str, bytes]]:
    for frame in frames(heard):
        _, found, data = frame.data.rpartition(b"data: ")
        if found:
            envelope = _envelopes.decode(data)
            yield frame.at_ns, envelope.type, bytes(envelope.payload.payload)


def read_lives(ran: Ran, top: str, heard: Sequence[Heard]) -> None:
    """Take apart what came since the prompt."""
    lives = ran.lives
    for at_ns, type_, payload in _told_in(heard):
        if type_.startswith("agent_") and type_ != "agent_event":
            agent = _agents.decode(payload)
            life = lives.setdefault(agent.session_id, Life(told=at_ns))
            _follow(life, agent, at_ns)
        elif type_ in ("message", "message_delta"):
            session_id = _said.decode(payload).session_id
            if session_id == top:
                _lead(ran, payload, at_ns)
            elif session_id in lives:
                _hear(lives[session_id], type_, payload, at_ns)
            ran.deltas += type_ == "message_delta"


def _follow(life: Life, agent: Agent, at_ns: int) -> None:
    if agent.state == "running":
        life.begun = life.begun or at_ns
    if agent.pid:
        life.pid, life.heard = agent.pid, life.heard or at_ns
    if agent.state == "ended":
        life.ended, life.outcome = at_ns, agent.outcome or ""


def _lead(ran: Ran, payload: bytes, at_ns: int) -> None:
    if b'"name":"agent"' not in payload:
        return
    if b'"role":"tool"' in payload:
        ran.answered = ran.answered or at_ns
    elif b'"finished":true' in payload:
        ran.called = ran.called or at_ns


def _hear(life: Life, type_: str, payload: bytes, at_ns: int) -> None:
    if type_ == "message_delta":
        life.tokens += payload.count(TOKEN)
    elif b'"type":"tool_call"' not in payload:
        return
    life.spoke = life.spoke or at_ns


# --- a server


class Bed:
    """A server, a workspace on it and its client. Made by `open_bed`."""

    def __init__(self, served: Served, desk: Desk, watch: Stream, model_url: str) -> None:
        self.served = served
        self.desk = desk
        self.watch = watch
        self._model_url = model_url

    async def play(self, script: Script) -> None:
        with closing(Asker(parse_url(self._model_url))) as asker:
            await asker.ask("POST", "/culm/script", script)

    async def run(self, who: str, agents: int) -> Ran:
        """Prompt in a new session, and wait until all of so many agents have ended."""
        (session_id,) = await self.desk.create_sessions(1)
        await asyncio.sleep(SETTLE_S)
        self.watch.begin()
        before_s, start_ns = cpu_s(self.served.pid), time.monotonic_ns()
        body = {"session_id": session_id, "prompt": f"{who} go", "run_id": str(uuid.uuid4())}
        await self.desk.ask("POST", "/agent", body)
        await self.watch.until_complete(agents + 1, WAIT_S)
        wall_s = (time.monotonic_ns() - start_ns) / 1e9
        await asyncio.sleep(SETTLE_S)
        ran = Ran(cpu_s(self.served.pid) - before_s, wall_s)
        read_lives(ran, session_id, self.watch.heard)
        ran.texts.update(one.text.strip() for one in completes(self.watch.heard))
        return ran

    async def run_held(self, who: str, agents: int) -> tuple[Ran, list[Memory]]:
        """A tree whose leaves are held in the middle of an answer: what its workers weigh then."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.run(who, agents))
            pids = await self._working(agents)
            await asyncio.sleep(SETTLE_S)
            sizes = [memory_of(pid) for pid in pids]
            with closing(Asker(parse_url(self._model_url))) as asker:
                await asker.ask("POST", "/culm/release")
        return task.result(), sizes

    async def _working(self, agents: int) -> list[int]:
        """The processes of so many agents, once all of them are there."""
        path = f"{self.desk.workspace}/agents"
        async with asyncio.timeout(WAIT_S):
            with closing(Asker(self.desk.address)) as asker:
                while True:
                    found = _listing.decode((await asker.ask("GET", path)).body)
                    pids = [agent.pid for agent in found if agent.pid]
                    if len(pids) >= agents:
                        return pids
                    await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_bed(place: Place, model_url: str) -> AsyncGenerator[Bed]:
    """A new server, whose zygote is not started yet.

    Nobody is given cores of their own: workers are descendants of the server, and would have to
    share its.
    """
    config = CONFIG.replace('"run_steps_max": 100', SETTINGS)
    served = start(Candidate("culm", OURS, config=config), place, model_url, Cores())
    async with AsyncExitStack() as stack:
        stack.callback(served.reap)
        directory = place.folder / "project"
        directory.mkdir(exist_ok=True)
        (directory / NOTES).write_text("One line of notes.\n")
        client_id = str(uuid.uuid4())
        opened = open_desk(served.address, str(directory), client_id)
        desk = await stack.enter_async_context(opened)
        watch = await open_stream(served.address, desk.workspace, client_id, keeps=True)
        stack.callback(watch.close)
        yield Bed(served, desk, watch, model_url)

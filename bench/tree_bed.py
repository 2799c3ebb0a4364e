"""The test bed of `tree.py`: a server with a scripted model, one client, and its events."""

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from bench.runs_bed import SETTLE_S
from bench.runs_client import (
    Asker,
    ReadData,
    Stream,
    WorkspaceClient,
    completes,
    frames,
    open_stream,
    open_workspace_client,
)
from bench.runs_host import CONFIG, OURS, TITLES, Candidate, Cores, Place, Served, parse_url, start
from bench.traffic import cpu_s
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.wire.agents import Agent
from culm.wire.codec import Json

WAIT_S = 240.0  # For one tree, on a busy machine.
POLL_S = 0.5
# No limits on the width of a tree; all children of an agent work at once.
SETTINGS = '"agents_at_once": 1000, "agents_children_max": 1000, "run_steps_max": 100'
COLD = '"prepare_workers_s": 0'  # The first agent starts the zygote.
NOTES = "notes.txt"
OFFLINE: dict[str, Json] = {"prompt": f"read {NOTES}", "model": "offline/offline"}
LEAF = "Say something."
Moment = Literal["known", "connected", "active"]
TOKEN = b"tok"  # The start of a scripted token.


# --- scripts of the model


def leading(word: str, assignments: Sequence[dict[str, Json]]) -> list[ReplyRule]:
    """In a conversation that begins with this word: one call for all agents, then an answer."""
    call = ScriptedCall(name="agent", input={"assignments": list(assignments)})
    return [
        ReplyRule(when=word, reply=Reply(calls=[call]), times=1),
        ReplyRule(when=word, reply=Reply(text="Done.")),
    ]


def tree_rules(word: str, widths: Sequence[int]) -> list[ReplyRule]:
    """A tree below the agent whose prompt begins with this word: its children, level by level.

    A conversation contains the prompts of its children, so the rules of a parent come first.
    """
    names = [f"{word[:-1]}.{n}:" for n in range(widths[0])]
    if len(widths) == 1:
        return leading(word, [{"prompt": LEAF} for _ in names])
    rules = leading(word, [{"prompt": f"{name} have it done"} for name in names])
    for name in names:
        rules += tree_rules(name, widths[1:])
    return rules


def levels_of(widths: Sequence[int]) -> list[int]:
    """Return the number of agents at each depth."""
    levels = [1]
    for width in widths:
        levels.append(levels[-1] * width)
    return levels[1:]


def script_of(rules: Sequence[ReplyRule], leaf: Reply) -> Script:
    titles = [ReplyRule(when=text, reply=Reply(text="A title")) for text in TITLES]
    return Script(rules=[*titles, *rules], otherwise=leaf)


# --- events of a client


@dataclass(slots=True)
class AgentTimes:
    """Times of the events of one agent, in ns; 0: never."""

    known: int = 0  # The first event.
    begun: int = 0  # It is running ...
    connected: int = 0  # ... its worker is connected ...
    active: int = 0  # ... and has sent text or a call.
    ended: int = 0
    outcome: str = ""
    pid: int = 0
    tokens: int = 0  # In deltas.


@dataclass(slots=True)
class Ran:
    """The result of one prompt and its tree."""

    cpu_s: float  # Of the server, until it was idle again.
    wall_s: float
    called: int = 0  # Time of the call.
    answered: int = 0  # Time of its result.
    agents_by_session: dict[str, AgentTimes] = field(default_factory=dict[str, AgentTimes])
    deltas: int = 0
    texts: Counter[str] = field(default_factory=Counter[str])  # The final texts of the runs.

    @property
    def tokens(self) -> int:
        return sum(times.tokens for times in self.agents_by_session.values())

    def last_s(self, moment: Moment) -> float:
        """Return the time from the call until this moment of the last agent."""
        return (
            max(getattr(times, moment) for times in self.agents_by_session.values()) - self.called
        ) / 1e9

    @property
    def call_s(self) -> float:
        return (self.answered - self.called) / 1e9

    @property
    def slowest_s(self) -> float:
        """The longest time of an agent from the start of its turn to its end."""
        return max(times.ended - times.begun for times in self.agents_by_session.values()) / 1e9

    @property
    def pids(self) -> set[int]:
        return {times.pid for times in self.agents_by_session.values() if times.pid}


class _Inner(Struct):
    payload: Raw


class _Envelope(Struct):
    type: str
    payload: _Inner


class _MessageRef(Struct):
    """The session of a message or of a delta."""

    session_id: str


_envelopes = msgspec.json.Decoder(_Envelope)
_agents = msgspec.json.Decoder(Agent)
_listing = msgspec.json.Decoder(list[Agent])
_message_refs = msgspec.json.Decoder(_MessageRef)


def _events_in(received: Sequence[ReadData]) -> Iterator[tuple[int, str, bytes]]:
    for frame in frames(received):
        _, found, data = frame.data.rpartition(b"data: ")
        if found:
            envelope = _envelopes.decode(data)
            yield frame.at_ns, envelope.type, bytes(envelope.payload.payload)


def read_times(ran: Ran, top: str, received: Sequence[ReadData]) -> None:
    """Parse everything received since the prompt."""
    agents_by_session = ran.agents_by_session
    for at_ns, type_, payload in _events_in(received):
        if type_.startswith("agent_") and type_ != "agent_event":
            agent = _agents.decode(payload)
            times = agents_by_session.setdefault(agent.session_id, AgentTimes(known=at_ns))
            _follow(times, agent, at_ns)
        elif type_ in ("message", "message_delta"):
            session_id = _message_refs.decode(payload).session_id
            if session_id == top:
                _lead(ran, payload, at_ns)
            elif session_id in agents_by_session:
                _read_message(agents_by_session[session_id], type_, payload, at_ns)
            ran.deltas += type_ == "message_delta"


def _follow(times: AgentTimes, agent: Agent, at_ns: int) -> None:
    if agent.state == "running":
        times.begun = times.begun or at_ns
    if agent.pid:
        times.pid, times.connected = agent.pid, times.connected or at_ns
    if agent.state == "ended":
        times.ended, times.outcome = at_ns, agent.outcome or ""


def _lead(ran: Ran, payload: bytes, at_ns: int) -> None:
    if b'"name":"agent"' not in payload:
        return
    if b'"role":"tool"' in payload:
        ran.answered = ran.answered or at_ns
    elif b'"finished":true' in payload:
        ran.called = ran.called or at_ns


def _read_message(times: AgentTimes, type_: str, payload: bytes, at_ns: int) -> None:
    if type_ == "message_delta":
        times.tokens += payload.count(TOKEN)
    elif b'"type":"tool_call"' not in payload:
        return
    times.active = times.active or at_ns


# --- a server


class Bed:
    """A server, a workspace on it and its client. Made by `open_bed`."""

    def __init__(
        self, served: Served, client: WorkspaceClient, watch: Stream, model_url: str
    ) -> None:
        self.served = served
        self.client = client
        self.watch = watch
        self._model_url = model_url

    async def play(self, script: Script) -> None:
        with closing(Asker(parse_url(self._model_url))) as asker:
            await asker.ask("POST", "/culm/script", script)

    async def run(self, word: str, agents: int) -> Ran:
        """Prompt in a new session, and wait until so many agents have ended."""
        (session_id,) = await self.client.create_sessions(1)
        await asyncio.sleep(SETTLE_S)
        self.watch.begin()
        before_s, start_ns = cpu_s(self.served.pid), time.monotonic_ns()
        body = {"session_id": session_id, "prompt": f"{word} go", "run_id": str(uuid.uuid4())}
        await self.client.ask("POST", "/agent", body)
        await self.watch.until_complete(agents + 1, WAIT_S)
        wall_s = (time.monotonic_ns() - start_ns) / 1e9
        await asyncio.sleep(SETTLE_S)
        ran = Ran(cpu_s(self.served.pid) - before_s, wall_s)
        read_times(ran, session_id, self.watch.received)
        ran.texts.update(one.text.strip() for one in completes(self.watch.received))
        return ran

    async def run_held(
        self, word: str, agents: int, measure: Callable[[Sequence[int]], None]
    ) -> Ran:
        """Run a tree whose leaves wait in the middle of an answer; `measure` gets its workers."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self.run(word, agents))
            pids = await self._working(agents)
            await asyncio.sleep(SETTLE_S)
            measure(pids)
            with closing(Asker(parse_url(self._model_url))) as asker:
                await asker.ask("POST", "/culm/release")
        return task.result()

    async def _working(self, agents: int) -> list[int]:
        """Return the processes of so many agents, once all of them run."""
        path = f"{self.client.workspace}/agents"
        async with asyncio.timeout(WAIT_S):
            with closing(Asker(self.client.address)) as asker:
                while True:
                    found = _listing.decode((await asker.ask("GET", path)).body)
                    pids = [agent.pid for agent in found if agent.pid]
                    if len(pids) >= agents:
                        return pids
                    await asyncio.sleep(POLL_S)


@asynccontextmanager
async def open_bed(place: Place, model_url: str, *, cold: bool = True) -> AsyncGenerator[Bed]:
    """A new server. Cold: it starts its zygote with its first agent.

    No process is pinned to cores: workers are descendants of the server and would share its cores.
    """
    settings = f"{SETTINGS}, {COLD}" if cold else SETTINGS
    config = CONFIG.replace('"run_steps_max": 100', settings)
    served = start(Candidate("culm", OURS, config=config), place, model_url, Cores())
    async with AsyncExitStack() as stack:
        stack.callback(served.reap)
        directory = place.folder / "project"
        directory.mkdir(exist_ok=True)
        (directory / NOTES).write_text("One line of notes.\n")
        client_id = str(uuid.uuid4())
        opened = open_workspace_client(served.address, str(directory), client_id)
        client = await stack.enter_async_context(opened)
        watch = await open_stream(served.address, client.workspace, client_id, keeps=True)
        stack.callback(watch.close)
        yield Bed(served, client, watch, model_url)

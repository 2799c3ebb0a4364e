"""Agents driven as clients drive them: a real server, a real model, workers without processes.

A worker here is the real runtime with its real tools, served over links within this process. It
starts no process of its own, so a test of a tree takes as long as one of a run.
"""

import asyncio
import itertools
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from msgspec import UNSET
from msgspec.structs import replace

from culm.assemble import open_server
from culm.client.workspace import RemoteWorkspace
from culm.clock import LoopClock
from culm.fleet.host.base import LaunchFailed
from culm.fleet.provision import Provision, encode_provision, parse_provision
from culm.fleet.transport.base import ConnectFailed
from culm.fleet.transport.memory import MemoryLink, MemoryListener
from culm.fleet.worker.executors.bamboo_runtime import make_bamboo_runtime
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.limits import mode_of, serving_terms_of
from culm.fleet.worker_server.modes import serve_on
from culm.ids import Ids, SessionId
from culm.processes.disabled import NoProcesses
from culm.settings import Settings
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.request_log import SeenRequest
from culm.testing.script import Reply, Rule, Script, ScriptedCall, ScriptedUsage
from culm.wire.agents import Agent, AgentDetails
from culm.wire.codec import Json, decode
from culm.wire.messages import Message, ToolResult, full_text
from tests.flow.conftest import FlowServer
from tests.flow.drive import Answer, until
from tests.flow.probes import Wound
from tests.flow.reading import Sent, finish_of, results_of, sent_in
from tests.flow.runs import Heard, Stage, open_heard
from tests.support import WAIT_S, FakeTimer, model_config, serve_options

T = TypeVar("T")

# Nobody counts what a title takes, so that it costs nothing.
TITLE = Rule(when="Write a title", reply=Reply(text="A title", usage=None))
SHORT_S = 1.0  # What takes less is waited for by the loop's clock; the rest ends by hand.
FIRST_PID = 1_000_001  # Beyond what a kernel gives: nobody can be hurt by mistake.
PRICES: Mapping[str, object] = {"cost_per_1m_in": 1.0, "cost_per_1m_out": 10.0}
WINDOW = 200_000
USAGE = ScriptedUsage(input=100, output=10)  # Of every answer that says nothing else ...
TOKENS, COST = 110, 0.0002  # ... and what that comes to.


class HandClock(Wound):
    """Short waits are real; the others end when a test says so."""

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        if delay_s >= SHORT_S:
            return super().call_later(delay_s, action)
        timer = FakeTimer(self.now_s() + delay_s, 0, action)
        LoopClock().call_later(delay_s, lambda: None if timer.cancelled else action())
        return timer


# --- what models say


def talk(who: str, *replies: Reply, then: str = "Done.") -> list[Rule]:
    """What is answered in the conversation that begins with this word, in order.

    Whoever starts another agent has that one's word in its own conversation, too: it comes first.
    """
    said = [Rule(when=who, reply=priced(reply), times=1) for reply in replies]
    return [*said, Rule(when=who, reply=priced(Reply(text=then)))]


def script_of(*talks: Iterable[Rule]) -> Script:
    return Script(rules=[TITLE, *itertools.chain(*talks)])


def priced(reply: Reply) -> Reply:
    """With a count of tokens that a test can add up."""
    return replace(reply, usage=USAGE) if reply.usage is UNSET else reply


def calls(tool: str, /, text: str = "", **inputs: Json) -> Reply:
    """An answer that calls a tool."""
    return Reply(text=text, calls=[ScriptedCall(name=tool, input=inputs)])


def start(*prompts: str, wait: bool = True, **more: Json) -> Reply:
    """An answer that has one agent work, or several; all have what else is said."""
    if len(prompts) == 1:
        return calls("agent", prompt=prompts[0], wait=wait, **more)
    return calls("agent", assignments=[{"prompt": p, **more} for p in prompts], wait=wait)


def held(text: str = "Late.", **more: Json) -> Reply:
    """An answer that the model gives when it is released."""
    return Reply(text=text, hold_after=0, **more)


def one_after_the_other(first: str, second: str, *, wait: bool = False) -> list[Reply]:
    """Answers that start two agents, of which the second comes when its answer is released.

    So a test knows which of them has the only slot.
    """
    later = ScriptedCall(name="agent", input={"prompt": second, "wait": wait})
    return [start(first, wait=False), held("", calls=[later])]


# --- workers


# Whether a frame arrives, of either direction; on its way it may wait, or kill the worker.
OnFrame = Callable[["LoopWorker", bytes], Awaitable[bool]]


async def let_pass(worker: "LoopWorker", frame: bytes) -> bool:
    return True


class LoopWorker:
    """Implements `Worker`, with the real runtime in a task."""

    def __init__(
        self, provision: Provision, clock: HandClock, folder: Path, pid: int, on_frame: OnFrame
    ) -> None:
        self.provision = provision
        self.id = provision.identity.child_id
        self.endpoint = f"memory://{pid}"
        self.pid = pid
        self.task: asyncio.Task[None] | None = None
        self.lie: Callable[[bytes], bytes] = lambda frame: frame  # What it says instead.
        self._clock = clock
        self._on_frame = on_frame
        self._listener = MemoryListener(str(pid), self._carry)
        self._links: list[MemoryLink] = []
        services = WorkerServices(clock, Ids(), NoProcesses(), folder / f"worker-{pid}")
        self._services = services
        self._runtime = make_bamboo_runtime(provision, services)

    @property
    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done()

    async def connect(self) -> MemoryLink:
        if not self.is_alive:
            raise ConnectFailed("it is gone")
        self._links.append(self._listener.connect())
        return self._links[-1]

    async def kill(self) -> None:
        self.strike()
        if self.task is not None:
            await asyncio.wait({self.task})

    def strike(self) -> None:
        """As `kill -9` looks from outside: its links are cut in the middle of a word."""
        for link in self._links:
            link.cut("the worker was killed")
        if self.task is not None:
            self.task.cancel()

    async def stderr_tail(self) -> str:
        return ""

    async def _carry(self, frame: bytes) -> Sequence[bytes]:
        return (self.lie(frame),) if await self._on_frame(self, frame) else ()

    async def work(self) -> None:
        terms = serving_terms_of(self.provision, self._clock, self._services.ids)
        try:
            await serve_on(self._listener, self._runtime, mode_of(self.provision), terms)
        finally:
            self._listener.close()
            await self._runtime.close()


class LoopLauncher:
    """Implements `Launcher`. Made by `open_launcher`."""

    def __init__(self, clock: HandClock, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self.workers: list[LoopWorker] = []
        self.refuses = 0  # So many launches fail.
        self.on_frame: OnFrame = let_pass
        self.forge: Callable[[Provision], Provision] = lambda told: told  # What they make of it.
        self._clock = clock
        self._folder = folder
        self._tasks = tasks
        self._pids = itertools.count(FIRST_PID)

    @property
    def alive(self) -> list[LoopWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    async def launch(self, provision: Provision) -> LoopWorker:
        if self.refuses:
            self.refuses -= 1
            raise LaunchFailed("there are no more processes")
        read = self.forge(parse_provision(encode_provision(provision)))  # As a process would.
        pid = next(self._pids)
        worker = LoopWorker(read, self._clock, self._folder, pid, lambda w, f: self.on_frame(w, f))
        self.workers.append(worker)
        worker.task = self._tasks.create_task(worker.work(), name=f"worker {worker.pid}")
        return worker


# --- the whole


class AgentStage(Stage):
    """A server with one session, the model behind it, and a client that listens."""

    def __init__(
        self,
        flow: FlowServer,
        clock: HandClock,
        model: ModelServer,
        remote: RemoteWorkspace,
        session_id: SessionId,
        heard: Heard,
        launcher: LoopLauncher,
    ) -> None:
        super().__init__(flow, clock, model, remote, session_id, heard)
        self.launcher = launcher

    # --- looking

    async def agents(self, below: str = "") -> list[Agent]:
        return await self.ask(f"/agents?below={below}", list[Agent])

    async def agent(self, who: str) -> Agent:
        """The one whose prompt begins with this word."""
        (found,) = [one for one in await self.agents() if one.name.startswith(who)]
        return found

    async def details(self, agent_id: str) -> AgentDetails:
        return await self.ask(f"/agents/{agent_id}", AgentDetails)

    async def when(self, who: str, is_so: Callable[[Agent], bool]) -> Agent:
        """Wait until an agent is there and stands so."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for one in await self.agents():
                    if one.name.startswith(who) and is_so(one):
                        return one
                await asyncio.sleep(0.002)

    async def messages_of(self, who: str) -> list[Message]:
        return await self.remote.messages((await self.agent(who)).session_id)

    async def rows_of(self, who: str) -> list[tuple[str, str, str]]:
        """Role, text and finish of every message in an agent's session."""
        found = await self.messages_of(who)
        return [(m.role, full_text(m.parts), finish_of(m).reason) for m in found]

    async def results(self, who: str = "") -> list[ToolResult]:
        """What the calls of an agent, or of the top, came to."""
        return results_of(await (self.messages_of(who) if who else self.messages()))

    async def outcomes(self) -> dict[str, str]:
        """Of every agent by the first word of its prompt: how it ended, or how it stands."""
        return {one.name.split()[0]: one.outcome or one.state for one in await self.agents()}

    def worker_of(self, agent_id: str) -> "LoopWorker":
        """The process that works for an agent now."""
        (found,) = [w for w in self.launcher.alive if w.pid == self._pid_of(agent_id)]
        return found

    def _pid_of(self, agent_id: str) -> int:
        live = self.flow.workspace(self.remote.id).runs.live()
        return next(run.pid() for run in live if run.agent_id == agent_id)

    # --- doing

    async def do(self, agent_id: str, what: str, **body: object) -> Answer:
        """`message`, `cancel` or `budget`."""
        return await self.request("POST", f"/agents/{agent_id}/{what}", body)

    async def done(self, agent_id: str, what: str, **body: object) -> Agent:
        answer = await self.do(agent_id, what, **body)
        assert answer.status == 200, answer
        return decode(answer.body, Agent)

    async def start_agent(self, prompt: str, **more: object) -> Agent:
        answer = await self.request("POST", "/agents", {"prompt": prompt, **more})
        assert answer.status == 202, answer
        return decode(answer.body, Agent)

    # --- the model

    def heard_by(self, who: str) -> list[SeenRequest]:
        """What the model was asked in one conversation."""
        return [seen for seen in self.seen() if _begins(seen, who)]

    async def asked_by(self, who: str, times: int = 1) -> SeenRequest:
        """Wait until the model was asked so often in one conversation."""
        await until(lambda: len(self.heard_by(who)) >= times)
        return self.heard_by(who)[times - 1]

    def read_by(self, who: str, n: int = -1) -> list[Sent]:
        """What it read there, without the system's words."""
        return [message for message in sent_in(self.heard_by(who)[n]) if message.role != "system"]

    def release(self, seen: SeenRequest) -> None:
        self.model.release(seen.n)

    def play(self, *talks: Iterable[Rule]) -> None:
        """What is said from now on: for what can only be said once an agent has its id."""
        self.model.play(script_of(*talks))


def _begins(seen: SeenRequest, who: str) -> bool:
    said = [message.content for message in sent_in(seen) if message.role == "user"]
    return bool(said) and who in str(said[0])


@asynccontextmanager
async def open_launcher(clock: HandClock, folder: Path) -> AsyncGenerator[LoopLauncher]:
    """At the end of the block no worker is left."""
    async with asyncio.TaskGroup() as tasks:
        launcher = LoopLauncher(clock, folder, tasks)
        yield launcher
        assert launcher.alive == []


@asynccontextmanager
async def open_again(
    folder: Path,
    model: ModelServer,
    *,
    settings: Settings | None = None,
    clock: HandClock | None = None,
    session_id: SessionId | None = None,
    config: Mapping[str, object] | None = None,
    window: int = WINDOW,
) -> AsyncGenerator[AgentStage]:
    """Serve on `folder`, anew or again; `config` beside what the model needs."""
    clock = clock or HandClock()
    about = model_config(model.url, context_window=window, **PRICES) | dict(config or {})
    async with open_alone(folder, model, clock, settings, about) as (flow, launcher):
        remote = await (await flow.client()).open_workspace(flow.directory())
        if session_id is None:
            session_id = (await remote.create_session("unnamed")).id
        async with open_heard(remote) as heard:
            yield AgentStage(flow, clock, model, remote, session_id, heard, launcher)


@asynccontextmanager
async def open_alone(
    folder: Path,
    model: ModelServer,
    clock: HandClock,
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
) -> AsyncGenerator[tuple[FlowServer, LoopLauncher]]:
    """A server that nobody has come to yet."""
    config = config or model_config(model.url, context_window=WINDOW, **PRICES)
    with tempfile.TemporaryDirectory(prefix="culm-") as short:  # A socket's path must be short.
        options = serve_options(folder, f"unix://{short}/s", settings=settings, config=config)
        async with (
            open_launcher(clock, folder / "workers") as launcher,
            open_server(options, clock, Ids(), lambda: None, None, launcher) as server,
        ):
            flow = FlowServer(server, clock, folder)
            try:
                yield flow, launcher
            finally:
                async with asyncio.timeout(WAIT_S):
                    await flow.aclose()


@asynccontextmanager
async def open_agents(
    folder: Path,
    *talks: Iterable[Rule],
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
    window: int = WINDOW,
) -> AsyncGenerator[AgentStage]:
    """As `open_again`, with a model of its own; the talks of those above come first."""
    async with (
        open_model_server(script_of(*talks)) as model,
        open_again(folder, model, settings=settings, config=config, window=window) as stage,
    ):
        yield stage

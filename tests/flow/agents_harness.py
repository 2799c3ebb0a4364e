"""Harness for agents: a real server, a real model server, and workers without processes.

A worker here is the real runtime with its real tools, served over in-memory links. It starts no
process, so a test of an agent tree takes as long as a test of a run.
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
from culm.fleet.provision import Provision, encode_provision, limits_of, parse_provision
from culm.fleet.transport.base import ConnectFailed
from culm.fleet.transport.memory import MemoryLink, MemoryListener
from culm.fleet.worker.executors.bamboo_runtime import BambooRuntime
from culm.fleet.worker.executors.base import WorkerServices
from culm.fleet.worker.lifecycle import mode_of
from culm.fleet.worker_server.connection import serve_on
from culm.fleet.worker_server.run import ServingSettings
from culm.ids import Ids, SessionId
from culm.processes.base import NoProcesses
from culm.settings import Settings
from culm.testing.answering import SeenRequest
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall, ScriptedUsage
from culm.wire.agents import Agent, AgentDetails
from culm.wire.codec import Json, decode
from culm.wire.messages import Message, ToolResult, full_text
from tests.flow.conftest import FlowServer
from tests.flow.drive import Answer, until
from tests.flow.probes import WaitableClock
from tests.flow.reading import Sent, finish_of, results_of, sent_in
from tests.flow.runs import Harness, ReceivedEvents, open_received
from tests.support import WAIT_S, FakeTimer, model_config, serve_options

T = TypeVar("T")

# Without usage, so that a title costs nothing.
TITLE = ReplyRule(when="Write a title", reply=Reply(text="A title", usage=None))
SHORT_S = 1.0  # Shorter waits use the real clock; longer ones end when a test advances time.
FIRST_PID = 1_000_001  # Beyond the pids of a kernel, so that no real process can be killed.
PRICES: Mapping[str, object] = {"cost_per_1m_in": 1.0, "cost_per_1m_out": 10.0}
WINDOW = 200_000
USAGE = ScriptedUsage(input=100, output=10)  # Of every answer without its own usage ...
TOKENS, COST = 110, 0.0002  # ... and its totals.


class HybridClock(WaitableClock):
    """A clock whose short waits are real; the others end when a test advances time."""

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        if delay_s >= SHORT_S:
            return super().call_later(delay_s, action)
        timer = FakeTimer(self.monotonic_s() + delay_s, 0, action)
        LoopClock().call_later(delay_s, lambda: timer.action())
        return timer


# --- model scripts


def talk(who: str, *replies: Reply, then: str = "Done.") -> list[ReplyRule]:
    """Replies, in order, to the conversation whose first prompt contains `who`.

    The conversation of a parent also contains the name of its child, so list parents first.
    """
    rules = [ReplyRule(when=who, reply=priced(reply), times=1) for reply in replies]
    return [*rules, ReplyRule(when=who, reply=priced(Reply(text=then)))]


def script_of(*talks: Iterable[ReplyRule]) -> Script:
    return Script(rules=[TITLE, *itertools.chain(*talks)])


def priced(reply: Reply) -> Reply:
    """The reply with a token count that a test can add up."""
    return replace(reply, usage=USAGE) if reply.usage is UNSET else reply


def calls(tool: str, /, text: str = "", **inputs: Json) -> Reply:
    """A reply that calls a tool."""
    return Reply(text=text, calls=[ScriptedCall(name=tool, input=inputs)])


def start(*prompts: str, wait: bool = True, **more: Json) -> Reply:
    """A reply that starts one agent or several; `more` applies to all of them."""
    if len(prompts) == 1:
        return calls("agent", prompt=prompts[0], wait=wait, **more)
    return calls("agent", assignments=[{"prompt": p, **more} for p in prompts], wait=wait)


def held(text: str = "Late.", **more: Json) -> Reply:
    """A reply that the model sends when it is released."""
    return Reply(text=text, hold_after=0, **more)


def start_one_by_one(first: str, second: str, *, wait: bool = False) -> list[Reply]:
    """Replies that start two agents, the second one when its reply is released.

    So a test knows which of them has the only slot.
    """
    later = ScriptedCall(name="agent", input={"prompt": second, "wait": wait})
    return [start(first, wait=False), held("", calls=[later])]


# --- workers


# Returns True to deliver a frame, of either direction. It may wait, or kill the worker.
OnFrame = Callable[["LoopWorker", bytes], Awaitable[bool]]


async def let_pass(worker: "LoopWorker", frame: bytes) -> bool:
    return True


class LoopWorker:
    """A `Worker` with the real runtime in a task."""

    def __init__(
        self, provision: Provision, clock: HybridClock, folder: Path, pid: int, on_frame: OnFrame
    ) -> None:
        self.provision = provision
        self.id = provision.identity.child_id
        self.endpoint = f"memory://{pid}"
        self.pid = pid
        self.task: asyncio.Task[None] | None = None
        self.rewrite: Callable[[bytes], bytes] = lambda frame: frame  # Replaces a frame.
        self._clock = clock
        self._on_frame = on_frame
        self._listener = MemoryListener(str(pid), self._carry)
        self._links: list[MemoryLink] = []
        services = WorkerServices(clock, Ids(), NoProcesses(), folder / f"worker-{pid}")
        self._services = services
        self._runtime = BambooRuntime(provision, services)

    @property
    def is_alive(self) -> bool:
        return self.task is not None and not self.task.done()

    async def connect(self) -> MemoryLink:
        if not self.is_alive:
            raise ConnectFailed("it is gone")
        self._links.append(self._listener.connect())
        return self._links[-1]

    async def kill(self) -> None:
        self.crash()
        if self.task is not None:
            await asyncio.wait({self.task})

    def crash(self) -> None:
        """End as with `kill -9`: the links are cut at once."""
        for link in self._links:
            link.cut("the worker was killed")
        if self.task is not None:
            self.task.cancel()

    async def stderr_tail(self) -> str:
        return ""

    async def _carry(self, frame: bytes) -> Sequence[bytes]:
        return (self.rewrite(frame),) if await self._on_frame(self, frame) else ()

    async def work(self) -> None:
        settings = ServingSettings(self._clock, self._services.ids, limits_of(self.provision))
        try:
            await serve_on(self._listener, self._runtime, mode_of(self.provision), settings)
        finally:
            self._listener.close()
            await self._runtime.close()


class LoopLauncher:
    """A `Launcher` of `LoopWorker`s. Created by `open_launcher`."""

    def __init__(self, clock: HybridClock, folder: Path, tasks: asyncio.TaskGroup) -> None:
        self.workers: list[LoopWorker] = []
        self.failing_launches = 0  # The number of launches that will fail.
        self.on_frame: OnFrame = let_pass
        # Changes the provision that a worker reads.
        self.change_provision: Callable[[Provision], Provision] = lambda given: given
        self._clock = clock
        self._folder = folder
        self._tasks = tasks
        self._pids = itertools.count(FIRST_PID)

    @property
    def alive(self) -> list[LoopWorker]:
        return [worker for worker in self.workers if worker.is_alive]

    async def launch(self, provision: Provision) -> LoopWorker:
        if self.failing_launches:
            self.failing_launches -= 1
            raise LaunchFailed("there are no more processes")
        # Encoded and parsed, as a worker process reads it.
        read = self.change_provision(parse_provision(encode_provision(provision)))
        pid = next(self._pids)
        worker = LoopWorker(read, self._clock, self._folder, pid, lambda w, f: self.on_frame(w, f))
        self.workers.append(worker)
        worker.task = self._tasks.create_task(worker.work(), name=f"worker {worker.pid}")
        return worker


# --- the harness


class AgentHarness(Harness):
    """A server with one session, its model server, and a client with an event stream."""

    def __init__(
        self,
        flow: FlowServer,
        clock: HybridClock,
        model: ModelServer,
        remote: RemoteWorkspace,
        session_id: SessionId,
        received: ReceivedEvents,
        launcher: LoopLauncher,
    ) -> None:
        super().__init__(flow, clock, model, remote, session_id, received)
        self.launcher = launcher

    # --- queries

    async def agents(self, below: str = "") -> list[Agent]:
        return await self.ask(f"/agents?below={below}", list[Agent])

    async def agent(self, who: str) -> Agent:
        """The agent whose name starts with `who`."""
        (found,) = [one for one in await self.agents() if one.name.startswith(who)]
        return found

    async def details(self, agent_id: str) -> AgentDetails:
        return await self.ask(f"/agents/{agent_id}", AgentDetails)

    async def until_agent(self, who: str, condition: Callable[[Agent], bool]) -> Agent:
        """Wait until an agent exists and meets the condition."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for one in await self.agents():
                    if one.name.startswith(who) and condition(one):
                        return one
                await asyncio.sleep(0.002)

    async def messages_of(self, who: str) -> list[Message]:
        return await self.remote.messages((await self.agent(who)).session_id)

    async def rows_of(self, who: str) -> list[tuple[str, str, str]]:
        """Role, text and finish of every message in an agent's session."""
        found = await self.messages_of(who)
        return [(m.role, full_text(m.parts), finish_of(m).reason) for m in found]

    async def results(self, who: str = "") -> list[ToolResult]:
        """Results of the calls of an agent, or of the top session."""
        return results_of(await (self.messages_of(who) if who else self.messages()))

    async def outcomes(self) -> dict[str, str]:
        """Outcome or state of every agent, by the first word of its name."""
        return {one.name.split()[0]: one.outcome or one.state for one in await self.agents()}

    def worker_of(self, agent_id: str) -> "LoopWorker":
        """The worker that currently runs an agent."""
        (found,) = [w for w in self.launcher.alive if w.pid == self._pid_of(agent_id)]
        return found

    def _pid_of(self, agent_id: str) -> int:
        live = self.flow.workspace(self.remote.id).runs.live()
        return next(run.pid for run in live if run.agent_id == agent_id)

    # --- actions

    async def do(self, agent_id: str, what: str, **body: object) -> Answer:
        """Post an action of an agent: `message`, `cancel` or `budget`."""
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

    def requests_by(self, who: str) -> list[SeenRequest]:
        """The model requests of one conversation."""
        return [seen for seen in self.seen() if _begins(seen, who)]

    async def until_asked_by(self, who: str, times: int = 1) -> SeenRequest:
        """Wait for the n-th model request of one conversation, and return it."""
        await until(lambda: len(self.requests_by(who)) >= times)
        return self.requests_by(who)[times - 1]

    def sent_by(self, who: str, n: int = -1) -> list[Sent]:
        """The messages of one of its requests, without the system prompt."""
        return [
            message for message in sent_in(self.requests_by(who)[n]) if message.role != "system"
        ]

    def release(self, seen: SeenRequest) -> None:
        self.model.release(seen.n)

    def play(self, *talks: Iterable[ReplyRule]) -> None:
        """Replace the script, for replies that need the id of an agent."""
        self.model.play(script_of(*talks))


def _begins(seen: SeenRequest, who: str) -> bool:
    prompts = [message.content for message in sent_in(seen) if message.role == "user"]
    return bool(prompts) and who in str(prompts[0])


@asynccontextmanager
async def open_launcher(clock: HybridClock, folder: Path) -> AsyncGenerator[LoopLauncher]:
    """A launcher; at the end of the block every worker must have ended."""
    async with asyncio.TaskGroup() as tasks:
        launcher = LoopLauncher(clock, folder, tasks)
        yield launcher
        assert launcher.alive == []


@asynccontextmanager
async def open_agent_harness(
    folder: Path,
    model: ModelServer,
    *,
    settings: Settings | None = None,
    clock: HybridClock | None = None,
    session_id: SessionId | None = None,
    config: Mapping[str, object] | None = None,
    window: int = WINDOW,
) -> AsyncGenerator[AgentHarness]:
    """Serve on `folder`, new or existing; `config` extends the configuration of the model."""
    clock = clock or HybridClock()
    about = model_config(model.url, context_window=window, **PRICES) | dict(config or {})
    async with open_server_only(folder, model, clock, settings, about) as (flow, launcher):
        remote = await (await flow.client()).open_workspace(flow.directory())
        if session_id is None:
            session_id = (await remote.create_session("unnamed")).id
        async with open_received(remote) as received:
            yield AgentHarness(flow, clock, model, remote, session_id, received, launcher)


@asynccontextmanager
async def open_server_only(
    folder: Path,
    model: ModelServer,
    clock: HybridClock,
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
) -> AsyncGenerator[tuple[FlowServer, LoopLauncher]]:
    """A server without a client."""
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
    *talks: Iterable[ReplyRule],
    settings: Settings | None = None,
    config: Mapping[str, object] | None = None,
    window: int = WINDOW,
) -> AsyncGenerator[AgentHarness]:
    """Like `open_agent_harness`, with its own model server; list the talks of parents first."""
    async with (
        open_model_server(script_of(*talks)) as model,
        open_agent_harness(
            folder, model, settings=settings, config=config, window=window
        ) as harness,
    ):
        yield harness

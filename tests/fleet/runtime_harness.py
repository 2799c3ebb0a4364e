"""A runtime executor in this process: real tools, a scripted provider, a recording host."""

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from culm.clock import LoopClock, Timer
from culm.fleet.executor import Outcome, SteerMessage
from culm.fleet.protocol.frames import RunSpec
from culm.fleet.provision import (
    Capabilities,
    Credential,
    CulmExtension,
    Identity,
    ModelName,
    Provision,
    RuntimeKind,
    Secrets,
)
from culm.fleet.worker.executors.bamboo_runtime import BambooRuntime
from culm.fleet.worker.executors.base import WorkerServices
from culm.ids import Ids
from culm.processes.base import Processes
from culm.processes.client import open_processes
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Reply, Script, ScriptedCall
from culm.wire.codec import Json
from tests.support import WAIT_S, FakeClock

KEY = "sk-this-is-the-one-and-only-key"
SHORT_S = 1.0  # Shorter waits use the loop's clock; longer ones wait for the test.
NEVER = Capabilities()  # Never asks.
ASKS = Capabilities(enforce_permissions=True)


class ManualClock(LoopClock):
    """Short waits are real; longer ones end when the test advances the clock."""

    def __init__(self) -> None:
        self.manual = FakeClock()

    def now_s(self) -> float:
        return self.manual.now_s()

    def monotonic_s(self) -> float:
        return self.manual.monotonic_s()

    def call_later(self, delay_s: float, action: Callable[[], None]) -> Timer:
        if delay_s < SHORT_S:
            return super().call_later(delay_s, action)
        return self.manual.call_later(delay_s, action)


Event = Mapping[str, Json]


@dataclass(eq=False)
class RecordingEventSink:
    """An `EventSink` that records events."""

    events: list[dict[str, Json]] = field(default_factory=list[dict[str, Json]])
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def emit(self, event: Event) -> None:
        self.events.append(dict(event))
        self.changed.set()
        self.changed = asyncio.Event()
        await asyncio.sleep(0)

    async def until(self, type_: str, **fields: Json) -> dict[str, Json]:
        """The first event of a type that has these fields."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self.events:
                    if event["type"] == type_ and fields.items() <= event.items():
                        return event
                await self.changed.wait()

    def of(self, *types: str) -> list[dict[str, Json]]:
        return [event for event in self.events if event["type"] in types]

    def types(self) -> list[str]:
        """Event types in order, consecutive repeats merged."""
        types = [str(event["type"]) for event in self.events]
        return [t for n, t in enumerate(types) if n == 0 or t != types[n - 1]]

    def text(self, type_: str = "token") -> str:
        return "".join(event["content"] for event in self.of(type_))


@dataclass(eq=False)
class FakeSteerInbox:
    """A `SteerInbox` that the test fills."""

    waiting: list[SteerMessage] = field(default_factory=list[SteerMessage])

    async def next(self) -> SteerMessage:
        raise AssertionError("the loop takes what there is")

    def take_nowait(self) -> list[SteerMessage]:
        taken, self.waiting = self.waiting, []
        return taken


class FakeCancelToken:
    """A `CancelToken` that the test sets."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        self._event.set()

    def is_set(self) -> bool:
        return self._event.is_set()

    async def wait(self) -> None:
        await self._event.wait()


@dataclass(eq=False)
class FakeHost:
    """A `RunHost` that records asks and calls; without an answer it never replies."""

    answer: bool | None = True
    asked: list[Event] = field(default_factory=list[Event])
    is_asked: asyncio.Event = field(default_factory=asyncio.Event)
    takes_calls: bool = False
    calls: list[Event] = field(default_factory=list[Event])
    # Replies per call kind, in order. A call without a reply waits; an exception is raised.
    replies: dict[str, list[Json]] = field(default_factory=dict[str, list[Json]])

    async def ask(self, body: Event) -> bool:
        self.asked.append(body)
        self.is_asked.set()
        if self.answer is None:
            await asyncio.Event().wait()
        return bool(self.answer)

    async def call(self, args: Event, tool_call_id: str = "") -> Json:
        assert self.takes_calls
        self.calls.append({**args, "for": tool_call_id} if tool_call_id else args)
        replies = self.replies.get(args["op"])
        if replies is None and args["op"] == "reserve":
            return {"id": f"r-{len(self.of('reserve'))}"}
        if not replies:
            self.is_asked.set()
            await asyncio.Event().wait()
        reply = (replies or [])[0]
        self.replies[args["op"]] = (replies or [])[1:]
        if isinstance(reply, Exception):
            raise reply
        return reply

    def of(self, op: str) -> list[Event]:
        return [call for call in self.calls if call["op"] == op]


@dataclass(eq=False)
class RuntimeHarness:
    runtime: BambooRuntime
    model: ModelServer
    folder: Path  # The workspace.
    clock: ManualClock
    processes: Processes
    sink: RecordingEventSink = field(default_factory=RecordingEventSink)
    steer: FakeSteerInbox = field(default_factory=FakeSteerInbox)
    host: FakeHost = field(default_factory=FakeHost)
    cancel: FakeCancelToken = field(default_factory=FakeCancelToken)

    async def run(self, assignment: str = "Do it.", **spec: Json) -> Outcome:
        """Run to the end, with a cleared event sink."""
        self.sink.events.clear()
        async with asyncio.timeout(WAIT_S):
            given = msgspec.convert({"kind": "run", "assignment": assignment, **spec}, RunSpec)
            return await self.runtime.run(given, self.sink, self.steer, self.cancel, self.host)

    def model_messages(self, n: int = -1) -> list[dict[str, Json]]:
        """The messages of one model request, without the system prompt."""
        body = self.model.requests[n].body
        return [message for message in body["messages"] if message["role"] != "system"]


def extension_of(folder: Path, **fields: Json) -> CulmExtension:
    return CulmExtension(env={"PATH": os.environ["PATH"], "HOME": str(folder)}, **fields)


def provision_of(folder: Path, url: str = "", **fields: Json) -> Provision:
    """A provision with a model at `url`; without a URL, without a model."""
    given = Provision(
        version=2,
        identity=Identity("child-1", depth=1),
        executor=RuntimeKind(),
        fabric_dir=str(folder / "fabric"),
        workspace=str(folder / "work"),
        culm=extension_of(folder),
    )
    if url:
        credential = Credential("demo", KEY, url, "openai-compat")
        given = msgspec.structs.replace(
            given, model=ModelName("demo", "demo-1"), secrets=Secrets([credential])
        )
    return msgspec.structs.replace(given, **fields)


@asynccontextmanager
async def open_runtime_harness(
    folder: Path, replies: Sequence[Reply] = (), **fields: Json
) -> AsyncGenerator[RuntimeHarness]:
    """Open an executor whose provider sends these replies, then "Done."."""
    (folder / "work").mkdir(exist_ok=True)
    clock, ids = ManualClock(), Ids(1)
    async with (
        open_model_server(Script(list(replies), otherwise=Reply(text="Done."))) as model,
        open_processes(folder / "data", LoopClock(), Ids()) as processes,
    ):
        services = WorkerServices(clock, ids, processes, folder / "storage")
        runtime = BambooRuntime(provision_of(folder, model.url, **fields), services)
        try:
            yield RuntimeHarness(runtime, model, folder / "work", clock, processes)
        finally:
            await runtime.close()


def calling(name: str, text: str = "", **inputs: Json) -> Reply:
    return Reply(text=text, calls=[ScriptedCall(name=name, input=inputs, id=f"call-{name}")])

"""Runs driven as clients drive them: a real server, a real model server, HTTP and events."""

import asyncio
import shutil
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlencode

from culm.client.stream import ServerEvent, SseParser
from culm.client.transport import HttpResponse as Incoming
from culm.client.workspace import RemoteWorkspace
from culm.ids import RunId, SessionId
from culm.run.live_run import LiveRun
from culm.settings import Settings
from culm.store.base import Connection
from culm.store.writer import READERS
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.request_log import SeenRequest
from culm.testing.script import Script
from culm.wire.agent import AgentEvent, RunComplete
from culm.wire.codec import decode
from culm.wire.messages import Message, full_text
from culm.wire.runs import CancelAnswer, CancelChanged, QueuedPrompt, Run, RunChanged
from culm.wire.sessions import Session
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import Answer, held_database, send, until
from tests.flow.probes import Probe, Wound, script
from tests.flow.reading import Sent, finish_of, sent_in
from tests.support import WAIT_S, model_config

T = TypeVar("T")

# --- what a client is told


class Heard:
    """One client's event stream, decoded as it comes."""

    def __init__(self, answer: Incoming) -> None:
        self.told: list[ServerEvent] = []
        self._answer = answer
        self._lines = SseParser()

    async def until(self, is_it: Callable[[ServerEvent], bool]) -> ServerEvent:
        """The first event like this, of all since the stream began; bounded."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for told in self.told:
                    if is_it(told):
                        return told
                data = await self._answer.piece()
                assert data, f"the stream ended after {[told.type for told in self.told]}"
                self.told += self._lines.feed(data)

    def all(self, type_: str, kind: type[T]) -> list[T]:
        """Everything of a type that has come so far."""
        return [told.read(kind) for told in self.told if told.type == type_]

    async def complete(self, run_id: str) -> RunComplete:
        """Wait for the end of a run."""

        def is_it(told: ServerEvent) -> bool:
            return told.type == "run_complete" and told.read(RunComplete).run_id == run_id

        return (await self.until(is_it)).read(RunComplete)

    async def state(self, run_id: str, state: str) -> RunChanged:
        def is_it(told: ServerEvent) -> bool:
            if told.type != "run_changed":
                return False
            changed = told.read(RunChanged)
            return (changed.run_id, changed.state) == (run_id, state)

        return (await self.until(is_it)).read(RunChanged)

    async def saying(self, type_: str, *words: str) -> ServerEvent:
        """Wait for an event of a type in which these words occur."""
        return await self.until(lambda told: told.type == type_ and says(told, *words))

    async def text(self, part: str) -> None:
        """Wait until a piece of an answer has streamed by."""
        await self.saying("message_delta", part)

    def completes(self) -> list[RunComplete]:
        return self.all("run_complete", RunComplete)

    def completed(self) -> list[str]:
        return [complete.run_id for complete in self.completes()]

    def errors(self) -> list[AgentEvent]:
        return [e for e in self.all("agent_event", AgentEvent) if e.type == "error"]

    def cancels(self) -> list[CancelChanged]:
        return self.all("cancel_changed", CancelChanged)

    def states(self, run_id: str) -> list[str]:
        return [c.state for c in self.all("run_changed", RunChanged) if c.run_id == run_id]


def says(told: ServerEvent, *words: str) -> bool:
    text = bytes(told.payload).decode()
    return all(word in text for word in words)


@asynccontextmanager
async def open_heard(
    remote: RemoteWorkspace, *, view: str = "delta", cursor: str = ""
) -> AsyncGenerator[Heard]:
    """Listen while in the block; attached once this is entered."""
    query = {"client_id": remote.client.id, "view": view} | ({"cursor": cursor} if cursor else {})
    path = remote.path(f"/events?{urlencode(query)}")
    async with remote.client.stream(path) as answer:
        yield Heard(answer)


# --- the whole


class Stage:
    """A server with one session, the model behind it, and a client that listens."""

    def __init__(
        self,
        flow: FlowServer,
        clock: Wound,
        model: ModelServer,
        remote: RemoteWorkspace,
        session_id: SessionId,
        heard: Heard,
    ) -> None:
        self.flow = flow
        self.clock = clock
        self.model = model
        self.remote = remote
        self.session_id = session_id
        self.heard = heard

    # --- asking

    async def request(
        self, method: str, rest: str, body: Mapping[str, object] | None = None
    ) -> Answer:
        return await send(self.flow, method, self.remote.path(rest), body or {})

    async def post(self, prompt: str, session_id: str | None = None, **more: object) -> Answer:
        """Send a prompt and return the answer, whatever it is."""
        wanted = self.session_id if session_id is None else session_id
        return await self.request(
            "POST", "/agent", {"session_id": wanted, "prompt": prompt, **more}
        )

    async def prompt(self, prompt: str, session_id: str | None = None, **more: object) -> RunId:
        """Send a prompt that is accepted; returns its run."""
        answer = await self.post(prompt, session_id, **more)
        assert (answer.status, answer.body) == (202, b""), answer
        return RunId(answer.headers["culm-run-id"])

    async def talk(self, *prompts: str) -> None:
        """Say one thing after the other, each when the one before has been answered."""
        for prompt in prompts:
            await self.heard.complete(await self.prompt(prompt))

    async def of_session(self, rest: str, method: str = "POST", **body: object) -> Answer:
        return await self.request(method, f"/agent/sessions/{self.session_id}/{rest}", body)

    async def cancel(self) -> None:
        answer = await self.of_session("cancel")
        assert (answer.status, answer.body) == (200, b""), answer

    async def cancel_run(self, run_id: str) -> CancelAnswer:
        answer = await self.request("POST", f"/runs/{run_id}/cancel")
        assert answer.status == 200, answer
        return decode(answer.body, CancelAnswer)

    async def ask(self, rest: str, kind: type[T]) -> T:
        return await self.remote.client.ask("GET", self.remote.path(rest), kind)

    # --- looking

    async def run(self, run_id: str) -> Run:
        return await self.ask(f"/runs/{run_id}", Run)

    async def runs(self, **query: str) -> list[Run]:
        return await self.ask(f"/runs?{urlencode(query)}", list[Run])

    async def queue(self) -> list[QueuedPrompt]:
        return await self.ask(f"/agent/sessions/{self.session_id}/queue", list[QueuedPrompt])

    async def session(self) -> Session:
        return await self.remote.session(self.session_id)

    async def messages(self) -> list[Message]:
        return await self.remote.messages(self.session_id)

    async def rows(self) -> list[tuple[str, str, str]]:
        """Role, text and finish of every message."""
        return [(m.role, full_text(m.parts), finish_of(m).reason) for m in await self.messages()]

    def live(self, run_id: str) -> LiveRun:
        """The run itself, for what no wire can tell."""
        run = self.flow.workspace(self.remote.id).runs.find(run_id)
        assert run is not None, f"{run_id} is not live"
        return run

    async def until_idle(self) -> None:
        """Wait until nothing is live any more."""
        await until(lambda: not self.flow.workspace(self.remote.id).runs.live())

    async def catch_up(self, *others: Heard) -> None:
        """Hear everything that has become durable so far."""
        mark = await self.remote.create_session("mark")
        for heard in (self.heard, *others):
            await heard.saying("session", mark.id)

    # --- the model

    def seen(self) -> list[SeenRequest]:
        """What the model was asked, titles aside."""
        return [seen for seen in self.model.requests if b"Write a title" not in seen.raw]

    async def asked(self, times: int) -> SeenRequest:
        """Wait until the model was asked so often; returns the latest of these."""
        await until(lambda: len(self.seen()) >= times)
        return self.seen()[times - 1]

    def sent(self, n: int) -> list[Sent]:
        """What the model read when it was asked for the n-th time, without the system's words."""
        return [message for message in sent_in(self.seen()[n - 1]) if message.role != "system"]


@asynccontextmanager
async def open_stage(
    folder: Path,
    kind: str,
    model: ModelServer,
    *,
    tools: Iterable[Probe] = (),
    settings: Settings | None = None,
    clock: Wound | None = None,
    session_id: SessionId | None = None,
    config: Mapping[str, object] | None = None,
    info: Mapping[str, object] | None = None,
) -> AsyncGenerator[Stage]:
    """Serve on `folder`, anew or again; `info` is about the model."""
    clock = clock or Wound()
    config = model_config(model.url, **(info or {})) if config is None else config
    given = {tool.name: tool for tool in tools}
    async with open_flow(
        folder, kind, settings=settings, clock=clock, config=config, tools=given
    ) as flow:
        remote = await (await flow.client()).open_workspace(flow.directory())
        if session_id is None:
            session_id = (await remote.create_session("unnamed")).id
        async with open_heard(remote) as heard:
            yield Stage(flow, clock, model, remote, session_id, heard)


@asynccontextmanager
async def open_runs(
    folder: Path,
    kind: str = "unix",
    play: Script | None = None,
    *,
    tools: Iterable[Probe] = (),
    settings: Settings | None = None,
    clock: Wound | None = None,
    info: Mapping[str, object] | None = None,
) -> AsyncGenerator[Stage]:
    """As `open_stage`, with a model of its own."""
    async with (
        open_model_server(play or script()) as model,
        open_stage(
            folder, kind, model, tools=tools, settings=settings, clock=clock, info=info
        ) as stage,
    ):
        yield stage


@asynccontextmanager
async def held_readers(stage: Stage) -> AsyncGenerator[None]:
    """Keep everybody waiting who reads the store; what is written is not held up."""
    store, gate = stage.flow.workspace(stage.remote.id).store, threading.Event()
    waiting: list[bool] = []

    def query(_: Connection) -> None:
        waiting.append(True)
        gate.wait(WAIT_S)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(READERS):
            tasks.create_task(store.read(query), name="reader")
        await until(lambda: len(waiting) == READERS)
        try:
            yield
        finally:
            gate.set()


def held_writer(stage: Stage) -> AbstractContextManager[None]:
    """Keep everything waiting that is to be stored."""
    return held_database(stage.flow.folder / "data", stage.flow.directory())


class Image:
    """The data directory as `kill -9` would leave it: taken now, put back when the server ended."""

    def __init__(self, stage: Stage) -> None:
        self._data = stage.flow.folder / "data"
        self._copy = stage.flow.folder / "image"
        shutil.copytree(self._data, self._copy)

    def restore(self) -> None:
        shutil.rmtree(self._data)
        self._copy.rename(self._data)

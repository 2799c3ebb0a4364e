"""Harness for runs: a real server, a real model server, HTTP and events."""

import asyncio
import shutil
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, closing
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
from culm.testing.answering import SeenRequest
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Script
from culm.wire.codec import decode
from culm.wire.messages import Message, Session, full_text
from culm.wire.runs import (
    AgentEvent,
    CancelAnswer,
    CancelChanged,
    QueuedPrompt,
    Run,
    RunChanged,
    RunComplete,
)
from culm.workspace.roots import project_folder
from tests.flow.conftest import FlowServer, open_flow
from tests.flow.drive import Answer, held_database, send, until
from tests.flow.probes import Probe, WaitableClock, script
from tests.flow.reading import Sent, finish_of, sent_in
from tests.support import WAIT_S, model_config

T = TypeVar("T")

# --- events of a client


class ReceivedEvents:
    """The event stream of one client, decoded as it arrives."""

    def __init__(self, answer: Incoming) -> None:
        self.events: list[ServerEvent] = []
        self._answer = answer
        self._lines = SseParser()

    async def until(self, is_it: Callable[[ServerEvent], bool]) -> ServerEvent:
        """Wait for the first matching event since the stream began; bounded."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for event in self.events:
                    if is_it(event):
                        return event
                data = await self._answer.piece()
                assert data, f"the stream ended after {[event.type for event in self.events]}"
                self.events += self._lines.feed(data)

    def all(self, type_: str, kind: type[T]) -> list[T]:
        """All events of a type so far."""
        return [event.read(kind) for event in self.events if event.type == type_]

    async def complete(self, run_id: str) -> RunComplete:
        """Wait for the end of a run."""

        def is_it(event: ServerEvent) -> bool:
            return event.type == "run_complete" and event.read(RunComplete).run_id == run_id

        return (await self.until(is_it)).read(RunComplete)

    async def state(self, run_id: str, state: str) -> RunChanged:
        def is_it(event: ServerEvent) -> bool:
            if event.type != "run_changed":
                return False
            changed = event.read(RunChanged)
            return (changed.run_id, changed.state) == (run_id, state)

        return (await self.until(is_it)).read(RunChanged)

    async def event_with(self, type_: str, *texts: str) -> ServerEvent:
        """Wait for an event of a type that contains these texts."""
        return await self.until(lambda event: event.type == type_ and has_text(event, *texts))

    async def text(self, part: str) -> None:
        """Wait until this piece of an answer has been streamed."""
        await self.event_with("message_delta", part)

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


def has_text(event: ServerEvent, *texts: str) -> bool:
    payload = bytes(event.payload).decode()
    return all(text in payload for text in texts)


@asynccontextmanager
async def open_received(
    remote: RemoteWorkspace, *, view: str = "delta", cursor: str = ""
) -> AsyncGenerator[ReceivedEvents]:
    """The events of a client; attached once the block is entered."""
    query = {"client_id": remote.client.id, "view": view} | ({"cursor": cursor} if cursor else {})
    path = remote.path(f"/events?{urlencode(query)}")
    async with remote.client.stream(path) as answer:
        yield ReceivedEvents(answer)


# --- the harness


class Harness:
    """A server with one session, its model server, and a client with an event stream."""

    def __init__(
        self,
        flow: FlowServer,
        clock: WaitableClock,
        model: ModelServer,
        remote: RemoteWorkspace,
        session_id: SessionId,
        received: ReceivedEvents,
    ) -> None:
        self.flow = flow
        self.clock = clock
        self.model = model
        self.remote = remote
        self.session_id = session_id
        self.received = received

    # --- requests

    async def request(
        self, method: str, rest: str, body: Mapping[str, object] | None = None
    ) -> Answer:
        return await send(self.flow, method, self.remote.path(rest), body or {})

    async def post(self, prompt: str, session_id: str | None = None, **more: object) -> Answer:
        """Send a prompt and return the answer, accepted or not."""
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
        """Send prompts one by one, each after the previous run has ended."""
        for prompt in prompts:
            await self.received.complete(await self.prompt(prompt))

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

    # --- queries

    async def run(self, run_id: str) -> Run:
        return await self.ask(f"/runs/{run_id}", Run)

    async def runs(self, *, session: str = "", state: str = "") -> list[Run]:
        query = {"session": session, "state": state}
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
        """The live run object, for state that is not on the wire."""
        run = self.flow.workspace(self.remote.id).runs.find(run_id)
        assert run is not None, f"{run_id} is not live"
        return run

    async def until_idle(self) -> None:
        """Wait until no run is live."""
        await until(lambda: not self.flow.workspace(self.remote.id).runs.live())

    async def catch_up(self, *others: ReceivedEvents) -> None:
        """Receive every event that is durable so far."""
        mark = await self.remote.create_session("mark")
        for received in (self.received, *others):
            await received.event_with("session", mark.id)

    # --- the model

    def seen(self) -> list[SeenRequest]:
        """The requests to the model, without those for titles."""
        return [seen for seen in self.model.requests if b"Write a title" not in seen.raw]

    async def until_asked(self, times: int) -> SeenRequest:
        """Wait for the n-th request to the model, and return it."""
        await until(lambda: len(self.seen()) >= times)
        return self.seen()[times - 1]

    def sent(self, n: int) -> list[Sent]:
        """The messages of the n-th request to the model, without the system prompt."""
        return [message for message in sent_in(self.seen()[n - 1]) if message.role != "system"]


@asynccontextmanager
async def open_harness(
    folder: Path,
    kind: str,
    model: ModelServer,
    *,
    tools: Iterable[Probe] = (),
    settings: Settings | None = None,
    clock: WaitableClock | None = None,
    session_id: SessionId | None = None,
    config: Mapping[str, object] | None = None,
    info: Mapping[str, object] | None = None,
) -> AsyncGenerator[Harness]:
    """Serve on `folder`, new or existing; `info` describes the model."""
    clock = clock or WaitableClock()
    config = model_config(model.url, **(info or {})) if config is None else config
    given = {tool.name: tool for tool in tools}
    async with open_flow(
        folder, kind, settings=settings, clock=clock, config=config, tools=given
    ) as flow:
        remote = await (await flow.client()).open_workspace(flow.directory())
        if session_id is None:
            session_id = (await remote.create_session("unnamed")).id
        async with open_received(remote) as received:
            yield Harness(flow, clock, model, remote, session_id, received)


@asynccontextmanager
async def open_runs(
    folder: Path,
    kind: str = "unix",
    play: Script | None = None,
    *,
    tools: Iterable[Probe] = (),
    settings: Settings | None = None,
    clock: WaitableClock | None = None,
    info: Mapping[str, object] | None = None,
) -> AsyncGenerator[Harness]:
    """Like `open_harness`, with its own model server."""
    async with (
        open_model_server(play or script()) as model,
        open_harness(
            folder, kind, model, tools=tools, settings=settings, clock=clock, info=info
        ) as harness,
    ):
        yield harness


@asynccontextmanager
async def held_readers(harness: Harness) -> AsyncGenerator[None]:
    """Block every read of the store; writes continue."""
    store, gate = harness.flow.workspace(harness.remote.id).store, threading.Event()
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


def held_writer(harness: Harness) -> AbstractContextManager[None]:
    """Block every write to the store."""
    return held_database(harness.flow.folder / "data", harness.flow.directory())


class CrashImage:
    """A copy of the data directory as `kill -9` would leave it; restored after the server ended."""

    def __init__(self, harness: Harness) -> None:
        self._data = harness.flow.folder / "data"
        self._copy = harness.flow.folder / "image"
        self._project = harness.flow.directory().resolve()
        shutil.copytree(self._data, self._copy)

    def execute(self, statement: str, *values: str) -> None:
        """Change its database."""
        database = project_folder(self._copy, self._project) / "culm.db"
        with closing(sqlite3.connect(database)) as connection, connection:
            connection.execute(statement, values)

    def restore(self) -> None:
        shutil.rmtree(self._data)
        self._copy.rename(self._data)

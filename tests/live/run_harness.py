"""Runs seen from outside: a scripted model, a server that calls it, and the events of both."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from msgspec import Struct, field

from culm.client.http import Client
from culm.client.stream import EventStream, ServerEvent
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.answering import SeenRequest
from culm.testing.model_server import ModelServer
from culm.testing.script import Reply, ReplyRule, Script
from culm.wire.codec import decode
from culm.wire.events import CallOutput
from culm.wire.messages import FinishPart, Message, full_text
from culm.wire.runs import Outcome, Run, RunComplete
from tests.live.harness import SERVE, ProcessServer, open_client_of, open_process_server
from tests.support import WAIT_S, model_config

TITLES = "Write a title"  # The start of a title request.
HELD = Reply(deltas=["It ", "has ", "begun ", "and ", "ended."], hold_after=3)
HELD_PREFIX, HELD_WHOLE = "It has begun ", "It has begun and ended."


def script(*replies: Reply, otherwise: Reply | None = None) -> Script:
    """Answers to prompts, in order; a title is always the same."""
    return Script(list(replies), [ReplyRule(TITLES, Reply(text="A title"))], otherwise)


def write_config(folder: Path, model: ModelServer, **settings: object) -> Path:
    """A configuration file that names this model."""
    file = folder / "culm.json"
    file.write_text(json.dumps({**model_config(model.url), **settings}))
    return file


@asynccontextmanager
async def open_agent(
    folder: Path, model: ModelServer, *args: str, program: tuple[str, ...] = SERVE
) -> AsyncGenerator[tuple[ProcessServer, Client]]:
    """A server that uses this model, and a client without an open workspace."""
    config = folder / "culm.json"
    if not config.exists():
        write_config(folder, model)
    given = ("--host", f"unix://{folder}/s", "--config", str(config), *args)
    async with (
        open_process_server(folder, *given, program=program) as server,
        open_client_of(server) as client,
    ):
        yield server, client


# --- requests to the model


class ChatMessage(Struct):
    """One message of a request, as a provider reads it."""

    role: str
    content: str | None = None
    tool_call_id: str = ""
    tool_calls: list[dict[str, object]] = field(default_factory=list[dict[str, object]])

    def begins(self, text: str) -> bool:
        return (self.content or "").startswith(text)


class Question(Struct):
    messages: list[ChatMessage]

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """Role and text of each message, without the system prompt."""
        return [(m.role, m.content or "") for m in self.messages if m.role != "system"]


def asked(model: ModelServer) -> list[SeenRequest]:
    """Return all requests except those for a title."""
    return [seen for seen in model.requests if not _question(seen).messages[0].begins(TITLES)]


def questions(model: ModelServer) -> list[Question]:
    return [_question(seen) for seen in asked(model)]


def _question(seen: SeenRequest) -> Question:
    return decode(seen.raw, Question)


async def until_asked(model: ModelServer, count: int) -> None:
    """Wait until the model got so many requests, not counting titles."""
    async with asyncio.timeout(WAIT_S):
        while len(asked(model)) < count:
            await model.until_requests(len(model.requests) + 1)


async def until_abandoned(model: ModelServer, seen: SeenRequest) -> None:
    """Wait until the client of a request has disconnected before the end of the answer."""
    async with asyncio.timeout(WAIT_S):
        await model.until_left(seen.n)


# --- events of clients


class Watch:
    """The stream of a client with all events so far, across restarts. Made by `open_watch`."""

    def __init__(self, stream: EventStream) -> None:
        self.stream = stream
        self.events: list[ServerEvent] = []
        self._changed = asyncio.Event()

    async def run(self) -> None:
        async with aclosing(self.stream.events()) as events:
            async for event in events:
                self.events.append(event)
                self._changed.set()

    async def until(self, condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
        async with asyncio.timeout(wait_s):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def until_complete(self, *run_ids: str, wait_s: float = WAIT_S) -> None:
        await self.until(lambda: {c.run_id for c in self.completes()} >= {*run_ids}, wait_s)

    def completes(self) -> list[RunComplete]:
        return [t.read(RunComplete) for t in self.events if t.type == "run_complete"]

    def text_of(self, complete: RunComplete) -> str:
        """The answer of a completed run; a long one is read from its message."""
        messages = (event.read(Message) for event in self.events if event.type == "message")
        found = [
            full_text(message.parts) for message in messages if message.id == complete.message_id
        ]
        return complete.text or found[-1]

    def output_of(self, call_id: str) -> str:
        """The output of a call that was received; it must have no gap."""
        shown = ""
        for event in self.events:
            if event.type == "call_output":
                output = event.read(CallOutput)
                if output.tool_call_id == call_id:
                    assert output.offset == len(shown), output
                    shown += output.text
        return shown

    def completed(self) -> list[str]:
        """Return the ids of all `run_complete` events, with repetitions."""
        return sorted(complete.run_id for complete in self.completes())


@asynccontextmanager
async def open_watch(remote: RemoteWorkspace, cursor: str = "") -> AsyncGenerator[Watch]:
    """Collect events while in the block, from a cursor or from now on."""
    connected = asyncio.Event()
    watch = Watch(EventStream(remote, cursor=cursor, on_connected=connected.set))
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch.run(), name="watch")
        try:
            async with asyncio.timeout(WAIT_S):
                await connected.wait()
            yield watch
        finally:
            task.cancel()


async def outcomes(remote: RemoteWorkspace, run_ids: Iterable[str]) -> list[Outcome | None]:
    return [(await remote.run(run_id)).outcome for run_id in run_ids]


async def act_on(remote: RemoteWorkspace, run_id: str, action: str) -> Run:
    """Start or drop a run."""
    return await remote.client.ask("POST", remote.path(f"/runs/{run_id}/{action}"), Run)


async def rows(remote: RemoteWorkspace, session_id: SessionId) -> list[tuple[str, str, str, str]]:
    """Return role, text and both finish reasons of each message of a session."""
    return [
        (message.role, full_text(message.parts), *finish_of(message))
        for message in await remote.messages(session_id)
    ]


def finish_of(message: Message) -> tuple[str, str]:
    (finish,) = [part.data for part in message.parts if isinstance(part, FinishPart)]
    return finish.reason, finish.culm_reason

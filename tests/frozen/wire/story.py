"""One server and one model, with all requests, answers and events.

Owns the parts of a step: send a request, wait for its events, advance the clock. The steps are in
`scenario.py`, `turns.py`, `asking.py` and `agents.py`.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from urllib.parse import quote, urlencode

from culm.client.workspace import RemoteWorkspace
from culm.ids import ClientId, RunId, SessionId, WorkspaceId
from culm.testing.model_server import ModelServer
from culm.wire import workspaces as wire
from culm.wire.config import Config
from culm.workspace.workspace import LiveWorkspace
from tests.flow.conftest import FlowServer
from tests.flow.drive import UNKNOWN, Answer, RawStream, open_events, send, until
from tests.frozen.wire.transcript import Exchange, Names, Stream
from tests.support import FakeClock, FakeTimer

W = "/v1/workspaces/{workspace_id}"
S = f"{W}/sessions/{{session_id}}"
A = f"{W}/agent/sessions/{{session_id}}"
R = f"{W}/runs/{{run_id}}"
TITLE = b"Write a title"  # In every request for one, and in no other.


class StoryClock(FakeClock):
    """Records all timers, so that time advances only after one is set."""

    def __init__(self) -> None:
        super().__init__()
        self.delays: list[float] = []

    def call_later(self, delay_s: float, action: Callable[[], None]) -> FakeTimer:
        self.delays.append(delay_s)
        return super().call_later(delay_s, action)


@dataclass
class Story:
    flow: FlowServer
    clock: StoryClock
    model: ModelServer
    exits: AsyncExitStack
    names: Names
    clients: list[ClientId]
    run_ids: list[RunId]  # Given by a client.
    exchanges: list[Exchange] = field(default_factory=list[Exchange])
    streams: list[Stream] = field(default_factory=list[Stream])
    workspace_id: str = UNKNOWN
    questions: int = 0  # Requests to the model so far, without titles.

    @property
    def folder(self) -> str:
        return str(self.flow.directory())

    @property
    def workspace(self) -> LiveWorkspace:
        return self.flow.workspace(self.workspace_id)

    # --- over HTTP

    async def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, str] | None = None,
        **ids: str,
    ) -> Answer:
        """Call a route by its path in the table, and record the exchange."""
        target = quote(path.format(**{"workspace_id": self.workspace_id, **ids}), safe="/$")
        if query:
            target += f"?{urlencode(query, safe='/$')}"
        data = b"" if body is None else json.dumps(body).encode()
        answer = await send(self.flow, method, target, data)
        self.exchanges.append(Exchange(method, path, target, data, answer))
        return answer

    async def attach(
        self, exits: AsyncExitStack, client: int, view: str, *, cursor: str = "", types: str = ""
    ) -> RawStream:
        """Open a stream that lasts as long as `exits`."""
        about = await self.flow.client(self.clients[client])
        info = wire.Workspace(WorkspaceId(self.workspace_id), "", Config())
        remote = RemoteWorkspace(about, wire.CreateWorkspace(), info)
        raw = await exits.enter_async_context(
            open_events(self.flow, remote, view=view, cursor=cursor, types=types)
        )
        query = {"client_id": about.id, "view": view, "cursor": cursor, "types": types}
        query = {name: value for name, value in query.items() if value}
        target = remote.path(f"/events?{urlencode(query, safe=',')}")
        self.streams.append(Stream(view, target, raw))
        answer = Answer(raw.status, raw.headers, b"")
        self.exchanges.append(Exchange("GET", f"{W}/events", target, b"", answer))
        await until(lambda: self.is_present(about.id))
        return raw

    def is_present(self, client_id: ClientId) -> bool:
        return client_id in {present.client_id for present in self.workspace.lifetime.presence()}

    async def gone(self, client: int) -> None:
        """Wait until the server has noticed that a client's stream is closed."""
        await until(lambda: not self.is_present(self.clients[client]))
        self.workspace.hub.flush()

    async def received(self, marker: bytes) -> None:
        """Wait until the first stream, which gets all events, has this."""
        await self.streams[0].raw.until(marker)

    # --- time

    async def tick(self) -> None:
        """Publish everything, and then let a second pass."""
        await self.settle()
        self.clock.advance(1)
        await self.settle()

    async def settle(self) -> None:
        await self.workspace.store.write(lambda tx: None)
        self.workspace.hub.flush()

    # --- the model

    async def question(self) -> int:
        """Wait for the next request to the model that is not for a title; return its number."""

        def found() -> list[int]:
            return [seen.n for seen in self.model.requests if TITLE not in seen.raw]

        await until(lambda: len(found()) > self.questions)
        self.questions += 1
        return found()[self.questions - 1]

    async def title(self) -> int:
        """Like `question`, for the request for a title."""

        def found() -> list[int]:
            return [seen.n for seen in self.model.requests if TITLE in seen.raw]

        await until(lambda: bool(found()))
        return found()[-1]

    async def idle(self, session_id: SessionId) -> None:
        """Wait until the last run of a session has ended and its end is published."""
        await until(lambda: not self.workspace.runs.is_busy(session_id))
        await self.settle()

"""A data directory with agents, served by one server after another, with one model for all."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path

from culm.settings import Settings
from culm.store.writer import connect
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import ReplyRule
from tests.flow.agents_harness import (
    AgentHarness,
    HybridClock,
    open_agent_harness,
    open_server_only,
    script_of,
)
from tests.flow.conftest import FlowServer
from tests.flow.runs import CrashImage

AWAY_S = 10.0


class Restarts:
    """Starts servers on the same data directory. Created by `open_restarts`."""

    def __init__(self, folder: Path, model: ModelServer) -> None:
        self._folder = folder
        self._model = model
        self._harness: AgentHarness | None = None
        self._image: CrashImage | None = None

    def kill(self) -> None:
        """Save the data directory now; the next server starts from this state."""
        assert self._harness is not None
        self._image = CrashImage(self._harness)

    def change_database(self, statement: str) -> None:
        """Change the database of the killed server before the next one starts."""
        assert self._image is not None
        self._image.restore()
        self._image = None
        (database,) = (self._folder / "data").glob("projects/*/culm.db")
        with closing(connect(database)) as connection:
            connection.execute(statement)

    @asynccontextmanager
    async def next(self, settings: Settings | None = None) -> AsyncGenerator[AgentHarness]:
        clock, session_id = HybridClock(), None
        if self._harness is not None:
            clock = HybridClock(self._harness.clock.now_s() + AWAY_S)
            session_id = self._harness.session_id
        if self._image is not None:
            self._image.restore()
        async with open_agent_harness(
            self._folder, self._model, settings=settings, clock=clock, session_id=session_id
        ) as harness:
            self._harness, self._image = harness, None
            yield harness

    @asynccontextmanager
    async def server_only(self) -> AsyncGenerator[FlowServer]:
        """Start a server without a client."""
        assert self._harness is not None
        clock = HybridClock(self._harness.clock.now_s() + AWAY_S)
        if self._image is not None:
            self._image.restore()
        async with open_server_only(self._folder, self._model, clock) as (flow, _):
            yield flow


@asynccontextmanager
async def open_restarts(folder: Path, *talks: Iterable[ReplyRule]) -> AsyncGenerator[Restarts]:
    async with open_model_server(script_of(*talks)) as model:
        yield Restarts(folder, model)

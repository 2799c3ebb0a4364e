"""One data directory with agents, under one server after the other, with one model behind all."""

from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager, closing
from pathlib import Path

from culm.settings import Settings
from culm.store.writer import connect
from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Rule
from tests.flow.agents_stage import AgentStage, HandClock, open_again, open_alone, script_of
from tests.flow.conftest import FlowServer
from tests.flow.runs import Image

AWAY_S = 10.0


class Lives:
    """Starts servers, each where the last one ended. Made by `open_lives`."""

    def __init__(self, folder: Path, model: ModelServer) -> None:
        self._folder = folder
        self._model = model
        self._stage: AgentStage | None = None
        self._image: Image | None = None

    def kill(self) -> None:
        """The server ends as it is now, as far as the next one can see."""
        assert self._stage is not None
        self._image = Image(self._stage)

    def change_database(self, statement: str) -> None:
        """Of the server that was killed, before the next one begins."""
        assert self._image is not None
        self._image.restore()
        self._image = None
        (database,) = (self._folder / "data").glob("projects/*/culm.db")
        with closing(connect(database)) as connection:
            connection.execute(statement)

    @asynccontextmanager
    async def next(self, settings: Settings | None = None) -> AsyncGenerator[AgentStage]:
        clock, session_id = HandClock(), None
        if self._stage is not None:
            clock = HandClock(self._stage.clock.now_s() + AWAY_S)
            session_id = self._stage.session_id
        if self._image is not None:
            self._image.restore()
        async with open_again(
            self._folder, self._model, settings=settings, clock=clock, session_id=session_id
        ) as stage:
            self._stage, self._image = stage, None
            yield stage

    @asynccontextmanager
    async def alone(self) -> AsyncGenerator[FlowServer]:
        """A server that nobody comes to."""
        assert self._stage is not None
        clock = HandClock(self._stage.clock.now_s() + AWAY_S)
        if self._image is not None:
            self._image.restore()
        async with open_alone(self._folder, self._model, clock) as (flow, _):
            yield flow


@asynccontextmanager
async def open_lives(folder: Path, *talks: Iterable[Rule]) -> AsyncGenerator[Lives]:
    async with open_model_server(script_of(*talks)) as model:
        yield Lives(folder, model)

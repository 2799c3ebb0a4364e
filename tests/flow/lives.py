"""One data directory under one server after the other, with one model behind all of them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Script
from tests.flow.probes import Probe, Wound
from tests.flow.runs import Image, Stage, open_heard, open_stage

AWAY_S = 10.0


class Lives:
    """Starts servers, each where the last one ended. Made by `open_lives`."""

    def __init__(self, folder: Path, kind: str, model: ModelServer) -> None:
        self.clock = Wound()
        self.model = model
        self._folder = folder
        self._kind = kind
        self._stage: Stage | None = None
        self._cursor = ""

    @asynccontextmanager
    async def first(self, *tools: Probe) -> AsyncGenerator[Stage]:
        async with open_stage(
            self._folder, self._kind, self.model, clock=self.clock, tools=tools
        ) as stage:
            self._stage = stage
            self._cursor = (await stage.remote.snapshot()).cursor
            yield stage

    @asynccontextmanager
    async def next(
        self,
        *tools: Probe,
        away_s: float = AWAY_S,
        image: Image | None = None,
        config: dict[str, object] | None = None,
    ) -> AsyncGenerator[Stage]:
        """Start again; `heard` has heard everything since the beginning of the first."""
        assert self._stage is not None
        if image is not None:
            image.restore()
        self.clock = Wound(self.clock.now_s() + away_s)
        again = open_stage(
            self._folder, self._kind, self.model,
            clock=self.clock, tools=tools, session_id=self._stage.session_id, config=config,
        )  # fmt: skip
        async with again as stage, open_heard(stage.remote, cursor=self._cursor) as heard:
            stage.heard = heard
            yield stage


@asynccontextmanager
async def open_lives(folder: Path, play: Script, kind: str = "unix") -> AsyncGenerator[Lives]:
    async with open_model_server(play) as model:
        yield Lives(folder, kind, model)


async def outcomes(stage: Stage) -> dict[str, str]:
    """How each run stands: its outcome, or its state."""
    return {run.id: run.outcome or run.state for run in await stage.runs()}


async def ends(stage: Stage) -> list[tuple[str, str]]:
    """Everything that has ended, in the order it was told: its id, and how."""
    await stage.catch_up()
    return [
        (c.run_id, "canceled" if c.cancelled else c.culm_reason or c.error or "good")
        for c in stage.heard.completes()
    ]

"""A data directory served by one server after another, with one model for all."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from culm.testing.model_server import ModelServer, open_model_server
from culm.testing.script import Script
from tests.flow.probes import Probe, WaitableClock
from tests.flow.runs import CrashImage, Harness, open_harness, open_received

AWAY_S = 10.0


class Restarts:
    """Starts servers on the same data directory. Created by `open_restarts`."""

    def __init__(self, folder: Path, kind: str, model: ModelServer) -> None:
        self.clock = WaitableClock()
        self.model = model
        self._folder = folder
        self._kind = kind
        self._harness: Harness | None = None
        self._cursor = ""

    @asynccontextmanager
    async def first(self, *tools: Probe) -> AsyncGenerator[Harness]:
        async with open_harness(
            self._folder, self._kind, self.model, clock=self.clock, tools=tools
        ) as harness:
            self._harness = harness
            self._cursor = (await harness.remote.snapshot()).cursor
            yield harness

    @asynccontextmanager
    async def next(
        self,
        *tools: Probe,
        away_s: float = AWAY_S,
        image: CrashImage | None = None,
        config: dict[str, object] | None = None,
    ) -> AsyncGenerator[Harness]:
        """Start the next server; `received` has every event since the first one started."""
        assert self._harness is not None
        if image is not None:
            image.restore()
        self.clock = WaitableClock(self.clock.now_s() + away_s)
        again = open_harness(
            self._folder, self._kind, self.model,
            clock=self.clock, tools=tools, session_id=self._harness.session_id, config=config,
        )  # fmt: skip
        async with again as harness, open_received(harness.remote, cursor=self._cursor) as received:
            harness.received = received
            yield harness


@asynccontextmanager
async def open_restarts(folder: Path, play: Script, kind: str = "unix") -> AsyncGenerator[Restarts]:
    async with open_model_server(play) as model:
        yield Restarts(folder, kind, model)


async def outcomes(harness: Harness) -> dict[str, str]:
    """Outcome or state of each run."""
    return {run.id: run.outcome or run.state for run in await harness.runs()}


async def ends(harness: Harness) -> list[tuple[str, str]]:
    """Id and outcome of each ended run, in the order they were published."""
    await harness.catch_up()
    return [
        (c.run_id, "canceled" if c.cancelled else c.culm_reason or c.error or "good")
        for c in harness.received.completes()
    ]

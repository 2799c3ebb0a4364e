"""One server under test in `runs.py`: started, watched by a subscriber, and given runs to do."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec import Struct

from bench.runs_client import (
    WAIT_S,
    Complete,
    Stream,
    WorkspaceClient,
    completes,
    open_stream,
    open_workspace_client,
)
from bench.runs_host import Candidate, Cores, Place, ScriptedModel, Served, start
from bench.runs_yardstick import LoneCommits
from bench.traffic import cpu_s
from culm.testing.script import Reply

SETTLE_S = 0.7  # An idle store checkpoints its log after half a second: that is counted, too.


class Size(Struct, frozen=True):
    """The amount of work; a full run takes five minutes, a quick one a minute and a half."""

    rounds: int
    flat_rounds: int  # Of 20 runs, for each round of 200.
    tokens: int
    paced_tokens: int
    lone_tokens: int  # Of a single run.
    prompts: int  # Per round.
    timed_tokens: int
    wire_tokens: int
    shown_tokens: int  # To 100 subscribers.


FULL = Size(
    rounds=3,
    flat_rounds=3,
    tokens=2000,
    paced_tokens=1000,
    lone_tokens=4000,
    prompts=40,
    timed_tokens=600,
    wire_tokens=2000,
    shown_tokens=600,
)
QUICK = Size(
    rounds=1,
    flat_rounds=3,
    tokens=2000,
    paced_tokens=300,
    lone_tokens=1000,
    prompts=30,
    timed_tokens=400,
    wire_tokens=1000,
    shown_tokens=400,
)


class Lab(Struct):
    """Everything that all servers of a benchmark run share."""

    model: ScriptedModel
    commits: LoneCommits
    cores: Cores
    size: Size
    wrong: list[str]  # Descriptions of all errors.


class Bed:
    """One server under test, a workspace on it and a subscriber. Made by `open_bed`."""

    def __init__(self, lab: Lab, candidate: Candidate, place: Place) -> None:
        self.lab = lab
        self.place = place
        self._candidate = candidate
        self._client_id = str(uuid.uuid4())
        self._served: Served | None = None
        self._client: WorkspaceClient | None = None
        self._watch: Stream | None = None
        self._stack = AsyncExitStack()

    @property
    def served(self) -> Served:
        assert self._served is not None, "started"
        return self._served

    @property
    def client(self) -> WorkspaceClient:
        assert self._client is not None, "started"
        return self._client

    @property
    def watch(self) -> Stream:
        assert self._watch is not None, "started"
        return self._watch

    async def start(self) -> None:
        lab = self.lab
        self._served = served = start(self._candidate, self.place, lab.model.url, lab.cores)
        self._stack.callback(served.reap)
        directory = self.place.folder / "project"
        directory.mkdir(exist_ok=True)
        self._client = await self._stack.enter_async_context(
            open_workspace_client(served.address, str(directory), self._client_id)
        )
        await self.watch_view("delta")
        self._stack.callback(lambda: self.watch.close())

    async def watch_view(self, view: str) -> None:
        """Replace the subscriber by one of this view."""
        if self._watch is not None:
            self._watch.close()
        self._watch = await open_stream(
            self.served.address, self.client.workspace, self._client_id, keeps=True, view=view
        )

    async def stop(self) -> None:
        await self._stack.aclose()

    def cpu_s(self) -> float:
        return cpu_s(self.served.pid)

    def add_error(self, what: str) -> None:
        self.lab.wrong.append(f"{self._candidate.name}: {what}")

    def check(self, ended: list[Complete], runs: int, tokens: int) -> None:
        """Check that every run ended once, without an error, and with all of its text."""
        wanted = "".join(f"tok{n} " for n in range(tokens)).strip()
        if len({complete.session_id for complete in ended}) != runs or len(ended) != runs:
            self.add_error(f"{len(ended)} ends of {runs} runs")
        for complete in ended:
            if complete.error or complete.cancelled or complete.text.strip() != wanted:
                self.add_error(f"a run ended with {complete.error!r}, {len(complete.text)} chars")


@asynccontextmanager
async def open_bed(lab: Lab, candidate: Candidate, place: Place) -> AsyncGenerator[Bed]:
    bed = Bed(lab, candidate, place)
    try:
        await bed.start()
        yield bed
    finally:
        await bed.stop()


class Ran(Struct):
    """The result of many runs at once."""

    cpu_s: float
    wall_s: float  # From the first prompt to the last end.
    wire_bytes: int
    deltas: int
    ended: list[Complete]


async def run_all(bed: Bed, runs: int, reply: Reply) -> Ran:
    bed.lab.model.play(reply)
    sessions = await bed.client.create_sessions(runs)
    await asyncio.sleep(SETTLE_S)
    watch = bed.watch
    watch.begin()
    before_s, start_ns = bed.cpu_s(), time.monotonic_ns()
    await bed.client.prompt_all(sessions)
    paced_s = reply.tokens / reply.rate if reply.rate else 0.0
    await watch.until_complete(runs, WAIT_S + 3 * paced_s + runs * reply.tokens / 1000)
    await asyncio.sleep(SETTLE_S)
    used_s = bed.cpu_s() - before_s
    ended = completes(watch.received)
    if not reply.stamp:
        bed.check(ended, runs, reply.tokens)
    wall_s = (max(complete.at_ns for complete in ended) - start_ns) / 1e9
    deltas = sum(one.data.count(b'"type":"message_delta"') for one in watch.received)
    return Ran(used_s, wall_s, watch.size, deltas, ended)

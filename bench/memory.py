"""Memory over time: a server in mixed use for twenty minutes, its resident size as a curve.

Usage: python -m bench.memory [--minutes M]     table on stdout, JSON in bench/out/memory.json

Exit status 1 if a run ended wrongly. What is measured and how: docs/benchmarks.md.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from statistics import linear_regression

import uvloop
from msgspec import Struct, field

from bench.fanout import describe_machine
from bench.ratios import OUT, write_result
from bench.runs_client import Asker, open_stream
from bench.runs_host import (
    OURS,
    TITLES,
    Address,
    Candidate,
    Cores,
    open_model,
    open_place,
    parse_url,
    start,
)
from bench.serving import rss_mb
from bench.tables import aligned_table, print_footer
from culm.client import connect, open_present
from culm.client.workspace import RemoteWorkspace
from culm.ids import SessionId
from culm.testing.script import Reply, ReplyRule, Script, ScriptedCall
from culm.wire.runs import Run

PEOPLE = 4
SESSIONS = 6  # Kept by each person; older ones are deleted.
STREAMS = 25  # Opened and closed together.
SAMPLE_S = 10.0
REST_S = 30.0  # Without use, at the end.
POLL_S, POLLS = 0.05, 1200  # A run that lasts longer than a minute is wrong.
PAUSE_S = 0.1  # Between two things that a person does.
DONE = "the command is done"
LEAF = "count the files"


def script() -> Script:
    """The answers of the model: by the last thing that happened in the session, then by words."""
    command = {"command": f"seq 2000 && echo {DONE}", "description": "count"}
    bash = ScriptedCall(name="bash", input=command)
    agents = ScriptedCall(name="agent", input={"assignments": [{"prompt": LEAF}] * 2})
    rules = [ReplyRule(when=title, reply=Reply(text="A title")) for title in TITLES]
    rules += [
        ReplyRule(when=f"\\n{DONE}", reply=Reply(tokens=200)),
        ReplyRule(when="@bash", reply=Reply(text="I run it.", calls=[bash])),
        ReplyRule(when="assignments", reply=Reply(tokens=100)),
        ReplyRule(when="@agents", reply=Reply(text="I ask them.", calls=[agents])),
        ReplyRule(when="@slow", reply=Reply(tokens=400, rate=200.0)),
        ReplyRule(when="@large", reply=Reply(tokens=150_000)),
    ]
    return Script(rules=rules, otherwise=Reply(tokens=300))


class Sample(Struct, frozen=True):
    at_s: float
    rss_mb: float
    runs: int  # Ended until then.


class Result(Struct):
    idle_mb: float
    rested_mb: float
    slope_mb_per_min: float  # In the second half of the use.
    samples: list[Sample]
    wrong: list[str]
    seconds: float
    machine: dict[str, str]


class Use(Struct):
    """The mixed use of one server."""

    workspace: RemoteWorkspace
    random: random.Random
    runs: int = 0
    wrong: list[str] = field(default_factory=list[str])

    async def person(self, until_s: float) -> None:
        sessions: list[SessionId] = []
        doings: list[tuple[Callable[[SessionId], Awaitable[None]], int]] = [
            (self._plain, 8),
            (self._tool, 3),
            (self._agents, 1),
            (self._cancelled, 2),
            (self._large, 1),
            (self._read, 4),
        ]
        while time.monotonic() < until_s:
            if not sessions or self.random.random() < 0.3:
                sessions.append((await self.workspace.create_session("memory")).id)
            if len(sessions) > SESSIONS:
                await self.workspace.delete_session(sessions.pop(0))
            (doing,) = self.random.choices(*zip(*doings, strict=True))
            await doing(sessions[-1])
            await asyncio.sleep(PAUSE_S)

    async def _plain(self, session_id: SessionId) -> None:
        await self._run(session_id, "tell me something")

    async def _tool(self, session_id: SessionId) -> None:
        await self._run(session_id, "@bash")

    async def _agents(self, session_id: SessionId) -> None:
        await self._run(session_id, "@agents")

    async def _large(self, session_id: SessionId) -> None:
        session_id = (await self.workspace.create_session("large")).id
        await self._run(session_id, "@large")
        await self.workspace.delete_session(session_id)

    async def _cancelled(self, session_id: SessionId) -> None:
        run_id = await self.workspace.prompt(session_id, "@slow", run_id=new_id())
        await asyncio.sleep(0.3)
        await self.workspace.cancel(session_id)
        await self._ended(run_id)

    async def _read(self, session_id: SessionId) -> None:
        await self.workspace.messages(session_id)
        await self.workspace.snapshot(session_id)
        await self.workspace.sessions()

    async def _run(self, session_id: SessionId, text: str) -> None:
        run_id = new_id()
        await self.workspace.prompt(session_id, text, run_id=run_id, approve="allow")
        run = await self._ended(run_id)
        if run.outcome != "end_turn":
            self.wrong.append(f"{text}: {run.outcome} {run.title} {run.details}")

    async def _ended(self, run_id: str) -> Run:
        for _ in range(POLLS):
            run = await self.workspace.run(run_id)
            if run.state == "ended":
                self.runs += 1
                return run
            await asyncio.sleep(POLL_S)
        raise TimeoutError(f"run {run_id} did not end")


def new_id() -> str:
    return str(uuid.uuid4())


async def streams(address: Address, path: str, until_s: float) -> None:
    """Clients that attach together and leave together, in both views."""
    while time.monotonic() < until_s:
        async with asyncio.TaskGroup() as group:
            opening = [
                group.create_task(
                    open_stream(
                        address, path, new_id(), keeps=False, view=("delta", "crush")[n % 2]
                    )
                )
                for n in range(STREAMS)
            ]
        await asyncio.sleep(1.0)
        for one in opening:
            one.result().close()
        await asyncio.sleep(1.0)


async def sample(pid: int, use: Use, samples: list[Sample]) -> None:
    start_s = time.monotonic()
    while True:
        at_s = time.monotonic() - start_s
        samples.append(Sample(at_s, rss_mb(pid), use.runs))
        print(f"  {at_s:5.0f} s  {samples[-1].rss_mb:6.1f} MB  {use.runs} runs", file=sys.stderr)
        await asyncio.sleep(SAMPLE_S)


async def measure(folder: Path, minutes: float) -> Result:
    with ExitStack() as stack:
        model = stack.enter_context(open_model(folder, Cores(), 0))
        with closing(Asker(parse_url(model.url))) as asker:
            await asker.ask("POST", "/culm/script", script())
        place = stack.enter_context(open_place(folder, "memory"))
        served = start(Candidate("culm", OURS), place, model.url, Cores())
        stack.callback(served.reap)
        project = place.folder / "project"
        project.mkdir()
        async with connect(place.url) as client:
            workspace = await client.open_workspace(project)
            async with open_present(workspace):
                return await use_for(minutes, served.pid, workspace, served.address)


async def use_for(minutes: float, pid: int, workspace: RemoteWorkspace, address: Address) -> Result:
    began_s = time.monotonic()
    await asyncio.sleep(REST_S / 10)
    idle_mb = rss_mb(pid)
    until_s = time.monotonic() + 60 * minutes
    use, samples = Use(workspace, random.Random(1)), list[Sample]()
    async with asyncio.TaskGroup() as group:
        sampling = group.create_task(sample(pid, use, samples))
        async with asyncio.TaskGroup() as users:
            for _ in range(PEOPLE):
                users.create_task(use.person(until_s))
            users.create_task(streams(address, workspace.path(), until_s))
        await asyncio.sleep(REST_S)
        sampling.cancel()
    return Result(
        idle_mb,
        rss_mb(pid),
        slope([one for one in samples if one.at_s <= 60 * minutes]),
        samples,
        use.wrong,
        time.monotonic() - began_s,
        describe_machine(),
    )


def slope(samples: Sequence[Sample]) -> float:
    """Return MB per minute in the second half, by linear regression."""
    half = samples[len(samples) // 2 :]
    return 60 * linear_regression([s.at_s for s in half], [s.rss_mb for s in half]).slope


def table(result: Result) -> str:
    last = f"{len(result.samples)} samples, {result.samples[-1].runs} runs"
    bound = 1.4 * result.idle_mb + 20
    rows = [
        ["idle", f"{result.idle_mb:.1f} MB", "", ""],
        ["after the use", f"{result.rested_mb:.1f} MB", f"≤ {bound:.1f} MB", ""],
        ["slope in the second half", f"{result.slope_mb_per_min:.2f} MB/min", "≤ 0.1 MB/min", last],
    ]
    return aligned_table(rows, ["<", ">", ">", "<"])


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the memory of a server in mixed use.")
    parser.add_argument("--minutes", type=float, default=20.0, help="how long; default 20")
    minutes = parser.parse_args().minutes
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        result = uvloop.run(measure(Path(folder), minutes))
    write_result("memory", result, [])
    print(table(result))
    print_footer([], result.wrong, result.seconds)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

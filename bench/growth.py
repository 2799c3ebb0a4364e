"""Growth: what one more run, subscriber, message, session or worker costs.

Usage: python -m bench.growth [--quick]     tables on stdout, JSON in bench/out/growth.json

Exit status 1 if a run ended wrongly or an event was lost. What is measured and how:
docs/benchmarks.md.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from bench import fanout, tree_bed
from bench.fanout import describe_machine
from bench.fleet_bed import memory_of
from bench.ratios import OUT, write_result
from bench.runs_bed import FULL as RUNS_FULL
from bench.runs_bed import Lab, open_bed, run_all
from bench.runs_host import OURS, Candidate, Cores, open_model, open_place, share_cores
from bench.runs_yardstick import open_commits, work_us
from bench.serving import ServedDirectory, rss_mb
from bench.tables import aligned_table, format_number, print_footer
from bench.traffic import raise_file_limit
from culm.clock import LoopClock
from culm.ids import Ids, SessionId
from culm.store.base import Unit, together
from culm.store.messages import add_message, capture
from culm.store.sessions import add_session
from culm.store.store import open_store
from culm.testing.script import Reply
from culm.wire.messages import Finish, FinishPart, Message, Part, Text, TextPart
from culm.workspace.roots import project_folder

RUNS = (1, 20, 200)
SUBSCRIBERS = (1, 100, 1000)
MESSAGES = (0, 1_000, 10_000, 50_000)
SESSIONS = (1, 1_000, 10_000)
WORKERS = (0, 10, 50)
MESSAGE_CHARS = 1000
GROUP = 500  # Rows in one commit.
EVENTS_MAX = 5_000  # In one step of a few seconds: they are published one by one.
IDLE_S = 3.0


class Size(Struct, frozen=True):
    rounds: int
    tokens: int
    deliveries: int


FULL = Size(rounds=3, tokens=2000, deliveries=60_000)
QUICK = Size(rounds=1, tokens=1000, deliveries=20_000)


class Table(Struct):
    """Figures by the number of something."""

    name: str
    unit: str
    values: dict[int, float]


class Result(Struct):
    tables: list[Table]
    wrong: list[str]
    work_us: list[float]
    seconds: float
    machine: dict[str, str]


class Bench:
    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self.tables: list[Table] = []
        self.wrong: list[str] = []
        self.work_us: list[float] = []

    def _progress(self, what: str) -> None:
        print(f"  {what} …", file=sys.stderr, flush=True)
        self.work_us.append(work_us())

    async def tokens(self) -> None:
        """CPU time of the server per token, by the number of runs flat out."""
        cores = share_cores()
        us: dict[int, list[float]] = {runs: [] for runs in RUNS}
        with ExitStack() as stack:
            model = stack.enter_context(open_model(self._folder, cores, 0))
            commits = stack.enter_context(open_commits(self._folder, cores))
            lab = Lab(model, commits, cores, RUNS_FULL, self.wrong)
            place = stack.enter_context(open_place(self._folder, "tokens"))
            async with open_bed(lab, Candidate("culm", OURS), place) as bed:
                for _ in range(self._size.rounds):
                    for runs in RUNS:
                        self._progress(f"{runs} runs")
                        # A single run gets more tokens, so that its start does not matter.
                        tokens = self._size.tokens * (10 if runs == 1 else 1)
                        ran = await run_all(bed, runs, Reply(tokens=tokens))
                        us[runs].append(ran.cpu_s / (runs * tokens) * 1e6)
        self._add("runs flat out: CPU per token", "µs", us)

    def subscribers(self) -> None:
        """CPU time of the server per delivery of one event, by the number of subscribers."""
        us: dict[int, list[float]] = {}
        for count in SUBSCRIBERS:
            self._progress(f"{count} subscribers")
            size = fanout.Size(
                rounds=self._size.rounds,
                deliveries=min(self._size.deliveries, EVENTS_MAX * count),
                timed_events=0,
                appends=0,
                turns=0,
                starts=0,
                section_s=60.0,
            )
            bench = fanout.Bench(size, self._folder)
            bench.fan_out(count, 2.0, timed=False)
            us[count] = [bench.rows[0].measured]
            if bench.wrong:
                self.wrong.append(f"{bench.wrong} events were lost, reordered or damaged")
        self._add("subscribers: CPU per delivery", "µs", us)

    def stored(self) -> None:
        """Resident size of an idle server, by what its database has."""
        by_messages = {n: [self._idle_mb(f"messages-{n}", 1, n)] for n in MESSAGES}
        self._add("stored messages of 1 KB: server", "MB", by_messages)
        by_sessions = {n: [self._idle_mb(f"sessions-{n}", n, 0)] for n in SESSIONS}
        self._add("stored sessions: server", "MB", by_sessions)

    def _idle_mb(self, name: str, sessions: int, messages: int) -> float:
        self._progress(name.replace("-", ": "))
        folder = self._folder / name
        folder.mkdir()
        served = ServedDirectory(folder)
        served.fill(0)
        database = project_folder(served.data, served.project) / "culm.db"
        uvloop.run(fill(database, sessions, messages))
        return served.start_once(idle_s=IDLE_S).server_mb

    async def workers(self) -> None:
        """Resident size of a server with agents in the middle of an answer, and of its workers."""
        server: dict[int, list[float]] = {}
        each: dict[int, list[float]] = {}
        with open_model(self._folder, Cores(), 0) as model:
            for count in WORKERS:
                self._progress(f"{count} workers")
                with open_place(self._folder, f"workers-{count}") as place:
                    async with tree_bed.open_bed(place, model.url) as bed:
                        server[count], each[count] = await self._held(bed, count)
        self._add("workers at work: server", "MB", server)
        self._add("workers at work: PSS of each", "MB", {n: mb for n, mb in each.items() if n})

    async def _held(self, bed: tree_bed.Bed, count: int) -> tuple[list[float], list[float]]:
        if not count:
            await asyncio.sleep(IDLE_S)
            return [rss_mb(bed.served.pid)], []
        rules = tree_bed.leading("@0:", [{"prompt": tree_bed.LEAF}] * count)
        await bed.play(tree_bed.script_of(rules, Reply(tokens=1, hold_after=0)))
        sizes: list[float] = []

        def measure(pids: Sequence[int]) -> None:
            sizes.extend((rss_mb(bed.served.pid), *(memory_of(pid).pss_mb for pid in pids)))

        await bed.run_held("@0:", count, measure)
        return sizes[:1], [sum(sizes[1:]) / count]

    def _add(self, name: str, unit: str, found: dict[int, list[float]]) -> None:
        self.tables.append(Table(name, unit, {n: median(values) for n, values in found.items()}))


async def fill(database: Path, sessions: int, messages: int) -> None:
    """Write sessions, and messages of the first of them."""
    ids = Ids()
    async with open_store(database, LoopClock(), ids) as store:
        created = [ids.session() for _ in range(sessions)]
        units: list[Unit] = [add_session(one, "a title", sessions_max=10**6) for one in created]
        units += [_message(ids, created[0], n) for n in range(messages)]
        for first in range(0, len(units), GROUP):
            await store.write(together(*units[first : first + GROUP]))


def _message(ids: Ids, session_id: SessionId, n: int) -> Unit:
    parts: list[Part] = [TextPart(Text("x" * MESSAGE_CHARS)), FinishPart(Finish("stop", 0))]
    message = Message(ids.message(), "assistant" if n % 2 else "user", session_id, parts)
    return add_message(capture(message), is_open=False)


def table(result: Result) -> str:
    lines: list[list[str]] = []
    for one in result.tables:
        cells = [f"{n:,}: {format_number(value)} {one.unit}" for n, value in one.values.items()]
        lines.append([one.name, *cells, *[""] * (4 - len(cells))])
    return aligned_table(lines, ["<", ">", ">", ">", ">"])


async def run(bench: Bench) -> None:
    await bench.tokens()
    await bench.workers()


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure how costs grow with the load.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, about three minutes")
    size = QUICK if parser.parse_args().quick else FULL
    raise_file_limit()  # Children inherit it.
    start_s = time.monotonic()
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        bench = Bench(size, Path(folder))
        uvloop.run(run(bench))
        bench.subscribers()
        bench.stored()
    seconds = time.monotonic() - start_s
    result = Result(bench.tables, bench.wrong, bench.work_us, seconds, describe_machine())
    write_result("growth", result, [])
    print(table(result))
    print_footer(result.work_us, result.wrong, result.seconds)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

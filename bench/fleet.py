"""The cost of workers: their start compared with a bare interpreter, their size, and frames.

Usage: python -m bench.fleet [--quick]
       table on stdout, JSON in bench/out/fleet.json

Exit status 1 if a run gave a wrong answer or something was left behind; a missed target is only
reported, as this machine may be busy. What is measured and how: docs/benchmarks.md.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

import uvloop
from msgspec import Struct

from bench.fanout import describe_machine
from bench.fleet_bed import (
    Answer,
    Bed,
    Serving,
    children_of,
    connect_many,
    is_alive,
    memory_of,
    open_bed,
    open_sender,
    open_service,
    parent_of,
    run_echoes,
    run_on,
    spawn_bare,
)
from bench.fleet_sender import EVENT_BYTES, Stream
from bench.ratios import OUT
from bench.runs_yardstick import work_us
from bench.tools import Result, Row, report
from bench.traffic import cpu_s, raise_file_limit
from culm.fleet.transport.websocket import connect_websocket

ZYGOTE_MS, POOL_MS, CROWD_S, PSS_MB, FRAME_US, SLOWEST = 12.0, 4.0, 1.5, 5.0, 4.0, 3.0
CROWD = 100  # Workers started at once.
CONNECTIONS = 200  # To one service.
POOL_ROLE = "pool"
REST_S = 0.1  # Before a start: the zygote has forked one ahead, retired workers are gone.
SETTLE_S = 2.0  # By then an idle worker has nothing left to do, and its record is written.
STREAMS = (
    Stream("a frame each", "tool_complete", epoch=0),
    Stream("numbered, a frame each", "tool_complete", epoch=1),
    Stream("numbered, up to 64 a frame", "token", epoch=1, burst=640),
)
PACED = Stream("a frame each, one at a time", "tool_complete", epoch=0, burst=1, pause_s=0.001)


class Size(Struct, frozen=True):
    """The amount of work; a full run takes a minute and a half."""

    starts: int
    crowds: int
    streams: int
    events: int  # In one stream.
    paced_events: int
    services: int  # Rounds of runs on all connections.


FULL = Size(starts=100, crowds=5, streams=5, events=50_000, paced_events=3000, services=20)
QUICK = Size(starts=30, crowds=2, streams=2, events=50_000, paced_events=1000, services=6)


class Bench:
    def __init__(self, size: Size) -> None:
        self._size = size
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.work_us: list[float] = []

    async def starts(self, folder: Path) -> None:
        """Start bare interpreters, pooled and new workers in turn, so that they share the noise."""
        bare_ms: list[float] = []
        zygote_ms: list[float] = []
        next_ms: list[float] = []
        pool_ms: list[float] = []
        async with open_bed(folder, idle_max=16) as bed:
            await bed.run("first")  # This also starts the zygote.
            await bed.run(POOL_ROLE)
            for number in range(self._size.starts):
                if number % 10 == 0:
                    self._progress(f"starts, from {number + 1}")
                bare_ms.append(_timed_ms(spawn_bare))
                await asyncio.sleep(REST_S)
                before = set(bed.pids)
                pool_ms.append(self._first_event(await bed.run(POOL_ROLE)))
                self._check("a pooled worker is used", set(bed.pids) <= before)
                zygote_ms.append(self._first_event(await bed.run(f"role-{number}")))
                next_ms.append(self._first_event(await bed.run(f"next-{number}")))
            pids = _pids_of(bed)
        self._check_gone(folder, pids)
        for name, values, target in (
            ("assignment → first event, from the zygote: p50", zygote_ms, ZYGOTE_MS),
            ("… of the next one, at once", next_ms, None),
            ("assignment → first event, from the pool: p50", pool_ms, POOL_MS),
        ):
            p50, p90 = median(values), sorted(values)[len(values) * 9 // 10]
            note = f"fastest {min(values):.1f}, p90 {p90:.1f}"
            self.rows.append(Row(name, "ms", p50, median(bare_ms), p50, "", target, note))

    async def crowd(self, folder: Path) -> None:
        """Start many workers at once, and measure their memory when they are idle."""
        bare_s: list[float] = []
        took_s: list[float] = []
        pss_mb: list[float] = []
        own_mb: list[float] = []
        zygote_mb: list[float] = []
        for number in range(self._size.crowds):
            self._progress(f"{CROWD} workers at once, round {number + 1}")
            bare_s.append(_timed_ms(lambda: spawn_bare(CROWD)) / 1e3)
            async with open_bed(folder, idle_max=CROWD + 1) as bed:
                await bed.run("first")
                answers = await bed.run_many("many", CROWD)
                took_s.append(max(self._ended(answer) for answer in answers) / 1e3)
                self._check("each has its own worker", len(bed.pids) == CROWD + 1)
                await asyncio.sleep(SETTLE_S)
                sizes = [memory_of(pid) for pid in bed.pids]
                pss_mb.append(mean(size.pss_mb for size in sizes))
                own_mb.append(mean(size.own_mb for size in sizes))
                zygote_mb.append(memory_of(parent_of(bed.pids[0])).pss_mb)
                pids = _pids_of(bed)
            self._check_gone(folder, pids)
        name = f"{CROWD} workers at once: until the last has answered"
        note = f"fastest {min(took_s):.2f}, slowest {max(took_s):.2f}"
        p50 = median(took_s)
        self.rows.append(Row(name, "s", p50, median(bare_s), p50, "", CROWD_S, note))
        name = f"an idle worker, {CROWD + 1} of them: PSS"
        note = f"{median(own_mb):.1f} its own; beside them the zygote {median(zygote_mb):.1f}"
        self.rows.append(Row(name, "MB", median(pss_mb), None, median(pss_mb), "", PSS_MB, note))

    async def frames(self) -> None:
        found: dict[str, list[tuple[float, float]]] = {stream.name: [] for stream in STREAMS}
        async with open_sender() as sender:
            for stream in STREAMS:
                await self._stream(sender, stream, 1000)  # Warm-up.
            for number in range(self._size.streams):
                self._progress(f"frames, round {number + 1}")
                for stream in STREAMS:
                    found[stream.name].append(await self._stream(sender, stream, self._size.events))
            paced = await self._stream(sender, PACED, self._size.paced_events)
        for name, spent_us in found.items():
            self._add_frames(name, spent_us, FRAME_US)
        self._add_frames(PACED.name, [paced], None)

    async def _stream(self, sender: Serving, stream: Stream, events: int) -> tuple[float, float]:
        """Return the CPU time per event of the sender, and of this process, in µs."""
        link = await connect_websocket(sender.endpoint)
        theirs_s, ours_s = cpu_s(sender.pid), time.process_time()
        answer = await run_on(link, stream.spec(events))
        spent_s = cpu_s(sender.pid) - theirs_s, time.process_time() - ours_s
        await link.close()
        # A worker on a busy machine may drop tokens, and reports a gap.
        is_whole = answer.events == events or (stream.type == "token" and answer.gaps > 0)
        self._check(
            f"events {stream.name}: {answer.events} of {events}, {answer.outcome}",
            is_whole and answer.outcome.status == "completed",
        )
        count = max(1, answer.events)
        return spent_s[0] / count * 1e6, spent_s[1] / count * 1e6

    def _add_frames(
        self, name: str, spent_us: list[tuple[float, float]], target: float | None
    ) -> None:
        for side, values in zip(("sent", "received"), zip(*spent_us, strict=True), strict=True):
            what = f"events of {EVENT_BYTES} bytes, {name}: {side}, CPU"
            self.rows.append(Row(what, "µs", median(values), None, median(values), "", target))

    async def service(self, folder: Path) -> None:
        """Run on all connections to one worker at once, in several rounds."""
        ratios: list[float] = []
        medians: list[float] = []
        slowest: list[float] = []
        async with open_service(folder) as serving:
            links = await connect_many(serving.endpoint, CONNECTIONS)
            await run_echoes(links)
            for number in range(self._size.services):
                self._progress(f"{CONNECTIONS} runs in one worker, round {number + 1}")
                took_ms = [self._ended(answer) for answer in await run_echoes(links)]
                medians.append(median(took_ms))
                slowest.append(max(took_ms))
                ratios.append(max(took_ms) / median(took_ms))
            for link in links:
                await link.close()
        self._check_gone(folder, [serving.pid])
        name = f"{CONNECTIONS} echo runs at once in one worker: slowest against median, at worst"
        note = f"a run takes {median(medians):.0f} ms; {median(ratios):.2f} × in most rounds"
        self.rows.append(Row(name, "ms", max(slowest), None, max(ratios), "×", SLOWEST, note))

    def _first_event(self, answer: Answer) -> float:
        """Return the time of the first event, in ms."""
        self._check(f"an echo: {answer.outcome}", answer.is_echo)
        return answer.first_ms

    def _ended(self, answer: Answer) -> float:
        self._check(f"an echo: {answer.outcome}", answer.is_echo)
        return answer.took_ms

    def _check_gone(self, folder: Path, pids: list[int]) -> None:
        left = [pid for pid in pids if is_alive(pid)]
        self._check(f"nothing is left: {left}", not left)
        records = [file.name for file in (folder / "fabric").glob("*.json")]
        self._check(f"no record is left: {records}", not records)

    def _check(self, what: str, is_right: bool) -> None:  # noqa: FBT001 - reads well
        if not is_right:
            self.wrong.append(what)

    def _progress(self, what: str) -> None:
        self.work_us.append(work_us())
        print(f"  {what} …", file=sys.stderr, flush=True)


def _timed_ms(action: Callable[[], None]) -> float:
    start_ns = time.perf_counter_ns()
    action()
    return (time.perf_counter_ns() - start_ns) / 1e6


def _pids_of(bed: Bed) -> list[int]:
    """Return the pids of the zygote, of its forks, and of the supervisor."""
    zygote = parent_of(bed.pids[0])
    return [*{*bed.pids, *children_of(zygote)}, zygote, parent_of(zygote)]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare workers with bare interpreters.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, half a minute")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> Result:
    task = asyncio.current_task()
    assert task is not None, "runs in one"
    # End the workers first, however this process ends.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    raise_file_limit()
    start_s = time.monotonic()
    bench = Bench(QUICK if options.quick else FULL)
    # Beside the results, not in a temporary directory, which may be in memory.
    with tempfile.TemporaryDirectory(dir=OUT) as name:
        folder = Path(name)
        await bench.starts(folder)
        await bench.crowd(folder)
        await bench.frames()
        await bench.service(folder)
    seconds = time.monotonic() - start_s
    machine = describe_machine() | {"load": " ".join(f"{one:.1f}" for one in os.getloadavg())}
    return Result(bench.rows, bench.wrong, bench.work_us, seconds, machine)


def main() -> int:
    options = parse()
    OUT.mkdir(exist_ok=True)
    return report(uvloop.run(run(options)), "fleet")


if __name__ == "__main__":
    sys.exit(main())

"""Fan-out, appends and serving: each figure against a yardstick of the same run, or a limit.

Usage: python -m bench.fanout [--quick]     table on stdout, JSON in bench/out/fanout.json

Exit status 1 if an event was lost, reordered or damaged; a missed target is only reported, as
this machine may be busy. What is measured and how: docs/benchmarks.md.
"""

import argparse
import platform
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from bench.appends import Appended, through_sqlite, through_store
from bench.encoding import event_us
from bench.ipc import Child, Command, Ready, Received, Spent, open_child
from bench.ratios import OUT, NamedRatio, Ratio, write_result
from bench.serving import ServedDirectory, list_messages
from bench.tables import aligned_table, format_number

ROUNDS_MIN = 3
PACE_S = 1 / 200  # The rate of the latency figure.
LISTED = 10_000
SESSIONS = 50
IDLE_S = 3.0  # After this a server has nothing left to do; its zygote is ready.


class Size(Struct, frozen=True):
    """The amount of work; a full run takes up to four minutes, a quick one 40 s.

    Many short rounds, because a ratio of adjacent rounds survives a noisy machine.
    """

    rounds: int
    deliveries: int  # Singly, per round; four times as many in bursts, which are cheaper.
    timed_events: int
    appends: int  # Per producer and round.
    turns: int
    starts: int
    section_s: float  # A busy machine gets fewer rounds, but never fewer than three.


FULL = Size(
    rounds=15,
    deliveries=60_000,
    timed_events=300,
    appends=300,
    turns=1500,
    starts=7,
    section_s=25.0,
)
QUICK = Size(
    rounds=5, deliveries=20_000, timed_events=100, appends=150, turns=300, starts=3, section_s=4.0
)


class Row(Struct):
    name: str
    unit: str
    measured: float
    yardstick: float | None  # None where the bound is absolute.
    ratio: float | None  # The median of the rounds' ratios: adjacent rounds share the noise.
    target: float
    at_least: bool = False
    note: str = ""

    @property
    def ok(self) -> bool:
        value = self.measured if self.ratio is None else self.ratio
        return value >= self.target if self.at_least else value <= self.target


class Result(Struct):
    rows: list[Row]
    wrong: int  # Events or rows lost, reordered or damaged, over everything.
    seconds: float
    machine: dict[str, str]


class Pair(Struct):
    """A publisher and the process that reads all its streams."""

    publisher: Child
    reader: Child

    def round(self, command: Command) -> tuple[Spent, Received]:
        spent = self.publisher.ask(command, Spent)
        return spent, self.reader.ask(Command("report"), Received)


@contextmanager
def open_pair(streams: int, *side: str) -> Generator[Pair]:
    with open_child("publisher", *side) as publisher, open_child("reader") as reader:
        where = publisher.receive(Ready)
        reader.ask(Command("open", streams=streams, where=where), Command)
        yield Pair(publisher, reader)


class Bench:
    def __init__(self, size: Size, folder: Path) -> None:
        self._size = size
        self._folder = folder
        self.rows: list[Row] = []
        self.wrong = 0

    def _folder_for(self, name: str) -> Path:
        place = self._folder / name
        place.mkdir()
        return place

    def _progress(self, what: str) -> None:
        print(f"  {what} …", file=sys.stderr, flush=True)

    def _rounds(self) -> Iterator[int]:
        end_s = time.monotonic() + self._size.section_s
        for number in range(self._size.rounds):
            if number < ROUNDS_MIN or time.monotonic() < end_s:
                yield number

    def _compare(
        self, row: Row, ours: Sequence[float], theirs: Sequence[float], note: str = ""
    ) -> None:
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        row.measured, row.yardstick, row.ratio = median(ours), median(theirs), median(ratios)
        row.note = note
        self.rows.append(row)

    # --- fan-out

    def fan_out(self, streams: int, target: float, *, timed: bool) -> None:
        with ExitStack() as stack:
            folder = self._folder_for(f"fanout-{streams}")
            culm = stack.enter_context(open_pair(streams, "culm", str(folder)))
            yardstick = stack.enter_context(open_pair(streams, "yardstick"))
            for burst in (1, 16):
                self._progress(f"{streams} streams, bursts of {burst}")
                self._cpu(culm, yardstick, streams, burst, target)
            if timed:
                self._progress(f"{streams} streams, latency at {1 / PACE_S:.0f} events/s")
                self._latency(culm, yardstick, streams)

    def _round(self, pair: Pair, command: Command) -> tuple[Spent, Received]:
        spent, received = pair.round(command)
        events = command.bursts * command.burst
        self.wrong += received.wrong + abs(received.events - events)
        return spent, received

    def _cpu(self, culm: Pair, yardstick: Pair, streams: int, burst: int, target: float) -> None:
        deliveries = self._size.deliveries * (1 if burst == 1 else 4)
        bursts = max(10, deliveries // (streams * burst))
        command = Command("round", bursts=bursts, burst=burst)
        us: tuple[list[float], list[float]] = ([], [])
        reads: list[str] = []
        for pair in (culm, yardstick):
            _, received = self._round(pair, command)  # The first one warms up.
            reads.append(f"{received.reads_per_write:.2f} × {received.frame_bytes:.0f} B")
        for _ in self._rounds():
            for n, pair in enumerate((culm, yardstick)):
                spent, _ = self._round(pair, command)
                us[n].append(spent.cpu_s / (bursts * burst * streams) * 1e6)
        name = f"fan-out, N = {streams}, " + ("singly" if burst == 1 else f"bursts of {burst}")
        row = Row(f"{name}: CPU per delivery", "µs", 0, 0, 0, target)
        self._compare(row, us[0], us[1], f"a write read in {reads[0]}; yardstick {reads[1]}")

    def _latency(self, culm: Pair, yardstick: Pair, streams: int) -> None:
        command = Command("round", bursts=self._size.timed_events, pace_s=PACE_S)
        p50: tuple[list[float], list[float]] = ([], [])
        p99: tuple[list[float], list[float]] = ([], [])
        for _ in self._rounds():
            for n, pair in enumerate((culm, yardstick)):
                _, received = self._round(pair, command)
                p50[n].append(received.p50_us)
                p99[n].append(received.p99_us)
        note = f"p50 {median(p50[0]):.0f} µs; yardstick {median(p50[1]):.0f}"
        row = Row(f"publish to receive, N = {streams}: p99", "µs", 0, 0, 0, 2.0)
        self._compare(row, p99[0], p99[1], note)

    # --- the rest

    def encoding(self) -> None:
        self._progress("encoding")
        counts = (1, 100, 500)
        us = {n: uvloop.run(event_us(n, self._size.turns)) for n in counts}
        row = Row("one more event in a turn: N = 500 against N = 1", "µs", 0, 0, 0, 1.5)
        self._compare(row, [us[500]], [us[1]], f"N = 100: {us[100]:.2f} µs")

    def appends(self) -> None:
        self._progress("durable appends")
        folder = self._folder_for("appends")
        count = self._size.appends
        sides: tuple[Callable[[Path, int], Appended], ...] = (through_store, through_sqlite)
        per_s: tuple[list[float], list[float]] = ([], [])
        for number in self._rounds():
            for n, side in enumerate(sides):
                appended = side(folder / f"{number}-{n}.db", count)
                self.wrong += appended.wrong
                per_s[n].append(appended.per_s)
        row = Row("durable appends, 20 producers", "/s", 0, 0, 0, 0.7, at_least=True)
        self._compare(row, per_s[0], per_s[1], "read back and in order")

    def serving(self) -> None:
        self._progress("start and rest")
        served = ServedDirectory(self._folder_for("serving"))
        served.fill(SESSIONS)
        started = [
            served.start_once(idle_s=IDLE_S if n == 0 else 0.0) for n in range(self._size.starts)
        ]
        idle = started[0]
        beside = f"PSS: supervisor {idle.supervisor_mb:.1f}, zygote {idle.zygote_mb:.1f} MB"
        self._bound("idle server: resident size", "MB", idle.server_mb, 48.0, beside)
        opened_s = [start.opened_s for start in started]
        import_s = median(start.import_s for start in started)
        note = f"best {min(opened_s):.2f}; only importing the libraries {import_s:.2f}"
        name = f"`serve` to an open workspace with {SESSIONS} sessions"
        self._bound(name, "s", median(opened_s), 1.2 * import_s + 0.05, note)
        self._progress(f"{LISTED:,} messages")
        listed = list_messages(self._folder_for("listing"), LISTED, self._size.starts)
        cpu_ms = median(entry.cpu_ms for entry in listed)
        wall_ms = median(entry.wall_ms for entry in listed)
        note = f"{listed[0].megabytes:.1f} MB; {wall_ms:.0f} ms for the client"
        self._bound(f"list {LISTED:,} messages: server CPU", "ms", cpu_ms, 40.0, note)

    def _bound(self, name: str, unit: str, value: float, target: float, note: str = "") -> None:
        self.rows.append(Row(name, unit, value, None, None, target, note=note))


def named_ratios(rows: Sequence[Row]) -> Iterator[NamedRatio]:
    for row in rows:
        if row.ratio is not None:
            yield NamedRatio(row.name, Ratio(row.ratio, "yardstick", row.at_least, row.target))


def describe_machine() -> dict[str, str]:
    names = ("aiohttp", "uvloop", "msgspec")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
        **{name: version(name) for name in names},
    }


def table(rows: list[Row]) -> str:
    head = ("", "measured", "yardstick", "ratio", "target", "", "")
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        sign = "≥" if row.at_least else "≤"
        unit = "×" if row.ratio is not None else row.unit
        lines.append(
            (
                row.name,
                f"{format_number(row.measured)} {row.unit}",
                "" if row.yardstick is None else f"{format_number(row.yardstick)} {row.unit}",
                "" if row.ratio is None else f"{row.ratio:.2f}",
                f"{sign} {row.target:g} {unit}",
                "ok" if row.ok else "MISS",
                row.note,
            )
        )
    return aligned_table(lines, ("<", ">", ">", ">", ">", "<", "<"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare culm with a yardstick in the same run.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, under 40 s")
    size = QUICK if parser.parse_args().quick else FULL
    start_s = time.monotonic()
    OUT.mkdir(exist_ok=True)
    # Not in a temporary directory, which may be in memory: fsync must be real.
    with tempfile.TemporaryDirectory(dir=OUT) as folder:
        bench = Bench(size, Path(folder))
        bench.fan_out(100, 1.5, timed=True)
        bench.fan_out(500, 2.0, timed=False)
        bench.encoding()
        bench.appends()
        bench.serving()
    result = Result(bench.rows, bench.wrong, time.monotonic() - start_s, describe_machine())
    write_result("fanout", result, named_ratios(result.rows))
    print(table(result.rows))
    print(f"\nlost, reordered or damaged: {result.wrong}; {result.seconds:.0f} s")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

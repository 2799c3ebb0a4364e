"""The cost of model adapters: CPU per delta, the first use, and a long history.

Usage: python -m bench.models [--quick] [--sdk-python PATH]
       table on stdout, JSON in bench/out/models.json

The openai package is measured as well if this interpreter has it, or the one of --sdk-python. Exit
status 1 if text was lost; a missed target is only reported, as this machine may be busy. What is
measured and how: docs/benchmarks.md.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from bench.fanout import describe_machine
from bench.ipc import Child, Command, end, open_child
from bench.models_history import Prepared, conversation, prepare
from bench.models_sides import ADAPTERS, BARE, Read, why_not
from bench.ratios import OUT, NamedRatio, Ratio, against_work, write_result
from bench.runs_host import Cores, ScriptedModel, open_model, share_cores
from bench.runs_yardstick import work_us
from bench.tables import aligned_table
from culm.testing.script import Reply

SDK = "openai package"
CPU_US, FIRST_MS, HISTORY_MS = 12.0, 30.0, 50.0
CHILD_TIMEOUT_S = 30.0
STREAMS, RATE = 200, 50.0  # The scripted model still sends each delta by itself.


class Size(Struct, frozen=True):
    """The amount of work; a full run takes two to four minutes, a quick one half a minute."""

    rounds: int
    tokens: int  # Flat out, on one stream.
    paced_rounds: int
    paced_tokens: int  # On each of the streams.
    starts: int
    histories: int


FULL = Size(rounds=7, tokens=20_000, paced_rounds=5, paced_tokens=100, starts=12, histories=15)
QUICK = Size(rounds=3, tokens=10_000, paced_rounds=2, paced_tokens=50, starts=5, histories=5)


class Row(Struct):
    name: str
    unit: str
    best: float
    median: float
    target: float | None  # None: only reported.
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "ok" if self.best <= self.target else "MISS"


class Result(Struct):
    rows: list[Row]
    skipped: list[str]
    wrong: int  # Reads with more or less text than was sent.
    work_us: list[float]  # The same plain work before every round, as a measure of the machine.
    seconds: float
    machine: dict[str, str]


class Bench:
    def __init__(self, size: Size, model: ScriptedModel, sides: dict[str, Child]) -> None:
        self._size = size
        self._model = model
        self._sides = sides
        self.rows: list[Row] = []
        self.wrong = 0
        self.work_us: list[float] = []

    def flat_out(self) -> None:
        size = self._size
        us = self._rounds(size.rounds, 1, size.tokens, 0.0)
        for side, values in us.items():
            target = CPU_US if side in ADAPTERS else None
            self._add(f"one stream flat out: {side}, CPU per delta", "µs", values, target)

    def paced(self) -> None:
        """At a pace every delta is a separate wake-up, which costs more than its processing."""
        size = self._size
        us = self._rounds(size.paced_rounds, STREAMS, size.paced_tokens, RATE)
        where = f"{STREAMS} streams of {RATE:g}/s"
        for side, values in us.items():
            self._add(f"{where}: {side}, CPU per wake-up", "µs", values, None)
        for name in [name for name in ADAPTERS if name in us]:
            ours, bare = us[name], us[BARE + name]
            middle = median(a - b for a, b in zip(ours, bare, strict=True))
            row = f"{where}: {name} beyond {BARE}{name}"
            self.rows.append(Row(row, "µs", min(ours) - min(bare), middle, CPU_US))

    def _rounds(
        self, rounds: int, streams: int, tokens: int, rate: float
    ) -> dict[str, list[float]]:
        """CPU time of a delta or, at a pace, of a wake-up, in µs.

        All sides take turns, so that they share the noise.
        """
        found: dict[str, list[float]] = {side: [] for side in self._sides}
        for number in range(rounds):
            _progress(f"{streams} streams at {rate:g}/s, round {number + 1}")
            for side, child in self._sides.items():
                self.work_us.append(work_us())
                # The cost of a request itself is subtracted. The first one also opens the
                # connections, which then stay open.
                if not number:
                    self._read(child, streams, 1, 0.0)
                asking = self._read(child, streams, 1, 0.0)
                whole = self._read(child, streams, tokens, rate)
                # On a busy machine some paced deltas arrive together, which is cheaper.
                pieces = whole.wakes - asking.wakes if rate else streams * (tokens - 1)
                found[side].append((whole.cpu_s - asking.cpu_s) / pieces * 1e6)
        return found

    def _read(self, child: Child, streams: int, tokens: int, rate: float) -> Read:
        self._model.play(Reply(tokens=tokens, rate=rate))
        read = child.ask(Command("read", streams=streams), Read)
        sent = sum(len(f"tok{n} ") for n in range(tokens)) * streams
        self.wrong += read.chars != sent
        return read

    def first_use(self, names: list[str]) -> None:
        took_ms: dict[str, list[float]] = {name: [] for name in names}
        for number in range(self._size.starts):
            _progress(f"first use, round {number + 1}")
            for name, values in took_ms.items():
                ran = subprocess.run(
                    [sys.executable, "-m", "bench.models_first", name],
                    stdout=subprocess.PIPE,
                    check=True,
                    timeout=CHILD_TIMEOUT_S,
                )
                values.append(float(ran.stdout))
        for name, values in took_ms.items():
            self._add(f"first use: {name}", "ms", values, FIRST_MS)

    def history(self, name: str) -> None:
        _progress(f"a long history for {name}")
        stored = conversation()
        found: list[Prepared] = [
            uvloop.run(prepare(name, stored)) for _ in range(self._size.histories)
        ]
        both_ms = [one.history_ms + one.post_ms for one in found]
        note = (
            f"{len(stored)} messages, {found[0].megabytes:.2f} MB; the history alone "
            f"{min(one.history_ms for one in found):.2f} ms"
        )
        self._add(f"a history of 200,000 tokens: {name}", "ms", both_ms, HISTORY_MS, note)

    def _add(
        self, name: str, unit: str, values: list[float], target: float | None, note: str = ""
    ) -> None:
        self.rows.append(Row(name, unit, min(values), median(values), target, note))


def _progress(what: str) -> None:
    print(f"  {what} …", file=sys.stderr, flush=True)


@contextmanager
def open_sdk(python: str, url: str) -> Generator[Child]:
    """The openai package in an interpreter that has it."""
    process = subprocess.Popen(
        [python, "-m", "bench.models_sdk", url],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parent.parent,
    )
    try:
        yield Child(process)
    finally:
        end(process)


def open_sides(
    stack: ExitStack, url: str, names: list[str], sdk: str, cores: Cores
) -> dict[str, Child]:
    sides: dict[str, Child] = {}
    for name in names:
        for side in (name, BARE + name):
            sides[side] = stack.enter_context(open_child("models_sides", side, url))
    if sdk:
        sides[SDK] = stack.enter_context(open_sdk(sdk, url))
    for child in sides.values():
        cores.pin_server(int(child.receive(Command).do))
    return sides


def named_ratios(result: Result) -> Iterator[NamedRatio]:
    """Compare an adapter with the bare reader of the same stream, or with plain work."""
    medians = {row.name: row.median for row in result.rows}
    for row in result.rows:
        where, found, what = row.name.partition(": ")
        bare = medians.get(f"{where}: {BARE}{what}") if found else None
        if bare is not None:
            yield NamedRatio(row.name, Ratio(row.median / bare, "bare reader"))
        else:
            yield from against_work(row.name, row.median, row.unit, result.work_us)


def table(rows: list[Row]) -> str:
    lines: list[tuple[str, ...]] = [("", "best", "median", "target", "", "")]
    for row in rows:
        target = "" if row.target is None else f"≤ {row.target:g} {row.unit}"
        best, middle = f"{row.best:.3g} {row.unit}", f"{row.median:.3g} {row.unit}"
        lines.append((row.name, best, middle, target, row.verdict, row.note))
    return aligned_table(lines, ("<", ">", ">", ">", "<", "<"))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the model adapters with bare readers.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, half a minute")
    parser.add_argument(
        "--sdk-python", metavar="PATH", default="", help="an interpreter that has `openai`"
    )
    parser.add_argument("--no-pin", action="store_true", help="let the kernel choose the cores")
    return parser.parse_args()


def run(options: argparse.Namespace) -> Result:
    start_s = time.monotonic()
    cores = Cores() if options.no_pin else share_cores()
    cores.pin_other(os.getpid())
    reasons = {name: why_not(name) for name in ADAPTERS}
    names = [name for name, reason in reasons.items() if not reason]
    skipped = [f"{name}: {reason}" for name, reason in reasons.items() if reason]
    sdk: str = options.sdk_python or (sys.executable if find_spec("openai") else "")
    if not sdk:
        skipped.append(f"{SDK}: not installed; hint: --sdk-python PATH")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=OUT)))
        model = stack.enter_context(open_model(folder, cores, 0))
        sides = open_sides(stack, model.url, names, sdk, cores)
        bench = Bench(QUICK if options.quick else FULL, model, sides)
        bench.flat_out()
        bench.paced()
    cores.pin_server(os.getpid())
    bench.first_use(names)
    for name in names:
        bench.history(name)
    seconds = time.monotonic() - start_s
    machine = describe_machine()
    return Result(bench.rows, skipped, bench.wrong, bench.work_us, seconds, machine)


def main() -> int:
    options = parse()
    OUT.mkdir(exist_ok=True)
    result = run(options)
    write_result("models", result, named_ratios(result))
    print(table(result.rows))
    for what in result.skipped:
        print(f"skipped {what}")
    work = sorted(result.work_us)
    print(
        f"\nthe same plain work took {work[0]:.0f} to {work[-1]:.0f} µs, median {median(work):.0f}"
    )
    print(f"wrong: {result.wrong}; {result.seconds:.0f} s")
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

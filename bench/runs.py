"""The cost and latency of runs on any server with this API.

Usage: python -m bench.runs [--quick] [--only NAME] [--server-cmd CMD | --host URL] …
       table on stdout, JSON in bench/out/runs.json

Several servers are measured in alternation and shown side by side. A command may hold {host}
(unix:///…), {data_dir} and {config}; the config is made of --config-template, where {model_url}
is the scripted model. A server that already runs (--host) must use --model-port.

Exit status 1 if a run was lost, damaged or not ended as asked; a missed target is only reported,
as this machine may be busy. What is measured and how: docs/benchmarks.md.
"""

import argparse
import asyncio
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import uvloop
from msgspec import Struct

from bench.fanout import describe_machine
from bench.ratios import OUT, NamedRatio, Ratio, against_work, write_result
from bench.runs_bed import FULL, QUICK, Lab, open_bed
from bench.runs_cases import CASES, Case, Figure, Samples
from bench.runs_host import CONFIG, OURS, Candidate, Cores, open_model, open_place, share_cores
from bench.runs_yardstick import open_commits, work_us
from bench.tables import aligned_table, format_number, print_footer
from bench.traffic import raise_file_limit


class Row(Struct):
    name: str
    unit: str
    target: float | None
    measured: list[float]  # Of each server; NaN if it cannot be measured.
    notes: list[str]

    def verdict(self, n: int) -> str:
        if self.target is None or math.isnan(self.measured[n]):
            return ""
        return "ok" if self.measured[n] <= self.target else "MISS"


class Result(Struct):
    servers: list[str]
    rows: list[Row]
    wrong: list[str]
    work_us: list[float]  # The same plain work before every round, as a measure of the machine.
    seconds: float
    machine: dict[str, str]


class Bench:
    def __init__(self, lab: Lab, candidates: list[Candidate], folder: Path) -> None:
        self._lab = lab
        self._candidates = candidates
        self._folder = folder
        self.rows: list[Row] = []
        self.work_us: list[float] = []

    async def measure(self, case: Case) -> None:
        """Run all rounds of a case, alternating between new instances of the servers."""
        pooled: list[Samples] = [{} for _ in self._candidates]
        async with AsyncExitStack() as stack:
            beds = [
                await stack.enter_async_context(
                    open_bed(
                        self._lab,
                        candidate,
                        stack.enter_context(open_place(self._folder, f"{case.name}-{n}")),
                    )
                )
                for n, candidate in enumerate(self._candidates)
            ]
            for number in range(self._lab.size.rounds):
                print(f"  {case.label}, round {number + 1} …", file=sys.stderr, flush=True)
                for bed, samples in zip(beds, pooled, strict=True):
                    self.work_us.append(work_us())
                    for name, values in (await case.round(bed)).items():
                        samples.setdefault(name, []).extend(values)
        self._add([case.figures(samples) for samples in pooled])

    def _add(self, found: list[list[Figure]]) -> None:
        for figures in zip(*found, strict=True):
            first = figures[0]
            measured = [figure.value for figure in figures]
            notes = [figure.note for figure in figures]
            self.rows.append(Row(first.name, first.unit, first.target, measured, notes))


def table(servers: list[str], rows: list[Row]) -> str:
    """Format one line per figure, with a column for each server."""
    head = [""]
    for server in servers:
        head += [server if len(servers) > 1 else "measured", ""]
    lines = [[*head, "target", ""]]
    for row in rows:
        line = [row.name]
        for n, value in enumerate(row.measured):
            shown = "" if math.isnan(value) else f"{format_number(value)} {row.unit}"
            line += [shown, row.verdict(n)]
        line.append("" if row.target is None else f"≤ {row.target:g} {row.unit}")
        lines.append([*line, " | ".join(note for note in row.notes if note)])
    return aligned_table(lines, ["<", *(">", "<") * len(servers), ">", "<"])


def named_ratios(result: Result) -> Iterator[NamedRatio]:
    """Yield the ratios of the first server; times are compared with plain work."""
    for row in result.rows:
        value = row.measured[0]
        if math.isnan(value):
            continue
        if row.unit == "×":
            yield NamedRatio(row.name, Ratio(value, "yardstick", budget=row.target))
        else:
            yield from against_work(row.name, value, row.unit, result.work_us)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure runs on one or more servers, with the same scripted model."
    )
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a minute and a half")
    parser.add_argument(
        "--server-cmd",
        action="append",
        default=[],
        metavar="CMD",
        help="starts a server; repeatable. Default: our own",
    )
    parser.add_argument(
        "--host", action="append", default=[], metavar="URL", help="a running server; repeatable"
    )
    parser.add_argument("--config-template", type=Path, metavar="FILE", help="with {model_url}")
    parser.add_argument(
        "--only", action="append", choices=[case.name for case in CASES], help="repeatable"
    )
    parser.add_argument("--model-port", type=int, default=0, help="of the scripted model")
    parser.add_argument("--no-pin", action="store_true", help="let the kernel choose the cores")
    return parser.parse_args()


def candidates_of(options: argparse.Namespace) -> list[Candidate]:
    template: Path | None = options.config_template
    config = CONFIG if template is None else template.read_text()
    commands: list[str] = options.server_cmd
    hosts: list[str] = options.host
    if not commands and not hosts:
        return [Candidate("culm", OURS, config=config)]
    found = [
        Candidate(f"{n}: {command.split()[0].rpartition('/')[2]}", command, config=config)
        for n, command in enumerate(commands, 1)
    ]
    return found + [
        Candidate(f"{n}: {url.rpartition('@')[2]}", url=url)
        for n, url in enumerate(hosts, len(found) + 1)
    ]


async def run(options: argparse.Namespace) -> Result:
    task = asyncio.current_task()
    assert task is not None, "runs in one"
    # End the servers first, however this process ends.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    start_s = time.monotonic()
    candidates = candidates_of(options)
    cores = Cores() if options.no_pin else share_cores()
    cores.pin_other(os.getpid())
    wanted: list[str] = options.only or [case.name for case in CASES]
    with ExitStack() as stack:
        # Not in a temporary directory, which may be in memory: fsync must be real.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=OUT)))
        model = stack.enter_context(open_model(folder, cores, options.model_port))
        commits = stack.enter_context(open_commits(folder, cores))
        lab = Lab(model, commits, cores, QUICK if options.quick else FULL, [])
        bench = Bench(lab, candidates, folder)
        for case in CASES:
            if case.name in wanted:
                await bench.measure(case)
    return Result(
        [candidate.name for candidate in candidates],
        bench.rows,
        lab.wrong,
        bench.work_us,
        time.monotonic() - start_s,
        describe_machine(),
    )


def main() -> int:
    options = parse()
    raise_file_limit()  # Children inherit it.
    OUT.mkdir(exist_ok=True)
    result = uvloop.run(run(options))
    write_result("runs", result, named_ratios(result))
    print(table(result.servers, result.rows))
    print_footer(result.work_us, result.wrong, result.seconds)
    return 1 if result.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

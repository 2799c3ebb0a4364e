"""The cost of tools compared with the plain operation: a command, a search, an edit, a check.

Usage: python -m bench.tools [--quick]
       table on stdout, JSON in bench/out/tools.json

ripgrep is installed into bench/out if it is missing. Exit status 1 if a tool gave a wrong
answer; a missed target is only reported, as this machine may be busy. What is measured and how:
docs/benchmarks.md.
"""

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from statistics import median

import uvloop
from msgspec import Struct

from bench.fanout import describe_machine
from bench.ratios import OUT, NamedRatio, Ratio, against_work, write_result
from bench.runs_yardstick import work_us
from bench.tables import aligned_table, format_number, print_footer
from bench.tools_bed import (
    FREQUENT,
    RARE,
    RARE_EVERY,
    Bed,
    install_ripgrep,
    make_tree,
    open_bed,
    replace_plainly,
    run_plain,
)
from culm.shell.judge import judge
from culm.tools.base import CallResult as ToolResult

BASH_MS, GREP_RATIO, EDIT_MS, JUDGE_US = 6.0, 1.5, 15.0, 300.0
TREE_FILES = 50_000
EDIT_LINES = 16_000  # Of 64 bytes: a megabyte.
COMMANDS = (
    "true",
    "git status --short && git diff --stat",
    "cat src/main.py | head -n 40",
    "cd src && ls -la",
    "grep -rn 'TODO' src --include='*.py' | sort | uniq -c",
    'for f in *.py; do wc -l "$f"; done',
    "npm run build 2>&1 | tail -20",
    "python - <<'END'\nprint(1)\nEND",
    "find . -name '*.pyc' -exec rm {} +",
    "env FOO=1 timeout 5 make test > out.log 2>&1",
    "echo $(git rev-parse HEAD) `date`",
    "sed -n 1,80p README.md; rg -n 'def main' src",
)


class Size(Struct, frozen=True):
    """The amount of work; a full run takes minutes, mostly for searches."""

    rounds: int
    commands: int  # In a round.
    searches: int
    edits: int
    judgements: int


FULL = Size(rounds=15, commands=20, searches=9, edits=60, judgements=200)
QUICK = Size(rounds=5, commands=10, searches=3, edits=20, judgements=50)


class Row(Struct):
    name: str
    unit: str
    measured: float
    yardstick: float | None
    compared: float  # The value that is compared with the target.
    sign: str  # ×: ratio to the yardstick; +: difference; empty: absolute.
    target: float | None  # None: only reported.
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.target is None:
            return ""
        return "ok" if self.compared <= self.target else "MISS"


class Result(Struct):
    rows: list[Row]
    wrong: list[str]
    work_us: list[float]  # The same plain work before every part, as a measure of the machine.
    seconds: float
    machine: dict[str, str]


Side = Callable[[], Awaitable[object]]


class Bench:
    def __init__(self, size: Size) -> None:
        self._size = size
        self.rows: list[Row] = []
        self.wrong: list[str] = []
        self.work_us: list[float] = []

    async def command(self, bed: Bed) -> None:
        async def ours() -> None:
            result = await bed.call("bash", command="true", description="nothing")
            self._check("bash true", not result.is_error)

        async def plain() -> None:
            await run_plain(bed, "bash", "-c", "true")

        ms, plain_ms = await self._rounds(
            "bash true", ours, plain, self._size.rounds, self._size.commands
        )
        beyond = median(a - b for a, b in zip(ms, plain_ms, strict=True))
        self._add("`bash true`", "ms", ms, plain_ms, beyond, "+", BASH_MS)

    async def search(self, bed: Bed, ripgrep: Path, bare: Bed) -> None:
        for name, pattern, hits in (
            ("one file in a thousand", RARE, TREE_FILES // RARE_EVERY),
            ("a line of every file", FREQUENT, TREE_FILES),
        ):
            shown = min(hits, 100)
            ours = self._searching(bed, pattern, shown)

            async def plain(pattern: str = pattern, hits: int = hits) -> None:
                lines = await run_plain(bed, ripgrep, "--line-number", pattern)
                self._check("rg alone", lines.count(b"\n") == hits)

            where = f"grep in {TREE_FILES:,} files, {name}"
            ms, plain_ms = await self._rounds(where, ours, plain, self._size.searches, 1)
            ratio = median(a / b for a, b in zip(ms, plain_ms, strict=True))
            self._add(where, "ms", ms, plain_ms, ratio, "×", GREP_RATIO)
            if pattern == RARE:
                own = self._searching(bare, pattern, shown)
                own_ms, plain_ms = await self._rounds(f"{where}, without rg", own, plain, 1, 1)
                ratio = own_ms[0] / plain_ms[0]
                self._add(f"{where}, by our own search", "ms", own_ms, plain_ms, ratio, "×", None)

    def _searching(self, bed: Bed, pattern: str, lines: int) -> Side:
        async def search() -> None:
            result = await bed.call("grep", pattern=pattern)
            is_found = f'"number_of_matches":{lines},' in result.metadata
            self._check(f"grep {pattern}", is_found and not result.is_error)

        return search

    async def edit(self, bed: Bed) -> None:
        """Measure edits of different lines, from the arguments to the durable file."""
        texts = [f"line {n:05} {'x' * 52}\n" for n in range(EDIT_LINES)]
        file, other = bed.path / "large.txt", bed.path / "plain.txt"
        for each in (file, other):
            each.write_text("".join(texts))
        await bed.call("view", file_path=str(file), limit=10)
        numbers = iter(range(100, EDIT_LINES, EDIT_LINES // (2 * self._size.edits + 4)))

        async def ours() -> None:
            old = texts[next(numbers)]
            result: ToolResult = await bed.call(
                "edit", file_path=str(file), old_string=old, new_string=old.upper()
            )
            self._check(f"edit: {result.content[:100]}", not result.is_error)

        async def plain() -> None:
            old = texts[next(numbers)]
            replace_plainly(other, old, old.upper())

        ms, plain_ms = await self._rounds("edit of 1 MB", ours, plain, self._size.edits, 1)
        lines = file.read_text().splitlines(keepends=True)
        changed = sum(a != b for a, b in zip(texts, lines, strict=True))
        self._check("edits are in the file", changed == self._size.edits + 1)  # One is the warm-up.
        self._add("`edit` of a file of 1 MB", "ms", ms, plain_ms, median(ms), "", EDIT_MS)

    def judge(self, folder: Path) -> None:
        _progress("judging shell commands")
        places = [folder]
        for command in COMMANDS:
            judge(command, folder, places)  # Warm-up: the first use loads the grammar.
        by_command: dict[str, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(self._size.judgements):
            for command, took_us in by_command.items():
                start_ns = time.perf_counter_ns()
                judge(command, folder, places)
                took_us.append((time.perf_counter_ns() - start_ns) / 1000)
        medians = {command: median(took) for command, took in by_command.items()}
        slowest = max(medians, key=lambda command: medians[command])
        note = f"the slowest of {len(COMMANDS)}: {slowest.splitlines()[0]}"
        mean = sum(medians.values()) / len(medians)
        self.rows.append(Row("judging a shell command", "µs", mean, None, mean, "", JUDGE_US))
        worst = medians[slowest]
        self.rows.append(Row("… the worst of them", "µs", worst, None, worst, "", JUDGE_US, note))

    async def _rounds(
        self, what: str, ours: Side, plain: Side, rounds: int, times: int
    ) -> tuple[list[float], list[float]]:
        """Return the time of one call in ms per round; the sides alternate to share the noise."""
        await ours()  # Warm-up.
        await plain()
        found: tuple[list[float], list[float]] = ([], [])
        for number in range(rounds):
            _progress(f"{what}, round {number + 1}")
            self.work_us.append(work_us())
            for side, values in zip((ours, plain), found, strict=True):
                took_ms: list[float] = []
                for _ in range(times):
                    start_ns = time.perf_counter_ns()
                    await side()
                    took_ms.append((time.perf_counter_ns() - start_ns) / 1e6)
                values.append(median(took_ms))
        return found

    def _add(
        self,
        name: str,
        unit: str,
        ours: list[float],
        plain: list[float],
        compared: float,
        sign: str,
        target: float | None,
    ) -> None:
        row = Row(name, unit, median(ours), median(plain), compared, sign, target)
        self.rows.append(row)

    def _check(self, what: str, is_right: bool) -> None:  # noqa: FBT001 - reads well
        if not is_right:
            self.wrong.append(what)


def _progress(what: str) -> None:
    print(f"  {what} …", file=sys.stderr, flush=True)


def table(rows: list[Row]) -> str:
    lines: list[tuple[str, ...]] = [("", "measured", "plain", "compared", "target", "", "")]
    for row in rows:
        unit = "×" if row.sign == "×" else row.unit
        plus = "+" if row.sign == "+" else ""
        lines.append(
            (
                row.name,
                f"{format_number(row.measured)} {row.unit}",
                "" if row.yardstick is None else f"{format_number(row.yardstick)} {row.unit}",
                f"{row.compared:{plus}.2f} {unit}" if row.sign else "",
                "" if row.target is None else f"≤ {plus}{row.target:g} {unit}",
                row.verdict,
                row.note,
            )
        )
    return aligned_table(lines, ("<", ">", ">", ">", ">", "<", "<"))


def named_ratios(result: Result) -> Iterator[NamedRatio]:
    """Yield the ratio of each row: its own, or the one to its yardstick or to plain work."""
    for row in result.rows:
        if row.sign == "×":
            yield NamedRatio(row.name, Ratio(row.compared, "yardstick", budget=row.target))
        elif row.yardstick is not None:
            yield NamedRatio(row.name, Ratio(row.measured / row.yardstick, "yardstick"))
        else:
            yield from against_work(row.name, row.measured, row.unit, result.work_us)


def report(result: Result, bench: str) -> int:
    """Write a result to its file, print it, and return the exit status."""
    write_result(bench, result, named_ratios(result))
    print(table(result.rows))
    print_footer(result.work_us, result.wrong, result.seconds)
    return 1 if result.wrong else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare tools with plain processes and rg.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, a minute")
    return parser.parse_args()


async def run(options: argparse.Namespace) -> Result:
    task = asyncio.current_task()
    assert task is not None, "runs in one"
    # Remove the tree first, however this process ends.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    start_s = time.monotonic()
    bench = Bench(QUICK if options.quick else FULL)
    _progress("ripgrep")
    ripgrep = install_ripgrep(OUT / "ripgrep")
    # Not in a temporary directory, which may be in memory: fsync must be real.
    with tempfile.TemporaryDirectory(dir=OUT) as name:
        folder = Path(name)
        async with open_bed(folder, [ripgrep.parent]) as bed, open_bed(folder, []) as bare:
            await bench.command(bed)
            await bench.edit(bed)
            bench.judge(bed.path)
            _progress(f"a tree of {TREE_FILES:,} files")
            make_tree(bed.path, TREE_FILES)
            await bench.search(bed, ripgrep, bare)
    seconds = time.monotonic() - start_s
    return Result(bench.rows, bench.wrong, bench.work_us, seconds, describe_machine())


def main() -> int:
    options = parse()
    OUT.mkdir(exist_ok=True)
    return report(uvloop.run(run(options)), "tools")


if __name__ == "__main__":
    sys.exit(main())

"""Ratios of the newest benchmark results, compared with the frozen baseline.

Usage: python -m bench.baseline            compare bench/out/*.json; exit status 1 if one is worse
       python -m bench.baseline --write    freeze them in tests/frozen/bench.json; --note tells how
                                           they were measured

Only ratios are compared: the same code takes another time on another machine, but about the same
multiple of its yardstick. Run `make bench` on a quiet machine before.
"""

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec import Struct

from bench.ratios import DECLARED, OUT, Ratio
from bench.tables import aligned_table

FROZEN = Path(__file__).parent.parent / "tests" / "frozen" / "bench.json"
# Two quick runs of one version beside other work: the median ratio changed by 7 %, nine in ten by
# less than 1.4 ×, the worst by 1.7 ×. Full runs on a quiet machine vary less.
WORSE_MAX = 1.5


class Baseline(Struct):
    note: str  # How it was measured.
    machine: dict[str, str]  # For information: figures are not compared across machines.
    ratios: dict[str, dict[str, Ratio]]  # By benchmark and name.


class Newest(Struct):
    """The common fields of all result files."""

    ratios: dict[str, Ratio]
    machine: dict[str, str] = msgspec.field(default_factory=dict[str, str])


class Compared(NamedTuple):
    name: str
    now: Ratio | None
    before: Ratio | None

    @property
    def worse(self) -> float | None:
        """The factor by which it is worse than before; below 1 it is better."""
        if self.now is None or self.before is None:
            return None
        up, down = self.now.ratio, self.before.ratio
        if self.now.at_least:
            up, down = down, up
        return up / down if down > 0 else None

    @property
    def verdict(self) -> str:
        if self.before is None:
            return "not frozen"
        if self.now is None:
            return "not measured"
        return "" if self.worse is None or self.worse <= WORSE_MAX else "WORSE"


def read_newest() -> dict[str, Newest]:
    files = {bench: OUT / f"{bench}.json" for bench in DECLARED}
    return {
        bench: msgspec.json.decode(file.read_bytes(), type=Newest)
        for bench, file in files.items()
        if file.exists()
    }


def read_baseline() -> Baseline:
    return msgspec.json.decode(FROZEN.read_bytes(), type=Baseline)


def write_baseline(newest: dict[str, Newest], note: str) -> int:
    missing = [
        f"{bench}: {name}"
        for bench, names in DECLARED.items()
        for name in names
        if bench not in newest or name not in newest[bench].ratios
    ]
    if missing:
        print("not measured, so nothing is frozen: " + ", ".join(missing), file=sys.stderr)
        return 1
    machine = next(result.machine for result in newest.values() if result.machine)
    ratios = {bench: _rounded(newest[bench].ratios) for bench in DECLARED}
    encoded = msgspec.json.encode(Baseline(note, machine, ratios))
    FROZEN.write_bytes(msgspec.json.format(encoded, indent=1) + b"\n")
    return 0


def _rounded(ratios: dict[str, Ratio]) -> dict[str, Ratio]:
    return {
        name: msgspec.structs.replace(ratio, ratio=float(f"{ratio.ratio:.4g}"))
        for name, ratio in ratios.items()
    }


def compare(newest: dict[str, Newest], baseline: Baseline) -> list[Compared]:
    """Compare every declared ratio, and every frozen one that is no longer declared."""
    compared: list[Compared] = []
    for bench in {**DECLARED, **baseline.ratios}:
        now = newest[bench].ratios if bench in newest else {}
        before = baseline.ratios.get(bench, {})
        names = {**dict.fromkeys(DECLARED.get(bench, {})), **dict.fromkeys(before)}
        compared += [Compared(name, now.get(name), before.get(name)) for name in names]
    return compared


def table(compared: list[Compared]) -> str:
    lines: list[tuple[str, ...]] = [("", "ratio", "baseline", "change", "budget", "against", "")]
    for one in compared:
        known = one.now or one.before
        budget = known.budget if known is not None else None
        lines.append(
            (
                one.name,
                "" if one.now is None else f"{one.now.ratio:.3g}",
                "" if one.before is None else f"{one.before.ratio:.3g}",
                "" if one.worse is None else f"{one.worse:.2f} ×",
                "" if budget is None else f"{budget:g}",
                "" if known is None else known.against,
                one.verdict,
            )
        )
    return aligned_table(lines, ("<", ">", ">", ">", ">", "<", "<"))


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare benchmark results with the frozen ones.")
    parser.add_argument("--write", action="store_true", help="freeze the newest results")
    parser.add_argument("--note", default="a full run", help="how they were measured")
    given = parser.parse_args()
    if given.write:
        return write_baseline(read_newest(), given.note)
    compared = compare(read_newest(), read_baseline())
    print(table(compared))
    worse = [one.name for one in compared if one.verdict == "WORSE"]
    print(f"\nchange: how many times worse; {len(worse)} above {WORSE_MAX:g} ×")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())

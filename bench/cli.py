"""Waiting times at the command line: help, a listing, the first byte of an answer.

python -m bench.cli            the figures of docs/benchmarks.md; JSON in bench/out/cli.json
python -m bench.cli --quick    a few rounds, to check that it works
"""

import argparse
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from msgspec import Struct

from bench.fanout import describe_machine
from bench.ratios import NamedRatio, Ratio, write_result
from bench.runs_yardstick import work_us
from bench.tables import aligned_table, print_footer

CULM = str(Path(sys.executable).with_name("culm"))  # The installed command.
PROMPT = "hello"
ROUNDS, QUICK_ROUNDS = 15, 3
TIMES = 2  # Repetitions of short commands in a round.
WAIT_S = 30.0
GONE_S = 10.0


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    target_s: float | None  # None: a yardstick.


PASS = Case("python -c pass", None)
CLICK = Case('python -c "import click"', None)
HELP = Case("culm --help", 0.15)
PS = Case("culm ps, with a server", 0.35)
COLD = Case("culm run, no server: first byte", 1.5)
WARM = Case("culm run, with a server: first byte", 0.5)
CASES = (PASS, CLICK, HELP, PS, COLD, WARM)


@dataclass(slots=True)
class Bench:
    took_s: dict[Case, list[float]] = field(
        default_factory=lambda: {case: list[float]() for case in CASES}
    )
    work: list[float] = field(default_factory=list[float])
    wrong: list[str] = field(default_factory=list[str])

    def round(self, home: Path) -> None:
        """Run every case once or twice in a new home."""
        env = environment(home)
        project = home / "project"
        project.mkdir()
        self.work.append(work_us())
        for _ in range(TIMES):
            self._whole(PASS, [sys.executable, "-c", "pass"], env, project)
            self._whole(CLICK, [sys.executable, "-c", "import click"], env, project)
            self._whole(HELP, [CULM, "--help"], env, project, "Usage: culm")
        try:
            self._first_byte(COLD, env, project)
            for _ in range(TIMES):
                self._first_byte(WARM, env, project)
                self._whole(PS, [CULM, "ps"], env, project)
        finally:
            end_server(home)

    def _whole(
        self,
        case: Case,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        wanted: str = "",
    ) -> None:
        """Measure a process from its start to its end."""
        start_s = time.perf_counter()
        done = subprocess.run(
            command, env=env, cwd=cwd, capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        self.took_s[case].append(time.perf_counter() - start_s)
        if done.returncode != 0 or wanted not in done.stdout:
            self.wrong.append(f"{case.name}: {done.stderr[-200:]}")

    def _first_byte(self, case: Case, env: Mapping[str, str], cwd: Path) -> None:
        """Measure `culm run` from its start to the first byte on its stdout."""
        start_s = time.perf_counter()
        with subprocess.Popen(
            [CULM, "run", PROMPT],
            env=env,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:
            assert process.stdout is not None, "asked for a pipe"
            first = os.read(process.stdout.fileno(), 1)
            self.took_s[case].append(time.perf_counter() - start_s)
            rest = process.stdout.read()
            if process.wait(WAIT_S) != 0 or b"offline model" not in first + rest:
                self.wrong.append(f"{case.name}: its output: {(first + rest)[-200:]!r}")


class Result(Struct):
    took_s: dict[str, list[float]]
    machine: dict[str, str]


def named_ratios(bench: Bench) -> Iterator[NamedRatio]:
    """Compare every command with an interpreter that does nothing."""
    bare_s = median(bench.took_s[PASS])
    for case in (HELP, PS, COLD, WARM):
        yield NamedRatio(case.name, Ratio(median(bench.took_s[case]) / bare_s, PASS.name))


def environment(home: Path) -> dict[str, str]:
    """An environment in which every default path is inside `home`."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("XDG_", "CULM_"))}
    inside = ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME")
    return {
        **kept,
        "HOME": str(home),
        "CULM_NO_DISCOVERY": "1",
        **{name: str(home) for name in inside},
    }


def end_server(home: Path) -> None:
    """Stop the server that `culm run` has started in this home, and wait for its end."""
    path = home / f"culm-{os.getuid()}.sock"
    if not path.exists():
        return
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(str(path))
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", peer)
    os.kill(pid, signal.SIGTERM)
    end_s = time.monotonic() + GONE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < end_s:
        time.sleep(0.02)


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure waiting times at the command line.")
    parser.add_argument("--quick", action="store_true", help="a few rounds, to check that it works")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    start_s = time.monotonic()
    bench = Bench()
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="culm-") as home:
            bench.round(Path(home))
    lines = [("", "median", "best", "target", "")]
    for case, took_s in bench.took_s.items():
        if case.target_s is None:
            wanted = verdict = ""
        else:
            wanted = f"≤ {1000 * case.target_s:,.0f} ms"
            verdict = "ok" if median(took_s) <= case.target_s else "missed"
        middle, best = f"{1000 * median(took_s):,.0f} ms", f"{1000 * min(took_s):,.0f} ms"
        lines.append((case.name, middle, best, wanted, verdict))
    result = Result(
        {case.name: took_s for case, took_s in bench.took_s.items()}, describe_machine()
    )
    write_result("cli", result, named_ratios(bench))
    print(aligned_table(lines, "<>>><"))
    print_footer(bench.work, bench.wrong, time.monotonic() - start_s)
    return 1 if bench.wrong else 0


if __name__ == "__main__":
    sys.exit(main())

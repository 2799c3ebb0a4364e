"""The hunt for flaky tests: the suite again and again, each time with another disturbance.

A round is determined by its number and the printed seed, so that a failure can be repeated. The
output of failed rounds, and one line for each failure, stay in `hunt/`.
"""

import os
import random
import shlex
import signal
import sys
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tests.suite.leftovers import below_suite, command_of
from tests.suite.results import Outcome
from tests.suite.steps import ROOT, Steps, test_all, workers

KEPT = ROOT / "hunt"
CPU_HOG = "while True: pass"
DISK_HOG = """
import os, sys
data = b"x" * 65_536
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(64):
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
"""
# A machine that is short of cores stops a process at any moment for this long.
PAUSE_S, PAUSE_EVERY_S = (0.1, 0.8), (0.05, 0.6)


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The conditions of one round."""

    name: str
    cpu_hogs: int = 0
    disk_hogs: int = 0
    workers: int = 1  # A factor of the normal number.
    pauses: bool = False  # Workers are stopped and continued at random moments.
    one_file_each: bool = False  # A process for each file, in random order.
    switch_interval: str = ""
    other_python: bool = False


DISTURBANCES = (
    Disturbance("plain"),
    Disturbance("two CPU hogs", cpu_hogs=2),
    Disturbance("disk hog", disk_hogs=1),
    Disturbance("twice the workers", workers=2),
    Disturbance("pauses", pauses=True),
    Disturbance("threads switch at once", switch_interval="1e-6"),
    Disturbance("four times the workers", workers=4),
    Disturbance("each file alone", one_file_each=True),
    Disturbance("another Python", other_python=True),
    Disturbance("CPU and disk hogs", cpu_hogs=2, disk_hogs=1, workers=2),
)


class Found(msgspec.Struct, frozen=True):
    """A failure, with everything needed to repeat it."""

    test: str
    message: str
    disturbance: str
    seed: int
    output: str
    again: str


def hunt(steps: Steps, rounds: int, paths: Sequence[str], other_python: str) -> int:
    """Run `rounds` rounds and print the failures; return the exit status."""
    KEPT.mkdir(exist_ok=True)
    first = random.SystemRandom().randrange(1_000_000)
    found: list[Found] = []
    for number in range(rounds):
        disturbance = DISTURBANCES[number % len(DISTURBANCES)]
        seed = first + number
        started_s = time.monotonic()
        python = _prepare(steps, other_python) if disturbance.other_python else sys.executable
        failed = _round(steps, disturbance, seed, list(paths) or ["tests"], python)
        found += failed
        minutes = (time.monotonic() - started_s) / 60
        verdict = f"{len(failed)} failed" if failed else "green"
        print(f"== round {number + 1} of {rounds}, {disturbance.name}, seed {seed}: "
              f"{verdict}, {minutes:.1f} min", flush=True)  # fmt: skip
    for line in _summary(found):
        print(line)
    return 1 if found else 0


def _round(steps: Steps, how: Disturbance, seed: int, paths: list[str], python: str) -> list[Found]:
    steps.outcome = Outcome()
    kept = KEPT / f"{seed}-{how.name.replace(' ', '-')}.txt"
    env = {"PYTHONHASHSEED": str(seed)}
    common = [f"--hypothesis-seed={seed}", f"--order-seed={seed}", "-p", "no:cacheprovider"]
    common += ["-o", "verbosity_assertions=2"]  # A flaky failure cannot be inspected later.
    if how.switch_interval:
        common.append(f"--switch-interval={how.switch_interval}")
    with kept.open("wb") as output, _disturbed(steps, how, seed):

        def test(name: str, *args: str, in_memory: bool = True) -> None:
            steps.test(
                name, *args, *common, env=env, python=python, output=output, in_memory=in_memory
            )

        if how.one_file_each:
            files = _files(paths)
            random.Random(seed).shuffle(files)
            for file in files:
                test("file", file, in_memory="live" not in Path(file).parts)
        elif paths == ["tests"]:
            test_all(test, how.workers * workers())
        else:
            test("tests", "-n", str(how.workers * workers()), *paths)
    again = f"PYTHONHASHSEED={seed} .venv/bin/pytest {shlex.join(common)}"
    found = [
        Found(
            name,
            message,
            how.name,
            seed,
            str(kept.relative_to(ROOT)),
            f"{again} {shlex.quote(name)}",
        )
        for name, message in _failures(steps.outcome)
    ]
    with (KEPT / "found.jsonl").open("ab") as file:
        for line in found:
            file.write(msgspec.json.encode(line) + b"\n")
    if not found:
        kept.unlink()
    return found


def _failures(outcome: Outcome) -> Iterator[tuple[str, str]]:
    yield from outcome.failures.items()
    for step in outcome.failed_steps:
        yield step.name, step.command
    for line in outcome.left:
        yield "left behind", line


def _files(paths: Sequence[str]) -> list[str]:
    found: list[str] = []
    for path in map(Path, paths):
        tests = path.rglob("test_*.py") if path.is_dir() else [path]
        found += map(str, tests)
    return sorted(found)


@contextmanager
def _disturbed(steps: Steps, how: Disturbance, seed: int) -> Generator[None]:
    file = str(steps.disk / "hog")
    programs = [[sys.executable, "-c", CPU_HOG]] * how.cpu_hogs
    programs += [[sys.executable, "-c", DISK_HOG, file]] * how.disk_hogs
    hogs = [steps.start(argv) for argv in programs]
    over = threading.Event()
    pauses = threading.Thread(target=_pause_workers, args=(over, seed))
    try:
        if how.pauses:
            pauses.start()
        yield
    finally:
        over.set()
        for hog in hogs:
            hog.kill()
            steps.wait(hog)
        if how.pauses:
            pauses.join()


def _pause_workers(over: threading.Event, seed: int) -> None:
    """Stop random workers of pytest for a moment, one after the other."""
    chance = random.Random(seed)
    while not over.wait(chance.uniform(*PAUSE_EVERY_S)):
        below = [stat.pid for stat in below_suite()]
        found = [pid for pid in below if "execnet" in command_of(pid)]
        if found:
            with suppress(ProcessLookupError):
                pid = chance.choice(found)
                os.kill(pid, signal.SIGSTOP)
                over.wait(chance.uniform(*PAUSE_S))
                os.kill(pid, signal.SIGCONT)


def _prepare(steps: Steps, other: str) -> str:
    """Return an interpreter of another version with everything installed; made on first use."""
    folder = steps.disk / "other-python"
    python = str(folder / "bin" / "python")
    if Path(python).exists():
        return python
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    steps.run(f"a virtual environment of {other}", other, "-m", "venv", str(folder))
    if not Path(python).exists():
        print(f"{other} cannot be used; hint: pass another one with --python", flush=True)
        return sys.executable
    steps.run("pip", *install, "--upgrade", "pip>=25.1")
    steps.run("culm", *install, "--editable", ".", "--group", "dev")
    return python


def _summary(found: Sequence[Found]) -> Iterator[str]:
    yield f"== {len(found)} failures"
    for test in sorted({line.test for line in found}):
        those = [line for line in found if line.test == test]
        yield f"{len(those):3} × {test}"
        yield f"      {those[0].message.splitlines()[0] if those[0].message else ''}"
        for line in those:
            yield f"      {line.disturbance}, seed {line.seed}: {line.output}"
        yield f"      again: {those[0].again}"

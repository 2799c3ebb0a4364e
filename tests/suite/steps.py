"""Steps of the suite: each a command that is started, awaited and cleaned up after.

Owns every process below the suite and the scratch directories that tests write to. `__main__.py`
selects the steps, `hunt.py` their conditions.
"""

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from tests.suite.leftovers import (
    POLL_S,
    adopt_orphans,
    end_processes,
    entries,
    make_home,
    unexpected,
)
from tests.suite.results import FailedStep, Outcome, read_results

ROOT = Path(__file__).parents[2]
MEMORY = Path("/dev/shm")
MEMORY_BYTES_MIN = 2_000_000_000  # Several times what the databases of a whole run need.
INTERRUPT_S = 10.0  # For pytest to end its tests after Ctrl-C; then everything is killed.
PREFIX = "check-"  # Differs from the names that tests use: another suite may run at the same time.
NO_TESTS = 5  # The exit status of pytest if it found none.


class Interrupted(Exception):
    """A signal asked the suite to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Steps:
    """The commands of one run of the suite. Made by `open_steps`."""

    def __init__(self, disk: Path, memory: Path) -> None:
        self.outcome = Outcome()
        self.disk = disk
        self.memory = memory
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._count = 0

    def start(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        output: IO[bytes] | None = None,
    ) -> subprocess.Popen[bytes]:
        errors = None if output is None else subprocess.STDOUT
        process = subprocess.Popen(
            argv, cwd=ROOT, env={**os.environ, **(env or {})}, stdout=output, stderr=errors
        )
        self._running[process.pid] = process
        return process

    def wait(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for one process and reap every other that ends meanwhile.

        Orphans of tests are children of the suite; a test that checks that one is gone must not
        find a zombie.
        """
        while process.returncode is None:
            self._note(*os.waitpid(-1, 0))
        return process.returncode

    def run(self, name: str, *argv: str) -> None:
        """Run a command other than pytest."""
        print(f"== {name}", flush=True)
        if self.wait(self.start(argv)) != 0:
            self.outcome.failed_steps.append(FailedStep(name, " ".join(argv)))

    def finish(self, command: str, process: subprocess.Popen[bytes], output: IO[bytes]) -> None:
        """Wait for a command that was started earlier; print its output, or the last line of it."""
        failed = self.wait(process) != 0
        output.seek(0)
        lines = output.read().decode().splitlines()
        print("\n".join(lines if failed else lines[-1:]), flush=True)
        if failed:
            self.outcome.failed_steps.append(FailedStep(command, command))

    def test(
        self,
        name: str,
        *args: str,
        in_memory: bool = True,
        env: Mapping[str, str] | None = None,
        python: str = "python",
        output: IO[bytes] | None = None,
    ) -> None:
        """Run pytest, read its results, end and name everything that it left behind."""
        print(f"== {name}: pytest {' '.join(args)}", flush=True)
        self._count += 1
        results = self.disk / f"results-{self._count}.jsonl"
        results.touch()
        # Short, because a test may have its socket in there.
        scratch = (self.memory if in_memory else self.disk) / str(self._count)
        scratch.mkdir()
        home = make_home(scratch)
        before = entries(scratch)
        argv = [python, "-m", "pytest", f"--results={results}", *args]
        env = {"TMPDIR": str(scratch), "HOME": str(home), **(env or {})}
        status = self.wait(self.start(argv, env=env, output=output))
        found = read_results(results)
        self.outcome.results += found
        if status not in (0, NO_TESTS) and all(result.outcome != "failed" for result in found):
            self.outcome.failed_steps.append(FailedStep(name, " ".join(["pytest", *args])))
        self.outcome.left += end_processes(self._running)
        self.outcome.left += [f"file {path}" for path in sorted(entries(scratch) - before)]
        if status == 0:  # A failed test may leave its files for inspection.
            self.outcome.left += [f"file {line}" for line in unexpected(scratch)]
        shutil.rmtree(scratch, ignore_errors=True)

    def end(self, interrupt: Interrupted) -> None:
        """Let the running commands end, then kill the rest."""
        deadline_s = time.monotonic() + INTERRUPT_S
        for process in self._running.values():
            if interrupt.number != signal.SIGINT:  # The terminal sent that to all of them.
                process.send_signal(signal.SIGINT)
        while self._running and time.monotonic() < deadline_s:
            self._note(*os.waitpid(-1, os.WNOHANG))
            time.sleep(POLL_S)
        end_processes(wait_s=0)

    def _note(self, pid: int, status: int) -> None:
        if (ended := self._running.pop(pid, None)) is not None:
            ended.returncode = os.waitstatus_to_exitcode(status)


@contextmanager
def open_steps() -> Generator[Steps]:
    """Handle the signals that end the suite, and clean up at any end."""
    adopt_orphans()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    disk = Path(tempfile.mkdtemp(prefix=PREFIX))
    disk.chmod(0o755)  # Some servers of the tests run as another user.
    memory = Path(tempfile.mkdtemp(prefix=PREFIX, dir=MEMORY)) if _has_memory() else disk
    steps = Steps(disk, memory)
    try:
        yield steps
    except Interrupted as exc:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        print(f"== {exc}: ending all processes", flush=True)
        steps.end(exc)
        raise
    finally:
        for scratch in {disk, memory}:
            shutil.rmtree(scratch, ignore_errors=True)


class RunTests(Protocol):
    """`Steps.test`, or the same under other conditions."""

    def __call__(self, name: str, *args: str, in_memory: bool = True) -> None: ...


def test_all(test: RunTests, count: int) -> None:
    """Run every test: live tests on a real disk, and last those that need the whole machine."""
    test("tests", "-n", str(count), "--ignore", "tests/live")
    test("live", "-n", str(count + 1), "-m", "not alone", "tests/live", in_memory=False)
    test("alone", "-m", "alone", "tests/live", in_memory=False)


def workers() -> int:
    """Return 1.5 workers per core: a test spends part of its time waiting."""
    cores = os.cpu_count() or 1
    return cores + (cores + 1) // 2


def _has_memory() -> bool:
    """True if there is a file system in memory with enough room.

    Thousands of small databases wait for the disk at each commit; in memory the suite takes half
    of the time.
    """
    return os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > MEMORY_BYTES_MIN


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise Interrupted(number)

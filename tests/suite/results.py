"""Results of the suite, and the summary at its end."""

import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

SLOWEST = 10


class Result(msgspec.Struct, frozen=True):
    """The result of one test. A failed teardown adds another one."""

    test: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    message: str


@dataclass(frozen=True, slots=True)
class FailedStep:
    """A command of the suite that failed without a failed test."""

    name: str
    command: str


@dataclass
class Outcome:
    """The sum of all steps."""

    results: list[Result] = field(default_factory=list[Result])
    failed_steps: list[FailedStep] = field(default_factory=list[FailedStep])
    left: list[str] = field(default_factory=list[str])  # Processes and files that remained.

    @property
    def failures(self) -> dict[str, str]:
        """The message of each failed test."""
        return {result.test: result.message for result in self.results if _has_failed(result)}

    @property
    def is_good(self) -> bool:
        return not (self.failures or self.failed_steps or self.left)

    def summary(self) -> Iterator[str]:
        """Yield the last lines of the suite."""
        if self.results:
            yield "== the slowest tests"
        for result in sorted(self.results, key=lambda result: -result.seconds)[:SLOWEST]:
            yield f"{result.seconds:6.1f} s  {result.test}"
        if not self.is_good:
            yield "== FAILED"
        for test, message in self.failures.items():
            yield f"test {test}"
            yield f"    {_first_line(message)}"
            yield f"    alone: .venv/bin/pytest {shlex.quote(test)}"
        for step in self.failed_steps:
            yield f"step {step.name}"
            yield f"    alone: {step.command}"
        for line in self.left:
            yield f"left behind: {line}"
        if self.results:
            skipped = sum(result.outcome == "skipped" for result in self.results)
            passed = len({result.test for result in self.results}) - len(self.failures) - skipped
            yield f"{passed} passed, {len(self.failures)} failed, {skipped} skipped"


def read_results(path: Path) -> list[Result]:
    return [msgspec.json.decode(line, type=Result) for line in path.read_bytes().splitlines()]


def _has_failed(result: Result) -> bool:
    return result.outcome == "failed"


def _first_line(message: str) -> str:
    lines = [line for line in message.splitlines() if line.strip()]
    return lines[0] if lines else "no message"

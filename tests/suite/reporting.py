"""The pytest plugin of the suite: readable failures, a file of results, seeded order.

`tests/conftest.py` loads it. A failure inside nested `async with` blocks reaches pytest as nested
exception groups; the plugin reports the exception that the reader needs.
"""

import random
import sys
from collections.abc import Generator, Iterator
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import cast

import msgspec
import pytest

from tests.suite.results import Result

MESSAGE_CHARS = 300  # Of a failure in the summary; pytest prints all of it above.


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("culm")
    group.addoption("--results", default="", help="append every result to this file as JSON lines")
    group.addoption("--order-seed", default="", help="shuffle the tests within each file")
    group.addoption("--switch-interval", default="", help="seconds between two thread switches")


def pytest_configure(config: pytest.Config) -> None:
    if interval := config.getoption("--switch-interval"):
        sys.setswitchinterval(float(interval))
    results = config.getoption("--results")
    if results and not hasattr(config, "workerinput"):  # Workers of xdist report to the controller.
        config.pluginmanager.register(ResultsFile(Path(results)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if seed := config.getoption("--order-seed"):
        items[:] = shuffled(items, seed)


def shuffled(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Return the files in their order, with the tests of each shuffled by the seed."""
    chance = random.Random(seed)
    ordered: list[pytest.Item] = []
    for _, group in groupby(items, key=lambda item: item.path):
        tests = list(group)
        chance.shuffle(tests)
        ordered += tests
    return ordered


class ResultsFile:
    """A file with one line per test, for programs that run pytest as one of several steps."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seconds: dict[str, float] = {}
        self._outcomes: dict[str, str] = {}

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", 0.0, str(report.longrepr))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = self._seconds.get(report.nodeid, 0.0) + report.duration
        self._seconds[report.nodeid] = seconds
        if report.outcome != "passed":
            self._outcomes[report.nodeid] = report.outcome
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash is not None else str(report.longrepr)
            self._write(report.nodeid, "failed", seconds, message)
        elif report.when == "teardown" and self._outcomes.get(report.nodeid) != "failed":
            outcome = self._outcomes.get(report.nodeid, "passed")
            self._write(report.nodeid, outcome, seconds, "")

    def _write(self, test: str, outcome: str, seconds: float, message: str) -> None:
        result = Result(test, outcome, seconds, message[:MESSAGE_CHARS])
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(result) + b"\n")


# --- readable failures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.excinfo is not None and isinstance(call.excinfo.value, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", call.excinfo.value)  # Any exceptions.
        exc = explanation(group, item.path)
        call.excinfo = pytest.ExceptionInfo[BaseException].from_exception(exc)
    return (yield)


def explanation(group: BaseExceptionGroup[BaseException], test_file: Path) -> BaseException:
    """Return the exception of a group that explains the failure, with notes about the others.

    That is the first failed assertion, else the first exception that passed through the test's own
    file, else the first of all.
    """
    found = list(leaves(group))
    assertions = [exc for exc in found if isinstance(exc, AssertionError)]
    own = [exc for exc in found if line_in(exc.__traceback__, test_file)]
    chosen = (assertions or own or found)[0]
    if not line_in(chosen.__traceback__, test_file):
        line = line_in(group.__traceback__, test_file)
        chosen.add_note(f"raised in a task, while the test was at {test_file.name}:{line}")
    for other in found:
        if other is not chosen:
            chosen.add_note(f"also raised: {type(other).__name__}: {other}")
    return chosen


def leaves(exc: BaseException) -> Iterator[BaseException]:
    if isinstance(exc, BaseExceptionGroup):
        group = cast("BaseExceptionGroup[BaseException]", exc)  # Any exceptions.
        for child in group.exceptions:
            yield from leaves(child)
    else:
        yield exc


def line_in(traceback: TracebackType | None, file: Path) -> int:
    """Return the innermost line of a file that a traceback passes, 0 for none."""
    line = 0
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == str(file):
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line

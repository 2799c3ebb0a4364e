"""The suite itself: readable failures, and nothing left behind at any end."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.live.harness import ROOT
from tests.suite.leftovers import command_of
from tests.suite.results import read_results

WAIT_S = 60  # For a whole run of the suite on a busy machine.
CONFTEST = "pytest_plugins = ['tests.suite.reporting']\n"
NESTED = """
import asyncio

async def main():
    async with asyncio.timeout(60), asyncio.TaskGroup(), asyncio.TaskGroup(), asyncio.TaskGroup():
        answer = 41
        assert answer == 42

def test_nested():
    asyncio.run(main())
"""
# Starts a process outside of its session without waiting for it, and leaves a file.
LEAVING = """
import os, pathlib, subprocess, tempfile

def test_leaving():
    left = tempfile.mkdtemp(prefix="left-")
    script = "setsid env -i /bin/sleep 300 > /dev/null 2>&1 & echo $!"
    pid = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, check=True).stdout
    pathlib.Path({folder!r}, "about").write_text(f"{{pid.decode().strip()}} {{left}}")
"""
WAITING = """
import os, pathlib, subprocess, tempfile

def test_waiting():
    left = tempfile.mkdtemp(prefix="left-")
    child = subprocess.Popen(["sh", "-c", "trap '' INT TERM HUP; sleep 300; sleep 300"])
    pathlib.Path({folder!r}, "half").write_text(f"{{child.pid}} {{left}}")
    pathlib.Path({folder!r}, "half").rename(pathlib.Path({folder!r}, "about"))
    child.wait()
"""


def write_test(folder: Path, text: str) -> Path:
    (folder / "conftest.py").write_text(CONFTEST)
    path = folder / "test_sample.py"
    path.write_text(text.format(folder=str(folder)))
    return path


def start_suite(path: Path) -> subprocess.Popen[str]:
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.Popen(
        [sys.executable, "-m", "tests.suite", str(path)],
        cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def assert_gone(folder: Path) -> None:
    pid, left = (folder / "about").read_text().split()
    assert "sleep 300" not in command_of(int(pid))
    assert not Path(left).exists()


def test_failed_assertion_is_shown_without_its_exception_groups(tmp_path: Path) -> None:
    path = write_test(tmp_path, NESTED)
    results = tmp_path / "results"
    argv = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--results={results}", path]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert re.search(r"^> +assert answer == 42\nE +assert 41 == 42$", ended.stdout, re.MULTILINE)
    assert "ExceptionGroup" not in ended.stdout
    (result,) = read_results(results)
    assert (result.outcome, result.message) == ("failed", "assert 41 == 42")


def test_process_and_file_that_a_test_leaves_are_removed_and_fail_the_suite(tmp_path: Path) -> None:
    suite = start_suite(write_test(tmp_path, LEAVING))
    output, _ = suite.communicate(timeout=WAIT_S)
    assert suite.returncode == 1, output
    assert "1 passed, 0 failed" in output
    assert "left behind: process" in output
    assert "/bin/sleep 300" in output
    assert "left behind: file" in output
    assert_gone(tmp_path)


def test_interrupt_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    suite = start_suite(write_test(tmp_path, WAITING).parent)  # A folder: with several workers.
    while not (tmp_path / "about").exists():
        assert suite.poll() is None, suite.communicate()[0]
        time.sleep(0.05)
    os.killpg(suite.pid, signal.SIGINT)
    output, _ = suite.communicate(timeout=WAIT_S)
    assert suite.returncode == 128 + signal.SIGINT, output
    assert_gone(tmp_path)

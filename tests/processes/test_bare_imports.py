"""The supervisor, its shims and the search process import little, so that they start at once."""

import subprocess
import sys

import pytest

from tests.support import WAIT_S

SUPERVISOR = {
    "culm",
    "culm.processes",
    *(f"culm.processes.{name}" for name in ("linux", "packets", "shim", "supervisor")),
}
SEARCH = {
    "culm",
    "culm.tools",
    "culm.tools.files",
    "culm.tools.files.safe_open",
    "culm.tools.search",
    "culm.tools.search.patterns",
    "culm.tools.search.process",
}
SLOW = {"asyncio", "dataclasses", "inspect", "logging", "pathlib", "subprocess", "threading"}
PROGRAM = """
import sys
sys.path.extend(path for path in sys.argv[2:] if path)
__import__(sys.argv[1])
print(*sys.modules)
"""


@pytest.mark.parametrize(
    ("module", "expected"),
    [("culm.processes.supervisor", SUPERVISOR), ("culm.tools.search.process", SEARCH)],
)
def test_bare_process_imports_only_these_modules(module: str, expected: set[str]) -> None:
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, module, *sys.path]
    output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=WAIT_S)
    loaded = set(output.stdout.split())
    assert {name for name in loaded if name.partition(".")[0] == "culm"} == expected
    assert loaded & SLOW == set()

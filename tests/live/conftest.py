"""A folder for everything a server writes, with a path short enough for a socket."""

import tempfile
import time
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.live.fleet_harness import related_processes
from tests.support import WAIT_S

PAUSE_S = 0.02


@pytest.fixture
def folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        path = Path(name).resolve()
        yield path
        wait_until_unused(path)


def wait_until_unused(folder: Path) -> None:
    """Wait for servers and workers that are still ending: they would write into it again."""
    for _ in range(round(WAIT_S / PAUSE_S)):
        if not related_processes(folder):
            return
        time.sleep(PAUSE_S)
    assert related_processes(folder) == [], "processes are left that use the folder"

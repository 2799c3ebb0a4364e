"""A folder for everything a server writes, with a path short enough for a socket."""

import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest


@pytest.fixture
def folder() -> Generator[Path]:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        yield Path(name).resolve()

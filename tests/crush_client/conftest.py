"""Fixtures for the simulated client; its flows run over both kinds of socket."""

import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from tests.crush_client.servers import open_flow
from tests.flow.conftest import FlowServer
from tests.flow.conftest import kind as kind
from tests.flow.conftest import pytest_generate_tests as pytest_generate_tests
from tests.support import NO_MODEL


@pytest.fixture
async def flow(tmp_path: Path, kind: str) -> AsyncGenerator[FlowServer]:
    async with open_flow(tmp_path, kind) as server:
        yield server


@pytest.fixture
async def bare(tmp_path: Path, kind: str) -> AsyncGenerator[FlowServer]:
    """A server without any model, not even the offline one: its clients are not configured."""
    async with open_flow(tmp_path, kind, config=NO_MODEL) as server:
        yield server


@pytest.fixture
def folder() -> Generator[Path]:
    """A folder for the files of a server process, with a path short enough for a socket."""
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        yield Path(name).resolve()

"""The recorded data directories, one of each version: how one is opened and read."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.flow.conftest import FlowServer, open_flow
from tests.frozen.data.reading import Reader
from tests.frozen.data.tree import lay_out, sessions_in
from tests.frozen.storage import Json, parse_json
from tests.support import FakeClock

HERE = Path(__file__).parent
AWAY_S = 60.0  # Between the end of the server that left it and the next one.
EXPECTED = "expected.json"


def recorded() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob(f"*/{EXPECTED}"))


def expected_of(version: str) -> dict[str, Json]:
    return parse_json((HERE / version / EXPECTED).read_text())


def put_at(version: str, folder: Path, at_s: float) -> None:
    lay_out(HERE / version, folder, at_s)


@asynccontextmanager
async def open_recorded(folder: Path, at_s: float) -> AsyncGenerator[FlowServer]:
    """Serve a directory that was laid out, some time after it was left."""
    async with open_flow(folder, "unix", clock=FakeClock(at_s + AWAY_S)) as flow:
        yield flow


def known_text(version: str) -> str:
    return "".join(path.read_text() for path in sorted((HERE / version).rglob("*.sql")))


async def read_recorded(version: str, folder: Path, at_s: float) -> dict[str, Json]:
    async with open_recorded(folder, at_s) as flow:
        known = known_text(version)
        return await Reader(flow, known).read_all(folder / "project", sessions_in(known))


async def count_recorded(version: str, folder: Path, at_s: float) -> dict[str, Json]:
    async with open_recorded(folder, at_s) as flow:
        return await Reader(flow, known_text(version)).count_events(folder / "project")

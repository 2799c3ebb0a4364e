"""The recorded data directories, one per version: opening and reading them."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.flow.conftest import FlowServer, open_flow
from tests.frozen.commands import run_culm
from tests.frozen.data.reading import Reader
from tests.frozen.data.tree import lay_out, sessions_in
from tests.frozen.storage import Json, parse_json
from tests.support import FakeClock

HERE = Path(__file__).parent
AWAY_S = 60.0  # Between the end of the recorded server and the next one.
EXPECTED = "expected.json"
OUTSIDE = "cli-program"  # A mailbox that no server reads.


def recorded() -> list[str]:
    return sorted(path.parent.name for path in HERE.glob(f"*/{EXPECTED}"))


def expected_of(version: str) -> dict[str, Json]:
    return parse_json((HERE / version / EXPECTED).read_text())


def restore(version: str, folder: Path, at_s: float) -> None:
    lay_out(HERE / version, folder, at_s)


@asynccontextmanager
async def open_recorded(
    folder: Path, at_s: float, kind: str = "unix"
) -> AsyncGenerator[FlowServer]:
    """Serve a recorded directory, some time after the end of its server."""
    async with open_flow(folder, kind, clock=FakeClock(at_s + AWAY_S)) as flow:
        yield flow


def known_text(version: str) -> str:
    return "".join(path.read_text() for path in sorted((HERE / version).rglob("*.sql")))


def read_mail(folder: Path) -> dict[str, Json]:
    """Return the letters that `culm mail` shows without a server: a list, and some by mailbox."""
    where = ("--json", "--dir", str(folder / "project"), "--data-dir", str(folder / "data"))
    letters = (folder / "data").glob(f"projects/*/mailboxes/{OUTSIDE}/*/*.json")
    found = {"list": run_culm(["mail", "list", *where])}
    for name in sorted(path.stem.partition("-")[2] for path in letters):
        found[name] = run_culm(["mail", "status", name, "--to", OUTSIDE, *where])
    assert {ended.status for ended in found.values()} == {0}, found
    return {name: parse_json(f'{{"is": {ended.stdout}}}')["is"] for name, ended in found.items()}


async def read_recorded(version: str, folder: Path, at_s: float) -> dict[str, Json]:
    async with open_recorded(folder, at_s) as flow:
        known = known_text(version)
        return await Reader(flow, known).read_all(folder / "project", sessions_in(known))


async def count_recorded(version: str, folder: Path, at_s: float) -> dict[str, Json]:
    async with open_recorded(folder, at_s) as flow:
        return await Reader(flow, known_text(version)).count_events(folder / "project")

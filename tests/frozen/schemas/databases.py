"""Databases of every version of the schema, with rows that were written by hand.

`NNNN.sql` is the whole database after migration N; `rows/NNNN.sql` are the rows that were inserted
right after it. Newer versions must migrate each of them and give the same answers.
"""

import sqlite3
from contextlib import closing
from pathlib import Path

from tests.frozen.comparing import HERE as FROZEN
from tests.frozen.comparing import as_text
from tests.frozen.data.directories import open_recorded
from tests.frozen.data.reading import Reader
from tests.frozen.data.tree import ROOT, dump, load_database, project_key, sessions_in
from tests.frozen.storage import Json, parse_json

HERE = Path(__file__).parent
EXPECTED = HERE / "expected.json"
SOURCE = FROZEN.parents[1] / "src"
LEFT_AT_S = 1_790_000_100.0  # The time of their last server.


def versions() -> list[str]:
    return sorted(path.stem for path in HERE.glob("*.sql"))


def migrations() -> list[Path]:
    """Return the migration scripts of the product."""
    return sorted(SOURCE.rglob("migrations/*.sql"), key=lambda path: path.name)


def build(upto: int) -> sqlite3.Connection:
    """Return a database in memory with the first migrations, each with its rows."""
    connection = sqlite3.connect(":memory:")
    for number, script in enumerate(migrations()[:upto], start=1):
        connection.executescript(script.read_text())
        connection.executescript((HERE / "rows" / f"{number:04}.sql").read_text())
    connection.execute(f"PRAGMA user_version = {upto}")
    return connection


def load(version: str) -> sqlite3.Connection:
    """Return the recorded database of a version, in memory."""
    connection = sqlite3.connect(":memory:")
    connection.executescript((HERE / f"{version}.sql").read_text())
    return connection


def content_of(connection: sqlite3.Connection) -> dict[str, object]:
    """Return the version, the schema and all rows of a database."""
    found: dict[str, object] = {
        "version": connection.execute("PRAGMA user_version").fetchone()[0],
        "schema": connection.execute("SELECT type, name, sql FROM sqlite_master ORDER BY 1, 2")
        .fetchall(),
    }  # fmt: skip
    names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
    for (name,) in names:
        found[f"rows of {name}"] = connection.execute(f'SELECT * FROM "{name}"').fetchall()
    return found


def place_of(folder: Path) -> Path:
    return folder / "data" / "projects" / project_key(folder / "project") / "culm.db"


async def open_and_read(version: str, folder: Path, times: int = 1) -> list[dict[str, Json]]:
    """Let a server open the database of a version so often; return its answers."""
    (folder / "project").mkdir()
    sql = (HERE / f"{version}.sql").read_text()
    load_database(sql.replace(ROOT, str(folder)), place_of(folder))
    answers: list[dict[str, Json]] = []
    for _ in range(times):
        async with open_recorded(folder, LEFT_AT_S) as flow:
            reader = Reader(flow, sql)
            answers.append(await reader.read_all(folder / "project", sessions_in(sql)))
    return answers


def expected_of(version: str) -> Json:
    return parse_json(EXPECTED.read_text())[version]


async def record_expected(folder: Path) -> None:
    EXPECTED.unlink()
    await record(folder)


async def record(folder: Path) -> None:
    """Write missing files; existing ones stay."""
    expected = parse_json(EXPECTED.read_text()) if EXPECTED.exists() else {}
    for number in range(1, len(migrations()) + 1):
        version = f"{number:04}"
        file = HERE / f"{version}.sql"
        if not file.exists():
            with closing(build(number)) as connection:
                file.write_text(dump(connection))
        if version not in expected:
            (folder / version).mkdir()
            (answers,) = await open_and_read(version, folder / version)
            expected[version] = answers
    EXPECTED.write_text(as_text(expected))

"""Named queries and migrations, loaded once from the files in this directory."""

import re
import sqlite3
from pathlib import Path

from culm.errors import SchemaTooNew

_FOLDER = Path(__file__).parent  # `importlib.resources` costs every start 3 ms.
_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def _load_queries() -> dict[str, str]:
    queries: dict[str, str] = {}
    for file in ("queries.sql", "asks.sql", "agents.sql", "stats.sql"):
        pieces = _NAME.split((_FOLDER / file).read_text())[1:]
        queries |= {name: sql.strip() for name, sql in zip(pieces[::2], pieces[1::2], strict=True)}
    return queries


def _load_migrations() -> list[str]:
    return [script.read_text() for script in sorted(_FOLDER.glob("migrations/*.sql"))]


QUERIES = _load_queries()
MIGRATIONS = _load_migrations()
READABLE_FROM = 7  # The oldest schema that commands can read without a server.


def migrate(connection: sqlite3.Connection, path: str) -> None:
    """Apply missing migrations, each in a transaction; raises `SchemaTooNew`."""
    found = schema_version(connection)
    if found > len(MIGRATIONS):
        raise SchemaTooNew(path, found, len(MIGRATIONS))
    for number, script in enumerate(MIGRATIONS[found:], start=found + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE;\n{script}\nPRAGMA user_version = {number};\nCOMMIT;"
        )


def schema_version(connection: sqlite3.Connection) -> int:
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return version

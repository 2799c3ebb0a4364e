"""Named queries and migrations, loaded once from the files in this directory."""

import re
import sqlite3
from importlib.resources import files

from culm.errors import SchemaTooNew

_NAME = re.compile(r"^-- name: (\w+)\n", re.MULTILINE)


def _load_queries() -> dict[str, str]:
    queries: dict[str, str] = {}
    for file in ("queries.sql", "asks.sql", "agents.sql", "stats.sql"):
        pieces = _NAME.split(files(__name__).joinpath(file).read_text())[1:]
        queries |= {name: sql.strip() for name, sql in zip(pieces[::2], pieces[1::2], strict=True)}
    return queries


def _load_migrations() -> list[str]:
    folder = files(__name__).joinpath("migrations")
    scripts = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return [script.read_text() for script in scripts]


QUERIES = _load_queries()
MIGRATIONS = _load_migrations()


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

"""A data directory as text files: written by the recorder, restored for a server by tests.

Two things depend on the location of a directory and are rewritten when it is restored. Paths are
stored under `/frozen`. A project's folder is named after its real path; here it is `@project`.
The rules for that name and for the id of a workspace are stored facts themselves, so they are
repeated here and not imported.
"""

import hashlib
import os
import re
import sqlite3
import uuid
from contextlib import closing
from pathlib import Path

ROOT = "/frozen"
PROJECT = "@project"
WORKSPACE = "00000000-0000-5000-8000-000000000000"  # Replaces the id, which depends on the path.
MODEL_URL = "http://127.0.0.1:9/v1"  # Nothing listens there.
MAILBOX_PARTS = ("tmp", "new", "cur", "corrupt", "dead")  # Git keeps no empty directory.
# Locks, and live processes; `culm.lock` stays, because its time is that of the last server.
_LEFT_OUT = re.compile(r"(^|/)(custody|fabric|\.gitignore)(/|$)|(?<!culm)\.lock$|\.db-(wal|shm)$")
_NAMESPACE = uuid.UUID("6f1c2b0e-5d0a-5c39-9a55-0c6d2f7b4e11")


def project_key(path: Path) -> str:
    """Return the folder name of a project: its path, and the low half of the path's FNV-1a 64."""
    digest = 0xCBF29CE484222325
    for byte in os.fsencode(str(path)):
        digest = ((digest ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{re.sub(r'[^A-Za-z0-9]', '-', str(path))[-200:]}-{digest & 0xFFFFFFFF:08x}"


def workspace_id(path: Path) -> str:
    digest = hashlib.sha1(_NAMESPACE.bytes + os.fsencode(path), usedforsecurity=False).digest()
    return str(uuid.UUID(bytes=digest[:16], version=5))


def dump(connection: sqlite3.Connection) -> str:
    """Return a database as SQL with its schema version."""
    version: int = connection.execute("PRAGMA user_version").fetchone()[0]
    return "\n".join([*connection.iterdump(), f"PRAGMA user_version = {version};", ""])


def load_database(sql: str, database: Path) -> None:
    database.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(sql)


def write_tree(folder: Path, image: Path, model_url: str, target: Path) -> None:
    """Store the files of a server: `folder` has the project, `image` the data directory."""
    project = folder / "project"
    places = {
        str(image): f"{ROOT}/data",
        str(folder): ROOT,
        model_url: MODEL_URL,
        workspace_id(project): WORKSPACE,
    }
    sources = {"culm.json": folder / "culm.json"}
    for name, root in (("project", project), ("data", image)):
        found = (path for path in sorted(root.rglob("*")) if path.is_file())
        sources |= {f"{name}/{path.relative_to(root).as_posix()}": path for path in found}
    for name, path in sources.items():
        if _LEFT_OUT.search(name):
            continue
        if path.suffix == ".db":
            name = name.removesuffix(".db") + ".sql"
            with closing(sqlite3.connect(path)) as connection:
                text = dump(connection)
        else:
            text = path.read_text()
        for place, word in places.items():
            text = text.replace(place, word)
        file = target / name.replace(project_key(project), PROJECT)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def lay_out(source: Path, folder: Path, at_s: float) -> None:
    """Restore a data directory, a project and a user's file in `folder`, last used at `at_s`."""
    project = folder / "project"
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        name = path.relative_to(source).as_posix()
        if "/" not in name and name != "culm.json":
            continue  # A file beside the tree, such as the expected answers.
        text = path.read_text().replace(ROOT, str(folder)).replace(WORKSPACE, workspace_id(project))
        file = folder / name.replace(PROJECT, project_key(project))
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.suffix == ".sql":
            file = file.with_suffix(".db")
            load_database(text, file)
        else:
            file.write_text(text)
        file.chmod(0o600)
        os.utime(file, (at_s, at_s))
    for mailboxes in (folder / "data").rglob("mailboxes"):
        for box in mailboxes.iterdir():
            for part in MAILBOX_PARTS:
                (box / part).mkdir(exist_ok=True)
    for path in (folder / "data").rglob("*"):
        if path.is_dir():
            path.chmod(0o700)


def sessions_in(sql: str) -> list[str]:
    """Return the ids of all sessions in a stored database, including those of agents."""
    with closing(sqlite3.connect(":memory:")) as connection:
        connection.executescript(sql)
        return [str(row[0]) for row in connection.execute("SELECT id FROM sessions ORDER BY no")]

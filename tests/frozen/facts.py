"""Facts that are derived from the product in one step, each with its file."""

import asyncio
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import uvloop

from tests.flow.conftest import open_flow
from tests.flow.drive import send
from tests.frozen.commands import all_help
from tests.frozen.comparing import HERE, as_text
from tests.frozen.data import directories as data
from tests.frozen.data.tree import load_database
from tests.frozen.shapes import api_text, run_lines_text
from tests.frozen.storage import (
    Json,
    listed_strings,
    parse_json,
    read_schema,
    stored_strings,
    unlisted_names,
)


def help_text() -> str:
    return all_help()


def storage_text() -> str:
    """Return the schema that a server creates, and the strings that it stores."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_storage())


async def _storage() -> str:
    with tempfile.TemporaryDirectory(prefix="culm-") as name:
        folder = Path(name).resolve()
        async with open_flow(folder, "unix") as flow:
            client = await flow.client()
            await client.open_workspace(flow.directory())
            openapi = parse_json((await send(flow, "GET", "/v1/openapi.json")).body)
        (database,) = folder.rglob("*.db")
        strings = listed_strings(openapi) | recorded_strings(folder)
        return as_text({"schema": read_schema(database), "strings": dict(sorted(strings.items()))})


def recorded_strings(folder: Path) -> dict[str, Json]:
    """Return the values of unlisted columns in the newest recorded directory."""
    database = folder / "recorded.db"
    (dump,) = (data.HERE / data.recorded()[-1]).rglob("culm.sql")
    load_database(dump.read_text(), database)
    found = stored_strings(database)
    return {name: list[Json](found[name]) for name in unlisted_names()}


FACTS: Mapping[str, Callable[[], str]] = {
    "help.txt": help_text,
    "api.txt": api_text,
    "run-lines.txt": run_lines_text,
    "storage.json": storage_text,
}


def record(names: list[str]) -> None:
    for name in names:
        (HERE / name).write_text(FACTS[name]())

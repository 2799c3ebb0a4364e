"""Databases of every earlier schema are migrated and give the recorded answers."""

from contextlib import closing
from pathlib import Path

import pytest

from tests.frozen.comparing import HERE, as_text, check_text
from tests.frozen.schemas import databases
from tests.frozen.storage import parse_json, read_schema

COMMAND = "python -m tests.frozen.record expected, if only the wording has changed"


def test_every_migration_has_a_recorded_database() -> None:
    numbers = [script.name[:4] for script in databases.migrations()]
    assert numbers == databases.versions(), "run python -m tests.frozen.record schemas"


@pytest.mark.parametrize("version", databases.versions())
def test_migrations_up_to_a_version_still_make_its_database(version: str) -> None:
    with closing(databases.build(int(version))) as made, closing(databases.load(version)) as old:
        assert databases.content_of(made) == databases.content_of(old), "a migration was edited"


@pytest.mark.parametrize("version", databases.versions())
async def test_recorded_database_opens_with_equal_content_twice(
    version: str, tmp_path: Path
) -> None:
    folder = tmp_path.resolve()
    expected = parse_json((HERE / "schemas" / "expected.json").read_text())
    for answers in await databases.open_and_read(version, folder, times=2):
        check_text(
            "schemas/expected.json", as_text({**expected, version: answers}), command=COMMAND
        )
    schema = parse_json((HERE / "storage.json").read_text())["schema"]
    assert read_schema(databases.place_of(folder)) == schema

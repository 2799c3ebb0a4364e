"""The schema and the stored strings are as they were recorded."""

from pathlib import Path

import pytest

from tests.frozen.comparing import HERE, check_text
from tests.frozen.data import directories as data
from tests.frozen.data.tree import load_database
from tests.frozen.facts import storage_text
from tests.frozen.storage import Json, parse_json, stored_strings, unlisted_names

SOURCE = HERE.parents[1] / "src" / "culm"


def frozen_strings() -> dict[str, set[str]]:
    strings = parse_json((HERE / "storage.json").read_text())["strings"]
    assert isinstance(strings, dict)
    return {name: strings_of(values) for name, values in strings.items()}


def strings_of(values: Json) -> set[str]:
    assert isinstance(values, list)
    return {str(value) for value in values}


def test_schema_and_stored_strings_are_unchanged() -> None:
    check_text("storage.json", storage_text())


@pytest.mark.parametrize("version", data.recorded())
def test_rows_of_a_recorded_directory_hold_only_frozen_strings(
    version: str, tmp_path: Path
) -> None:
    (dump,) = (data.HERE / version).rglob("culm.sql")
    load_database(dump.read_text(), tmp_path / "recorded.db")
    frozen = frozen_strings()
    for name, values in stored_strings(tmp_path / "recorded.db").items():
        assert set(values) <= frozen[name], name


def test_strings_that_no_route_lists_are_in_the_source() -> None:
    files = [path for path in SOURCE.rglob("*") if path.suffix in (".py", ".sql")]
    source = "".join(path.read_text() for path in files)
    for name in sorted(unlisted_names()):
        for word in frozen_strings()[name]:
            is_there = f'"{word}"' in source or f"'{word}'" in source or f"    {word}: " in source
            assert is_there, f"{name} may hold {word!r}, which is not in the source"

"""The published schema contains exactly the keys that the check knows."""

import json
from typing import cast

import pytest
from msgspec import Struct

from culm.config.checking import check_text
from culm.config.schema import SCHEMA_URL, ProjectFile, UserFile, json_schema
from culm.settings import Settings
from culm.wire.codec import Json

SCHEMA = json_schema()
DEFINED = cast("dict[str, dict[str, Json]]", SCHEMA["$defs"])
PROPERTIES = cast("dict[str, dict[str, Json]]", DEFINED["UserFile"]["properties"])


def names_of(kind: type[Struct]) -> set[str]:
    return set(kind.__struct_encode_fields__)


def test_the_schema_describes_the_user_file_with_project_keys_and_settings() -> None:
    assert (SCHEMA["$schema"], SCHEMA["title"]) == (SCHEMA_URL, "culm.json")
    assert SCHEMA["$ref"] == "#/$defs/UserFile"
    assert set(PROPERTIES) == names_of(UserFile) == names_of(ProjectFile) | names_of(Settings)
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def test_every_setting_has_a_description_and_its_default() -> None:
    defaults = Settings()
    for name in names_of(Settings):
        assert PROPERTIES[name]["description"]
        assert PROPERTIES[name]["default"] == getattr(defaults, name)


def test_no_key_is_required_and_every_key_may_be_null() -> None:
    assert not DEFINED["UserFile"].get("required")
    nothing = json.dumps(dict.fromkeys(PROPERTIES))
    assert check_text(nothing, UserFile, "f").problems == ()


@pytest.mark.parametrize("name", sorted(PROPERTIES))
def test_every_published_default_passes_the_check(name: str) -> None:
    published = PROPERTIES[name]
    if "default" in published:
        text = json.dumps({name: published["default"]})
        assert check_text(text, UserFile, "f").problems == ()


def test_every_definition_is_used() -> None:
    text = json.dumps(SCHEMA)
    assert [name for name in DEFINED if f'"#/$defs/{name}"' not in text] == []

"""Trust: the settings allowed in an untrusted project file, and the record of trusted files."""

import os
import stat
from pathlib import Path
from typing import cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect

from culm.config.checking import Document
from culm.config.schema import ProjectFile
from culm.config.sources import RestrictedDocument, TrustedFiles, digest_of, is_inside, restrict
from culm.wire.codec import Json, strings_in

MINE = {"mine", "offline"}
CHOICE: Document = {"provider": "mine", "model": "m", "temperature": 0.5, "think": True}


# --- the allowed part of an untrusted file


def test_an_untrusted_file_may_choose_models_context_paths_and_display() -> None:
    document: Document = {
        "$schema": "https://example.org/culm.json",
        "models": {"large": CHOICE, "small": {"provider": "offline", "model": "offline"}},
        "fallbacks": {"large": [CHOICE]},
        "options": {
            "context_paths": ["docs/agents.md", ".rules/"],
            "tui": {"compact_mode": True},
            "notifications": "bell",
            "progress": False,
        },
    }
    assert restrict(document, MINE) == RestrictedDocument(document, ())


@pytest.mark.parametrize(
    ("document", "ignored"),
    [
        ({"providers": {"p": {"base_url": "http://evil"}}}, ["providers"]),
        ({"providers": {"mine": {"api_key": "k"}}}, ["providers"]),
        ({"permissions": {"allowed_tools": ["bash"]}}, ["permissions"]),
        ({"hooks": {"start": [{"command": "id"}]}}, ["hooks"]),
        ({"mcp": {"m": {"command": "id"}}, "lsp": {"l": {"command": "id"}}}, ["mcp", "lsp"]),
        ({"tools": {"ls": {"max_depth": 1}}, "env": {"PATH": "."}}, ["tools", "env"]),
        ({"recent_models": {"large": [CHOICE]}}, ["recent_models"]),
        ({"options": {"disabled_tools": ["view"]}}, ["options"]),
        ({"options": {"data_directory": ".", "global_context_paths": ["/"]}}, ["options"]),
        ({"models": {"large": {"provider": "theirs", "model": "m"}}}, ["models"]),
        ({"models": {"large": {"model": "m"}}}, ["models"]),
        ({"models": {"large": {**CHOICE, "model": "$KEY"}}}, ["models"]),
        ({"models": None, "options": {"context_paths": None}}, ["models", "options"]),
        ({"fallbacks": {"large": [{"provider": "theirs"}]}}, ["fallbacks"]),
        ({"options": {"context_paths": ["/etc/passwd", "../up"]}}, ["options"]),
    ],
)
def test_settings_that_need_trust_are_ignored_and_named(
    document: Document, ignored: list[str]
) -> None:
    assert restrict(document, MINE) == RestrictedDocument({}, tuple(ignored))


@pytest.mark.parametrize(
    ("document", "left", "ignored"),
    [
        (
            {"models": {"large": {**CHOICE, "provider_options": {"a": 1}}, "small": {}}},
            {"models": {"large": CHOICE}},
            ["models.large.provider_options", "models.small"],
        ),
        (
            {"fallbacks": {"large": [{"provider": "theirs"}, CHOICE]}},
            {"fallbacks": {"large": [CHOICE]}},
            ["fallbacks.large"],
        ),
        (
            {"options": {"debug": True, "context_paths": ["/etc/x", "in.md", "~/y"], "tui": {}}},
            {"options": {"context_paths": ["in.md"], "tui": {}}},
            ["options.debug", "options.context_paths"],
        ),
        (
            {"options": {"tui": {"diff_mode": "$(id)"}, "notifications": "bell"}},
            {"options": {"notifications": "bell"}},
            ["options.tui"],
        ),
    ],
)
def test_allowed_settings_next_to_ignored_ones_are_kept(
    document: Document, left: Document, ignored: list[str]
) -> None:
    assert restrict(document, MINE) == RestrictedDocument(left, tuple(ignored))


@pytest.mark.parametrize(
    ("path", "inside"),
    [
        ("AGENTS.md", True),
        ("a/b.md", True),
        (".rules/", True),
        ("a..b", True),
        ("./a", True),
        ("", False),
        ("..", False),
        ("../a", False),
        ("a/../../b", False),
        ("a/..", False),
        ("/a", False),
        ("//a", False),
        ("~", False),
        ("~root/a", False),
        ("$HOME/a", False),
        ("a/${X}", False),
        ("$(id)", False),
        (7, False),
        (None, False),
    ],
)
def test_a_path_is_inside_only_if_written_as_relative_and_literal(
    path: Json, *, inside: bool
) -> None:
    assert is_inside(path) is inside


# --- any document of the schema

TEXTS = st.sampled_from(
    [
        *("mine", "offline", "theirs", "m", "in.md", "dir/in.md", "dark"),
        *("$KEY", "${KEY}", "$(id)", "a$", "/etc/passwd", "../up", "a/../../b", "~/x", ""),
    ]
)
NAMES = TEXTS | st.sampled_from(["p", "command", "large"])
ANYTHING = st.none() | TEXTS | st.lists(TEXTS, max_size=2) | st.dictionaries(NAMES, TEXTS)


def of_type(kind: inspect.Type) -> st.SearchStrategy[Json]:
    """Return a strategy for the values of this type in a checked file."""
    match kind:
        case inspect.Metadata(type=inner):
            return of_type(inner)
        case inspect.StructType(fields=fields):
            return st.none() | st.fixed_dictionaries(
                {}, optional={field.encode_name: of_type(field.type) for field in fields}
            )
        case inspect.DictType(key_type=key_type, value_type=value_type):
            names = cast("st.SearchStrategy[str]", of_type(key_type))
            return st.none() | st.dictionaries(names, of_type(value_type), max_size=2)
        case inspect.ListType(item_type=item_type):
            return st.none() | st.lists(of_type(item_type), max_size=3)
        case inspect.LiteralType(values=values):
            return st.sampled_from(values)
        case inspect.UnionType(types=types):
            return st.one_of([of_type(inner) for inner in types])
        case inspect.StrType():
            return TEXTS
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType() | inspect.FloatType():
            return st.integers(0, 3)
        case _:
            return ANYTHING


DOCUMENTS = of_type(inspect.type_info(ProjectFile)).filter(lambda found: found is not None)
ALLOWED = {"$schema", "models", "fallbacks", "options"}
ALLOWED_OPTIONS = {"context_paths", "tui", "notifications", "progress"}


def selections_in(document: Document) -> list[Document]:
    fallbacks = cast("dict[str, list[Document]]", document.get("fallbacks", {}))
    return [
        *cast("dict[str, Document]", document.get("models", {})).values(),
        *(one for choices in fallbacks.values() for one in choices),
    ]


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_an_untrusted_file_never_gains_a_setting_that_needs_trust(
    document: Document,
) -> None:
    left, ignored = restrict(document, MINE)
    assert left.keys() <= ALLOWED
    options = cast("Document", left.get("options", {}))
    assert options.keys() <= ALLOWED_OPTIONS
    assert all(map(is_inside, cast("list[str]", options.get("context_paths", []))))
    for selection in selections_in(left):
        assert selection["provider"] in MINE
        assert "provider_options" not in selection
    referring = [path for path, text in strings_in(left) if "$" in text and path != ("$schema",)]
    assert referring == []
    assert restrict(left, MINE) == RestrictedDocument(left, ())
    assert bool(ignored) == (left != document)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(DOCUMENTS)
def test_every_dropped_string_is_below_an_ignored_key(document: Document) -> None:
    left, ignored = restrict(document, MINE)
    kept = dict(strings_in(left))
    for path, text in strings_in(document):
        if kept.get(path) != text:
            names = [step for step in path if isinstance(step, str)]
            prefixes = {".".join(names[: n + 1]) for n in range(len(names))}
            assert prefixes & set(ignored), (path, ignored)


# --- the record of trusted files


def test_trust_covers_one_content_of_one_file(tmp_path: Path) -> None:
    trusted = TrustedFiles(tmp_path / "data")
    file, other = tmp_path / "culm.json", tmp_path / "crush.json"
    assert not trusted.is_trusted(file, b"{}")
    trusted.add({file: b"{}", other: b"[]"})
    assert trusted.is_trusted(file, b"{}")
    assert not trusted.is_trusted(other, b"{}")
    for changed in (b"", b"{} ", b"{]", b"\xef\xbb\xbf{}"):
        assert not trusted.is_trusted(file, changed)
    trusted.add({file: b"{} "})
    assert trusted.known() == {str(file): digest_of(b"{} "), str(other): digest_of(b"[]")}
    trusted.remove([file, tmp_path / "never"])
    assert not trusted.is_trusted(file, b"{} ")
    assert trusted.is_trusted(other, b"[]")
    assert stat.S_IMODE(trusted.file.stat().st_mode) == 0o600


@pytest.mark.parametrize(
    "damage", [b"", b"{", b"[]", b'{"f": 1}', b"null", b"\xff", b'{"f": "' + b"x" * (1 << 20)]
)
def test_a_damaged_record_trusts_nothing_and_can_be_rewritten(
    tmp_path: Path, damage: bytes
) -> None:
    trusted, file = TrustedFiles(tmp_path), tmp_path / "culm.json"
    trusted.add({file: b"{}"})
    trusted.file.write_bytes(damage)
    assert (trusted.known(), trusted.is_trusted(file, b"{}")) == ({}, False)
    trusted.add({file: b"{}"})
    assert trusted.is_trusted(file, b"{}")


def test_files_whose_names_are_not_utf8_are_distinguished(tmp_path: Path) -> None:
    trusted = TrustedFiles(tmp_path)
    one, other = (Path(os.fsdecode(b"/\xc3" + end + b"/culm.json")) for end in (b"\xff", b"\xfe"))
    trusted.add({one: b"{}"})
    assert (trusted.is_trusted(one, b"{}"), trusted.is_trusted(other, b"{}")) == (True, False)
    trusted.remove([one])
    assert trusted.known() == {}


def test_a_record_that_is_not_a_regular_file_trusts_nothing(tmp_path: Path) -> None:
    trusted = TrustedFiles(tmp_path)
    trusted.file.mkdir()
    assert trusted.known() == {}
    trusted.file.rmdir()
    os.mkfifo(trusted.file)
    assert trusted.known() == {}

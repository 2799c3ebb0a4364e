"""Names that people give for a session, a run or an agent."""

import pytest

from culm.cli.names import NamedItem, find_named, nearest, short_ids
from culm.errors import InvalidRequest, NotFound
from tests.support import contract

PLUMS = NamedItem("session", "aaaaaaaa-1", "Blue plums")
PEARS = NamedItem("session", "aaaaaaaa-2", "Green pears")
RUN = NamedItem("run", "abc", "count the plums")
LONGER = NamedItem("run", "abcdef", "count the pears")
KNOWN = [PLUMS, PEARS, RUN, LONGER]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("aaaaaaaa-1", PLUMS),
        ("abc", RUN),  # A whole id wins over another id that begins with it.
        ("abcd", LONGER),
        ("blue PLUMS", PLUMS),
    ],
)
def test_item_is_found_by_id_id_prefix_or_title(text: str, found: NamedItem) -> None:
    assert find_named(KNOWN, text) == found


@contract("CLI-9")
def test_ambiguous_name_is_refused_with_the_matches() -> None:
    with pytest.raises(InvalidRequest) as refused:
        find_named(KNOWN, "aaaa")
    assert refused.value.message == "'aaaa' is ambiguous (2 matches)"
    assert refused.value.hint == (
        "which one: session aaaaaaaa-1 (Blue plums), session aaaaaaaa-2 (Green pears)"
    )


@contract("CLI-9")
@pytest.mark.parametrize(
    ("text", "suggested"), [("plum", "Blue plums"), ("gren pears", "Green pears"), ("abx", "abc ")]
)
def test_unknown_name_is_refused_with_the_nearest_names(text: str, suggested: str) -> None:
    with pytest.raises(NotFound) as refused:
        find_named(KNOWN, text)
    assert refused.value.message == f"no session or run is named {text}"
    assert suggested in refused.value.hint


def test_unknown_name_is_printed_without_control_characters() -> None:
    assert nearest(KNOWN, "") == []
    with pytest.raises(NotFound) as refused:
        find_named(KNOWN, "\x1b[2Jzzzzzzzzzzzzzz")
    assert "\x1b" not in refused.value.message
    assert refused.value.hint == "`culm ps` and `culm sessions` list them"


def test_short_ids_are_as_short_as_uniqueness_allows() -> None:
    ids = ["aaaaaaaa-1", "aaaaaaaa-2", "b" * 36, "b" * 36]
    short = short_ids(ids)
    assert short == {"aaaaaaaa-1": "aaaaaaaa-1", "aaaaaaaa-2": "aaaaaaaa-2", "b" * 36: "b" * 8}
    assert short_ids([]) == {}

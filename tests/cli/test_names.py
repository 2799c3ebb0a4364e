"""What a person calls a session, a run or an agent."""

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
        ("abc", RUN),  # Whole, although another begins with it.
        ("abcd", LONGER),
        ("blue PLUMS", PLUMS),
    ],
)
def test_an_id_its_beginning_or_a_title_is_enough(text: str, found: NamedItem) -> None:
    assert find_named(KNOWN, text) == found


@contract("CLI-9")
def test_what_several_are_called_is_refused_with_those() -> None:
    with pytest.raises(InvalidRequest) as refused:
        find_named(KNOWN, "aaaa")
    assert refused.value.message == "2 of them are called aaaa"
    assert refused.value.hint == (
        "which one: session aaaaaaaa-1 (Blue plums), session aaaaaaaa-2 (Green pears)"
    )


@contract("CLI-9")
@pytest.mark.parametrize(
    ("text", "offered"), [("plum", "Blue plums"), ("gren pears", "Green pears"), ("abx", "abc ")]
)
def test_what_nobody_is_called_is_answered_with_the_nearest(text: str, offered: str) -> None:
    with pytest.raises(NotFound) as refused:
        find_named(KNOWN, text)
    assert refused.value.message == f"no session or run is called {text}"
    assert offered in refused.value.hint


def test_nothing_is_near_to_nothing_and_strange_names_are_printed_harmlessly() -> None:
    assert nearest(KNOWN, "") == []
    with pytest.raises(NotFound) as refused:
        find_named(KNOWN, "\x1b[2Jzzzzzzzzzzzzzz")
    assert "\x1b" not in refused.value.message
    assert refused.value.hint == "`culm ps` and `culm sessions` list them"


def test_shown_ids_are_as_short_as_tells_them_apart() -> None:
    ids = ["aaaaaaaa-1", "aaaaaaaa-2", "b" * 36, "b" * 36]
    short = short_ids(ids)
    assert short == {"aaaaaaaa-1": "aaaaaaaa-1", "aaaaaaaa-2": "aaaaaaaa-2", "b" * 36: "b" * 8}
    assert short_ids([]) == {}

"""Cursors: encoding, and the position where a stream begins."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from culm.errors import InvalidRequest
from culm.events.stream import ResumeFrom, StartFresh, where_to_start
from culm.events.views import Cursor, parse_cursor
from culm.ids import Epoch, Ids
from tests.support import contract

EPOCH = Epoch("e1")


@given(st.integers(0, 10**17), st.integers(0, 2**32))
def test_cursor_round_trips(seq: int, seed: int) -> None:
    cursor = Cursor(Ids(seed).epoch(), seq)
    assert parse_cursor(str(cursor)) == cursor


@pytest.mark.parametrize(
    "text", ["", "7", "e.", ".7", "e.-1", "e.7.8", "e.٣", "e.1e3", "e." + "9" * 30]
)
def test_invalid_cursor_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_cursor(text)


@contract("EXC-13")
@pytest.mark.parametrize(
    ("cursor", "start"),
    [
        (None, StartFresh()),
        (Cursor(EPOCH, 10), ResumeFrom(10)),
        (Cursor(EPOCH, 20), ResumeFrom(20)),
        (Cursor(EPOCH, 5), ResumeFrom(5)),
        (Cursor(EPOCH, 4), StartFresh("trimmed")),
        (Cursor(EPOCH, 21), StartFresh("future")),
        (Cursor(Epoch("e2"), 10), StartFresh("another_epoch")),
    ],
)
def test_start_of_a_stream_depends_on_its_cursor(
    cursor: Cursor | None, start: ResumeFrom | StartFresh
) -> None:
    assert where_to_start(cursor, epoch=EPOCH, trimmed_to=5, last=20) == start

from hypothesis import given
from hypothesis import strategies as st

from culm.model.http import LineSplitter


def feed_all(lines: LineSplitter, chunks: list[bytes]) -> list[bytes]:
    return [line for chunk in chunks for line in lines.feed(chunk)]


def split_at(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


TEXT = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r\n", b"defgh"]), max_size=40)


@given(TEXT.map(b"".join), st.lists(st.integers(0, 120)))
def test_lines_do_not_depend_on_how_the_bytes_are_split(data: bytes, places: list[int]) -> None:
    lines = LineSplitter()
    assert feed_all(lines, split_at(data, places)) == data.split(b"\n")[:-1]
    assert lines.rest() == data.split(b"\n")[-1]


@given(TEXT.map(b"".join), st.lists(st.integers(0, 120)))
def test_lines_before_one_that_is_too_long_do_not_depend_on_the_split(
    data: bytes, places: list[int]
) -> None:
    whole, split = LineSplitter(6), LineSplitter(6)
    assert feed_all(split, split_at(data, places)) == feed_all(whole, [data])
    assert split.overflowed == whole.overflowed == any(len(x) > 6 for x in data.split(b"\n"))


def test_a_line_may_have_exactly_the_maximum_length() -> None:
    lines = LineSplitter(3)
    assert feed_all(lines, [b"ab", b"c\nabc\nabcd\nx\n", b"y\n"]) == [b"abc", b"abc"]
    assert lines.overflowed
    assert lines.rest() == b""

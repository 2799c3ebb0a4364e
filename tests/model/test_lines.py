from hypothesis import given
from hypothesis import strategies as st

from culm.model.lines import LineSplitter


def fed(lines: LineSplitter, chunks: list[bytes]) -> list[bytes]:
    return [line for chunk in chunks for line in lines.feed(chunk)]


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = sorted({min(place, len(data)) for place in places} | {len(data)})
    return [data[a:b] for a, b in zip([0, *ends], ends, strict=False) if b > a]


TEXT = st.lists(st.sampled_from([b"\n", b"a", b"bc", b"\r\n", b"defgh"]), max_size=40)


@given(TEXT.map(b"".join), st.lists(st.integers(0, 120)))
def test_the_lines_are_the_same_however_the_bytes_were_cut(data: bytes, places: list[int]) -> None:
    lines = LineSplitter()
    assert fed(lines, cut(data, places)) == data.split(b"\n")[:-1]
    assert lines.rest() == data.split(b"\n")[-1]


@given(TEXT.map(b"".join), st.lists(st.integers(0, 120)))
def test_what_comes_before_a_line_that_is_too_long_is_the_same_however_it_was_cut(
    data: bytes, places: list[int]
) -> None:
    whole, cut_up = LineSplitter(6), LineSplitter(6)
    assert fed(cut_up, cut(data, places)) == fed(whole, [data])
    assert cut_up.overflowed == whole.overflowed == any(len(x) > 6 for x in data.split(b"\n"))


def test_a_line_may_have_exactly_its_limit() -> None:
    lines = LineSplitter(3)
    assert fed(lines, [b"ab", b"c\nabc\nabcd\nx\n", b"y\n"]) == [b"abc", b"abc"]
    assert lines.overflowed
    assert lines.rest() == b""

"""A recording as an SVG: complete and bounded in size."""

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest
from examples.recording.__main__ import SVG_BYTES_MAX
from examples.recording.frames import TOTAL_S_MAX, Frame, frames_of
from examples.recording.screen import text_of
from examples.recording.svg import LINE, colour_of, svg_of
from examples.recording.tape import Beat

SVG = "{http://www.w3.org/2000/svg}"
DOCS = Path(__file__).parent.parent.parent / "docs"


def beats(*texts: str, pause_s: float = 0.2) -> list[Beat]:
    return [Beat(pause_s, text.encode()) for text in texts]


def texts_of(frame: Frame) -> list[str]:
    return [text for row in frame.rows if (text := text_of(row))]


def test_changes_too_fast_to_see_become_one_frame() -> None:
    frames = frames_of(beats(*"abcdef", pause_s=0.05), 10, 2)
    assert [texts_of(frame) for frame in frames] == [["a"], ["abc"], ["abcde"], ["abcdef"]]


def test_equal_frames_are_merged() -> None:
    frames = frames_of([*beats("a"), *beats("", "", ""), *beats("b")], 10, 2)
    assert [(texts_of(one), round(one.duration_s, 2)) for one in frames] == [
        ([], 0.2),
        (["a"], 0.8),
        (["ab"], 0.08),
    ]


def test_a_long_recording_is_played_faster() -> None:
    frames = frames_of(beats(*map(str, range(100)), pause_s=1.0), 10, 2)
    assert sum(frame.duration_s for frame in frames) == pytest.approx(TOTAL_S_MAX)


def frames_in(drawing: str) -> list[dict[int, str]]:
    """Return the text of every visible line of each frame."""
    root = ElementTree.fromstring(drawing)
    named = {one.get("id"): one for one in root.iter(f"{SVG}g")}

    def lines(drawn: ElementTree.Element, y: int) -> Iterator[tuple[int, str]]:
        for use in drawn.findall(f"{SVG}use"):
            inner = named[use.attrib["href"].removeprefix("#")]
            there = y + int(use.get("y", "0"))
            if texts := inner.findall(f"{SVG}text"):
                yield there // LINE, " ".join("".join(text.itertext()) for text in texts)
            yield from lines(inner, there)

    frames: list[dict[int, str]] = []
    for frame in root.findall(f".//{SVG}g[@class='s']/{SVG}g"):
        up = int(frame.attrib["transform"].split()[1].removesuffix(")"))
        frames.append({row: text for row, text in lines(frame, up) if row >= 0})
    return frames


def test_every_frame_draws_what_the_screen_showed() -> None:
    few = [f"<{number}> & 漢 \x1b[1;31mred\x1b[0m\r\n" for number in range(30)]
    many = "".join(f"{number}\r\n" for number in range(50))  # More than one screen at once.
    frames = frames_of(beats(*few, many, "\x1b[2Aabove\r", "\x1b[Jbelow"), 20, 6)
    drawing = svg_of(frames, "a & b")
    assert "<title>a &amp; b</title>" in drawing
    assert frames_in(drawing) == [
        {n: text for n, row in enumerate(frame.rows) if (text := text_of(row))} for frame in frames
    ]


def test_columns_line_up_after_wide_characters() -> None:
    drawing = svg_of(frames_of(beats("  \x1b[1m漢字\x1b[0mx"), 20, 1), "t")
    places = re.findall(r'<text x="([\d.]+)" y="14" textLength="([\d.]+)"[^>]*>(.*?)<', drawing)
    assert places == [("16.8", "33.6", "漢字"), ("50.4", "8.4", "x")]


def test_a_drawing_loads_nothing_and_runs_nothing() -> None:
    drawing = svg_of(frames_of(beats("x"), 20, 2), "t")
    assert drawing.count("http") == 1  # The XML namespace.
    assert not re.search(r"<script|<image|<foreignObject|@import|url\(|\son\w+=", drawing)


def test_a_long_recording_stays_small() -> None:
    lines = [f"{number}: {'some words of a line ' * 3}\r\n" for number in range(400)]
    drawing = svg_of(frames_of(beats(*lines)), "t")
    assert len(drawing.encode()) < SVG_BYTES_MAX


def test_the_published_recording_is_valid() -> None:
    drawing = (DOCS / "recording.svg").read_text()
    root = ElementTree.fromstring(drawing)
    assert len(drawing.encode()) <= SVG_BYTES_MAX
    shown = " ".join("".join(text.itertext()) for text in root.iter(f"{SVG}text"))
    assert "culm run" in shown
    assert "/tmp/" not in shown


@pytest.mark.parametrize(
    ("number", "colour"), [(1, "#ff7b72"), (16, "#000000"), (196, "#ff0000"), (255, "#eeeeee")]
)
def test_there_are_256_colors(number: int, colour: str) -> None:
    assert colour_of(number) == colour

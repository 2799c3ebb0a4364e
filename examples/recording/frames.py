"""A recording as a series of still pictures: few, none too short, within a total time."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from examples.recording.screen import Row, Screen
from examples.recording.tape import Beat

FRAME_S_MIN = 0.08  # Faster changes are merged into one picture.
TOTAL_S_MAX = 25.0


@dataclass(frozen=True, slots=True)
class Frame:
    """A screen, and the time that it is shown."""

    duration_s: float
    top: int  # Number of rows that were scrolled out.
    rows: tuple[Row, ...]
    cursor: tuple[int, int]  # Its row and its column.


def frames_of(beats: Iterable[Beat], columns: int = 80, rows: int = 24) -> list[Frame]:
    """Return the pictures of a terminal, sped up if they take too long."""
    screen = Screen(columns, rows)
    frames: list[Frame] = []
    for beat in beats:
        if beat.pause_s:
            frames.append(_frame(screen, beat.pause_s))
        screen.feed(beat.data)
    frames.append(_frame(screen, FRAME_S_MIN))  # The last output is visible.
    return _merged(_in_time(frames))


def _frame(screen: Screen, duration_s: float) -> Frame:
    cursor = screen.row, min(screen.column, screen.columns - 1)
    return Frame(duration_s, len(screen.scrolled), screen.cells(), cursor)


def _merged(frames: Sequence[Frame]) -> list[Frame]:
    """Merge pictures that are equal or too short: the later one gets the time of both."""
    merged: list[Frame] = []
    for frame in frames:
        last = merged[-1] if merged else None
        if last is not None and (_is_same(last, frame) or last.duration_s < FRAME_S_MIN):
            merged[-1] = replace(frame, duration_s=last.duration_s + frame.duration_s)
        else:
            merged.append(frame)
    return merged


def _is_same(one: Frame, other: Frame) -> bool:
    return replace(one, duration_s=0) == replace(other, duration_s=0)


def _in_time(frames: Sequence[Frame]) -> list[Frame]:
    total_s = sum(frame.duration_s for frame in frames)
    faster = max(total_s / TOTAL_S_MAX, 1.0)
    return [replace(frame, duration_s=frame.duration_s / faster) for frame in frames]

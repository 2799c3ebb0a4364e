"""Debug mode of asyncio at a price that a suite can pay: all of its checks, short memories.

In that mode every future, task and callback notes the stack that made it, and each note reads up
to sixty frames, the times of their files and their lines: half of the time of a test. Nobody reads
them unless something fails, and then the nearest frames say where.
"""

import traceback
from collections.abc import Iterable
from itertools import islice
from traceback import FrameSummary, StackSummary
from types import FrameType

FRAMES_MAX = 3
_extract_all = StackSummary.extract


def keep_notes_short() -> None:
    # C code of asyncio holds this very function, and calls it without arguments.
    traceback.extract_stack.__defaults__ = (None, FRAMES_MAX)
    StackSummary.extract = _extract  # pyright: ignore[reportAttributeAccessIssue]


def _extract(
    frames: Iterable[tuple[FrameType, int]],
    *,
    limit: int | None = None,
    lookup_lines: bool = True,
    capture_locals: bool = False,
) -> StackSummary:
    if limit is None or capture_locals:  # Somebody is about to read it.
        return _extract_all(
            frames, limit=limit, lookup_lines=lookup_lines, capture_locals=capture_locals
        )
    # Without a look at the disk: a line is read when somebody wants it.
    return StackSummary(
        FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in islice(frames, min(limit, FRAMES_MAX))
    )

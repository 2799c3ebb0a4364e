"""Cheaper debug mode of asyncio: all of its checks but one, with short stack traces.

In that mode every future, task and callback records the stack that created it. Each record reads
up to sixty frames with the times and lines of their files, which takes half of the time of a test.
They are printed only after a failure, and then the nearest frames are enough.
"""

import logging
import traceback
from collections.abc import Iterable
from itertools import islice
from traceback import FrameSummary, StackSummary
from types import FrameType

FRAMES_MAX = 3
_extract_all = StackSummary.extract


def shorten_stacks() -> None:
    # The C code of asyncio has a reference to this function and calls it without arguments.
    traceback.extract_stack.__defaults__ = (None, FRAMES_MAX)
    StackSummary.extract = _extract  # pyright: ignore[reportAttributeAccessIssue]


def ignore_slow_callbacks() -> None:
    """Drop the warning about a callback that took long: on a busy machine any of them may."""
    logging.getLogger("asyncio").addFilter(
        lambda record: not str(record.msg).startswith("Executing ")
    )


def _extract(
    frames: Iterable[tuple[FrameType, int]],
    *,
    limit: int | None = None,
    lookup_lines: bool = True,
    capture_locals: bool = False,
) -> StackSummary:
    if limit is None or capture_locals:  # It is about to be printed.
        return _extract_all(
            frames, limit=limit, lookup_lines=lookup_lines, capture_locals=capture_locals
        )
    # Without disk access: a line is read when it is printed.
    return StackSummary(
        FrameSummary(frame.f_code.co_filename, line, frame.f_code.co_name, lookup_line=False)
        for frame, line in islice(frames, min(limit, FRAMES_MAX))
    )

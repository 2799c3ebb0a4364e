"""Signals to a command that waits for a run: the first cancels the run, the second exits."""

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

# One request may arrive as two signals: `timeout` signals the process and its process group.
ECHO_S = 0.2


@contextmanager
def cancelling(
    loop: asyncio.AbstractEventLoop,
    cancel: Callable[[], None],
    leave: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """Call `cancel` at the first signal within the block, and exit at once at the second.

    `cancel` is called in the loop, which may run in another thread; `leave` just before the exit.
    """
    first_s: float | None = None

    def on_signal(number: int, _: FrameType | None) -> None:
        # Not a handler of the loop: it must run even while a write to stdout blocks.
        nonlocal first_s
        if first_s is None:
            first_s = loop.time()
            loop.call_soon_threadsafe(cancel)
        elif loop.time() - first_s > ECHO_S:
            leave()
            os._exit(128 + number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, on_signal) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

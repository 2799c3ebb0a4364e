"""What a signal does to a command that waits for a run: the first cancels, the second leaves."""

import asyncio
import os
import signal
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

ECHO_S = 0.2  # One request may come as two signals: `timeout` sends one to us and one to our group.


@contextmanager
def cancelling(
    loop: asyncio.AbstractEventLoop,
    cancel: Callable[[], None],
    leave: Callable[[], object] = lambda: None,
) -> Generator[None]:
    """Within the block the first signal has `cancel` called, and a second one ends us at once.

    `cancel` is called in the loop, which may be another thread's; `leave` just before the end.
    """
    first_s: float | None = None

    def on_signal(number: int, _: FrameType | None) -> None:
        # Not a handler of the loop: it must be heard while a write to stdout blocks.
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

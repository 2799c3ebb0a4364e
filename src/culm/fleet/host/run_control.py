"""What may be done to a run by whoever wants it, from before it begins until after its end."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from culm.errors import LimitExceeded, TooLarge
from culm.fleet.executor import SteerMessage
from culm.wire.codec import clean

STEERS_MAX: Final = 64  # Waiting to be sent; as many may be sent and not admitted.
STEER_CHARS_MAX: Final = 1 << 20


class RunControl:
    """Of one run. Everything here is done at once, and is heard when there is somebody to hear."""

    def __init__(self) -> None:
        self._waiting: deque[SteerMessage] = deque()
        self._is_over = False
        self._on_change: Callable[[], None] | None = None
        self._is_cancelled = False
        self._has_begun = False
        self.pid: int | None = None  # Of the worker that does it, if that is a process of ours.

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def has_begun(self) -> bool:
        """A worker was heard: something may have been done."""
        return self._has_begun

    @property
    def unadmitted(self) -> tuple[SteerMessage, ...]:
        """What was said and, as far as is known, never reached the run. Final when it is over."""
        return tuple(self._waiting)

    def steer(self, text: str, id: str = "") -> bool:
        """Say something to the run. False if it is over; raises `LimitExceeded`, `TooLarge`."""
        if self._is_over:
            return False
        if len(text) > STEER_CHARS_MAX:
            raise TooLarge(f"a message to a run has at most {STEER_CHARS_MAX} characters")
        if len(self._waiting) >= STEERS_MAX:
            raise LimitExceeded("messages that wait for a run", STEERS_MAX)
        self._waiting.append(SteerMessage(clean(text), clean(id)))
        self._changed()
        return True

    def cancel(self) -> None:
        """Have the run end soon. Nothing happens the second time, or when it is over."""
        if not self._is_cancelled and not self._is_over:
            self._is_cancelled = True
            self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    # --- for whoever runs it

    def watch(self, on_change: Callable[[], None] | None) -> None:
        """Have this called whenever there is something new; it replaces the one before."""
        self._on_change = on_change

    def take_nowait(self) -> SteerMessage | None:
        """The next that waits to be sent."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, steers: Sequence[SteerMessage]) -> None:
        """They were sent in vain. If another worker is tried, it hears them first."""
        self._waiting.extendleft(reversed(steers))

    def begin(self) -> None:
        self._has_begun = True

    def close(self) -> tuple[SteerMessage, ...]:
        """The run is over. Returns what is `unadmitted`."""
        self._is_over = True
        return self.unadmitted

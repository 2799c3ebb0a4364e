"""The caller's control of a run, from before it begins until after its end."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from culm.errors import LimitExceeded, TooLarge
from culm.fleet.executor import SteerMessage
from culm.wire.codec import clean

STEERS_MAX: Final = 64  # Waiting to be sent; as many may be sent but not admitted.
STEER_CHARS_MAX: Final = 1 << 20


class RunControl:
    """Steers and cancels one run. Calls return at once and take effect once a worker has it."""

    def __init__(self) -> None:
        self._waiting: deque[SteerMessage] = deque()
        self._is_over = False
        self._on_change: Callable[[], None] | None = None
        self._is_cancelled = False
        self._has_begun = False
        self.pid: int | None = None  # The worker's, if that is a process of ours.

    @property
    def is_cancelled(self) -> bool:
        return self._is_cancelled

    @property
    def has_begun(self) -> bool:
        """A worker sent a frame, so the run may have had effects."""
        return self._has_begun

    @property
    def unadmitted(self) -> tuple[SteerMessage, ...]:
        """Messages that, as far as is known, never reached the run. Final when it is over."""
        return tuple(self._waiting)

    def steer(self, text: str, id: str = "") -> bool:
        """Send a message to the run; False if it is over. Raises `LimitExceeded`, `TooLarge`."""
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
        """Cancel the run. A second call, or one after the end, does nothing."""
        if not self._is_cancelled and not self._is_over:
            self._is_cancelled = True
            self._changed()

    def _changed(self) -> None:
        if self._on_change is not None:
            self._on_change()

    # --- for the driver of the run

    def watch(self, on_change: Callable[[], None] | None) -> None:
        """Set the function to call on every change, replacing the previous one."""
        self._on_change = on_change

    def take_nowait(self) -> SteerMessage | None:
        """Take the next message that waits to be sent."""
        return self._waiting.popleft() if self._waiting else None

    def put_back(self, steers: Sequence[SteerMessage]) -> None:
        """Return messages that did not arrive. If another worker is tried, it gets them first."""
        self._waiting.extendleft(reversed(steers))

    def begin(self) -> None:
        self._has_begun = True

    def close(self) -> tuple[SteerMessage, ...]:
        """End the run's control; return the `unadmitted` messages."""
        self._is_over = True
        return self.unadmitted

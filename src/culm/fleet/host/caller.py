"""The sender of an assignment: its callbacks while a run goes on, and its control of the run."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from msgspec import Raw, Struct

from culm.clock import parse_time
from culm.errors import LimitExceeded, TooLarge
from culm.fleet.executor import HostCallFailed, SteerMessage
from culm.wire.codec import Json, clean

STEERS_MAX: Final = 64  # Waiting to be sent; as many may be sent but not admitted.
STEER_CHARS_MAX: Final = 1 << 20


class WorkerAsk(Struct, frozen=True):
    """A worker's request for approval. All of its fields are claims of the worker."""

    tool_name: str
    permission: str
    resource: str
    question: str
    deadline_s: float | None  # Seconds since 1970; without an answer by then, it is denied.
    body: Mapping[str, Json]  # As it was sent.


class HostCallbacks(Protocol):
    async def on_event(self, event: Raw) -> None:
        """Handle one event, in order. Meanwhile the worker's frames are not read."""
        ...

    async def on_gap(self) -> None:
        """Events that only extend a text or repeat a state were dropped on the way."""
        ...

    async def on_ask(self, ask: WorkerAsk) -> bool:
        """Decide about a call. Canceled when the run ends first, which denies it.

        Raises `ApprovalUnavailable` if nobody can be asked, or nobody has decided.
        """
        ...

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        """Carry out a host call; raises `HostCallFailed`. Canceled when the run ends first."""
        ...


class DenyAll:
    """Callbacks that allow nothing and do nothing."""

    async def on_event(self, event: Raw) -> None:
        pass

    async def on_gap(self) -> None:
        pass

    async def on_ask(self, ask: WorkerAsk) -> bool:
        return False

    async def on_call(self, tool_call_id: str, args: Mapping[str, Json]) -> Json:
        raise HostCallFailed("host calls are not supported here")


def parse_ask(body: Mapping[str, Json]) -> WorkerAsk:
    """Read an ask; fields that are missing or not text are empty.

    One field has two names; `permission` takes precedence.
    """

    def text(name: str) -> str:
        value = body.get(name)
        return value if isinstance(value, str) else ""

    return WorkerAsk(
        tool_name=text("tool_name"),
        permission=text("permission") or text("permission_type"),
        resource=text("resource"),
        question=text("question"),
        deadline_s=parse_time(text("deadline")),
        body=body,
    )


class RunControl:
    """Steers and cancels one run, from before it begins until after its end.

    Calls return at once and take effect once a worker has the run.
    """

    def __init__(self) -> None:
        self._waiting: deque[SteerMessage] = deque()
        self._is_over = False
        self._on_change: Callable[[], None] | None = None
        self.is_cancelled = False
        self.has_begun = False  # A worker sent a frame, so the run may have had effects.
        self.pid: int | None = None  # The worker's, if that is a process of ours.

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
        if not self.is_cancelled and not self._is_over:
            self.is_cancelled = True
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

    def close(self) -> tuple[SteerMessage, ...]:
        """End the run's control; return the `unadmitted` messages."""
        self._is_over = True
        return self.unadmitted

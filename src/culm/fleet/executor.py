"""Interface between a worker and the executor that carries out a run.

An executor is `async def run(spec, events, steer, cancel, host) -> Outcome`. It is called once per
run, with objects that end with the run: after it returned, `events` and `host` refuse.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from culm.fleet.protocol.frames import RunSpec, Status
from culm.wire.codec import Json


class Outcome(Struct, frozen=True):
    """The end of a run. `completed` has a result, `error` an error, `cancelled` neither."""

    status: Status
    result: str | None = None
    error: str | None = None


CANCELLED = Outcome("cancelled")


def completed(result: str) -> Outcome:
    return Outcome("completed", result=result)


def failed(error: str) -> Outcome:
    return Outcome("error", error=error)


# Prefixes by which hosts recognize errors that are not failures of the work.
LIMIT_PREFIX = "limit:"
DENIED_PREFIX = "denied:"


def limit_error(name: str, text: str) -> str:
    """Error text of a run that a limit has ended."""
    return f"{LIMIT_PREFIX}{name}: {text}"


class RunEnded(Exception):
    """The run has ended or its host is gone, so nothing can be sent any more."""


class EventSink(Protocol):
    async def emit(self, event: Mapping[str, Json]) -> None:
        """Send an event to the host; `type` names its kind. Waits while 256 are unsent.

        Events that only extend a text (`token`, …) or repeat a state may be dropped if the host is
        slow; drops are counted and reported. Raises `RunEnded`.
        """
        ...


class SteerMessage(Struct, frozen=True):
    """A message from the host in the middle of a run."""

    text: str
    id: str = ""  # If set, the host waits for `message_admitted` with this id.


class SteerInbox(Protocol):
    async def next(self) -> SteerMessage:
        """Wait for the next message. Only a cancel of the run ends the wait."""
        ...

    def take_nowait(self) -> list[SteerMessage]:
        """Return all waiting messages."""
        ...


class CancelToken(Protocol):
    """Set when the run shall end. A run that does not end within seconds is aborted."""

    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class RunHost(Protocol):
    """The requests that a run may send to its host."""

    @property
    def takes_calls(self) -> bool:
        """True if the host is one of ours and accepts `call`s, as stated at provisioning."""
        ...

    async def ask(self, body: Mapping[str, Json]) -> bool:
        """Ask for approval: False if denied, if no answer came or if the host is gone.

        If the host takes calls, raises `ApprovalUnavailable` where no decision is known to have
        been made.
        """
        ...

    async def call(self, args: Mapping[str, Json], tool_call_id: str = "") -> Json:
        """Make a host call; raises `HostCallFailed` with the host's reason, and `RunEnded`."""
        ...


class ApprovalUnavailable(Exception):
    """Not approved, though nobody decided so. The message gives the reason."""


class HostCallFailed(Exception):
    """The host did not carry out the call. The message gives the reason."""


class Executor(Protocol):
    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome: ...

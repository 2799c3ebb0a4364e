"""The seam towards whoever does the work of a run in a worker.

An executor is `async def run(spec, events, steer, cancel, host) -> Outcome`. It is called once a
run, with things that end with it: after it returned, `events` and `host` refuse.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from culm.fleet.protocol.frames import RunSpec, Status
from culm.wire.codec import Json


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `completed` has a result, `error` an error, `cancelled` neither."""

    status: Status
    result: str | None = None
    error: str | None = None


CANCELLED = Outcome("cancelled")


def completed(result: str) -> Outcome:
    return Outcome("completed", result=result)


def failed(error: str) -> Outcome:
    return Outcome("error", error=error)


# How an error begins that is no failure of the work, for hosts to tell by.
LIMIT_PREFIX = "limit:"
DENIED_PREFIX = "denied:"


def limit_error(name: str, words: str) -> str:
    """What a run says that a limit has ended."""
    return f"{LIMIT_PREFIX}{name}: {words}"


class RunEnded(Exception):
    """What is said to a run's host after the run has ended, or the host is gone."""


class EventSink(Protocol):
    async def emit(self, event: Mapping[str, Json]) -> None:
        """Tell the host; `type` says what it is. Waits while 256 of a run are not sent yet.

        Of what only grows a text (`token`, …) or repeats a state, some may be dropped towards a
        slow host; that is counted and told. Raises `RunOver`.
        """
        ...


@dataclass(frozen=True, slots=True)
class SteerMessage:
    """What the host says in the middle of a run."""

    text: str
    id: str = ""  # If there is one, the host waits to hear `message_admitted` with it.


class SteerInbox(Protocol):
    async def next(self) -> SteerMessage:
        """Wait for the next one. Never ends by itself: a cancel of the run ends the wait."""
        ...

    def take_nowait(self) -> list[SteerMessage]:
        """All that wait now."""
        ...


class CancelToken(Protocol):
    """Told that the run shall end. Who does not end within seconds is ended."""

    def is_set(self) -> bool: ...

    async def wait(self) -> object: ...


class RunHost(Protocol):
    """What a run may ask of its host while it goes on."""

    @property
    def takes_calls(self) -> bool:
        """Whether it is one of ours, and was told at provisioning to take `call`s."""
        ...

    async def ask(self, body: Mapping[str, Json]) -> bool:
        """Whether it may: False if it was denied, if nobody answered, or the host is gone.

        If the host takes calls, raises `NotAsked` where nobody has decided, as far as is known.
        """
        ...

    async def call(self, args: Mapping[str, Json], tool_call_id: str = "") -> Json:
        """Have a host call done; raises `CallFailed` with the host's reason, `RunOver`."""
        ...


class ApprovalUnavailable(Exception):
    """It may not, and that is nobody's decision. Says why, in words."""


class HostCallFailed(Exception):
    """The host did not do it. Says why, in words."""


class Executor(Protocol):
    async def run(
        self,
        spec: RunSpec,
        events: EventSink,
        steer: SteerInbox,
        cancel: CancelToken,
        host: RunHost,
    ) -> Outcome: ...

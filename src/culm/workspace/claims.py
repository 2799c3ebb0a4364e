"""Claims keep a workspace open: one pure function from claims and an input to new claims.

A claim is one client's reason; live runs count as another. `WorkspaceLifetime` owns the claims of a
workspace, arms the timer that a `ClaimStep` contains and reports back; the registry carries out the
teardown.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import assert_never

from msgspec import Struct, field
from msgspec.structs import replace

from culm.clock import Clock, Timer
from culm.errors import (
    ClientNotAttached,
    InvalidRequest,
    LimitExceeded,
    WorkspaceClosing,
    WorkspaceNotFound,
)
from culm.events.hub import TransientEvent
from culm.ids import ClientId
from culm.settings import Settings
from culm.wire.codec import encode
from culm.wire.workspaces import Present

SESSION_ID_CHARS_MAX = 512  # A child's id is made of its parent's message and call.


class ClientClaim(Struct, frozen=True):
    claim_id: int  # Identifies this claim: streams of an earlier one do not count.
    streams: int = 0
    released: bool = False
    hold: int | None = None  # The timer that may end it; never set while a stream is open.
    session_id: str = ""  # The session that the client shows; dropped with the claim.
    interactive: int = 0  # The number of its streams with a person present.

    @property
    def is_interactive(self) -> bool:
        """Return True if a person is present who can be asked."""
        return self.streams > 0 and (self.interactive > 0 or bool(self.session_id))


class Claims(Struct, frozen=True):
    by_client: Mapping[ClientId, ClientClaim] = field(default_factory=dict[ClientId, ClientClaim])
    live_runs: int = 0
    abandoned: int | None = None  # The timer of runs without a client.
    last_number: int = 0  # Claims and timers share one sequence, so that no number is reused.

    def attached(self) -> Counter[str]:
        """Count the clients with a live stream per selected session."""
        return Counter(c.session_id for c in self.by_client.values() if c.streams)

    def attached_to(self, session_id: str) -> int:
        return self.attached()[session_id]


# --- inputs


class Created(Struct, frozen=True):
    client_id: ClientId


class StreamOpened(Struct, frozen=True):
    client_id: ClientId
    interactive: bool = False


class StreamClosed(Struct, frozen=True):
    client_id: ClientId
    claim_id: int
    interactive: bool = False


class Released(Struct, frozen=True):
    client_id: ClientId


class Retired(Struct, frozen=True):
    client_id: ClientId


class Selected(Struct, frozen=True):
    client_id: ClientId
    session_id: str


class HoldExpired(Struct, frozen=True):
    client_id: ClientId
    hold: int


class RunsChanged(Struct, frozen=True):
    live: int


class AbandonedExpired(Struct, frozen=True):
    timer: int


Input = (
    Created
    | StreamOpened
    | StreamClosed
    | Released
    | Retired
    | Selected
    | HoldExpired
    | RunsChanged
    | AbandonedExpired
)


# --- outputs


class WorkspaceFate(Enum):
    KEEP = auto()
    CLOSE = auto()  # It is no longer needed.
    INTERRUPT = auto()  # Its runs had no client for too long: end them, then close.


class ArmTimer(Struct, frozen=True):
    """Start a timer and report `then` when it fires; the report of an older timer has no effect."""

    delay_s: float
    then: HoldExpired | AbandonedExpired


class ClaimStep(Struct, frozen=True):
    claims: Claims
    fate: WorkspaceFate
    arm: ArmTimer | None = None


class Graces(Struct, frozen=True):
    create_s: float
    detach_s: float
    abandoned_s: float


def on_claim(claims: Claims, event: Input, graces: Graces) -> ClaimStep:
    """Apply one input to the claims; docs/contract/workspaces.md has the table."""
    if isinstance(event, AbandonedExpired) and event.timer == claims.abandoned:
        return ClaimStep(claims, WorkspaceFate.INTERRUPT)
    claims, arm = _apply(claims, event, graces)
    if claims.by_client:
        return ClaimStep(replace(claims, abandoned=None), WorkspaceFate.KEEP, arm)
    if not claims.live_runs:
        return ClaimStep(claims, WorkspaceFate.CLOSE)
    if claims.abandoned is not None:
        return ClaimStep(claims, WorkspaceFate.KEEP)
    number = claims.last_number + 1
    claims = replace(claims, abandoned=number, last_number=number)
    return ClaimStep(
        claims, WorkspaceFate.KEEP, ArmTimer(graces.abandoned_s, AbandonedExpired(number))
    )


def _apply(claims: Claims, event: Input, graces: Graces) -> tuple[Claims, ArmTimer | None]:
    if isinstance(event, RunsChanged):
        return replace(claims, live_runs=event.live), None
    if isinstance(event, AbandonedExpired):
        return claims, None
    client_id = event.client_id
    claim = claims.by_client.get(client_id)
    match event:
        case Created():
            if claim is not None and claim.streams:
                return _put(claims, client_id, replace(claim, released=False)), None
            # Held or new: start a full create grace; the previous timer is void.
            return _hold(claims, client_id, claim, graces.create_s)
        case StreamOpened(interactive=interactive):
            if claim is None:
                claims, claim = _new_claim(claims)
            opened = replace(
                claim,
                streams=claim.streams + 1,
                hold=None,
                interactive=claim.interactive + interactive,
            )
            return _put(claims, client_id, opened), None
        case StreamClosed(claim_id=claim_id, interactive=interactive):
            if claim is None or claim.claim_id != claim_id or not claim.streams:
                return claims, None
            claim = replace(
                claim, streams=claim.streams - 1, interactive=claim.interactive - interactive
            )
            if claim.streams:
                return _put(claims, client_id, claim), None
            if claim.released or graces.detach_s <= 0:
                return _drop(claims, client_id), None
            return _hold(claims, client_id, claim, graces.detach_s)
        case Released():
            if claim is not None and claim.streams:
                return _put(claims, client_id, replace(claim, released=True)), None
            return _drop(claims, client_id), None
        case Retired():
            return _drop(claims, client_id), None
        case Selected(session_id=session_id):
            assert claim is not None, "only an attached client selects"
            return _put(claims, client_id, replace(claim, session_id=session_id)), None
        case HoldExpired(hold=hold):
            if claim is None or claim.hold != hold:
                return claims, None
            return _drop(claims, client_id), None
        case _:
            assert_never(event)


def _hold(
    claims: Claims, client_id: ClientId, claim: ClientClaim | None, delay_s: float
) -> tuple[Claims, ArmTimer]:
    if claim is None:
        claims, claim = _new_claim(claims)
    hold = claims.last_number + 1
    claims = _put(replace(claims, last_number=hold), client_id, replace(claim, hold=hold))
    return claims, ArmTimer(delay_s, HoldExpired(client_id, hold))


def _new_claim(claims: Claims) -> tuple[Claims, ClientClaim]:
    claim_id = claims.last_number + 1
    return replace(claims, last_number=claim_id), ClientClaim(claim_id)


def _put(claims: Claims, client_id: ClientId, claim: ClientClaim) -> Claims:
    return replace(claims, by_client={**claims.by_client, client_id: claim})


def _drop(claims: Claims, client_id: ClientId) -> Claims:
    rest = {other: claim for other, claim in claims.by_client.items() if other != client_id}
    return replace(claims, by_client=rest)


class WorkspaceLifetime:
    """The claims on one workspace, with their timers, and the presence of its clients."""

    def __init__(
        self,
        clock: Clock,
        settings: Settings,
        publish: Callable[[TransientEvent], None],
        on_fate: Callable[[WorkspaceFate], None],
    ) -> None:
        self.claims = Claims()
        self.closing = False
        self.is_abandoned = False  # Its runs had no client for too long: none keeps waiting.
        self._clock = clock
        self._publish = publish
        self._on_fate = on_fate  # Called if the workspace is no longer needed.
        self._clients_max = settings.clients_max
        self._graces = Graces(
            settings.create_grace_s, settings.detach_grace_s, settings.abandoned_runs_s
        )
        self._timers: dict[ClientId | None, Timer] = {}

    def is_watched(self) -> bool:
        """Return True if somebody could answer an ask."""
        return any(claim.is_interactive for claim in self.claims.by_client.values())

    def check_open(self) -> None:
        """Raise `WorkspaceClosing` once the workspace is closing."""
        if self.closing:
            raise WorkspaceClosing

    def close(self) -> None:
        """Accept nothing new; safe to repeat."""
        self.closing = True
        for timer in self._timers.values():
            timer.cancel()

    def apply(self, event: Input) -> None:
        """Apply one input to the claims and carry out the result."""
        if self.closing:
            return  # Its fate is decided.
        before = self.claims
        step = on_claim(before, event, self._graces)
        self.claims = step.claims
        if step.arm is not None:
            self._arm(step.arm)
        self._publish_presence(before)
        if step.fate is not WorkspaceFate.KEEP:
            self.is_abandoned = step.fate is WorkspaceFate.INTERRUPT
            self._on_fate(step.fate)

    def open_stream(self, client_id: ClientId, *, interactive: bool = False) -> int:
        """Count a stream of this client; return the number to pass to `close_stream`."""
        if self.closing:
            raise WorkspaceNotFound
        self.check_room(client_id)
        self.apply(StreamOpened(client_id, interactive))
        return self.claims.by_client[client_id].claim_id

    def check_room(self, client_id: ClientId) -> None:
        """Raise `LimitExceeded` if there is no room for another client."""
        if client_id not in self.claims.by_client and (
            len(self.claims.by_client) >= self._clients_max
        ):
            raise LimitExceeded("clients of this workspace", self._clients_max)

    def close_stream(
        self, client_id: ClientId, claim_id: int, *, interactive: bool = False
    ) -> None:
        self.apply(StreamClosed(client_id, claim_id, interactive))

    def select(self, client_id: ClientId, session_id: str) -> None:
        """Record the session that a client shows; requires a live stream."""
        claim = self.claims.by_client.get(client_id)
        if claim is None or not claim.streams:
            raise ClientNotAttached
        if len(session_id) > SESSION_ID_CHARS_MAX:
            raise InvalidRequest(f"session_id may have at most {SESSION_ID_CHARS_MAX} characters")
        self.apply(Selected(client_id, session_id))

    def _arm(self, arm: ArmTimer) -> None:
        """Keep one timer per client: a newer one voids the report of the older one."""
        owner = arm.then.client_id if isinstance(arm.then, HoldExpired) else None
        if older := self._timers.pop(owner, None):
            older.cancel()

        def fire() -> None:
            del self._timers[owner]
            self.apply(arm.then)

        self._timers[owner] = self._clock.call_later(arm.delay_s, fire)

    def presence(self) -> Iterable[Present]:
        for client_id, claim in self.claims.by_client.items():
            if claim.streams:
                yield Present(client_id, claim.session_id)

    def _publish_presence(self, before: Claims) -> None:
        for client_id in before.by_client.keys() | self.claims.by_client.keys():
            old, new = before.by_client.get(client_id), self.claims.by_client.get(client_id)
            was = old.session_id if old is not None and old.streams else None
            now = new.session_id if new is not None and new.streams else None
            if was != now:
                present = Present(client_id, now or "", attached=now is not None)
                self._publish(TransientEvent("presence_changed", "", encode(present)))

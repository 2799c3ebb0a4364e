"""Decisions about idle workers: which is reused, which stays, which must go.

Pure: functions of the idle workers and the time; the caller ends those that must go. Idle workers
are ordered by the time they were parked, the oldest first. A worker may be reused for another child
if both would have been provisioned alike, which their fingerprints show.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from culm.fleet.provision import Provision

IDLE_S: Final = 300.0
# A worker itself waits this much longer: the host sweeps, and so retires it, before that.
IDLE_MARGIN_S: Final = 60.0
# Object keys are sorted, because their order has no meaning.
_encoder = msgspec.json.Encoder(order="deterministic")


class IdleWorker(Protocol):
    @property
    def is_alive(self) -> bool: ...


W = TypeVar("W", bound=IdleWorker)


@dataclass(frozen=True, slots=True)
class PoolBounds:
    idle_per_key_max: int = 4
    idle_max: int = 16
    idle_s: float = IDLE_S
    sweep_s: float = 30.0


@dataclass(frozen=True, slots=True)
class ParkedWorker(Generic[W]):
    worker: W
    key: str  # Its fingerprint.
    until_s: float  # From then on it is not handed out.


@dataclass(frozen=True, slots=True)
class PoolDecision(Generic[W]):
    """Every idle worker, including the new one, is in exactly one of these."""

    idle: tuple[ParkedWorker[W], ...]
    retired: tuple[W, ...] = ()
    chosen: W | None = None


def check_out(waiting: tuple[ParkedWorker[W], ...], key: str, now_s: float) -> PoolDecision[W]:
    """Reuse a worker of that key: the newest, so that surplus workers grow old and are retired."""
    decided = sweep(waiting, now_s)
    for parked in reversed(decided.idle):
        if parked.key == key:
            kept = tuple(one for one in decided.idle if one is not parked)
            return PoolDecision(kept, decided.retired, parked.worker)
    return decided


def park(
    waiting: tuple[ParkedWorker[W], ...],
    newcomer: ParkedWorker[W],
    bounds: PoolBounds,
    now_s: float,
) -> PoolDecision[W]:
    """Add an idle worker. Above a limit the oldest are retired: first of its key, then of all."""
    decided = sweep((*waiting, newcomer), now_s)
    kept, first = _limit(decided.idle, bounds.idle_per_key_max, lambda one: one.key == newcomer.key)
    kept, second = _limit(kept, bounds.idle_max, lambda _: True)
    return PoolDecision(kept, (*decided.retired, *first, *second))


def sweep(waiting: tuple[ParkedWorker[W], ...], now_s: float) -> PoolDecision[W]:
    """Retire workers that died or were idle too long."""
    kept = tuple(one for one in waiting if one.worker.is_alive and now_s < one.until_s)
    if len(kept) == len(waiting):
        return PoolDecision(waiting)
    staying = {id(one) for one in kept}
    return PoolDecision(kept, tuple(one.worker for one in waiting if id(one) not in staying))


def _limit(
    waiting: tuple[ParkedWorker[W], ...], at_most: int, counts: Callable[[ParkedWorker[W]], bool]
) -> tuple[tuple[ParkedWorker[W], ...], tuple[W, ...]]:
    counted = [one for one in waiting if counts(one)]
    surplus = counted[: max(0, len(counted) - at_most)]
    going = {id(one) for one in surplus}
    kept = tuple(one for one in waiting if id(one) not in going)
    return kept, tuple(one.worker for one in surplus)


def fingerprint(provision: Provision) -> str:
    """Digest of a provision, equal for children that differ only in identity and tool order.

    Every part of the document counts unless it is reset here; data sent with each run is not in it.
    Secrets count, so that a run with a changed key never gets a worker with the old one; they
    cannot be recovered from the digest.
    """
    alike = replace(
        provision,
        identity=replace(provision.identity, child_id="", parent_id=None),
        owner=None,
        secrets=replace(provision.secrets, worker_auth_token=None),
        culm=replace(provision.culm, control_fd=None),
        disabled_tools=_sorted(provision.disabled_tools),
    )
    return hashlib.sha256(_encoder.encode(alike)).hexdigest()


def _sorted(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))

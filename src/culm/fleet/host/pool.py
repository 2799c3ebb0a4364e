"""Workers that wait for their next assignment: which is taken, which is kept, which must go.

Pure: the decisions are functions of who waits and of the time; whoever calls them ends those that
must go. Who waits is in the order of parking, the longest first.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

IDLE_S: Final = 300.0
# What a worker waits longer by itself: the parent sweeps, and so retires it, before that is over.
IDLE_MARGIN_S: Final = 60.0


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
class ParkResult(Generic[W]):
    worker: W
    key: str  # Its fingerprint.
    until_s: float  # From then on it is not handed out.


@dataclass(frozen=True, slots=True)
class PoolDecision(Generic[W]):
    """Everybody who waited, and came to wait, is in exactly one of these."""

    idle: tuple[ParkResult[W], ...]
    retired: tuple[W, ...] = ()
    chosen: W | None = None


def check_out(waiting: tuple[ParkResult[W], ...], key: str, now_s: float) -> PoolDecision[W]:
    """Take one of that key. The latest that was parked, so that a surplus grows old and goes."""
    decided = sweep(waiting, now_s)
    for parked in reversed(decided.idle):
        if parked.key == key:
            kept = tuple(one for one in decided.idle if one is not parked)
            return PoolDecision(kept, decided.retired, parked.worker)
    return decided


def park(
    waiting: tuple[ParkResult[W], ...], newcomer: ParkResult[W], bounds: PoolBounds, now_s: float
) -> PoolDecision[W]:
    """Let one wait. What is too many goes, the oldest first: of its key, then of all."""
    decided = sweep((*waiting, newcomer), now_s)
    kept, first = _limit(decided.idle, bounds.idle_per_key_max, lambda one: one.key == newcomer.key)
    kept, second = _limit(kept, bounds.idle_max, lambda _: True)
    return PoolDecision(kept, (*decided.retired, *first, *second))


def sweep(waiting: tuple[ParkResult[W], ...], now_s: float) -> PoolDecision[W]:
    """Those that died, or waited long enough, go."""
    kept = tuple(one for one in waiting if one.worker.is_alive and now_s < one.until_s)
    if len(kept) == len(waiting):
        return PoolDecision(waiting)
    staying = {id(one) for one in kept}
    return PoolDecision(kept, tuple(one.worker for one in waiting if id(one) not in staying))


def _limit(
    waiting: tuple[ParkResult[W], ...], at_most: int, counts: Callable[[ParkResult[W]], bool]
) -> tuple[tuple[ParkResult[W], ...], tuple[W, ...]]:
    counted = [one for one in waiting if counts(one)]
    surplus = counted[: max(0, len(counted) - at_most)]
    going = {id(one) for one in surplus}
    kept = tuple(one for one in waiting if id(one) not in going)
    return kept, tuple(one.worker for one in surplus)

"""How a worker serves: who may come, for how long it waits, what a run is given."""

from dataclasses import dataclass

from culm.clock import Clock
from culm.fleet.provision import ACCEPT_S, DEPTH_MAX, IDLE_S
from culm.ids import Ids


@dataclass(frozen=True, slots=True)
class One:
    """One connection, and the end. Nobody in time is an error; None waits for ever."""

    accept_s: float | None = ACCEPT_S


@dataclass(frozen=True, slots=True)
class Reusable:
    """One connection after the other; the end when nobody comes for so long."""

    idle_s: float = IDLE_S


@dataclass(frozen=True, slots=True)
class Service:
    """Many connections at once, each on its own, until it is cancelled."""

    connections_max: int = 512


Mode = One | Reusable | Service


@dataclass(frozen=True, slots=True)
class Terms:
    """What holds for every run of a worker."""

    clock: Clock
    ids: Ids
    run_s: float | None = None  # No run takes longer.
    host_calls: bool = False  # Its hosts are ours, and take host calls.
    depth: int = 1  # Of the worker in its tree ...
    depth_max: int = DEPTH_MAX  # ... which is not deeper than this.


class NobodyCame(Exception):
    """No connection was made in time."""

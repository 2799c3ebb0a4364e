"""How a worker serves: who may come, for how long it waits, what a run is given."""

from dataclasses import dataclass

from culm.clock import Clock
from culm.fleet.provision import ACCEPT_S, DEPTH_MAX, IDLE_S
from culm.ids import Ids


@dataclass(frozen=True, slots=True)
class ServeOnce:
    """One connection, and the end. Nobody in time is an error; None waits for ever."""

    accept_s: float | None = ACCEPT_S


@dataclass(frozen=True, slots=True)
class ServeInTurn:
    """One connection after the other; the end when nobody comes for so long."""

    idle_s: float = IDLE_S


@dataclass(frozen=True, slots=True)
class ServeMany:
    """Many connections at once, each on its own, until it is cancelled."""

    connections_max: int = 512


Mode = ServeOnce | ServeInTurn | ServeMany


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """What holds for every run of a worker."""

    clock: Clock
    ids: Ids
    run_s: float | None = None  # No run takes longer.
    host_calls: bool = False  # Its hosts are ours, and take host calls.
    depth: int = 1  # Of the worker in its tree ...
    depth_max: int = DEPTH_MAX  # ... which is not deeper than this.


class ConnectTimeout(Exception):
    """No connection was made in time."""

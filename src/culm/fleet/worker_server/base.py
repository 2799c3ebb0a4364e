"""Serving modes of a worker, and the settings of its runs."""

from dataclasses import dataclass

from culm.clock import Clock
from culm.fleet.provision import ACCEPT_S, DEPTH_MAX, IDLE_S
from culm.ids import Ids


@dataclass(frozen=True, slots=True)
class ServeOnce:
    """Serve one connection. None in time is an error; `accept_s=None` waits forever."""

    accept_s: float | None = ACCEPT_S


@dataclass(frozen=True, slots=True)
class ServeInTurn:
    """Serve one connection after the other; end when none comes for `idle_s`."""

    idle_s: float = IDLE_S


@dataclass(frozen=True, slots=True)
class ServeMany:
    """Serve many independent connections at once, until canceled."""

    connections_max: int = 512


Mode = ServeOnce | ServeInTurn | ServeMany


@dataclass(frozen=True, slots=True)
class ServingSettings:
    """Settings for every run of a worker."""

    clock: Clock
    ids: Ids
    run_s: float | None = None  # Limit for a run.
    host_calls: bool = False  # Its hosts are ours and accept host calls.
    depth: int = 1  # The worker's depth in its tree ...
    depth_max: int = DEPTH_MAX  # ... which is at most this deep.


class ConnectTimeout(Exception):
    """No connection was made in time."""

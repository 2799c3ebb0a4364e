"""The limits of a provision in a worker's terms: how it serves, what a run may take.

What a limit has ended is told in `error` with words that a program can read: `limit:<name>: …`.
"""

from culm.clock import Clock
from culm.fleet.provision import IDLE_S, SECONDS_MAX, Provision
from culm.fleet.worker_server.base import Mode, ServeInTurn, ServeOnce, ServingSettings
from culm.ids import Ids


def mode_of(provision: Provision) -> Mode:
    if not provision.reusable:
        return ServeOnce()
    idle_s = provision.limits.idle_timeout_secs
    return ServeInTurn(IDLE_S if idle_s is None else min(idle_s, SECONDS_MAX))


def serving_terms_of(provision: Provision, clock: Clock, ids: Ids) -> ServingSettings:
    run_s = provision.limits.run_timeout_secs
    return ServingSettings(
        clock,
        ids,
        run_s=None if run_s is None else min(run_s, SECONDS_MAX),
        host_calls=provision.culm.host_calls,
        depth=provision.identity.depth,
        depth_max=provision.capabilities.depth_max,
    )

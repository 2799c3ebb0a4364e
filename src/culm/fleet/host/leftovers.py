"""Ends workers that a crashed server left behind, and removes their records.

A worker ends by itself when its owner is gone; those found here hung or were stopped.
"""

import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from culm.clock import Clock
from culm.fleet.discovery.base import AgentRecord, is_live, is_running
from culm.fleet.discovery.files import FileDiscovery
from culm.fleet.provision import storage_beside
from culm.processes.linux import end_one, is_alive, now_s, read_world_id

_log = logging.getLogger(__name__)

END_BOUND_S: Final = 3.0
_PAUSE_S: Final = 0.01


def end_leftover_workers(discovery_dir: Path, clock: Clock) -> None:
    """End the workers whose owner is gone, and verify it. Blocks if there are any.

    A worker whose owner lives, or that was started manually, is not touched.
    """
    discovery = FileDiscovery(discovery_dir, clock)
    world, now = read_world_id(), clock.now_s()
    left = [record for record in discovery.records() if is_leftover(record, world, now)]
    for record in left:
        if _end(record):
            _log.warning("ended worker %s, left by a crash", record.agent_id)
        with suppress(OSError):
            discovery.withdraw(record.agent_id)
        # The ids of records are safe names: discovery reads no others.
        shutil.rmtree(storage_beside(discovery_dir, record.agent_id), ignore_errors=True)


def is_leftover(record: AgentRecord, world: str, now_s: float) -> bool:
    """Return True if a worker of ours has no owner or no process any more.

    For one on another machine or in another container, only the lease is known.
    """
    placed = record.culm
    if placed is None or not world:
        return False
    if placed.world != world:
        return not is_live(record, now_s)
    if not is_running(record):
        return True
    return placed.owner is not None and not is_alive(placed.owner.pid, placed.owner.start_ticks)


def _end(record: AgentRecord) -> bool:
    """Kill it and wait until it is gone; return True if it was alive."""
    if record.culm is None or not is_running(record):
        return False
    if not end_one(record.pid, record.culm.start_ticks):
        return False
    until_s = now_s() + END_BOUND_S
    while is_running(record) and now_s() < until_s:
        time.sleep(_PAUSE_S)
    return True

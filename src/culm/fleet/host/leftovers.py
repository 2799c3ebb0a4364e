"""Workers that a crashed server left behind: ended by the next one, and their records removed.

A worker ends by itself when its owner is gone; what is found here hung, or was stopped.
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
from culm.fleet.storage import storage_beside
from culm.processes.linux import is_alive, now_s, read_world_id
from culm.processes.tree import end_one

_log = logging.getLogger(__name__)

END_BOUND_S: Final = 3.0
_PAUSE_S: Final = 0.01


def end_leftover_workers(fabric_dir: Path, clock: Clock) -> None:
    """End those whose owner is gone, and verify it. Blocks, if there are any.

    A worker whose owner lives, or that was started by hand, is not touched.
    """
    discovery = FileDiscovery(fabric_dir, clock)
    world, now = read_world_id(), clock.now_s()
    left = [record for record in discovery.records() if is_leftover(record, world, now)]
    for record in left:
        if _end(record):
            _log.warning("ended worker %s, which a crash had left", record.agent_id)
        with suppress(OSError):
            discovery.withdraw(record.agent_id)
        # The ids of records are safe names: the fabric reads no others.
        shutil.rmtree(storage_beside(fabric_dir, record.agent_id), ignore_errors=True)


def is_leftover(record: AgentRecord, world: str, now_s: float) -> bool:
    """Whether it is one of ours, and has nobody any more: no owner, or no process.

    Of one on another machine or in another container, nothing is known but its lease.
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
    """Kill it, and wait until it is gone; whether there was something."""
    if record.culm is None or not is_running(record):
        return False
    if not end_one(record.pid, record.culm.start_ticks):
        return False
    until_s = now_s() + END_BOUND_S
    while is_running(record) and now_s() < until_s:
        time.sleep(_PAUSE_S)
    return True

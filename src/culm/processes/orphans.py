"""What falls to the server when its keeper dies alone: waited for, ended, verified.

Blocks; runs in a thread. The wardens end what they hold by themselves once their keeper is gone;
here they are collected, and ended if they do not.
"""

import os
import signal
import time

from culm.processes.linux import ProcStat, now_s, read_table
from culm.processes.process_set import end_tagged, reap, reap_tagged

SHIMS_S = 2.5  # They ask for 0.3 seconds, then end; the rest is a busy machine.
STRAYS_S = 1.0
_PAUSE_S = 0.01
WORKER_NAME = "culm-worker"
ZYGOTE_NAME = "culm-zygote"
PREFORK_NAME = "culm-bud"


def end_orphans(
    mark: int, shims: frozenset[int], sidecars: frozenset[int]
) -> tuple[int, list[int]]:
    """How many had to be ended that no warden ended, and the pids that are left."""
    until_s = now_s() + SHIMS_S
    while (waiting := _shims(shims)) and now_s() < until_s + STRAYS_S:
        for stat in waiting:
            if now_s() > until_s:
                os.kill(stat.pid, signal.SIGKILL)  # Our child: the pid is not another's.
            reap(stat.pid)
        time.sleep(_PAUSE_S)
    ended, left = end_tagged(mark, {}, STRAYS_S)
    reap_tagged(mark)
    _reap_ours(sidecars)
    return ended, left


def _reap_ours(sidecars: frozenset[int]) -> None:
    """Collect the zygote and its bud, which end with the keeper, and workers that had ended.

    Workers that live are nobody's remains: they go on, and fell to us.
    """
    until_s = now_s() + STRAYS_S
    while True:
        ours = [stat for stat in read_table().values() if stat.parent == os.getpid()]
        # By its pid: one that only just started has no name yet.
        ending = [
            stat
            for stat in ours
            if stat.pid in sidecars or stat.comm in (ZYGOTE_NAME, PREFORK_NAME)
        ]
        ended = [stat for stat in ours if stat.comm == WORKER_NAME and not stat.is_alive]
        left = [stat for stat in (*ended, *ending) if not reap(stat.pid)]
        if not left or now_s() > until_s:
            return
        time.sleep(_PAUSE_S)


def _shims(known: frozenset[int]) -> list[ProcStat]:
    """Those that became our children, also those that had not introduced themselves yet."""
    own = os.getpid()
    return [
        stat
        for stat in read_table().values()
        if stat.parent == own and (stat.pid in known or stat.comm == "culm-warden")
    ]

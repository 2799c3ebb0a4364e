"""End and verify the processes that fall to the server when its supervisor dies alone.

Blocks; runs in a thread. The shims end their process trees by themselves once their supervisor is
gone; they are reaped here, and killed if they take too long.
"""

import os
import signal
import time

from culm.processes.linux import ProcStat, now_s, read_table
from culm.processes.process_set import end_tagged, reap, reap_tagged

SHIMS_S = 2.5  # They allow 0.3 seconds before SIGKILL; the rest is for a busy machine.
STRAYS_S = 1.0
_PAUSE_S = 0.01
WORKER_NAME = "culm-worker"
ZYGOTE_NAME = "culm-zygote"
PREFORK_NAME = "culm-prefork"


def end_orphans(
    process_tag: int, shims: frozenset[int], sidecars: frozenset[int]
) -> tuple[int, list[int]]:
    """Return how many processes were killed that no shim had ended, and the pids left."""
    until_s = now_s() + SHIMS_S
    while (waiting := _shims(shims)) and now_s() < until_s + STRAYS_S:
        for stat in waiting:
            if now_s() > until_s:
                # It is our child, so the pid cannot have been reused.
                os.kill(stat.pid, signal.SIGKILL)
            reap(stat.pid)
        time.sleep(_PAUSE_S)
    ended, left = end_tagged(process_tag, {}, STRAYS_S)
    reap_tagged(process_tag)
    _reap_ours(sidecars)
    return ended, left


def _reap_ours(sidecars: frozenset[int]) -> None:
    """Reap the zygote and its prefork, which end with the supervisor, and workers that ended.

    Living workers are not leftovers: they go on as our children.
    """
    until_s = now_s() + STRAYS_S
    while True:
        ours = [stat for stat in read_table().values() if stat.parent == os.getpid()]
        # Compared by pid as well: a process that only just started has no name yet.
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
    """Find the shims that became our children, including those that had not reported yet."""
    own = os.getpid()
    return [
        stat
        for stat in read_table().values()
        if stat.parent == own and (stat.pid in known or stat.comm == "culm-shim")
    ]

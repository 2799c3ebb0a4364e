"""Everything that descends from a process: found, asked to end, ended.

A child subreaper never loses a descendant, however it forks, detaches or empties its environment;
so the tree below one is all there is. Imported by the bare keeper.
"""

import os
import signal

from culm.processes.linux import ProcStat, is_alive, read_table


def descendants_of(root: int, table: dict[int, ProcStat]) -> list[ProcStat]:
    """All below `root`, parents first; without `root`."""
    children: dict[int, list[ProcStat]] = {}
    for stat in table.values():
        children.setdefault(stat.parent, []).append(stat)
    found: list[ProcStat] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for stat in children.get(waiting.pop(0), ()):
            # The table is no moment's picture: a pid used twice meanwhile could close a ring.
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                waiting.append(stat.pid)
    return found


def alive_below(root: int, apart_from: tuple[int, ...] = ()) -> list[ProcStat]:
    """What lives below `root`, without those named and all below them."""
    table = read_table()
    for pid in apart_from:
        table.pop(pid, None)
    return [stat for stat in descendants_of(root, table) if stat.is_alive]


def ask_to_end(members: list[ProcStat]) -> None:
    """SIGTERM to each; one that was stopped wakes up to hear it."""
    for stat in members:
        _signal(stat.pid, signal.SIGTERM)
        _signal(stat.pid, signal.SIGCONT)


def end(members: list[ProcStat]) -> None:
    """SIGKILL to each and to the process group of each.

    A group is ended in one step, so nothing forks its way out of it; what left its group just now
    is found in the next round.
    """
    for group in groups_of(members, os.getpgid(0)):
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue  # Gone, or of another user: its members are tried one by one.
    for stat in members:
        _signal(stat.pid, signal.SIGKILL)


def end_one(pid: int, start_ticks: int) -> bool:
    """SIGKILL to that very process, whoever's child it is. Whether it was there.

    By a handle, checked after it was opened: the pid may be another's by now.
    """
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not is_alive(pid, start_ticks):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except OSError:
        return False  # It ended just now, or is another user's.
    finally:
        os.close(handle)
    return True


def groups_of(members: list[ProcStat], own: int) -> list[int]:
    """The process groups of these, without ours: a new child is in it until its `setsid`."""
    return sorted({stat.group for stat in members} - {own, 0, 1})


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return  # Gone, or of another user: what is left is seen by whoever verifies.

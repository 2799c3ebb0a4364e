"""Find, terminate and kill all descendants of a process.

A child subreaper never loses a descendant, however that forks, detaches or clears its environment,
so the tree below it is complete. Imported by the bare supervisor.
"""

import os
import signal

from culm.processes.linux import ProcStat, is_alive, read_table


def descendants_of(root: int, table: dict[int, ProcStat]) -> list[ProcStat]:
    """Return all processes below `root`, parents first, without `root`."""
    children: dict[int, list[ProcStat]] = {}
    for stat in table.values():
        children.setdefault(stat.parent, []).append(stat)
    found: list[ProcStat] = []
    seen = {root}
    waiting = [root]
    while waiting:
        for stat in children.get(waiting.pop(0), ()):
            # The table is not an atomic snapshot: a pid reused meanwhile could close a cycle.
            if stat.pid not in seen:
                seen.add(stat.pid)
                found.append(stat)
                waiting.append(stat.pid)
    return found


def alive_below(root: int, apart_from: tuple[int, ...] = ()) -> list[ProcStat]:
    """Return the living processes below `root`, without the excluded ones and their trees."""
    table = read_table()
    for pid in apart_from:
        table.pop(pid, None)
    return [stat for stat in descendants_of(root, table) if stat.is_alive]


def ask_to_end(members: list[ProcStat]) -> None:
    """Send SIGTERM to each, and SIGCONT so that a stopped process receives it."""
    for stat in members:
        _signal(stat.pid, signal.SIGTERM)
        _signal(stat.pid, signal.SIGCONT)


def end(members: list[ProcStat]) -> None:
    """Send SIGKILL to each process and to its process group.

    A group is killed in one step, so a member cannot escape by forking; a process that just left
    its group is found in the next round.
    """
    for group in groups_of(members, os.getpgid(0)):
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            continue  # Gone, or another user's: its members are tried one by one.
    for stat in members:
        _signal(stat.pid, signal.SIGKILL)


def end_one(pid: int, start_ticks: int) -> bool:
    """Send SIGKILL to that very process, child or not; return whether it existed.

    Uses a pidfd that is checked after it was opened: the pid may have been reused by now.
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
    """Return the process groups of these, without ours: a new child is in it until `setsid`."""
    return sorted({stat.group for stat in members} - {own, 0, 1})


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except OSError:
        return  # Gone, or another user's: the verification finds what is left.

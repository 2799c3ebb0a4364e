"""Process sets: an on-disk record of one supervisor's commands, and the cleanup after its death.

A set is a folder `<data>/custody/<process tag>/` with a lock that its server, supervisor and shims
hold open together, and one file per command with its pid and start time. If the lock of a set is
free, no process is left that would end its commands: `end_leftovers` does. If only the supervisor
dies, its processes fall to the server, and `end_orphans` ends them. Both block: use a thread.
"""

import fcntl
import hashlib
import logging
import os
import resource
import shutil
import signal
import time
from pathlib import Path

from msgspec import Struct

from culm.processes.linux import (
    ProcStat,
    end_one,
    find_process_tag,
    has_process_tag,
    is_alive,
    now_s,
    read_boot_id,
    read_table,
    start_ticks_of,
)

_log = logging.getLogger(__name__)

# Above any CPU time a process could use. A set inside a command of another set goes below that
# set's tag.
_TAG_MAX = 1 << 61
_TAG_BITS = 40
LOCK_WAIT_S = 3.0  # For the shims of a server that just died; they need less than one second.
END_BOUND_S = 3.0
SHIMS_S = 2.5  # They allow 0.3 seconds before SIGKILL; the rest is for a busy machine.
STRAYS_S = 1.0
_PAUSE_S = 0.01
_LOCK = "lock"
_NEW = ".new-"
WORKER_NAME = "culm-worker"
ZYGOTE_NAME = "culm-zygote"
PREFORK_NAME = "culm-prefork"


class ProcessSet(Struct, frozen=True):
    """The process set of one supervisor."""

    process_tag: int
    folder: Path
    lock: int  # A descriptor; the lock lasts until its last copy is closed.

    def close(self, *, keep: bool) -> None:
        """Release the set; with `keep`, the next server looks for its processes."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def make_process_set(data_dir: Path, chance: float) -> ProcessSet:
    """Raises OSError if the data directory cannot be written."""
    process_tag = _make_tag(data_dir, chance)
    parent = data_dir.absolute() / "custody"
    for folder in (data_dir, parent):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = parent / f"{_NEW}{process_tag:x}"
    new.mkdir(mode=0o700)
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(lock, f"{read_boot_id()} {os.getpid()} {start_ticks_of(os.getpid())}".encode())
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Renamed only now, so that a visible folder is always locked.
        folder = new.rename(parent / f"{process_tag:x}")
    except OSError:
        os.close(lock)
        shutil.rmtree(new, ignore_errors=True)
        raise
    return ProcessSet(process_tag, folder, lock)


def _make_tag(data_dir: Path, chance: float) -> int:
    """Make a number that no other set uses, below the limit that applies to ourselves."""
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    ceiling = _TAG_MAX if hard == resource.RLIM_INFINITY else min(hard, _TAG_MAX)
    pid = os.getpid()
    name = f"{data_dir} {read_boot_id()} {pid} {start_ticks_of(pid)} {chance}".encode()
    digest = hashlib.sha256(name, usedforsecurity=False).digest()
    return ceiling - 1 - (int.from_bytes(digest[:8]) >> (64 - _TAG_BITS))


def end_leftovers(data_dir: Path) -> None:
    """End and verify the processes that earlier servers left, and remove their records.

    Takes time only if there are any. The sets of living servers, including this one, are not
    touched.
    """
    parent = data_dir / "custody"
    if not parent.is_dir():
        return
    for folder in sorted(parent.iterdir()):
        try:
            _end_leftover(folder)
        except (OSError, ValueError) as failure:
            _log.warning("leftover processes of %s could not be checked: %s", folder.name, failure)


def _end_leftover(folder: Path) -> None:
    if folder.name.startswith(_NEW):
        _remove_unfinished(folder)
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        boot_id, server, ticks = os.read(lock, 200).decode().split()
        is_server_gone = boot_id != read_boot_id() or not is_alive(int(server), int(ticks))
        if not _take(lock, LOCK_WAIT_S if is_server_gone else 0.0):
            if is_server_gone:
                _log.warning("a supervisor outlives its server: %s", folder.name)
            return
        left: list[int] = []
        if boot_id == read_boot_id():
            ended, left = end_tagged(int(folder.name, 16), _recorded(folder), END_BOUND_S)
            if ended:
                _log.warning("ended %d processes left by a crash", ended)
        if left:
            _log.error("processes left by a crash cannot be ended: %s", left)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_unfinished(folder: Path) -> None:
    """Remove the folder of a server that died while creating it; it never had a command."""
    day_s = 86400.0
    if folder.stat().st_mtime < time.time() - day_s:  # noqa: TID251 - compared with a file's time
        shutil.rmtree(folder, ignore_errors=True)


def _take(lock: int, wait_s: float) -> bool:
    until_s = now_s() + wait_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if now_s() >= until_s:
                return False
            time.sleep(_PAUSE_S)
        else:
            return True


def _recorded(folder: Path) -> dict[int, int]:
    """Return the commands that were not verified gone: start time by pid."""
    found: dict[int, int] = {}
    for file in folder.iterdir():
        if file.name.isdigit():
            fields = file.read_text().split()
            if len(fields) == 2:
                found[int(fields[0])] = int(fields[1])
    return found


def end_tagged(process_tag: int, recorded: dict[int, int], bound_s: float) -> tuple[int, list[int]]:
    """Kill and verify every process of that tag; return their number and the pids left."""
    until_s = now_s() + bound_s
    ended: set[int] = set()
    while True:
        alive = [stat for stat in _find_tagged(process_tag, recorded) if stat.is_alive]
        for stat in alive:
            ended.add(stat.pid)
            # A process that cannot be killed is reported as left.
            end_one(stat.pid, stat.start_ticks)
        if not alive or now_s() > until_s:
            return len(ended), [stat.pid for stat in alive]
        time.sleep(_PAUSE_S)


def reap_tagged(process_tag: int) -> None:
    """Reap the tagged processes that became our children and have ended."""
    own = os.getpid()
    for stat in read_table().values():
        if stat.parent == own and not stat.is_alive and find_process_tag(stat.pid) == process_tag:
            reap(stat.pid)


def reap(pid: int) -> bool:
    """Reap a child if it ended; return whether it is gone."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _find_tagged(process_tag: int, recorded: dict[int, int]) -> list[ProcStat]:
    return [
        stat
        for stat in read_table().values()
        if recorded.get(stat.pid) == stat.start_ticks or has_process_tag(process_tag, stat.pid)
    ]


def end_orphans(
    process_tag: int, shims: frozenset[int], sidecars: frozenset[int]
) -> tuple[int, list[int]]:
    """Return how many processes were killed that no shim had ended, and the pids left.

    The shims end their process trees by themselves once their supervisor is gone; they are reaped
    here, and killed if they take too long.
    """
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

"""Sets: what one keeper held, recorded on disk; and what a set that died whole left behind.

A set is a folder `<data>/processes/<mark>/` with a lock that its server, keeper and wardens hold
open together, and one file a command with its pid and start time. A set whose lock is free has
nobody left who would end its commands: `end_leftovers` does.
"""

import fcntl
import hashlib
import logging
import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from culm.processes.linux import (
    ProcStat,
    find_process_tag,
    is_alive,
    is_of,
    now_s,
    read_boot_id,
    read_table,
    start_ticks_of,
)
from culm.processes.tree import end_one

_log = logging.getLogger(__name__)

# Above every time a process could spend; a set inside another one's command goes below it.
_MARK_MAX = 1 << 61
_MARK_BITS = 40
LOCK_WAIT_S = 3.0  # For the wardens of a server that just died; they need less than one second.
END_BOUND_S = 3.0
_PAUSE_S = 0.01
_LOCK = "lock"
_NEW = ".new-"


@dataclass(frozen=True, slots=True)
class ProcessSet:
    """The set of one keeper."""

    process_tag: int
    folder: Path
    lock: int  # A descriptor; the lock lasts until the last copy of it is closed.

    def close(self, *, keep: bool) -> None:
        """Let go of it; with `keep`, the next server looks for what it held."""
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.lock)


def make_set(data_dir: Path, chance: float) -> ProcessSet:
    """Raises OSError if the data directory cannot be written."""
    mark = _make_mark(data_dir, chance)
    parent = data_dir.absolute() / "custody"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = parent / f"{_NEW}{mark:x}"
    new.mkdir(mode=0o700)
    lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(lock, f"{read_boot_id()} {os.getpid()} {start_ticks_of(os.getpid())}".encode())
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Under its own name only now: a folder that is seen is a folder that is locked.
        folder = new.rename(parent / f"{mark:x}")
    except OSError:
        os.close(lock)
        shutil.rmtree(new, ignore_errors=True)
        raise
    return ProcessSet(mark, folder, lock)


def _make_mark(data_dir: Path, chance: float) -> int:
    """A number nobody else uses, and not above the limit we are under ourselves."""
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    ceiling = _MARK_MAX if hard == resource.RLIM_INFINITY else min(hard, _MARK_MAX)
    pid = os.getpid()
    name = f"{data_dir} {read_boot_id()} {pid} {start_ticks_of(pid)} {chance}".encode()
    digest = hashlib.sha256(name, usedforsecurity=False).digest()
    return ceiling - 1 - (int.from_bytes(digest[:8]) >> (64 - _MARK_BITS))


def end_leftovers(data_dir: Path) -> None:
    """End what earlier servers left, verify it, forget it. Takes time if there is something.

    A set of a server that lives, this one's or another's, is not touched.
    """
    parent = data_dir / "custody"
    if not parent.is_dir():
        return
    for folder in sorted(parent.iterdir()):
        try:
            _end_leftover(folder)
        except (OSError, ValueError) as failure:
            _log.warning("what %s held could not be looked for: %s", folder.name, failure)


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
                _log.warning("a keeper outlives its server: %s", folder.name)
            return
        left: list[int] = []
        if boot_id == read_boot_id():
            ended, left = end_tagged(int(folder.name, 16), _recorded(folder), END_BOUND_S)
            if ended:
                _log.warning("ended %d processes that a crash had left", ended)
        if left:
            _log.error("processes of a crash cannot be ended: %s", left)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_unfinished(folder: Path) -> None:
    """A server died while it made this; no command was ever in it."""
    day_s = 86400.0
    if folder.stat().st_mtime < time.time() - day_s:  # noqa: TID251 - beside a file's own time
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
    """The commands that were not verified gone: start time by pid."""
    found: dict[int, int] = {}
    for file in folder.iterdir():
        if file.name.isdigit():
            words = file.read_text().split()
            if len(words) == 2:
                found[int(words[0])] = int(words[1])
    return found


def end_tagged(mark: int, recorded: dict[int, int], bound_s: float) -> tuple[int, list[int]]:
    """End every process of that mark, and verify: how many there were, and which are left."""
    until_s = now_s() + bound_s
    ended: set[int] = set()
    while True:
        alive = [stat for stat in _of_mark(mark, recorded) if stat.is_alive]
        for stat in alive:
            ended.add(stat.pid)
            end_one(stat.pid, stat.start_ticks)  # What it cannot end is left, and said.
        if not alive or now_s() > until_s:
            return len(ended), [stat.pid for stat in alive]
        time.sleep(_PAUSE_S)


def reap_tagged(mark: int) -> None:
    """Collect those that became our children and have ended."""
    own = os.getpid()
    for stat in read_table().values():
        if stat.parent == own and not stat.is_alive and find_process_tag(stat.pid) == mark:
            reap(stat.pid)


def reap(pid: int) -> bool:
    """Collect a child if it ended. Whether it is no child any more."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def _of_mark(mark: int, recorded: dict[int, int]) -> list[ProcStat]:
    return [
        stat
        for stat in read_table().values()
        if recorded.get(stat.pid) == stat.start_ticks or is_of(mark, stat.pid)
    ]

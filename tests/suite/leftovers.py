"""Everything that a step of the suite may leave behind: processes, and entries on disk.

The suite is the reaper of all that descends from it (`PR_SET_CHILD_SUBREAPER`), so a process that
loses its parent becomes a child of the suite, whatever it does to its session or environment.
Elsewhere than on Linux only direct children are seen.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
EXIT_S = 3.0  # For processes that are about to end when their step has ended.
KILL_S = 5.0  # A killed process needs that long only if it is stuck in the kernel.
POLL_S = 0.05
NAMES_MAX = 12  # Of files in a folder that was left: enough to recognize the test.


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants(pid: int | None = None) -> list[int]:
    """Return the ids of all live processes below one, this process by default."""
    found: list[int] = []
    for child in _children(os.getpid() if pid is None else pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    try:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(child) for child in (task / "children").read_text().split()]
    except OSError:  # It has ended, or this is not Linux.
        return []
    return [child for child in found if _state(child) not in ("Z", "X", "")]


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def command_of(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip() or "?"


def end_processes(spared: Collection[int] = (), wait_s: float = EXIT_S) -> list[str]:
    """Kill all descendants but those spared; return a line for each that had to be killed."""
    deadline_s = time.monotonic() + wait_s
    while (left := _others(spared)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    lines = [f"process {pid}: {command_of(pid)[:200]}" for pid in left]
    deadline_s = time.monotonic() + KILL_S
    while (left := _others(spared)) and time.monotonic() < deadline_s:
        for pid in left:
            send(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    return lines


def _others(spared: Collection[int]) -> list[int]:
    found = [pid for pid in _children(os.getpid()) if pid not in spared]
    return [*found, *(below for pid in found for below in descendants(pid))]


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# --- on disk


def entries(scratch: Path) -> frozenset[Path]:
    """Return what stands where a test might leave something: beside `scratch`, and at home.

    Only names that are ours: other programs use the same directories.
    """
    home = Path.home()
    shared = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), scratch.parent]
    shared += [
        home,
        home / ".local/share",
        home / ".config",
        home / ".cache",
        home / ".local/state",
    ]
    found: set[Path] = set()
    for folder in shared:
        if folder.is_dir():
            found |= {path for path in folder.iterdir() if _is_ours(path.name)}
    return frozenset(path for path in found if path != scratch)


def _is_ours(name: str) -> bool:
    return name.lstrip(".").startswith(("culm", "pytest-of", "crush"))


def unexpected(scratch: Path) -> list[str]:
    """Describe whatever tests left in their temporary directory outside of pytest's own folders."""
    left = [path for path in sorted(scratch.iterdir()) if not path.name.startswith("pytest-of-")]
    return [f"{path} with {_names_in(path)}" for path in left]


def _names_in(path: Path) -> str:
    if not path.is_dir():
        return f"{path.stat().st_size} bytes"
    names = sorted(str(below.relative_to(path)) for below in path.rglob("*"))
    return ", ".join(names[:NAMES_MAX]) or "nothing in it"

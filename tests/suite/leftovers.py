"""Processes and files that a step of the suite may leave behind.

The suite is the reaper of all that descends from it (`PR_SET_CHILD_SUBREAPER`), so a process that
loses its parent becomes a child of the suite, whatever its session or environment. On systems
other than Linux nothing is detected.
"""

import os
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from culm.processes.linux import ProcStat, alive_below, become_subreaper, end

EXIT_S = 3.0  # For processes that are about to end when their step has ended.
KILL_S = 5.0  # Needed only by a process that is stuck in the kernel.
POLL_S = 0.05
NAMES_MAX = 12  # Of files in a folder that was left: enough to recognize the test.


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    with suppress(OSError, AttributeError):  # Not Linux.
        become_subreaper()


def below_suite(apart_from: tuple[int, ...] = ()) -> list[ProcStat]:
    """Return all live descendants except the given ones and theirs."""
    try:
        return alive_below(os.getpid(), apart_from)
    except FileNotFoundError:  # No /proc.
        return []


def command_of(pid: int) -> str:
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return "?"
    return raw.replace(b"\0", b" ").decode(errors="replace").strip() or "?"


def end_processes(spared: Collection[int] = (), wait_s: float = EXIT_S) -> list[str]:
    """Kill all descendants except the spared ones and theirs; return a line for each."""
    apart_from = tuple(spared)
    deadline_s = time.monotonic() + wait_s
    while (left := below_suite(apart_from)) and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    lines = [f"process {stat.pid}: {command_of(stat.pid)[:200]}" for stat in left]
    deadline_s = time.monotonic() + KILL_S
    while (left := below_suite(apart_from)) and time.monotonic() < deadline_s:
        end(left)
        time.sleep(POLL_S)
    return lines


# --- on disk


HOME = "home"  # In `scratch`: the home directory of the tests.


def make_home(scratch: Path) -> Path:
    home = scratch / HOME
    home.mkdir()
    return home


def entries(scratch: Path) -> frozenset[Path]:
    """Return the entries of folders where a test might leave files.

    Only names that tests use: other programs, and another culm, use the same directories.
    """
    home = scratch / HOME
    folders = [Path("/tmp"), Path("/var/tmp"), Path("/dev/shm"), scratch.parent, home]
    folders += [home / name for name in (".local/share", ".config", ".cache", ".local/state")]
    found: set[Path] = set()
    for folder in folders:
        if folder.is_dir():
            found |= {path for path in folder.iterdir() if _is_ours(path.name)}
    return frozenset(path for path in found if path != scratch)


def _is_ours(name: str) -> bool:
    is_runtime_folder = name == f"culm-{os.getuid()}"  # Of a server that was started by hand.
    return name.lstrip(".").startswith(("culm", "pytest-of", "crush")) and not is_runtime_folder


def unexpected(scratch: Path) -> list[str]:
    """Describe what tests left in their temporary directory outside of pytest's own folders."""
    left = [path for path in sorted(scratch.iterdir()) if not path.name.startswith("pytest-of-")]
    return [f"{path} with {_names_in(path)}" for path in left if path.name != HOME]


def _names_in(path: Path) -> str:
    if not path.is_dir():
        return f"{path.stat().st_size} bytes"
    names = sorted(str(below.relative_to(path)) for below in path.rglob("*"))
    return ", ".join(names[:NAMES_MAX]) or "nothing in it"

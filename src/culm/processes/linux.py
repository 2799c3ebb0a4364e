"""Linux processes: /proc as values, `prctl`, and finding and killing all descendants of a process.

Imported by the bare supervisor, so it imports nothing that is slow to import. The decision which
processes to kill is made elsewhere.
"""

import ctypes
import os
import signal
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

# Loaded once: each fork would spend half a millisecond on it.
_library = ctypes.CDLL(None, use_errno=True)

TOKEN_NAME = "CULM_PROCESS_TOKEN"  # In the environment of every command.
_TAG_ROW = b"Max realtime timeout"
_ENVIRON_BYTES_MAX = 1 << 20


class ProcStat:
    """One line of /proc/<pid>/stat. A plain class, because `dataclasses` is slow to import."""

    __slots__ = ("comm", "group", "parent", "pid", "rss_bytes", "start_ticks", "state")

    def __init__(
        self, pid: int, comm: str, state: str, parent: int, group: int, start_ticks: int, rss: int
    ) -> None:
        self.pid = pid
        self.comm = comm
        self.state = state
        self.parent = parent
        self.group = group
        self.start_ticks = start_ticks  # Since boot; unique together with the pid.
        self.rss_bytes = rss

    @property
    def is_alive(self) -> bool:
        """False for a zombie, which only waits to be reaped and ignores signals."""
        return self.state not in "ZXx"


def now_s() -> float:
    return time.monotonic()  # noqa: TID251 - a bare process has no Clock, only bounds to keep


def parse_stat(line: bytes, page_bytes: int = 4096) -> ProcStat | None:
    """Parse a stat line; None if malformed. The name may contain blanks and parentheses."""
    opening, closing = line.find(b"("), line.rfind(b")")
    fields = line[closing + 1 :].split()
    if opening < 0 or closing < opening or len(fields) < 22:
        return None
    try:
        return ProcStat(
            pid=int(line[:opening]),
            comm=line[opening + 1 : closing].decode("utf-8", "replace"),
            state=fields[0].decode("ascii", "replace"),
            parent=int(fields[1]),
            group=int(fields[2]),
            start_ticks=int(fields[19]),
            rss=int(fields[21]) * page_bytes,
        )
    except ValueError:
        return None


def parse_process_tag(limits: bytes) -> int | None:
    """Find the process tag in /proc/<pid>/limits: the hard limit on real-time CPU time, if set."""
    for line in limits.splitlines():
        if line.startswith(_TAG_ROW):
            fields = line[len(_TAG_ROW) :].split()
            return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None
    return None


def parse_token(environ: bytes) -> str | None:
    name = f"{TOKEN_NAME}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(name):
            return entry[len(name) :].decode("ascii", "replace")
    return None


def _read(path: str, bytes_max: int = 1 << 16) -> bytes:
    """Read a file of /proc; empty if the process is gone or not accessible to us."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts: list[bytes] = []
        while bytes_max > 0 and (part := os.read(descriptor, min(bytes_max, 1 << 16))):
            parts.append(part)
            bytes_max -= len(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def find_stat(pid: int) -> ProcStat | None:
    return parse_stat(_read(f"/proc/{pid}/stat"), os.sysconf("SC_PAGE_SIZE"))


def start_ticks_of(pid: int) -> int:
    """Return the start time of a process; 0 if it does not exist."""
    stat = find_stat(pid)
    return 0 if stat is None else stat.start_ticks


def is_alive(pid: int, start_ticks: int) -> bool:
    """Return True if this very process lives, and not a later one with the same pid."""
    stat = find_stat(pid)
    return stat is not None and stat.is_alive and stat.start_ticks == start_ticks


def find_process_tag(pid: int) -> int | None:
    return parse_process_tag(_read(f"/proc/{pid}/limits"))


def find_token(pid: int) -> str | None:
    return parse_token(_read(f"/proc/{pid}/environ", _ENVIRON_BYTES_MAX))


def token_of(process_tag: int, number: int) -> str:
    """Return the token in the environment of one command of a process set."""
    return f"{process_tag:x}.{number}"


def has_process_tag(process_tag: int, pid: int) -> bool:
    """Return True if the process is a command of that set or descends from one.

    Tag and token both survive fork and exec.
    """
    if find_process_tag(pid) == process_tag:
        return True
    token = find_token(pid)
    return token is not None and token.startswith(f"{process_tag:x}.")


def read_table() -> dict[int, ProcStat]:
    """Read every process. Not an atomic snapshot: processes come and go meanwhile."""
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    table: dict[int, ProcStat] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            stat = parse_stat(_read(f"/proc/{entry.name}/stat"), page_bytes)
            if stat is not None:
                table[stat.pid] = stat
    return table


def read_boot_id() -> str:
    return _read("/proc/sys/kernel/random/boot_id").decode("ascii", "replace").strip()


def read_world_id() -> str:
    """Identify the scope in which a pid is unique: one boot, one pid namespace."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - `pathlib` is slow to import
    except OSError:
        return ""
    return f"{read_boot_id()} {namespace}"


def become_subreaper(*, on: bool = True) -> None:
    """Make orphaned descendants our children instead of init's. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def is_subreaper() -> bool:
    """Return the subreaper setting. Raises OSError where the kernel lacks it."""
    found = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(found))
    return bool(found.value)


def set_death_signal(number: int) -> None:
    """Receive this signal when the thread that started us dies. Not inherited by a fork."""
    _prctl(_PR_SET_PDEATHSIG, number)


def set_name(name: bytes) -> None:
    """Set the name that `ps` shows."""
    buffer = ctypes.create_string_buffer(name[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    if _library.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def descendants_of(root: int, table: dict[int, ProcStat]) -> list[ProcStat]:
    """Return all processes below `root`, parents first, without `root`.

    A child subreaper never loses a descendant, however that forks, detaches or clears its
    environment, so the tree below it is complete.
    """
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

"""What Linux knows of processes: /proc as values, and the three `prctl` calls custody needs.

Imported by the bare keeper, so it imports nothing that is slow to import. Who is killed is
decided elsewhere.
"""

import ctypes
import os
import time

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37

_library = ctypes.CDLL(None, use_errno=True)  # Once: each fork would spend half a millisecond.

TOKEN_NAME = "CULM_PROCESS_TOKEN"  # In the environment of every command.
_MARK_ROW = b"Max realtime timeout"
_ENVIRON_BYTES_MAX = 1 << 20


class ProcStat:
    """One line of /proc/<pid>/stat. A plain class: `dataclasses` is slow to import."""

    __slots__ = ("comm", "group", "parent", "pid", "rss_bytes", "start_ticks", "state")

    def __init__(
        self, pid: int, comm: str, state: str, parent: int, group: int, start_ticks: int, rss: int
    ) -> None:
        self.pid = pid
        self.comm = comm
        self.state = state
        self.parent = parent
        self.group = group
        self.start_ticks = start_ticks  # Since the machine started; with the pid it is unique.
        self.rss_bytes = rss

    @property
    def is_alive(self) -> bool:
        """Whether a signal still means something to it: a zombie only waits to be collected."""
        return self.state not in "ZXx"


def now_s() -> float:
    return time.monotonic()  # noqa: TID251 - a bare process has no Clock, only bounds to keep


def parse_stat(line: bytes, page_bytes: int = 4096) -> ProcStat | None:
    """None if it is not such a line. The name may hold blanks and parentheses."""
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
    """The hard limit on uninterrupted real-time CPU, if there is one: /proc/<pid>/limits."""
    for line in limits.splitlines():
        if line.startswith(_MARK_ROW):
            fields = line[len(_MARK_ROW) :].split()
            return int(fields[1]) if len(fields) > 1 and fields[1].isdigit() else None
    return None


def parse_token(environ: bytes) -> str | None:
    name = f"{TOKEN_NAME}=".encode()
    for entry in environ.split(b"\0"):
        if entry.startswith(name):
            return entry[len(name) :].decode("ascii", "replace")
    return None


def _read(path: str, bytes_max: int = 1 << 16) -> bytes:
    """What a file of /proc says; nothing if the process is gone or is not ours to ask."""
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
    """0 if there is no such process."""
    stat = find_stat(pid)
    return 0 if stat is None else stat.start_ticks


def is_alive(pid: int, start_ticks: int) -> bool:
    """Whether that very process still is, and not a later one with its pid."""
    stat = find_stat(pid)
    return stat is not None and stat.is_alive and stat.start_ticks == start_ticks


def find_process_tag(pid: int) -> int | None:
    return parse_process_tag(_read(f"/proc/{pid}/limits"))


def find_token(pid: int) -> str | None:
    return parse_token(_read(f"/proc/{pid}/environ", _ENVIRON_BYTES_MAX))


def token_of(mark: int, number: int) -> str:
    """What a command of the set with that mark has in its environment."""
    return f"{mark:x}.{number}"


def is_of(mark: int, pid: int) -> bool:
    """Whether a command of that set is this process or an ancestor: forks and execs keep both."""
    if find_process_tag(pid) == mark:
        return True
    token = find_token(pid)
    return token is not None and token.startswith(f"{mark:x}.")


def read_table() -> dict[int, ProcStat]:
    """Every process there is. Not one moment's picture: processes come and go meanwhile."""
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
    """The same for processes whose pids mean the same: of one boot, in one namespace of pids."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115 - `pathlib` is slow to import
    except OSError:
        return ""
    return f"{read_boot_id()} {namespace}"


def become_subreaper(*, on: bool = True) -> None:
    """Orphaned descendants become our children instead of init's. Raises OSError."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(on))


def is_subreaper() -> bool:
    """Raises OSError where the kernel does not know of it."""
    found = ctypes.c_int(0)
    _prctl(_PR_GET_CHILD_SUBREAPER, ctypes.addressof(found))
    return bool(found.value)


def set_death_signal(number: int) -> None:
    """Get this signal when the thread that started us dies. A fork forgets it."""
    _prctl(_PR_SET_PDEATHSIG, number)


def set_name(name: bytes) -> None:
    """What `ps` shows."""
    buffer = ctypes.create_string_buffer(name[:15])
    _prctl(_PR_SET_NAME, ctypes.addressof(buffer))


def _prctl(option: int, argument: int) -> None:
    zero = ctypes.c_ulong(0)
    if _library.prctl(ctypes.c_int(option), ctypes.c_ulong(argument), zero, zero, zero) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

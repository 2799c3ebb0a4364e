"""One command: forked, made ready, executed; and why that failed. Imported by the bare keeper."""

import errno
import fcntl
import os
import resource
import signal

from culm.processes.linux import set_death_signal
from culm.processes.packets import SpawnCommand

_ABOVE = 300  # Descriptors are moved here first, so that putting one in place covers no other.


class ForkedCommand:
    """A command that was forked. `report` is at its end, and empty, once it executes."""

    __slots__ = ("pid", "report")

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self.report = report


def fork_command(command: SpawnCommand, descriptors: list[int], mark: int | None) -> ForkedCommand:
    """Raises OSError if there can be no further process. It dies with us, the parent."""
    parent = os.getpid()
    report, said = os.pipe()
    os.set_blocking(report, False)
    try:
        pid = os.fork()
    except OSError:
        os.close(report)
        os.close(said)
        raise
    if pid != 0:
        os.close(said)
        return ForkedCommand(pid, report)
    step = "setup"
    try:
        signal.set_wakeup_fd(-1)
        _reset_signals()  # First: a request to end may come at once.
        os.setsid()
        # If its parent is killed the command does not outlive it; an exec keeps this.
        set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        said = fcntl.fcntl(said, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        _limit(mark)
        _place(descriptors)
        step = "chdir"
        os.chdir(command.cwd)
        step = "exec"
        _execute(command)
    except OSError as failure:
        os.write(said, f"{step} {failure.errno or 0}".encode())
    finally:
        os._exit(127)


def parse_report(report: bytes) -> tuple[str, int] | None:
    """The step that failed and its errno; None if nothing failed."""
    step, _, number = report.decode().partition(" ")
    return (step, int(number)) if step else None


def _limit(mark: int | None) -> None:
    """No core files; and the mark by which the command's descendants are known, whatever they do.

    A limit on real-time scheduling that nobody reaches: it passes through fork, exec and an
    emptied environment, and /proc shows it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if mark is None:
        return
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
    except (OSError, ValueError):
        return  # The mark is a second means; the tree below the warden is the first.


def _place(descriptors: list[int]) -> None:
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for each in descriptors]
    if len(moved) < 3:
        null = os.open(os.devnull, os.O_RDWR)
        moved += [null] * (3 - len(moved))
    for target, source in enumerate(moved):
        os.dup2(source, target, inheritable=True)


def _reset_signals() -> None:
    for number in signal.valid_signals():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            try:
                signal.signal(number, signal.SIG_DFL)
            except (OSError, ValueError):
                continue  # Reserved by the C library.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _execute(command: SpawnCommand) -> None:
    """As a shell finds it: by its path, or in the PATH of its own environment."""
    env = dict(entry.split(b"=", 1) for entry in command.env)
    name = command.argv[0]
    if b"/" in name:
        os.execve(name, command.argv, env)
    refused: OSError | None = None
    for folder in env.get(b"PATH", b"/usr/local/bin:/usr/bin:/bin").split(b":"):
        try:
            os.execve((folder or b".") + b"/" + name, command.argv, env)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as failure:
            if failure.errno != errno.EACCES:
                raise
            refused = failure  # There may be another one further on.
    raise refused or OSError(errno.ENOENT, "")

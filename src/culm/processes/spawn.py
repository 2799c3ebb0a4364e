"""Fork, prepare and execute one command, and report failures. Used by the bare supervisor."""

import errno
import fcntl
import os
import resource
import signal

from culm.processes.linux import set_death_signal
from culm.processes.packets import SpawnCommand

_ABOVE = 300  # Descriptors are first moved up here, so that placing one does not overwrite another.


class ForkedCommand:
    """A forked command. `report` reaches its end, without data, when the command executes."""

    __slots__ = ("pid", "report")

    def __init__(self, pid: int, report: int) -> None:
        self.pid = pid
        self.report = report


def fork_command(
    command: SpawnCommand, descriptors: list[int], process_tag: int | None
) -> ForkedCommand:
    """Fork a command that dies with this process. Raises OSError if the fork fails."""
    parent = os.getpid()
    report, report_end = os.pipe()
    os.set_blocking(report, False)
    try:
        pid = os.fork()
    except OSError:
        os.close(report)
        os.close(report_end)
        raise
    if pid != 0:
        os.close(report_end)
        return ForkedCommand(pid, report)
    step = "setup"
    try:
        signal.set_wakeup_fd(-1)
        _reset_signals()  # First, because a SIGTERM may arrive at once.
        os.setsid()
        # If its parent is killed, the command dies too; exec keeps this setting.
        set_death_signal(signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(127)
        report_end = fcntl.fcntl(report_end, fcntl.F_DUPFD_CLOEXEC, _ABOVE)
        _limit(process_tag)
        _install(descriptors)
        step = "chdir"
        os.chdir(command.cwd)
        step = "exec"
        _execute(command)
    except OSError as failure:
        os.write(report_end, f"{step} {failure.errno or 0}".encode())
    finally:
        os._exit(127)


def parse_report(report: bytes) -> tuple[str, int] | None:
    """Return the step that failed and its errno; None if nothing failed."""
    step, _, number = report.decode().partition(" ")
    return (step, int(number)) if step else None


def _limit(process_tag: int | None) -> None:
    """Disable core files and set the process tag by which descendants are recognized.

    The tag is a limit on real-time scheduling that no process reaches: it survives fork, exec and a
    cleared environment, and /proc shows it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if process_tag is None:
        return
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (process_tag, process_tag))
    except (OSError, ValueError):
        return  # The tag is the second safeguard; the tree below the shim is the first.


def _install(descriptors: list[int]) -> None:
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
    """Find the program as a shell does: by its path, or in the PATH of its own environment."""
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
            refused = failure  # A later folder may hold an executable one.
    raise refused or OSError(errno.ENOENT, "")

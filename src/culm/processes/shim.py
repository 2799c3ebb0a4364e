"""The shim: runs one command and supervises all its descendants until none is left.

A shim is a fork of the supervisor and a child subreaper: every process that escapes from the
command becomes its child, so "I have no child" proves that all have ended. It ends the tree on
request, when the command has ended, and when the server or the supervisor is gone.
"""

import enum
import errno
import fcntl
import math
import os
import resource
import select
import signal
import socket
import sys

from culm.processes.linux import (
    alive_below,
    ask_to_end,
    become_subreaper,
    end,
    find_stat,
    now_s,
    set_death_signal,
    set_name,
    start_ticks_of,
)
from culm.processes.packets import (
    SpawnCommand,
    encode_ended,
    parse_command,
    read_all,
    receive,
    send,
)

DEATH_SIGNAL = signal.SIGUSR1  # "Your parent died"; verified by `getppid`.
SETTLE_S = 0.1  # Leftovers of a command may be about to end: `tee` in `> >(tee log)`.
SWEEP_GRACE_S = 0.5  # Then they get SIGTERM and this long ...
VERIFY_S = 1.5  # ... and SIGKILL; survivors after this are reported as left.
ORPHAN_GRACE_S = 0.3  # Without a client there is no reason for a longer grace period.
ORPHAN_BOUND_S = 60.0  # Without a server; the next server finds what is left then.
_ROUND_S_MIN = 0.002
_ROUND_S_MAX = 0.5
_NEXT_PIDS = 4  # Other processes fork meanwhile, too.


class EndPhase(enum.Enum):
    """The progress of the end. It only goes forward."""

    RUNNING = 0  # The command lives, and no end was requested.
    SETTLING = 1  # The command ended; its leftovers may end by themselves.
    ASKED = 2  # All received SIGTERM.
    ENDING = 3  # All are killed, in rounds, until none is left.


class Shim:
    """Created in a fork of the supervisor, which exits when `run` returns."""

    def __init__(
        self, channel: socket.socket, record: str, supervisor: int, process_tag: int, woken: int
    ) -> None:
        self._channel = channel
        self._record = record
        self._supervisor = supervisor
        self._process_tag = process_tag
        self._woken = woken
        self._child: ForkedCommand | None = None
        self._start_ticks = 0
        self._status: int | None = None  # From waitpid; None while the command lives.
        self._phase = EndPhase.RUNNING
        self._due_s = 0.0  # When the phase is over or its next round is due.
        self._report_by_s = 0.0
        self._round_s = _ROUND_S_MIN
        self._swept: set[int] = set()
        self._ended_with_it: set[int] = set()
        self._is_started = False
        self._is_reported = False
        self._is_orphan = False  # The client or the supervisor is gone.
        self._give_up_s = math.inf
        self._is_lost = False  # The supervisor is gone.

    def run(self, command: SpawnCommand, descriptors: list[int]) -> bool:
        """Run the command to its end; return whether nothing is left."""
        send(self._channel, b"begun")
        try:
            self._child = fork_command(command, descriptors, self._process_tag)
        except OSError as failure:
            send(self._channel, f"failed fork {failure.errno or 0}".encode())
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self._start_ticks = start_ticks_of(self._child.pid)
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._channel, select.POLLIN)
        poller.register(self._child.report, select.POLLIN)
        while True:
            self._read_inputs(poller)
            now = now_s()
            if not self._collect():
                break
            self._advance(now)
            if now > self._give_up_s:
                return False
            poller.poll(self._timeout_ms(now_s()))
        self._report([])
        self._remove_record()
        return True

    def _read_inputs(self, poller: select.poll) -> None:
        """Process the inputs: packets of the client, deaths of other processes, the exec."""
        drain(self._woken)
        if not self._is_orphan:
            packets, is_over = receive(self._channel)
            for fields in packets:
                if fields[0] == "kill":
                    self._request_end(int(fields[1]) / 1000)
            self._is_lost = os.getppid() != self._supervisor
            if is_over or self._is_lost:
                poller.unregister(self._channel)
                self._is_orphan = True
                self._give_up_s = now_s() + ORPHAN_BOUND_S
                self._request_end(ORPHAN_GRACE_S)
        if not self._is_started and self._on_exec():
            assert self._child is not None
            poller.unregister(self._child.report)
            os.close(self._child.report)

    def _on_exec(self) -> bool:
        """Report the result of the exec; return False while it is not known."""
        assert self._child is not None
        try:
            report = os.read(self._child.report, 100)
        except BlockingIOError:
            return False
        self._is_started = True
        failure = parse_report(report)
        if failure is not None:
            self._is_reported = True
            send(self._channel, f"failed {failure[0]} {failure[1]}".encode())
        else:
            self._write_record()
            packet = f"started {self._child.pid} {self._start_ticks} {os.getpid()}"
            send(self._channel, packet.encode())
        return True

    def _collect(self) -> bool:
        """Reap all that ended; return whether anything is left."""
        assert self._child is not None
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                # The report may have arrived after we last read it.
                if not self._is_started:
                    self._on_exec()
                return False
            if pid == 0:
                return True
            if pid == self._child.pid:
                self._status = status
            if self._phase is EndPhase.ENDING:
                self._chase(pid)

    def _chase(self, ended: int) -> None:
        """Kill a process that forks and exits repeatedly, faster than a scan of all processes.

        Its next fork has one of the next pids. Only a process that is already our child is killed.
        """
        for pid in range(ended + 1, ended + 1 + _NEXT_PIDS):
            stat = find_stat(pid)
            if stat is not None and stat.is_alive and stat.parent == os.getpid():
                end([stat])
                self._count_swept([pid])

    def _request_end(self, grace_s: float) -> None:
        """Terminate all processes, and kill them after `grace_s`."""
        now = now_s()
        if self._phase in (EndPhase.RUNNING, EndPhase.SETTLING):
            self._phase = EndPhase.ASKED
            self._due_s = now + grace_s
            if grace_s > 0:
                self._terminate_all()
        elif self._phase is EndPhase.ASKED:
            self._due_s = min(self._due_s, now + grace_s)

    def _advance(self, now: float) -> None:
        """Do the next due step. Something is left."""
        if self._phase is EndPhase.RUNNING and self._status is not None:
            self._phase = EndPhase.SETTLING
            self._due_s = now + SETTLE_S
        elif self._phase is EndPhase.SETTLING and now >= self._due_s:
            self._request_end(SWEEP_GRACE_S)
        elif self._phase is EndPhase.ASKED and now >= self._due_s:
            self._phase = EndPhase.ENDING
            self._report_by_s = now + VERIFY_S
        if self._phase is EndPhase.ENDING and now >= self._due_s:
            members = alive_below(os.getpid())
            self._count_swept([stat.pid for stat in members])
            end(members)
            self._due_s = now_s() + self._round_s
            self._round_s = min(self._round_s * 1.5, _ROUND_S_MAX)
            if members and now > self._report_by_s:
                self._report([stat.pid for stat in members])

    def _terminate_all(self) -> None:
        members = alive_below(os.getpid())
        self._count_swept([stat.pid for stat in members])
        ask_to_end(members)

    def _count_swept(self, pids: list[int]) -> None:
        """Count the processes that outlived the command, except those killed along with it."""
        if self._status is not None:
            self._swept.update(pid for pid in pids if pid not in self._ended_with_it)
        elif self._phase is EndPhase.ENDING:
            self._ended_with_it.update(pids)

    def _timeout_ms(self, now: float) -> int | None:
        if self._phase is EndPhase.RUNNING:
            return None  # A signal or a packet ends the wait.
        return max(0, int((self._due_s - now) * 1000) + 1)

    def _report(self, left: list[int]) -> None:
        """Report the end, once."""
        if self._is_reported:
            return
        self._is_reported = True
        code = number = None
        if self._status is not None and not self._is_lost:
            if os.WIFSIGNALED(self._status):
                number = os.WTERMSIG(self._status)
            else:
                code = os.WEXITSTATUS(self._status)
        ended = encode_ended(code, number, len(self._swept), left, lost=self._is_lost)
        send(self._channel, ended)

    def _write_record(self) -> None:
        """Record the command for the next server, in case all our processes are killed at once."""
        assert self._child is not None
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
            file = os.open(self._record, flags, 0o600)
            try:
                os.write(file, f"{self._child.pid} {self._start_ticks}".encode())
            finally:
                os.close(file)
        except OSError:
            return  # The process tag and the token remain.

    def _remove_record(self) -> None:
        try:
            os.remove(self._record)  # noqa: PTH107 - pathlib is slow to import
        except OSError:
            return


def run_shim(
    channel: socket.socket,
    body: int,
    descriptors: list[int],
    supervisor: int,
    process_tag: int,
    record: str,
) -> bool:
    """Run one command as its shim, in a fork of the supervisor; return whether nothing is left."""
    woken, waking = os.pipe()
    os.set_blocking(woken, False)
    os.set_blocking(waking, False)
    signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
    set_name(b"culm-shim")
    become_subreaper()
    set_death_signal(DEATH_SIGNAL)
    command = parse_command(read_all(body))
    os.close(body)
    shim = Shim(channel, record, supervisor, process_tag, woken)
    is_clean = shim.run(command, descriptors)
    sys.stderr.flush()
    return is_clean


def drain(descriptor: int) -> None:
    """Discard the bytes that signals wrote; they only wake the loop."""
    try:
        while os.read(descriptor, 512):
            continue
    except BlockingIOError:
        return


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
        report_end = _install(descriptors, report_end)
        _limit(process_tag, command.files)
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


def _limit(process_tag: int | None, files: int) -> None:
    """Disable core files, restore the user's limit on open files, and set the process tag.

    Descendants of the command are recognized by the tag.

    The tag is a limit on real-time scheduling that no process reaches: it survives fork, exec and a
    cleared environment, and /proc shows it.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    if process_tag is None:
        return
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (process_tag, process_tag))
    except (OSError, ValueError):
        return  # The tag is the second safeguard; the tree below the shim is the first.


def _install(descriptors: list[int], report_end: int) -> int:
    """Place the descriptors from 0 on, and return the new one of the report."""
    count = max(len(descriptors), 3)
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    sources = [*descriptors, *[null] * (count - len(descriptors)), report_end]
    # First moved above all targets, so that placing one does not overwrite another.
    *moved, report_end = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, count) for one in sources]
    for target, source in enumerate(moved):
        os.dup2(source, target, inheritable=True)
    return report_end


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

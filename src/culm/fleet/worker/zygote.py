"""The zygote: one warm process that has imported everything a worker needs, and forks workers.

It is a sidecar of the supervisor, has one thread, and ends when its socket closes. A forked worker
is independent of it: it outlives the zygote and ends with the server. While idle, the zygote forks
the next worker ahead: a prefork, which waits for its request.

server → zygote   fork                  with the provision, the worker's stderr, its control socket
zygote → server   begun <pid>           with a pidfd of the zygote; before any large import
                  warm                  the imports are done
                  exited <pid> <status> one of its forks has ended; the status is that of `waitpid`
in the control    forked <pid>          with a pidfd of the worker
                  unforked <errno>      fork failed
"""

import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Final

from msgspec import Struct

from culm.processes.linux import now_s, set_name
from culm.processes.packets import receive_or_end, send, send_with
from culm.processes.process_set import PREFORK_NAME, WORKER_NAME, ZYGOTE_NAME
from culm.processes.shim import drain

CHANNEL: Final = 3  # The descriptor of the zygote's socket, placed there by its starter.
PASSED: Final = 3  # Descriptors passed with a request.
PREFORK_MS: Final = 25  # Idle time before a worker is forked ahead.
PREFORK_AGAIN_MS: Final = 5000  # The same after a failure, or after a prefork died by itself.
THREADS_S: Final = 1.0  # A joined thread may take a moment to disappear.
_PAUSE_S: Final = 0.002
_DESCRIPTORS_MAX: Final = 1 << 16  # If the system has no limit.


class ForkTask(Struct, frozen=True):
    """The work of a fork."""

    run: Callable[[], int]  # Returns the exit status.
    warm_up: Callable[[], None] = lambda: None  # Called while a prefork waits for its request.


def preload() -> ForkTask:
    """Import and exercise everything a worker needs. Leaves no threads."""
    from culm.fleet.worker import main

    main.preload()
    main.warm_up()
    return ForkTask(main.run_worker, lambda: main.warm_up(1))


class _Prefork:
    """A worker forked ahead that waits for the descriptors of the next request."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    @property
    def is_warm(self) -> bool:
        """True once, when its message has arrived; the caller must then use the prefork."""
        try:
            return bool(self.channel.recv(1, socket.MSG_DONTWAIT))
        except OSError:
            return False


class Zygote:
    """The main loop of the zygote; created once, by `serve`."""

    def __init__(self, channel: socket.socket, task: ForkTask) -> None:
        self._channel = channel
        self._task = task
        self._prefork: _Prefork | None = None
        self._prefork_ms = PREFORK_MS
        self._woken, waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._set_signals = find_set_signals()

    def serve(self) -> None:
        """Fork workers until the other end of the socket is closed."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._channel, select.POLLIN)
        while True:
            if not poller.poll(self._prefork_ms if self._prefork is None else None):
                self._fork_ahead()
            drain(self._woken)
            self._collect()
            received = receive_or_end(self._channel)
            if received is None:
                continue
            packet, descriptors = received
            if not packet:
                return
            # Otherwise descriptors got lost because we have too many open; closing the rest lets
            # the server notice.
            if packet == b"fork" and len(descriptors) == PASSED:
                self._carry_out(descriptors)
            for descriptor in descriptors:
                os.close(descriptor)

    def _collect(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._prefork is not None and pid == self._prefork.pid:
                self._drop_prefork()
                self._prefork_ms = PREFORK_AGAIN_MS
            else:
                send(self._channel, f"exited {pid} {status}".encode())

    def _carry_out(self, descriptors: list[int]) -> None:
        """Start a worker with these descriptors: the prefork if there is one, else a new fork."""
        control = descriptors[2]
        pid = self._use_prefork(descriptors)
        if pid is None:
            try:
                pid = self._fork(lambda: descriptors)
            except OSError as failure:
                _send_on(control, f"unforked {failure.errno or 0}", [])
                return
        # The pid cannot be reused yet, because the process has not been reaped.
        handle = os.pidfd_open(pid)
        _send_on(control, f"forked {pid}", [handle])
        os.close(handle)

    def _use_prefork(self, descriptors: list[int]) -> int | None:
        """Start the prefork and return its pid; None if none is ready."""
        if self._prefork is None or not self._prefork.is_warm:
            return None
        pid = self._prefork.pid
        try:
            send_with(self._prefork.channel, b"go", descriptors)
        except OSError:
            return None
        finally:
            self._drop_prefork()
        return pid

    def _fork_ahead(self) -> None:
        """Fork a worker for the next request while the zygote is idle."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._fork(lambda: self._wait_as_prefork(ours, theirs))
        except OSError:
            ours.close()  # The next request will report the error.
            self._prefork_ms = PREFORK_AGAIN_MS
        else:
            self._prefork = _Prefork(pid, ours)
            self._prefork_ms = PREFORK_MS
        finally:
            theirs.close()

    def _drop_prefork(self) -> None:
        if self._prefork is not None:
            self._prefork.channel.close()
            self._prefork = None

    def _fork(self, get_descriptors: Callable[[], list[int]]) -> int:
        """Fork a worker, which runs once it has its descriptors. Raises OSError."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._channel.close()
                self._drop_prefork()
                reset_process(self._set_signals)
                place_descriptors(get_descriptors())
                set_name(WORKER_NAME.encode())
                gc.enable()
                status = self._task.run()
            except BaseException:  # boundary: a fork never returns into its parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    def _wait_as_prefork(self, zygotes: socket.socket, own: socket.socket) -> list[int]:
        """In a fork: wait for the descriptors of its request. Exits if the zygote ends."""
        set_name(PREFORK_NAME.encode())
        zygotes.close()
        self._task.warm_up()
        send(own, b"warm")
        select.select([own], [], [])
        received = receive_or_end(own)
        if received is None or not received[0]:
            os._exit(0)
        own.detach()
        return received[1]


def _send_on(control: int, message: str, passed: list[int]) -> None:
    """Send on a control socket without closing it. A closed peer is noticed elsewhere."""
    channel = socket.socket(fileno=control)
    try:
        send_with(channel, message.encode(), passed)
    except OSError:
        return
    finally:
        channel.detach()


def find_set_signals() -> list[signal.Signals]:
    """List the signals without their default action. Called once, because a fork has no time."""
    return [
        number
        for number in signal.Signals
        if signal.getsignal(number) not in (signal.SIG_DFL, None)
    ]


def reset_process(set_signals: list[signal.Signals]) -> None:
    """In a fork: reset the signals and start a session. Python reseeds `random` itself."""
    signal.set_wakeup_fd(-1)
    for number in set_signals:
        signal.signal(number, signal.SIG_DFL)
    # The defaults of a Python process: a closed peer raises an error and does not kill the process.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()


def place_descriptors(descriptors: list[int]) -> None:
    """Put the provision at 0, /dev/null at 1, stderr at 2 and the control socket at 3, and close
    all others.

    The sources are above 2, because the zygote has 0 to 2 open; one may be 3, which is replaced
    last.
    """
    provision, stderr, control = descriptors
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for target, source in enumerate((provision, null, stderr, control)):
        os.dup2(source, target)
    os.closerange(4, max(os.sysconf("SC_OPEN_MAX"), _DESCRIPTORS_MAX))


def count_threads() -> int:
    return sum(1 for _ in os.scandir("/proc/self/task"))


def serve(make_task: Callable[[], ForkTask]) -> None:
    """Run the zygote with the socket at descriptor `CHANNEL`; `make_task` does the imports."""
    channel = socket.socket(fileno=CHANNEL)
    channel.set_inheritable(False)
    set_name(ZYGOTE_NAME.encode())
    # Signals to a whole service or terminal reach the server, too, and the zygote ends after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    own = os.pidfd_open(os.getpid())
    send_with(channel, f"begun {os.getpid()}".encode(), [own])
    os.close(own)
    task = make_task()
    until_s = now_s() + THREADS_S
    while (threads := count_threads()) != 1:
        if now_s() > until_s:
            sys.exit(f"{threads - 1} threads were started, so forking is not safe")
        select.select([], [], [], _PAUSE_S)
    gc.disable()
    gc.collect()
    gc.freeze()  # The collector ignores all objects made so far, so their pages stay shared.
    send(channel, b"warm")
    Zygote(channel, task).serve()


def main() -> None:
    serve(preload)

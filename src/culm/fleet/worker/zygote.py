"""The zygote: one warm process, with all that a worker needs imported, that forks workers on order.

It is a companion of custody's keeper, has one thread, and ends when its socket does. A worker is
no longer part of it once it is forked: it outlives the zygote, and ends with the server. When
nobody wants one, the next one is forked ahead: a bud, which waits for its order.

server → zygote   fork                  with the provision, the worker's stderr, its control socket
zygote → server   begun <pid>           with a handle of the zygote; before it imports anything big
                  warm                  what was imported is ready to be forked
                  exited <pid> <status> one of its forks, as `waitpid` has it
in the control    forked <pid>          with a handle of the worker
                  unforked <errno>      there can be no further process
"""

import gc
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from culm.processes.linux import now_s, set_name
from culm.processes.orphans import PREFORK_NAME, WORKER_NAME, ZYGOTE_NAME
from culm.processes.packets import receive_or_end, send, send_with
from culm.processes.shim import drain

CHANNEL: Final = 3  # Where whoever starts a zygote puts its socket.
PASSED: Final = 3  # Descriptors of an order.
PREFORK_MS: Final = 25  # Without an order, before one more is forked ahead ...
PREFORK_AGAIN_MS: Final = 5000  # ... or so long, if that failed, or the last one died of itself.
THREADS_S: Final = 1.0  # A thread that was joined may still be on its way out.
_PAUSE_S: Final = 0.002
_DESCRIPTORS_MAX: Final = 1 << 16  # Where the system names no limit.


@dataclass(frozen=True, slots=True)
class ForkTask:
    """What a fork is for."""

    run: Callable[[], int]  # What it does; returns its exit status.
    warm_up: Callable[[], None] = lambda: None  # What it does while it waits for an order.


def preload() -> ForkTask:
    """Import what any worker needs, and use it. No thread of that is left."""
    from culm.fleet.worker import main
    from culm.fleet.worker.warmup import warm_up

    main.preload()
    warm_up()
    return ForkTask(main.run_worker, lambda: warm_up(1))


class _Prefork:
    """A fork made ahead: it waits for the descriptors of the next order."""

    def __init__(self, pid: int, channel: socket.socket) -> None:
        self.pid = pid
        self.channel = channel

    @property
    def is_warm(self) -> bool:
        """It says so once, and is used then."""
        try:
            return bool(self.channel.recv(1, socket.MSG_DONTWAIT))
        except OSError:
            return False


class Zygote:
    """Made once, by `serve`."""

    def __init__(self, channel: socket.socket, part: ForkTask) -> None:
        self._channel = channel
        self._part = part
        self._prefork: _Prefork | None = None
        self._prefork_ms = PREFORK_MS
        self._woken, waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)
        self._set_signals = find_set_signals()

    def serve(self) -> None:
        """Until the other end of the socket is gone."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._channel, select.POLLIN)
        while True:
            if not poller.poll(self._prefork_ms if self._prefork is None else None):
                self._grow()
            drain(self._woken)
            self._collect()
            received = receive_or_end(self._channel)
            if received is None:
                continue
            packet, descriptors = received
            if not packet:
                return
            # Else some got lost, for we have too many: the other ends of these close.
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
        """Have a worker with these: the bud, or else a new fork."""
        control = descriptors[2]
        pid = self._use_prefork(descriptors)
        if pid is None:
            try:
                pid = self._fork(lambda: descriptors)
            except OSError as failure:
                _send_on(control, f"unforked {failure.errno or 0}", [])
                return
        # Not collected yet, so the pid is this one's.
        handle = os.pidfd_open(pid)
        _send_on(control, f"forked {pid}", [handle])
        os.close(handle)

    def _use_prefork(self, descriptors: list[int]) -> int | None:
        """Its pid; None if there is none that waits."""
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

    def _grow(self) -> None:
        """Nobody wants anything just now: make ahead what the next order will wait for."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            pid = self._fork(lambda: self._wait_as_prefork(ours, theirs))
        except OSError:
            ours.close()  # The next order will say so.
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
        """A worker, once it has its descriptors. Raises OSError."""
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                self._channel.close()
                self._drop_prefork()
                begin_anew(self._set_signals)
                place_descriptors(get_descriptors())
                set_name(WORKER_NAME.encode())
                gc.enable()
                status = self._part.run()
            except BaseException:  # boundary: a fork never returns into its parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        return pid

    def _wait_as_prefork(self, zygotes: socket.socket, own: socket.socket) -> list[int]:
        """In a fork: the descriptors of the order it is for. Ends if the zygote does."""
        set_name(PREFORK_NAME.encode())
        zygotes.close()
        self._part.warm_up()
        send(own, b"warm")
        select.select([own], [], [])
        received = receive_or_end(own)
        if received is None or not received[0]:
            os._exit(0)
        own.detach()
        return received[1]


def _send_on(control: int, words: str, passed: list[int]) -> None:
    """Into a socket that stays as it is. That nobody hears it any more is seen elsewhere."""
    channel = socket.socket(fileno=control)
    try:
        send_with(channel, words.encode(), passed)
    except OSError:
        return
    finally:
        channel.detach()


def find_set_signals() -> list[signal.Signals]:
    """Those that do not do what they do by default. (Asked once: a fork has no time for it.)"""
    return [
        number
        for number in signal.Signals
        if signal.getsignal(number) not in (signal.SIG_DFL, None)
    ]


def begin_anew(set_signals: list[signal.Signals]) -> None:
    """In a fork: a session and signals of its own. (Python gives `random` a new state itself.)"""
    signal.set_wakeup_fd(-1)
    for number in set_signals:
        signal.signal(number, signal.SIG_DFL)
    # As every Python process has them: a peer that is gone is an error, and no end.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.setsid()


def place_descriptors(descriptors: list[int]) -> None:
    """The provision at 0, its stderr at 2, the control at 3; nowhere to 1; and no others.

    They are above 2, where the zygote's own were; 3 may be one of them, and is covered last.
    """
    provision, stderr, control = descriptors
    null = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    for target, source in enumerate((provision, null, stderr, control)):
        os.dup2(source, target)
    os.closerange(4, max(os.sysconf("SC_OPEN_MAX"), _DESCRIPTORS_MAX))


def count_threads() -> int:
    return sum(1 for _ in os.scandir("/proc/self/task"))


def serve(make_part: Callable[[], ForkTask]) -> None:
    """Be the zygote whose socket is descriptor `CHANNEL`; `make_part` imports what is needed."""
    channel = socket.socket(fileno=CHANNEL)
    channel.set_inheritable(False)
    set_name(ZYGOTE_NAME.encode())
    # Whoever ends a whole service or terminal asks the server, too; we end after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
    own = os.pidfd_open(os.getpid())
    send_with(channel, f"begun {os.getpid()}".encode(), [own])
    os.close(own)
    part = make_part()
    until_s = now_s() + THREADS_S
    while (threads := count_threads()) != 1:
        if now_s() > until_s:
            sys.exit(f"{threads - 1} threads were started, and no fork would be safe")
        select.select([], [], [], _PAUSE_S)
    gc.disable()
    gc.collect()
    gc.freeze()  # What is there now is never looked at again, so its pages stay shared.
    send(channel, b"warm")
    Zygote(channel, part).serve()


def main() -> None:
    serve(preload)

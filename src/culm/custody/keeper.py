"""The keeper: a bare process, one a server, that forks a warden for every command.

It imports little and has one thread, so forking it is quick and safe. It ends with the server
(end of its socket, or a death signal), after all it holds. If a warden is killed, what that held
falls to the keeper, a child subreaper: any child it did not fork is such a stray, and is ended.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import traceback

from culm.custody.linux import Stat, become_subreaper, now_s, set_death_signal, set_name
from culm.custody.packets import encode_left, receive_with, send
from culm.custody.tree import alive_below, end
from culm.custody.warden import DEATH_SIGNAL, ORPHAN_BOUND_S, become_warden, drain

STRAYS_S = 0.7  # For ending what a killed warden held; then it is reported as left.
WARDENS_S = 4.0  # For the wardens, once the server is gone; then they are ended, too.
_ROUND_MS = 5
_PATIENT_MS = 500  # When what cannot be ended was reported.


class _Loss:
    """A warden that died before its command was verified gone."""

    __slots__ = ("by_s", "number", "swept")

    def __init__(self, number: int, by_s: float) -> None:
        self.number = number
        self.by_s = by_s
        self.swept: set[int] = set()


class Keeper:
    """Made once, by `main`."""

    def __init__(self, control: socket.socket, server: int, mark: int, folder: str) -> None:
        self._control = control
        self._server = server
        self._mark = mark
        self._folder = folder
        self._wardens: dict[int, int] = {}  # By pid: the number of the order.
        self._losses: list[_Loss] = []
        self._has_strays = False
        self._over_since_s: float | None = None  # Since when the server is gone.
        self._woken, waking = os.pipe()
        self._waking = waking
        os.set_blocking(self._woken, False)
        os.set_blocking(waking, False)
        signal.set_wakeup_fd(waking, warn_on_full_buffer=False)

    def run(self) -> None:
        """Until the server is gone, and then everything."""
        poller = select.poll()
        poller.register(self._woken, select.POLLIN)
        poller.register(self._control, select.POLLIN)
        while True:
            poller.poll(self._timeout_ms())
            drain(self._woken)
            if self._over_since_s is None and not self._listen():
                self._over_since_s = now_s()
                poller.unregister(self._control)
            has_children = self._collect()
            self._end_strays()
            if self._over_since_s is not None:
                if not has_children or now_s() > self._over_since_s + ORPHAN_BOUND_S:
                    return
                if now_s() > self._over_since_s + WARDENS_S:
                    for pid in self._wardens:
                        _kill(pid)

    def _timeout_ms(self) -> int | None:
        if any(loss.by_s > now_s() for loss in self._losses):
            return _ROUND_MS
        if self._has_strays or self._over_since_s is not None:
            return _PATIENT_MS
        return None

    def _listen(self) -> bool:
        """Take one packet, if there is one. False if the server is gone."""
        if os.getppid() != self._server:
            return False
        try:
            packet, descriptors = receive_with(self._control)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not packet:
            return False
        words = packet.decode().split(" ")
        if words[0] == "start" and len(descriptors) == int(words[2]):
            self._start(int(words[1]), descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        if words[0] == "end":
            self._end(int(words[1]))
        else:
            self._report(int(words[1]), 0, [])  # Some descriptors got lost: we have too many.
        return True

    def _start(self, number: int, descriptors: list[int]) -> None:
        channel, body, *rest = descriptors
        keeper = os.getpid()
        try:
            pid = os.fork()
        except OSError as failure:
            with socket.socket(fileno=channel) as refused:
                send(refused, f"failed fork {failure.errno or 0}".encode())
            for descriptor in (body, *rest):
                os.close(descriptor)
            return
        if pid == 0:
            status = 1
            try:
                for own in (self._woken, self._waking, self._control.fileno()):
                    os.close(own)
                record = f"{self._folder}/{number}"
                with socket.socket(fileno=channel) as own_channel:
                    is_clean = become_warden(own_channel, body, rest, keeper, self._mark, record)
                status = 0 if is_clean else 1
            except BaseException:  # boundary: a fork never returns into its parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        self._wardens[pid] = number
        for descriptor in descriptors:
            os.close(descriptor)

    def _end(self, number: int) -> None:
        """What it holds falls to us."""
        pids = [pid for pid, held in self._wardens.items() if held == number]
        if not pids:
            self._report(number, 0, [])
        for pid in pids:
            _kill(pid)

    def _collect(self) -> bool:
        """Reap all that ended. Whether we have children left."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return False
            if pid == 0:
                return True
            number = self._wardens.pop(pid, None)
            if number is not None and status != 0:
                self._losses.append(_Loss(number, now_s() + STRAYS_S))
                self._has_strays = True

    def _end_strays(self) -> None:
        """A child that we did not fork was held by a warden that died."""
        if not self._has_strays:
            return
        strays = alive_below(os.getpid(), tuple(self._wardens))
        end(strays)
        now = now_s()
        for loss in list(self._losses):
            loss.swept.update(stat.pid for stat in strays)
            if not strays or now > loss.by_s:
                self._losses.remove(loss)
                self._report(loss.number, len(loss.swept), strays)
        self._has_strays = bool(strays)

    def _report(self, number: int, swept: int, left: list[Stat]) -> None:
        words = f"lost {number} {swept} {encode_left([stat.pid for stat in left])}"
        send(self._control, words.encode())


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _ignore(_number: int, _frame: object) -> None:
    """A signal only wakes us."""


def main() -> None:
    """Arguments: the socket, the lock, the server's pid, the mark, the folder of the set."""
    control, lock, server, mark = (int(word) for word in sys.argv[1:5])
    # The lock is held open by us and by our forks, and by no command.
    for descriptor in (control, lock):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.setsid()
    os.chdir("/")
    set_name(b"culm-keeper")
    # Whoever ends a whole service or terminal asks the server, too; we end after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.signal(DEATH_SIGNAL, _ignore)
    become_subreaper()
    set_death_signal(DEATH_SIGNAL)
    Keeper(socket.socket(fileno=control), server, mark, sys.argv[5]).run()

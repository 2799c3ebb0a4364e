"""The keeper: a bare process, one a server, that forks a warden for every command.

It imports little and has one thread, so forking it is quick and safe. It ends with the server
(end of its socket, or a death signal), after all it holds. If a warden is killed, what that held
falls to the keeper, a child subreaper: any child it did not fork is such a stray, and is ended.

The server's workers order over connections of their own. They are no commands: they descend from
a companion (the zygote), and outlive it; the keeper only collects them, unless the server is gone.
"""

import fcntl
import os
import select
import signal
import socket
import sys
import traceback

from culm.processes.linux import (
    ProcStat,
    become_subreaper,
    find_stat,
    is_of,
    now_s,
    read_table,
    set_death_signal,
    set_name,
)
from culm.processes.packets import (
    NUMBERS,
    encode_left,
    parse_command,
    read_all,
    receive_or_end,
    send,
)
from culm.processes.shim import DEATH_SIGNAL, ORPHAN_BOUND_S, drain, run_shim
from culm.processes.spawn import fork_command
from culm.processes.tree import alive_below, end

STRAYS_S = 0.7  # For ending what a killed warden held; then it is reported as left.
SHIMS_S = 4.0  # For the wardens, once their client is gone; then they are ended, too.
CONNECTIONS_MAX = 1024  # Of workers; a descriptor each.
_ROUND_MS = 5
_PATIENT_MS = 500  # When what cannot be ended was reported.


class _Client:
    """Who orders: the server, or one of its workers."""

    __slots__ = ("base", "by_s", "channel")

    def __init__(self, channel: socket.socket, base: int) -> None:
        self.channel = channel
        self.base = base  # The server's name for it.
        self.by_s = 0.0  # When its wardens are ended, once it is gone.

    @property
    def is_gone(self) -> bool:
        return self.channel.fileno() < 0

    def may_use(self, number: int) -> bool:
        """Orders of different clients have different numbers, for their records have."""
        return self.base <= number < self.base + NUMBERS


class _Shim:
    """The order that a warden carries out."""

    __slots__ = ("client", "number")

    def __init__(self, number: int, client: _Client) -> None:
        self.number = number
        self.client = client


class _Loss:
    """A warden that died before its command was verified gone."""

    __slots__ = ("by_s", "shim", "swept")

    def __init__(self, shim: _Shim, by_s: float) -> None:
        self.shim = shim
        self.by_s = by_s
        self.swept: set[int] = set()


class Supervisor:
    """Made once, by `main`."""

    def __init__(self, control: socket.socket, server: int, mark: int, folder: str) -> None:
        self._server = server
        self._mark = mark
        self._folder = folder
        self._owner = _Client(control, 0)
        self._clients = {control.fileno(): self._owner}
        self._leaving: list[_Client] = []  # Gone; some of their wardens may not be.
        self._shims: dict[int, _Shim] = {}  # By pid, as the next two.
        self._sidecars: set[int] = set()
        self._adopted: set[int] = set()  # What a companion that died had forked.
        self._losses: list[_Loss] = []
        self._has_strays = False
        self._over_since_s: float | None = None  # Since when the server is gone.
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._poller.register(control, select.POLLIN)

    def run(self) -> None:
        """Until the server is gone, and then everything."""
        while True:
            ready = self._poller.poll(self._timeout_ms())
            drain(self._woken)
            if self._over_since_s is None:
                self._listen([descriptor for descriptor, _ in ready])
            has_children = self._collect()
            self._end_strays()
            self._see_off()
            if self._over_since_s is not None:
                if not has_children or now_s() > self._over_since_s + ORPHAN_BOUND_S:
                    return
                if now_s() > self._over_since_s + SHIMS_S:
                    end(alive_below(os.getpid()))

    def _timeout_ms(self) -> int | None:
        if any(loss.by_s > now_s() for loss in self._losses):
            return _ROUND_MS
        if self._has_strays or self._leaving or self._over_since_s is not None:
            return _PATIENT_MS
        return None

    def _listen(self, ready: list[int]) -> None:
        """Take one packet of each that said something."""
        for descriptor in ready:
            client = self._clients.get(descriptor)
            if client is not None and not self._take(client):
                self._let_go(client)
        if os.getppid() != self._server or self._owner in self._leaving:
            self._over_since_s = now_s()
            for client in list(self._clients.values()):
                self._let_go(client)

    def _let_go(self, client: _Client) -> None:
        del self._clients[client.channel.fileno()]
        self._poller.unregister(client.channel)
        client.channel.close()
        client.by_s = now_s() + SHIMS_S
        self._leaving.append(client)

    def _take(self, client: _Client) -> bool:
        """Take one packet, if there is one. False if the client is gone, or talks nonsense."""
        found = receive_or_end(client.channel)
        if found is None:
            return True
        packet, descriptors = found
        words = packet.decode("ascii", "replace").split(" ")
        if all(word.isdecimal() for word in words[1:]):
            if self._takes_over(client, words, descriptors):
                return True
            is_word = self._answer(client, words)
        else:
            is_word = False  # No number where one should be.
        for descriptor in descriptors:
            os.close(descriptor)
        return is_word

    def _takes_over(self, client: _Client, words: list[str], descriptors: list[int]) -> bool:
        """Whether it is one of the words with descriptors, and all of them are there."""
        match words:
            case ["start", number, count] if client.may_use(int(number)):
                if len(descriptors) != int(count) or len(descriptors) < 2:
                    return False
                self._start(_Shim(int(number), client), descriptors)
            case ["hold", count] if client is self._owner and len(descriptors) == int(count) >= 1:
                self._hold(descriptors)
            case ["connect", base] if client is self._owner and len(descriptors) == 1:
                self._connect(socket.socket(fileno=descriptors[0]), int(base))
            case _:
                return False
        return True

    def _answer(self, client: _Client, words: list[str]) -> bool:
        """What needs no descriptors, or lost them on the way: we have too many. Is it a word?"""
        match words:
            case ["end", number]:
                self._end(client, int(number))
            case ["start", number, _] if client.may_use(int(number)):
                _report(_Shim(int(number), client), 0, [])
            case ["connect", base] if client is self._owner:
                send(self._owner.channel, f"over {base}".encode())
            case ["hold", _]:
                return client is self._owner  # Who ordered it sees the end of what it passed.
            case _:
                return False
        return True

    def _connect(self, channel: socket.socket, base: int) -> None:
        if len(self._clients) > CONNECTIONS_MAX:
            channel.close()
            send(self._owner.channel, f"over {base}".encode())
            return
        self._clients[channel.fileno()] = _Client(channel, base)
        self._poller.register(channel, select.POLLIN)
        send(self._owner.channel, f"connected {base}".encode())

    def _hold(self, descriptors: list[int]) -> None:
        """Start a companion; whether that works is seen by who holds the other ends."""
        command = parse_command(read_all(descriptors[0]))
        try:
            child = fork_command(command, descriptors[1:], None)
        except OSError:
            traceback.print_exc()
        else:
            os.close(child.report)
            self._sidecars.add(child.pid)
            send(self._owner.channel, f"held {child.pid}".encode())
        for descriptor in descriptors:
            os.close(descriptor)

    def _start(self, shim: _Shim, descriptors: list[int]) -> None:
        channel, body, *rest = descriptors
        supervisor = os.getpid()
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
                for own in (self._woken, self._waking, *self._clients):
                    os.close(own)
                record = f"{self._folder}/{shim.number}"
                with socket.socket(fileno=channel) as own_channel:
                    is_clean = run_shim(own_channel, body, rest, supervisor, self._mark, record)
                status = 0 if is_clean else 1
            except BaseException:  # boundary: a fork never returns into its parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        self._shims[pid] = shim
        for descriptor in descriptors:
            os.close(descriptor)

    def _end(self, client: _Client, number: int) -> None:
        """What it holds falls to us."""
        pids = [
            pid
            for pid, shim in self._shims.items()
            if shim.number == number and shim.client is client
        ]
        if not pids:
            _report(_Shim(number, client), 0, [])
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
            shim = self._shims.pop(pid, None)
            if shim is not None and status != 0:
                self._losses.append(_Loss(shim, now_s() + STRAYS_S))
                self._has_strays = True
            self._adopted.discard(pid)
            if pid in self._sidecars:
                self._sidecars.discard(pid)
                self._adopt()
                send(self._owner.channel, f"unheld {pid}".encode())

    def _adopt(self) -> None:
        """What a companion forked fell to us when it died: workers, which live on.

        What a warden left has the mark. (Who got rid of that as well was adopted only if its
        warden died at the same moment; it ends with the server.)
        """
        own = os.getpid()
        known = {*self._shims, *self._sidecars, *self._adopted}
        self._adopted.update(
            stat.pid
            for stat in read_table().values()
            if stat.parent == own and stat.pid not in known and not is_of(self._mark, stat.pid)
        )

    def _end_strays(self) -> None:
        """A child that we did not fork, and no worker, was held by a warden that died."""
        if not self._has_strays:
            return
        known = *self._shims, *self._sidecars, *self._adopted
        strays = alive_below(os.getpid(), known)
        if not all(map(_is_alive, self._sidecars)):
            return  # What it had forked may be among them: it is adopted first, in the next round.
        end(strays)
        now = now_s()
        for loss in list(self._losses):
            loss.swept.update(stat.pid for stat in strays)
            if not strays or now > loss.by_s:
                # Who is too busy to hear it is told in another round; who is gone, never.
                is_told = _report(loss.shim, len(loss.swept), strays)
                if is_told or loss.shim.client.is_gone:
                    self._losses.remove(loss)
        self._has_strays = bool(strays) or bool(self._losses)

    def _see_off(self) -> None:
        """Tell the server which worker's commands are all gone; end those that stay too long."""
        for client in list(self._leaving):
            pids = [pid for pid, shim in self._shims.items() if shim.client is client]
            if not pids and not any(loss.shim.client is client for loss in self._losses):
                is_told = send(self._owner.channel, f"over {client.base}".encode())
                if is_told or self._owner.is_gone:
                    self._leaving.remove(client)
            elif now_s() > client.by_s:
                for pid in pids:
                    _kill(pid)


def _report(shim: _Shim, swept: int, left: list[ProcStat]) -> bool:
    """Whether it was heard."""
    words = f"lost {shim.number} {swept} {encode_left([stat.pid for stat in left])}"
    return send(shim.client.channel, words.encode())


def _is_alive(pid: int) -> bool:
    stat = find_stat(pid)
    return stat is not None and stat.is_alive


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
    Supervisor(socket.socket(fileno=control), server, mark, sys.argv[5]).run()

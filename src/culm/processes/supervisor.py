"""The supervisor: a bare process, one per server, that forks a shim for every command.

It imports little and has one thread, so forking it is quick and safe. It ends with the server (end
of its socket, or a death signal), after all its commands. If a shim is killed, the shim's process
tree falls to the supervisor, a child subreaper: any child it did not fork is such a stray and is
killed.

The server's workers send requests over connections of their own. Workers are not commands: they
descend from a sidecar (the zygote) and outlive it. The supervisor only reaps them, unless the
server is gone.
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
    alive_below,
    become_subreaper,
    end,
    find_stat,
    has_process_tag,
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
from culm.processes.shim import DEATH_SIGNAL, ORPHAN_BOUND_S, drain, fork_command, run_shim

STRAYS_S = 0.7  # For killing the tree of a dead shim; then the rest is reported as left.
SHIMS_S = 4.0  # For the shims, once their client is gone; then they are killed, too.
CONNECTIONS_MAX = 1024  # Workers; each takes a descriptor.
_ROUND_MS = 5
_PATIENT_MS = 500  # After processes that cannot be killed were reported.


class _Client:
    """A sender of requests: the server or one of its workers."""

    __slots__ = ("base", "by_s", "channel")

    def __init__(self, channel: socket.socket, base: int) -> None:
        self.channel = channel
        self.base = base  # The server's number for it.
        self.by_s = 0.0  # When its shims are killed, once it is gone.

    @property
    def is_gone(self) -> bool:
        return self.channel.fileno() < 0

    def may_use(self, number: int) -> bool:
        """Requests of different clients have different numbers, because their record files do."""
        return self.base <= number < self.base + NUMBERS


class _Shim:
    """The request that a shim carries out."""

    __slots__ = ("client", "number")

    def __init__(self, number: int, client: _Client) -> None:
        self.number = number
        self.client = client


class _Loss:
    """A shim that died before its command was verified gone."""

    __slots__ = ("by_s", "shim", "swept")

    def __init__(self, shim: _Shim, by_s: float) -> None:
        self.shim = shim
        self.by_s = by_s
        self.swept: set[int] = set()


class Supervisor:
    """Created once, by `main`."""

    def __init__(self, control: socket.socket, server: int, process_tag: int, folder: str) -> None:
        self._server = server
        self._process_tag = process_tag
        self._folder = folder
        self._owner = _Client(control, 0)
        self._clients = {control.fileno(): self._owner}
        self._leaving: list[_Client] = []  # Gone, but some of their shims may not be.
        self._shims: dict[int, _Shim] = {}  # By pid, like the next two.
        self._sidecars: set[int] = set()
        self._adopted: set[int] = set()  # Forks of a sidecar that died.
        self._losses: list[_Loss] = []
        self._has_strays = False
        self._over_since_s: float | None = None  # Time at which the server was found gone.
        self._woken, self._waking = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waking, False)
        signal.set_wakeup_fd(self._waking, warn_on_full_buffer=False)
        self._poller = select.poll()
        self._poller.register(self._woken, select.POLLIN)
        self._poller.register(control, select.POLLIN)

    def run(self) -> None:
        """Run until the server is gone, and then until all processes are."""
        while True:
            ready = self._poller.poll(self._timeout_ms())
            drain(self._woken)
            if self._over_since_s is None:
                self._receive_all([descriptor for descriptor, _ in ready])
            has_children = self._collect()
            self._end_strays()
            self._finish_clients()
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

    def _receive_all(self, ready: list[int]) -> None:
        """Receive one packet from each client that is ready."""
        for descriptor in ready:
            client = self._clients.get(descriptor)
            if client is not None and not self._receive_one(client):
                self._drop_client(client)
        if os.getppid() != self._server or self._owner in self._leaving:
            self._over_since_s = now_s()
            for client in list(self._clients.values()):
                self._drop_client(client)

    def _drop_client(self, client: _Client) -> None:
        del self._clients[client.channel.fileno()]
        self._poller.unregister(client.channel)
        client.channel.close()
        client.by_s = now_s() + SHIMS_S
        self._leaving.append(client)

    def _receive_one(self, client: _Client) -> bool:
        """Receive one packet, if any. False if the client is gone or sent an invalid packet."""
        found = receive_or_end(client.channel)
        if found is None:
            return True
        packet, descriptors = found
        fields = packet.decode("ascii", "replace").split(" ")
        if all(field.isdecimal() for field in fields[1:]):
            if self._handle_with_descriptors(client, fields, descriptors):
                return True
            is_valid = self._handle_plain(client, fields)
        else:
            is_valid = False  # Not a number where one is required.
        for descriptor in descriptors:
            os.close(descriptor)
        return is_valid

    def _handle_with_descriptors(
        self, client: _Client, fields: list[str], descriptors: list[int]
    ) -> bool:
        """Handle a packet with descriptors; False if it is not one, or if some are missing."""
        match fields:
            case ["start", number, count] if client.may_use(int(number)):
                if len(descriptors) != int(count) or len(descriptors) < 2:
                    return False
                self._start(_Shim(int(number), client), descriptors)
            case ["hold", count] if client is self._owner and len(descriptors) == int(count) >= 1:
                self._start_sidecar(descriptors)
            case ["connect", base] if client is self._owner and len(descriptors) == 1:
                self._connect(socket.socket(fileno=descriptors[0]), int(base))
            case _:
                return False
        return True

    def _handle_plain(self, client: _Client, fields: list[str]) -> bool:
        """Handle a packet without descriptors, or one that lost them; False if it is unknown.

        The kernel drops descriptors when this process has too many open.
        """
        match fields:
            case ["end", number]:
                self._kill_shim(client, int(number))
            case ["start", number, _] if client.may_use(int(number)):
                _report(_Shim(int(number), client), 0, [])
            case ["connect", base] if client is self._owner:
                send(self._owner.channel, f"over {base}".encode())
            case ["hold", _]:
                # The server sees the end of the descriptors it passed.
                return client is self._owner
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

    def _start_sidecar(self, descriptors: list[int]) -> None:
        """Start a sidecar; a failure shows on the other ends of its descriptors."""
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
                    is_clean = run_shim(
                        own_channel, body, rest, supervisor, self._process_tag, record
                    )
                status = 0 if is_clean else 1
            except BaseException:  # boundary: a fork must not return to its parent's loop
                traceback.print_exc()
            finally:
                os._exit(status)
        self._shims[pid] = shim
        for descriptor in descriptors:
            os.close(descriptor)

    def _kill_shim(self, client: _Client, number: int) -> None:
        """Kill a shim; its process tree falls to us."""
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
        """Reap all that ended; return whether children are left."""
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
        """Adopt the forks of a dead sidecar: workers, which live on.

        Processes that a shim left have the process tag. (A process that also lost its tag is
        adopted only if its shim died at the same moment; it ends with the server.)
        """
        own = os.getpid()
        known = {*self._shims, *self._sidecars, *self._adopted}
        self._adopted.update(
            stat.pid
            for stat in read_table().values()
            if stat.parent == own
            and stat.pid not in known
            and not has_process_tag(self._process_tag, stat.pid)
        )

    def _end_strays(self) -> None:
        """Kill strays: children that we did not fork and that are not workers."""
        if not self._has_strays:
            return
        known = *self._shims, *self._sidecars, *self._adopted
        strays = alive_below(os.getpid(), known)
        if not all(map(_is_alive, self._sidecars)):
            return  # Its forks may be among the strays; the next round adopts them first.
        end(strays)
        now = now_s()
        for loss in list(self._losses):
            loss.swept.update(stat.pid for stat in strays)
            if not strays or now > loss.by_s:
                # A busy client gets the report in a later round; a client that is gone, never.
                is_sent = _report(loss.shim, len(loss.swept), strays)
                if is_sent or loss.shim.client.is_gone:
                    self._losses.remove(loss)
        self._has_strays = bool(strays) or bool(self._losses)

    def _finish_clients(self) -> None:
        """Report the workers whose commands are all gone; kill the shims that take too long."""
        for client in list(self._leaving):
            pids = [pid for pid, shim in self._shims.items() if shim.client is client]
            if not pids and not any(loss.shim.client is client for loss in self._losses):
                is_sent = send(self._owner.channel, f"over {client.base}".encode())
                if is_sent or self._owner.is_gone:
                    self._leaving.remove(client)
            elif now_s() > client.by_s:
                for pid in pids:
                    _kill(pid)


def _report(shim: _Shim, swept: int, left: list[ProcStat]) -> bool:
    """Report a lost shim; return whether the packet was sent."""
    packet = f"lost {shim.number} {swept} {encode_left([stat.pid for stat in left])}"
    return send(shim.client.channel, packet.encode())


def _is_alive(pid: int) -> bool:
    stat = find_stat(pid)
    return stat is not None and stat.is_alive


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return


def _ignore(_number: int, _frame: object) -> None:
    """Do nothing: a signal only wakes the loop."""


def main() -> None:
    """Arguments: the socket, the lock, the server's pid, the process tag, the set's folder."""
    control, lock, server, process_tag = (int(field) for field in sys.argv[1:5])
    # The lock is held open by us and by our forks, but by no command.
    for descriptor in (control, lock):
        fcntl.fcntl(descriptor, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    os.setsid()
    os.chdir("/")
    set_name(b"culm-supervisor")
    # A signal to a whole service or terminal also reaches the server; we end after it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, _ignore)
    signal.signal(DEATH_SIGNAL, _ignore)
    become_subreaper()
    set_death_signal(DEATH_SIGNAL)
    Supervisor(socket.socket(fileno=control), server, process_tag, sys.argv[5]).run()

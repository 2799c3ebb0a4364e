"""Listening sockets. A stale unix socket is replaced; a live one is an error."""

import errno
import fcntl
import ipaddress
import os
import socket
import stat
import time
from pathlib import Path

from msgspec import Struct

from culm.errors import InvalidRequest, ListenFailed

BACKLOG = 512
PROBE_S = 0.2  # The time that Crush clients, too, allow for a connection to a live socket.
LEAVE_S = 1.0  # Time for a server that has removed its socket to release its lock.
_PAUSE_S = 0.01
# `sun_path` holds 108 bytes on Linux, 104 elsewhere.
UNIX_PATH_BYTES_MAX = 103


class UnixAddress(Struct, frozen=True):
    path: Path

    def __str__(self) -> str:
        return f"unix://{self.path}"


class TcpAddress(Struct, frozen=True):
    host: str
    port: int

    def __str__(self) -> str:
        return f"tcp://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"


Address = UnixAddress | TcpAddress


class Listener(Struct):
    """A bound socket. A unix socket also has a file and a lock."""

    address: Address
    sock: socket.socket
    file: tuple[int, int] | None = None  # Device and inode of a unix socket's file.
    lock: int | None = None  # Held while this server owns the path of a unix socket.

    def hide(self) -> None:
        """Free the path for a successor. Open connections continue."""
        # A client may have started another server on our path; leave its socket alone.
        address = self.address
        if isinstance(address, UnixAddress) and self.file == _identity(address.path):
            address.path.unlink(missing_ok=True)
        self.file = None  # After the removal a successor's socket may get the same inode.
        if self.lock is not None:
            os.close(self.lock)
            self.lock = None

    def close(self) -> None:
        self.hide()
        self.sock.close()


def parse_address(text: str) -> Address:
    scheme, separator, rest = text.partition("://")
    if separator and scheme == "unix" and rest.startswith("/"):
        return UnixAddress(Path(rest))
    if separator and scheme == "tcp":
        host, colon, port = rest.partition("/")[0].rpartition(":")
        if colon and host and port.isascii() and port.isdecimal() and int(port) < 65536:
            return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))
    raise InvalidRequest(
        f"{text!r} is not an address", hint="use unix:///absolute/path or tcp://host:port"
    )


def listen(address: Address) -> Listener:
    """Bind and listen; raises `ListenFailed` with a hint."""
    try:
        if isinstance(address, UnixAddress):
            return _listen_unix(address)
        return _listen_tcp(address)
    except OSError as exc:
        raise ListenFailed(str(address), exc.strerror or str(exc), hint=_hint(exc)) from exc


def _hint(exc: OSError) -> str:
    match exc.errno:
        case errno.EADDRINUSE:
            return "another server is using it; stop it, or choose another address with --host"
        case errno.EACCES | errno.EPERM:
            return "choose a writable directory, or a port above 1023, with --host"
        case _:
            return "choose another address with --host"


def _listen_tcp(address: TcpAddress) -> Listener:
    found = socket.getaddrinfo(
        address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    # `localhost` may resolve to IPv4 and IPv6. Prefer IPv4, which people type.
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(BACKLOG)
    except OSError:
        sock.close()
        raise
    return Listener(TcpAddress(address.host, sock.getsockname()[1]), sock)


def _listen_unix(address: UnixAddress) -> Listener:
    path = address.path
    if len(os.fsencode(path)) > UNIX_PATH_BYTES_MAX:
        raise ListenFailed(
            str(address),
            f"the path is longer than {UNIX_PATH_BYTES_MAX} bytes",
            hint="choose a shorter one with --host",
        )
    _make_private_parent(path.parent)
    lock = _lock_path(path)
    if lock is None:
        raise ListenFailed(
            str(address),
            "a culm server is already running there",
            hint="use that one, or choose another address with --host",
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    old_umask = os.umask(0o177)
    try:
        if _is_stale(path):
            path.unlink(missing_ok=True)
        sock.bind(str(path))
        sock.listen(BACKLOG)
    except (OSError, ListenFailed):
        sock.close()
        os.close(lock)
        raise
    finally:
        os.umask(old_umask)
    return Listener(address, sock, _identity(path), lock)


def _make_private_parent(folder: Path) -> None:
    """Create the directory with mode 0700; refuse one in which others could replace the socket."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = folder.stat()
    open_to_all = found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX
    if found.st_uid not in (os.getuid(), 0) or open_to_all:
        raise ListenFailed(
            f"unix://{folder}/…",
            "the directory belongs to another user or is world-writable",
            hint="choose another directory with --host",
        )


def _lock_path(path: Path) -> int | None:
    """Lock the path for this server; None if another server has it. The lock file is not removed.

    If another server holds the lock but has no socket, it is starting or shutting down; wait.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    descriptor = os.open(f"{path}.lock", flags, 0o600)
    for _ in range(round(LEAVE_S / _PAUSE_S)):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if _identity(path) is not None:
                break
            time.sleep(_PAUSE_S)
        else:
            return descriptor
    os.close(descriptor)
    return None


def _is_stale(path: Path) -> bool:
    """Return True if no server accepts on a socket file. A timeout counts as a live server."""
    try:
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise ListenFailed(
                f"unix://{path}",
                "the path exists and is not a socket",
                hint="choose another path with --host",
            )
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_S)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return True
        except OSError:
            return False
    return False


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino

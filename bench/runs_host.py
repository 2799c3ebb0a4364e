"""The processes of `runs.py`: servers under test, the scripted model, and their cores.

Starts and ends them. A server is measured by the process that listens on its address, which may
differ from the one that was started.
"""

import os
import re
import shlex
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from bench.ipc import END_TIMEOUT_S, end
from bench.serving import REQUEST_TIMEOUT_S
from culm.testing.script import Reply, ReplyRule, Script

START_TIMEOUT_S = 30.0
POLL_S = 0.01
LOG_BYTES = 2000  # Of the log of a server that did not start.
OURS = (
    f"{sys.executable} -m culm serve --host {{host}} --data-dir {{data_dir}} --config {{config}}"
    " --log-level error"
)
CONFIG = """{
  "models": {
    "large": {"model": "demo-1", "provider": "demo"},
    "small": {"model": "demo-1", "provider": "demo"}
  },
  "providers": {
    "demo": {
      "type": "openai-compat",
      "base_url": "{model_url}",
      "api_key": "k",
      "models": [{"id": "demo-1", "context_window": 0}]
    }
  },
  "run_steps_max": 100
}
"""
# The start of title requests, which must not be answered like a run.
TITLES = ("Write a title", "generate a short title")


class Candidate(Struct, frozen=True):
    """A server to be measured: a command that starts it, or the address of a running one."""

    name: str
    command: str = ""
    url: str = ""
    config: str = CONFIG


class Address(Struct, frozen=True):
    unix: str = ""
    host: str = ""
    port: int = 0
    token: str = ""

    def head(self, method: str, path: str, body: bytes = b"", *, version: str = "1.1") -> bytes:
        """Return a whole request."""
        host = self.host or "localhost"
        lines = [
            f"{method} {path} HTTP/{version}",
            f"Host: {host}:{self.port or 80}",
            "Accept: */*",
        ]
        if self.token:
            lines.append(f"Authorization: Bearer {self.token}")
        if body:
            lines += ["Content-Type: application/json"]
        if method != "GET":
            lines += [f"Content-Length: {len(body)}"]
        return "\r\n".join([*lines, "", ""]).encode() + body

    def dial(self) -> socket.socket:
        if self.unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.settimeout(REQUEST_TIMEOUT_S)
            sock.connect(self.unix)
            return sock
        return socket.create_connection((self.host, self.port), REQUEST_TIMEOUT_S)


def parse_url(url: str) -> Address:
    """`unix:///path`, `tcp://host:port` or `http://:token@host:port`."""
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return Address(unix=parts.path)
    if parts.hostname is None or parts.port is None:
        raise SystemExit(f"{url}: use unix:///path or http://host:port")
    return Address(host=parts.hostname, port=parts.port, token=parts.password or "")


# --- cores


class Cores(Struct, frozen=True):
    """The cores of the server and of all others. Empty sets: the kernel chooses."""

    server: frozenset[int] = frozenset()
    others: frozenset[int] = frozenset()

    def pin_server(self, pid: int) -> None:
        if self.server:
            os.sched_setaffinity(pid, self.server)

    def pin_other(self, pid: int) -> None:
        if self.others:
            os.sched_setaffinity(pid, self.others)


def share_cores() -> Cores:
    """Assign half of the cores to the servers, the others to the model and the clients."""
    found = sorted(os.sched_getaffinity(0))
    if len(found) < 2:
        return Cores()
    half = len(found) // 2
    return Cores(frozenset(found[:half]), frozenset(found[half:]))


# --- a server


class Place(Struct, frozen=True):
    """The folder and the socket of one server; a restart in the same place finds its data."""

    folder: Path  # On the disk whose commits are measured.
    socket: str  # Not below the results: a socket's path may have 103 bytes only.

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"


class Served:
    """A running server. Made by `start`."""

    def __init__(self, address: Address, pid: int, process: subprocess.Popen[bytes] | None) -> None:
        self.address = address
        self.pid = pid
        self._process = process

    @property
    def is_ours(self) -> bool:
        return self._process is not None

    def kill(self) -> None:
        """Send SIGKILL to the process that has the data."""
        assert self._process is not None, "only a server that we started"
        os.kill(self.pid, signal.SIGKILL)

    def reap(self) -> None:
        """End the server, and then the process that started it."""
        if self._process is None:
            return
        if self.pid != self._process.pid:
            _end_other(self.pid)
        end(self._process)


def _end_other(pid: int) -> None:
    """End a process that is not our child, and wait until it is gone."""
    end_s = time.monotonic() + END_TIMEOUT_S
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
        while time.monotonic() < end_s:
            os.kill(pid, 0)
            time.sleep(POLL_S)
        os.kill(pid, signal.SIGKILL)


def start(candidate: Candidate, place: Place, model_url: str, cores: Cores) -> Served:
    """Start a server and wait, with a limit, until it answers."""
    if candidate.url:
        address = parse_url(candidate.url)
        _await_health(address, None, place)
        return Served(address, find_pid(address), None)
    config = place.folder / "config.json"
    config.write_text(candidate.config.replace("{model_url}", model_url))
    values = {"host": place.url, "data_dir": str(place.folder / "data"), "config": str(config)}
    argv = [_fill(word, values) for word in shlex.split(candidate.command)]
    own = {"XDG_STATE_HOME": "state", "XDG_CONFIG_HOME": "none", "XDG_DATA_HOME": "share"}
    environment = {**os.environ, **{k: str(place.folder / v) for k, v in own.items()}}
    with (place.folder / "log").open("ab") as log:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        cores.pin_server(process.pid)
        address = Address(unix=place.socket)
        _await_health(address, process, place)
        return Served(address, find_pid(address), process)
    except BaseException:
        end(process)
        raise


def _fill(word: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _await_health(address: Address, process: subprocess.Popen[bytes] | None, place: Place) -> None:
    end_s = time.monotonic() + START_TIMEOUT_S
    while True:
        with suppress(OSError), address.dial() as sock:
            sock.sendall(address.head("GET", "/v1/health", version="1.0"))
            if sock.recv(64).split(b" ")[1:2] == [b"200"]:
                return
        if process is not None and process.poll() is not None:
            raise RuntimeError(
                f"the server ended with {process.returncode}: {_tail(place.folder / 'log')}"
            )
        if time.monotonic() > end_s:
            raise RuntimeError(f"the server does not answer: {_tail(place.folder / 'log')}")
        time.sleep(POLL_S)


def _tail(log: Path) -> str:
    return log.read_bytes()[-LOG_BYTES:].decode(errors="replace") if log.exists() else ""


@contextmanager
def open_place(folder: Path, name: str) -> Generator[Place]:
    own = folder / name
    own.mkdir()
    with tempfile.TemporaryDirectory() as short:
        yield Place(own, str(Path(short) / "s.sock"))


# --- finding the listening process


def find_pid(address: Address) -> int:
    """Return the process that listens on an address of this machine."""
    if address.unix:
        with address.dial() as sock:
            data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        pid: int = struct.unpack("3i", data)[0]
        return pid
    inodes = _listening(address.port)
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and not inodes.isdisjoint(_sockets(entry)):
            return int(entry.name)
    raise SystemExit(f"no process of this machine listens on port {address.port}")


def _listening(port: int) -> set[str]:
    found: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(fields[9])
    return found


def _sockets(process: Path) -> set[str]:
    found: set[str] = set()
    with suppress(OSError):  # It ended, or belongs to another user.
        for link in (process / "fd").iterdir():
            with suppress(OSError):
                found.update(re.findall(r"^socket:\[(\d+)\]$", str(link.readlink())))
    return found


# --- the model


class ScriptedModel:
    """A `ModelServer` in a separate process. Made by `open_model`."""

    def __init__(self, url: str) -> None:
        self.url = url
        parts = urlsplit(url)
        self._address = Address(host=parts.hostname or "", port=parts.port or 0)

    def play(self, reply: Reply) -> None:
        """Answer every prompt with this reply from now on, and title requests with a title."""
        rules = [ReplyRule(when=title, reply=Reply(text="A title")) for title in TITLES]
        body = msgspec.json.encode(Script(rules=rules, otherwise=reply))
        with self._address.dial() as sock:
            sock.sendall(self._address.head("POST", "/culm/script", body, version="1.0"))
            response = sock.recv(1 << 16)
        if response.split(b" ")[1:2] != [b"200"]:
            raise RuntimeError(f"the model refused its script: {response!r}")


@contextmanager
def open_model(folder: Path, cores: Cores, port: int) -> Generator[ScriptedModel]:
    command = [sys.executable, "-m", "culm.testing.model_server", "--port", str(port)]
    log = folder / "model.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)
    late = Timer(START_TIMEOUT_S, process.kill)
    late.start()
    try:
        cores.pin_other(process.pid)
        assert process.stdout is not None, "opened with a pipe"
        found = re.fullmatch(r"listening (\S+)\n", process.stdout.readline().decode())
        late.cancel()
        if found is None:
            raise RuntimeError(f"the model server did not start: {_tail(log)}")
        yield ScriptedModel(found[1])
    finally:
        late.cancel()
        end(process)

"""`culm serve`: the time until a workspace is open, and the memory of an idle server."""

import http.client
import json
import os
import re
import subprocess
import sys
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from bench.fleet_bed import children_of, memory_of
from bench.ipc import Command, Ready, Spent, end, open_child
from bench.publisher import Filled

REQUEST_TIMEOUT_S = 10.0
LIBRARIES = "aiohttp, uvloop, msgspec, sqlite3"  # A server cannot start without them.


class Started(Struct):
    opened_s: float  # From its start to the first 200 of opening a workspace.
    import_s: float  # The same for an interpreter that only imports the libraries.
    server_mb: float = 0.0  # RSS when idle ...
    supervisor_mb: float = 0.0  # ... and PSS of the processes beside it.
    zygote_mb: float = 0.0


class Listed(Struct):
    cpu_ms: float
    wall_ms: float
    megabytes: float


def get(port: int, path: str) -> tuple[int, bytes]:
    return request(port, "GET", path)


def request(port: int, method: str, path: str, body: object = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=REQUEST_TIMEOUT_S)
    try:
        connection.request(method, path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


class ServedDirectory:
    """Servers that are started one after the other with one data directory."""

    def __init__(self, folder: Path) -> None:
        self.project = folder / "project"
        self.data = folder / "data"
        self._folder = folder
        self.project.mkdir(exist_ok=True)

    def fill(self, sessions: int) -> None:
        with self._started() as (port, _):
            path = f"/v1/workspaces/{self._open(port)}/sessions"
            for n in range(sessions):
                status, _ = request(port, "POST", path, {"title": f"session {n}"})
                if status != 200:
                    raise RuntimeError(f"creating a session answered {status}")

    def start_once(self, *, idle_s: float = 0.0) -> Started:
        """Start `culm serve`, open the workspace, let it idle, stop it."""
        began_s = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {LIBRARIES}"], check=True)
        start_s = time.monotonic()
        with self._started() as (port, pid):
            self._open(port)
            opened_s = time.monotonic() - start_s
            started = Started(opened_s, start_s - began_s)
            if idle_s:
                time.sleep(idle_s)
                started.server_mb = rss_mb(pid)
                (supervisor,) = children_of(pid)
                (zygote,) = children_of(supervisor)
                started.supervisor_mb = memory_of(supervisor).pss_mb
                started.zygote_mb = memory_of(zygote).pss_mb
            return started

    def _open(self, port: int) -> str:
        body = {"path": str(self.project), "client_id": str(uuid.uuid4())}
        status, answer = request(port, "POST", "/v1/workspaces", body)
        if status != 200:
            raise RuntimeError(f"opening a workspace answered {status}")
        return json.loads(answer)["id"]

    @contextmanager
    def _started(self) -> Generator[tuple[int, int]]:
        """A server, as its port and the id of its process."""
        environment = {**os.environ, "XDG_STATE_HOME": str(self._folder / "state")}
        command = [sys.executable, "-m", "culm", "serve", "--host", "tcp://127.0.0.1:0"]
        command += ["--no-auth", "--data-dir", str(self.data), "--log-level", "error"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment)
        try:
            assert process.stdout is not None, "opened with a pipe"
            line = process.stdout.readline().decode()
            found = re.fullmatch(r"listening tcp://127\.0\.0\.1:(\d+)\n", line)
            if found is None:
                raise RuntimeError(f"culm serve printed {line!r}")
            yield int(found[1]), process.pid
        finally:
            end(process)


def rss_mb(pid: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None, "a running process has a resident size"
    return int(found[1]) / 1024


def list_messages(folder: Path, count: int, rounds: int) -> list[Listed]:
    """Get all messages of a session; measure the CPU of the server and the wait of the client."""
    with open_child("publisher", "culm", str(folder)) as server:
        port = server.receive(Ready).port
        path = server.ask(Command("fill", bursts=count), Filled).path
        found: list[Listed] = []
        for _ in range(rounds):
            before = server.ask(Command("cpu"), Spent)
            start_s = time.monotonic()
            status, body = get(port, path)
            wall_s = time.monotonic() - start_s
            after = server.ask(Command("cpu"), Spent)
            if status != 200 or body.count(b'"session_id"') != count:
                raise RuntimeError(f"listing {count} messages answered {status}")
            cpu_s = after.cpu_s - before.cpu_s
            found.append(Listed(cpu_s * 1000, wall_s * 1000, len(body) / 1e6))
        return found
